"""Overlap, total variation and the TV barycentre in PyTorch.

Twin: `reference/distance.py`, where the barycentre is derived.  The same answer is found here without sorting
all jumps by level: each column is sorted once (for any number of weight vectors), the jumps' mass is collected
in a histogram over levels, and only the bin in which the mass reaches one is sorted.  Columns are worked through
in slabs, so that beside the rows only their sorted values and ranks are held.
"""

import numpy as np
import torch

BINS = 4096  # of the histogram over levels
SLAB = 2**18  # entries worked on at a time


def overlap(p, q):
    """Acceptance probability sum_v min(p(v), q(v)), [...]: see `reference.distance.overlap`."""
    return torch.minimum(p, q).sum(dim=-1)


def total_variation(p, q):
    """TV(p, q) = 1/2 sum_v |p(v) - q(v)|, [...]: see `reference.distance.total_variation`."""
    return (p - q).abs().sum(dim=-1) / 2


def barycentre(rows, weights=None):
    """The distribution that minimises the weighted mean total variation to the rows (App. B.4).

    Args:
        rows: probabilities, float32 or float64 [U, V], each summing to one within 1e-4.
        weights: [U] or [B, U], non-negative with a positive sum; None = equal weights.
    Returns: q [V] or [B, V] in the dtype of the rows.
    Raises: ValueError naming the row that is no distribution, or the bad weight.
    """
    rows, weights = distributions(rows), _weights(weights, rows)
    if weights.ndim == 1:
        return barycentre(rows, weights[None])[0]
    heaviest = weights.argmax(dim=1)
    sure = weights.amax(dim=1) > weights.sum(dim=1) / 2  # it is the weighted median of every coordinate at once
    q = rows[heaviest]
    if not sure.all():
        used = (rows.amax(dim=0) > 0).nonzero()[:, 0]
        q[~sure] = 0
        solved = _solve(rows if len(used) == rows.shape[1] else rows[:, used], weights[~sure])
        q[(~sure).nonzero(), used] = solved.to(q.dtype)
    return q


def barycentre_risk(rows, q, weights=None):
    """Weighted mean total variation between the rows and one proposal, float in [0, 1].

    Args: rows [U, V]; q [V]; weights [U] or None = equal.
    """
    weights = _weights(weights, rows)
    return float(weights @ total_variation(distributions(rows), q).double() / weights.sum())


def distributions(rows):
    """The rows, or a ValueError that names the row that is no distribution; float64 rows are made to sum to one."""
    if rows.ndim != 2 or not rows.numel():
        raise ValueError(f"rows must be a non-empty [U, V] array, got shape {tuple(rows.shape)}")
    sums = rows.sum(dim=1)
    bad = ~((sums - 1).abs() <= 1e-4) | (rows.amin(dim=1) < 0)
    if bad.any():
        worst = int(bad.int().argmax())
        raise ValueError(f"row {worst} is no distribution: sum {float(sums[worst])}, smallest entry {float(rows[worst].min())}")
    return rows / sums[:, None] if rows.dtype == torch.float64 else rows


def _solve(rows, weights):
    """Barycentres of rows [U, V] under weights [B, U] by the histogram described above: float64 [B, V]."""
    slabs = [_sorted_jumps(slab) for slab in rows.split(max(1, SLAB // len(rows)), dim=1)]
    return torch.stack([_solve_sorted(slabs, w / w.sum()) for w in weights])


def _sorted_jumps(rows):
    """Sort each column of [U, C]: (jumps between its order statistics [C, U], the row each comes from [C, U])."""
    columns = rows.T.contiguous()
    if rows.is_cuda or rows.dtype != torch.float32 or len(rows) > 2**16:
        values, order = columns.sort(dim=1)
    else:  # one vectorised sort of 64-bit words: the value's bits (ordered like the value, as it is >= 0), then its row
        keys = columns.numpy().view(np.uint32).astype(np.uint64) << 32 | np.arange(len(rows), dtype=np.uint64)
        keys.sort(axis=1)
        halves = torch.from_numpy(keys.view(np.int32).reshape(*keys.shape, 2))  # little-endian: row, value
        values, order = halves[..., 1].contiguous().view(torch.float32), halves[..., 0]
    values[:, 1:] -= values[:, :-1].clone()
    return values, order.to(torch.int32)


def _solve_sorted(slabs, weights):
    levels = []
    mass = torch.zeros(BINS, dtype=torch.float64, device=weights.device)
    for jumps, order in slabs:
        weight = weights[order]
        level = (weight.cumsum(dim=1) - weight).to(jumps.dtype)  # weight strictly below each value
        mass += torch.bincount(_bins(level).flatten(), jumps.flatten(), BINS)
        levels.append(level)
    mass = mass.cumsum(0)
    full = min(1.0, float(mass[-1])) - 1e-12  # float32 rows may stop short of one
    last = int(torch.searchsorted(mass, full))

    # Sort the jumps of the bin in which the mass reaches one, and find the level at which it does.
    before = float(mass[last - 1]) if last else 0.0
    inside = [_bins(level) == last for level in levels]
    level, order = torch.cat([level[here] for level, here in zip(levels, inside, strict=True)]).sort()
    jump = torch.cat([jumps[here] for (jumps, _), here in zip(slabs, inside, strict=True)])[order].double()
    reached = before + jump.cumsum(0)
    critical = level[min(int(torch.searchsorted(reached, full)), len(level) - 1)]

    tie = 1e-12 if level.dtype == torch.float64 else 1e-6
    below = torch.cat([(jumps * (level < critical - tie)).sum(dim=1) for (jumps, _), level in zip(slabs, levels, strict=True)])
    upto = torch.cat([(jumps * (level <= critical + tie)).sum(dim=1) for (jumps, _), level in zip(slabs, levels, strict=True)])
    below, step = below.double(), (upto - below).double()
    q = below + step * ((1 - below.sum()) / step.sum()).clamp(0, 1)
    return q / q.sum()


def _bins(level):
    return (level * BINS).long().clamp_(max=BINS - 1)


def _weights(weights, rows):
    if weights is None:
        return torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    weights = torch.as_tensor(weights, dtype=torch.float64, device=rows.device)
    if weights.shape[-1:] != rows.shape[:1]:
        raise ValueError(f"{len(rows)} rows need {len(rows)} weights, got shape {tuple(weights.shape)}")
    if not (weights.isfinite().all() and (weights >= 0).all() and (weights.sum(dim=-1) > 0).all()):
        raise ValueError("weights must be finite and non-negative with a positive sum")
    return weights
