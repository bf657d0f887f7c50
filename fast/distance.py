"""Overlap, total variation and the TV barycentre in PyTorch.

Twin: `reference/distance.py`, where the barycentre is derived.  Here the critical level is searched for: a slab
of columns is sorted, with the cumulative weights beside the values, and the proposals at several levels are then
binary searches in each column.  Whole weights (numbers of paths) have whole levels, so the search ends exactly
(other levels are told apart to 1e-12 in float64, 1e-6 in float32); a sample of the columns says where to begin,
so that one pass over all of them usually suffices.
"""

import sys

import torch

SLAB = 2**18  # entries sorted at a time, to stay in cache
SAMPLE = 32  # one in so many columns tells where to look


def overlap(p, q):
    """Acceptance probability sum_v min(p(v), q(v)), [...]: see `reference.distance.overlap`."""
    return torch.minimum(p, q).sum(dim=-1)


def total_variation(p, q):
    """TV(p, q) = 1/2 sum_v |p(v) - q(v)|, [...]: see `reference.distance.total_variation`."""
    return (p - q).abs_().sum(dim=-1) / 2


def barycentre(rows, weights=None):
    """The distribution that minimises the weighted mean total variation to the rows (App. B.4).

    Args:
        rows: probabilities, float32 or float64 [U, V], each summing to one within 1e-4.
        weights: [U] or [B, U], non-negative with a positive sum; None = equal weights.
    Returns: q [V] or [B, V] in the dtype of the rows.
    Raises: ValueError naming the row that is no distribution, or the bad weight.
    """
    rows, weights = distributions(rows), _weights(weights, rows)
    one, weights = weights.ndim == 1, weights.view(-1, len(rows))
    heaviest = weights.argmax(dim=1)
    sure = weights.amax(dim=1) > weights.sum(dim=1) / 2  # it is the weighted median of every coordinate at once
    q = rows[heaviest]
    if not sure.all():
        peak = rows.amax(dim=0)
        used = (peak > 0).nonzero()[:, 0]
        if len(used) < rows.shape[1]:  # a truncating law leaves few columns
            rows, peak = rows[:, used], peak[used]
            q[~sure] = 0
        for i in (~sure).nonzero()[:, 0]:
            q[i, used] = _solve(rows, peak, weights[i]).to(q.dtype)
    return q[0] if one else q


def barycentre_risk(rows, q, weights=None):
    """Weighted mean total variation between the rows and one proposal, float in [0, 1].

    Args: rows [U, V]; q [V]; weights [U] or None = equal.
    """
    weights = _weights(weights, rows)
    if distributions(q[None]).shape[1] != rows.shape[1]:
        raise ValueError(f"a proposal over {len(q)} tokens cannot meet rows over {rows.shape[1]}")
    risks = torch.stack([total_variation(row, q) for row in distributions(rows)])  # row by row stays in cache
    return float(weights @ risks.double() / weights.sum())


def distributions(rows):
    """The rows, or a ValueError that names the row that is no distribution; float64 rows are made to sum to one."""
    if rows.ndim != 2 or not rows.numel():
        raise ValueError(f"rows must be a non-empty [U, V] array, got shape {tuple(rows.shape)}")
    sums = rows.sum(dim=1)
    bad = ~((sums - 1).abs() <= 1e-4) | (rows.amin(dim=1) < 0)
    if bad.any():
        worst = int(bad.int().argmax())
        raise ValueError(
            f"row {worst} is no distribution: sum {float(sums[worst])}, smallest entry {float(rows[worst].min())}"
        )
    return rows / sums[:, None] if rows.dtype == torch.float64 else rows


