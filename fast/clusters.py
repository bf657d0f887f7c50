"""K proposals instead of one, in PyTorch.  Twin: `reference/clusters.py`, where the search is explained.

Distances and barycentres are computed where the rows are; who is nearest to whom is decided on the host, by the
same rules and from the same random numbers as in the reference.
"""

import numpy as np
import torch

from fast.distance import barycentre, barycentre_risk, distributions, total_variation
from reference.clusters import KMedian, check_clusters, draw_row

__all__ = ["KMedian", "k_median"]


def k_median(rows, weights, k, *, seed, restarts=3, iterations=12):
    """The K proposals that together come closest to a family of rows: see `reference.clusters.k_median`.

    Args: rows, probabilities, float32 or float64 [U, V]; weights [U] or None.
    Returns: `KMedian` with a tensor of centres in the dtype of the rows.
    """
    check_clusters(k, restarts)
    q = barycentre(rows, weights)
    best, first = KMedian(q[None], barycentre_risk(rows, q, weights), 0.0), q[None]
    if k == 1:
        return best
    rows = distributions(rows)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=np.float64)
    rows, weights = _take(rows, weights > 0), weights[weights > 0] / weights.sum()
    for width in range(2, k + 1):
        rng = np.random.default_rng([seed, width])
        starts = [improve(rows, weights, _seed(rows, weights, width, best.centres, rng), iterations)]
        for _ in range(restarts):
            starts.append(improve(rows, weights, _seed(rows, weights, width, first, rng), iterations))
        risks = [risk for _, risk in starts]
        centres, risk = starts[int(np.round(risks, 12).argmin())]
        best = KMedian(centres, risk, max(risks[1:]) - min(risks[1:]))
    return best


def _seed(rows, weights, k, centres, rng):
    """Centres [k, V] that begin with the given ones and go on with drawn rows."""
    while len(centres) < k:
        nearest = _distances(rows, centres).min(axis=1).round(12)
        centres = torch.cat([centres, rows[draw_row(weights, nearest, rng)][None]])
    return centres


def improve(rows, weights, centres, iterations):
    """Lloyd's alternation from given centres [k, V]: (centres, risk), never worse than where it began."""
    distances = _distances(rows, centres)
    risk = float(weights @ distances.min(axis=1))
    for _ in range(iterations):
        moved = centres.clone()
        nearest, served = distances.round(12).argmin(axis=1), distances.min(axis=1).round(12)
        for j in range(len(centres)):
            mine = nearest == j
            if mine.any():
                moved[j] = barycentre(_take(rows, mine), weights[mine])
            else:
                worst = int(served.argmax())
                moved[j], served[worst] = rows[worst], 0
        distances = _distances(rows, moved)
        reached = float(weights @ distances.min(axis=1))
        if reached > risk - 1e-9:
            break
        centres, risk = moved, reached
    return centres, risk


def _take(rows, which):
    return rows if which.all() else rows[torch.from_numpy(which.nonzero()[0]).to(rows.device)]


def _distances(rows, centres):  # float64 [U, k], on the host
    found = [[total_variation(row, q) for q in centres] for row in rows]  # row by row stays in cache
    return torch.stack([torch.stack(f) for f in found]).double().cpu().numpy()
