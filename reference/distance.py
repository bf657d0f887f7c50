"""Overlap, total variation, and the distribution that is closest to many others.

A draft token drawn from q is accepted against p with probability sum_v min(p(v), q(v)) = 1 - TV(p, q), so the
best single proposal for a family of target rows p_1..p_U with weights w_u is their TV barycentre,

    q* = argmin_q  sum_u w_u TV(p_u, q)        over probability vectors q,

and the risk it still carries is an information floor (paper Sec. 2, App. B.4).

Solving it.  Without the constraint sum_v q(v) = 1 the problem falls apart into one weighted median per
coordinate.  The Lagrange multiplier of the constraint moves every coordinate from its median to a common
quantile: q*(v) is the beta-quantile of {p_u(v)} under the weights, and beta is the level at which the total
mass reaches one.  Picture beta rising from 0: coordinate v sits at its smallest value and jumps to its next
order statistic whenever beta passes the weight lying below that value.  So all jumps of all coordinates are
sorted by their level and added up until the mass is one; the jumps at the last level are taken in proportion.

Twin: `fast/distance.py`.  Tests: `tests/test_distance.py` (linear programme, closed forms).
"""

from bisect import bisect_left

import numpy as np


def overlap(p, q):
    """Probability that a token drawn from q is accepted: sum_v min(p(v), q(v)), float64 [...] (paper Sec. 2).

    Args: p, q, probabilities [..., V], broadcast against each other.
    """
    return np.minimum(p, q).sum(axis=-1)


def total_variation(p, q):
    """TV(p, q) = 1/2 sum_v |p(v) - q(v)| = 1 - overlap, float64 [...], zero exactly when p = q.

    Args: p, q, probabilities [..., V], broadcast against each other.
    """
    return np.abs(np.asarray(p, dtype=np.float64) - q).sum(axis=-1) / 2


def barycentre(rows, weights=None):
    """The distribution that minimises the weighted mean total variation to the rows (App. B.4).

    Minimisers need not be unique: proportional interpolation at the critical level picks one, the middle of the
    segment between two rows weighted alike.  A row that holds more than half the weight is itself the answer.

    Args:
        rows: probabilities [U, V]; each must sum to one within 1e-4 (float32 rows are renormalised).
        weights: [U] or [B, U], non-negative with a positive sum; None = equal weights.  Rows repeated n times
            and one row of weight n give the same answer.
    Returns: q, float64 [V] or [B, V], on the simplex.
    Raises: ValueError naming the row that is no distribution, or the bad weight.
    """
    rows, weights = distributions(rows), _weights(weights, len(rows))
    return np.stack([_solve(rows, w) for w in weights]) if weights.ndim == 2 else _solve(rows, weights)


def _solve(rows, weights):
    total = weights.sum()
    heaviest = weights.argmax()
    if weights[heaviest] > total / 2:  # it is the weighted median of every coordinate at once
        return rows[heaviest].copy()

    order = np.argsort(rows, axis=0)
    values = np.take_along_axis(rows, order, axis=0)
    jumps = np.diff(values, axis=0, prepend=0)  # [U, V]
    weight = (weights / total)[order]
    levels = np.round(np.cumsum(weight, axis=0) - weight, 12)  # weight strictly below each value

    def mass(level):  # of the proposal once every jump up to this level is taken
        return jumps[levels <= level].sum()

    distinct = np.unique(levels)
    critical = distinct[bisect_left(distinct, 1 - 1e-12, key=mass)]
    below = np.where(levels < critical, jumps, 0).sum(axis=0)
    step = np.where(levels == critical, jumps, 0).sum(axis=0)
    q = below + step * np.clip((1 - below.sum()) / step.sum(), 0, 1)
    return q / q.sum()


def barycentre_risk(rows, q, weights=None):
    """Weighted mean total variation between the rows and one proposal: sum_u w_u TV(p_u, q) / sum_u w_u.

    Args: rows [U, V]; q [V]; weights [U] or None = equal.
    Returns: float in [0, 1].
    """
    rows = distributions(rows)
    if distributions(np.asarray(q)[None]).shape[1] != rows.shape[1]:
        raise ValueError(f"a proposal over {len(q)} tokens cannot meet rows over {rows.shape[1]}")
    weights = _weights(weights, len(rows))
    return float(weights @ total_variation(rows, q) / weights.sum())


def distributions(rows):
    """Rows as float64 distributions that sum to one exactly, or a ValueError that names the row at fault."""
    rows = np.asarray(rows, dtype=np.float64)
    if rows.ndim != 2 or rows.size == 0:
        raise ValueError(f"rows must be a non-empty [U, V] array, got shape {rows.shape}")
    sums = rows.sum(axis=1)
    bad = ~(np.abs(sums - 1) <= 1e-4) | (rows.min(axis=1) < 0)
    if bad.any():
        worst = int(bad.argmax())
        raise ValueError(f"row {worst} is no distribution: sum {sums[worst]}, smallest entry {rows[worst].min()}")
    return rows / sums[:, None]


def _weights(weights, count):
    if weights is None:
        return np.ones(count)
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape[-1:] != (count,):
        raise ValueError(f"{count} rows need {count} weights, got shape {weights.shape}")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and (weights.sum(axis=-1) > 0).all()):
        raise ValueError("weights must be finite and non-negative with a positive sum")
    return weights