def _solve(rows, peak, weights):
    """The barycentre of rows [U, V], whose columns' maxima are `peak`, under weights [U]: [V]."""
    whole = bool((weights == weights.round()).all() and weights.sum() < 2**24)
    weights = weights if whole else weights / weights.sum()
    resolution = 1.0 if whole else 1e-12 if rows.dtype == torch.float64 else 1e-6
    total, columns = float(weights.sum()), rows.shape[1]
    levels = _between(-resolution, total, resolution)
    complete = whole and len(levels) >= total
    if columns > 100 * SAMPLE and not complete:  # where to look: the heaviest columns, and some of the others
        heavy = torch.zeros(columns, dtype=torch.bool, device=rows.device)
        heavy[peak.topk(columns // SAMPLE).indices] = True
        sample = torch.cat([heavy.nonzero()[:, 0], (~heavy).nonzero()[::SAMPLE, 0]])
        guess, _ = _search(rows[:, sample], weights, torch.where(heavy[sample], 1, SAMPLE), levels, resolution)
        near = torch.tensor([-2, -1, 0, 1] if whole else [-1e-2, -1e-3, -1e-4, 1e-4, 1e-3, 1e-2])
        levels = (guess + near).clamp(-resolution, total)
    return _search(rows, weights, None, levels, resolution)[1]


def _search(rows, weights, counts, levels, resolution):
    """Narrow down the level at which the mass (column v counted counts[v] times) reaches one: (level, proposal)."""

    def mass(q):
        return float((q if counts is None else q * counts).sum(dtype=torch.float64))

    low, high = -resolution, float(weights.sum())
    below, above = torch.zeros_like(rows[0]), None
    while True:
        for level, q in zip(levels.tolist(), _proposals(rows, weights, levels), strict=True):
            if level < high and mass(q) >= 1 - 1e-12:  # masses rise with the level
                high, above = level, q
                break
            low, below = max(low, level), q
        if high - low <= resolution:
            break
        levels = _between(low, high, resolution)
    if above is None:  # float32 rows can stop short of one
        return high, below / mass(below)
    share = (1 - mass(below)) / (mass(above) - mass(below))
    return high, below + share * (above - below)


def _between(low, high, resolution):
    """Up to 32 levels strictly between two, on the grid of whole levels where that is the resolution."""
    levels = torch.linspace(low, high, 34, dtype=torch.float64)[1:-1]
    levels = levels.round().unique() if resolution == 1 else levels
    return levels[(levels > low) & (levels < high)]


def _proposals(rows, weights, levels):
    """Each column's value once every jump up to a level is taken, for several rising levels: [levels, V].

    The value at a level is the first whose cumulative weight exceeds it.
    """
    weights, levels = weights.to(rows.dtype), levels.to(rows.device, rows.dtype)

    found = rows.new_empty((len(levels), rows.shape[1]))
    columns = max(1, SLAB // len(rows))
    scratch = torch.empty((columns, len(rows)), dtype=torch.int64), rows.new_empty((columns, len(rows)))
    for slab, out in zip(rows.split(columns, dim=1), found.split(columns, dim=1), strict=True):
        values, reached = _sort_columns(slab.T, weights, scratch)
        rank = torch.searchsorted(reached, levels.expand(len(reached), -1).contiguous(), right=True)
        out.copy_(values.gather(1, rank.clamp_(max=len(rows) - 1)).T)
    return found


def _sort_columns(columns, weights, scratch):
    """Sort each of [C, U]: (its values in rising order, the weight reached with each).

    `scratch` spares the float32 path on a CPU its allocations: an int64 and a float32 array of at least that size.
    """
    if columns.is_cuda or columns.dtype != torch.float32:
        values, order = columns.sort(dim=1)
        return values, weights[order].cumsum(dim=1)
    # NumPy's vectorised sort of 64-bit words: the bits of a value, which order like it, then those of its weight.
    words, reached = (buffer[: len(columns)] for buffer in scratch)
    words.copy_(columns.view(torch.int32)).bitwise_left_shift_(32).bitwise_or_(weights.view(torch.int32))
    words.numpy().sort(axis=1)
    pairs = words.view(torch.float32).view(*words.shape, 2)
    value, weight = (1, 0) if sys.byteorder == "little" else (0, 1)
    return pairs[..., value], torch.cumsum(pairs[..., weight], dim=1, out=reached)


def _weights(weights, rows):
    if weights is None:
        return torch.ones(len(rows), dtype=torch.float64, device=rows.device)
    weights = torch.as_tensor(weights, dtype=torch.float64, device=rows.device)
    if weights.shape[-1:] != rows.shape[:1]:
        raise ValueError(f"{len(rows)} rows need {len(rows)} weights, got shape {tuple(weights.shape)}")
    if not (weights.isfinite().all() and (weights >= 0).all() and (weights.sum(dim=-1) > 0).all()):
        raise ValueError("weights must be finite and non-negative with a positive sum")
    return weights
