"""K proposals instead of one: how much of a floor is a choice between a few modes.

If something told a drafter which of K proposals to use, its risk could fall to

    min over q_1..q_K of  sum_u w_u min_j TV(p_u, q_j),                            (paper App. D.2)

whose case K = 1 is the order-0 floor.  The search is that of K-means with total variation for distance: rows go
to their nearest centre, centres move to the TV barycentre of their rows, and neither step can raise the risk.
It ends in a local optimum, so several seedings are tried; the risk returned is attained by its centres, so it bounds
the optimum from above.  One start more continues the best solution for K - 1, so the risk never rises with K.

Twin: `fast/clusters.py`.  Tests: `tests/test_clusters.py`.
"""

from dataclasses import dataclass

import numpy as np

from reference.distance import barycentre, barycentre_risk, distributions, total_variation


@dataclass(frozen=True)
class KMedian:
    """K proposals and the risk they leave.

    centres   [k, V], the proposals
    risk      weighted mean total variation of the rows to their nearest centre
    spread    largest minus smallest risk over the random starts: 0 says that the seeding did not matter
    """

    centres: np.ndarray
    risk: float
    spread: float


def k_median(rows, weights, k, *, seed, restarts=3, iterations=12):
    """The K proposals that together come closest to a family of rows (App. D.2).

    Each start takes the barycentre of all rows, then rows drawn with probability proportional to
    weight x (distance to the nearest centre)^2, and improves them for `iterations` rounds at most.  A centre that
    is nobody's nearest moves to the worst-served row.

    Args: rows, probabilities [U, V]; weights, [U], None = equal; k, number of proposals; seed, of the drawn rows;
        restarts, number of random starts; iterations, rounds per start.
    Returns: `KMedian`.  k = 1 is the barycentre itself, with spread 0.
    Raises: ValueError for k or restarts below 1, for rows that are no distributions, or for bad weights.
    """
    check_clusters(k, restarts)
    q = barycentre(rows, weights)
    best, first = KMedian(q[None], barycentre_risk(rows, q, weights), 0.0), q[None]
    if k == 1:
        return best
    rows = distributions(rows)
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, dtype=np.float64)
    rows, weights = rows[weights > 0], weights[weights > 0] / weights.sum()
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
        centres = np.concatenate([centres, rows[draw_row(weights, nearest, rng)][None]])
    return centres


def improve(rows, weights, centres, iterations):
    """Lloyd's alternation from given centres [k, V]: (centres, risk), never worse than where it began."""
    distances = _distances(rows, centres)
    risk = float(weights @ distances.min(axis=1))
    for _ in range(iterations):
        moved = centres.copy()
        nearest, served = distances.round(12).argmin(axis=1), distances.min(axis=1).round(12)
        for j in range(len(centres)):
            mine = nearest == j
            if mine.any():
                moved[j] = barycentre(rows[mine], weights[mine])
            else:
                worst = served.argmax()
                moved[j], served[worst] = rows[worst], 0
        distances = _distances(rows, moved)
        reached = float(weights @ distances.min(axis=1))
        if reached > risk - 1e-9:
            break
        centres, risk = moved, reached
    return centres, risk


def _distances(rows, centres):  # [U, k]
    return np.stack([total_variation(rows, q) for q in centres], axis=1)


def draw_row(weights, nearest, rng):
    """Draw a row in proportion to weight x nearest^2, both [U]; in proportion to weight where all are 0."""
    chances = weights * nearest**2
    chances = np.cumsum(chances if chances.any() else weights)
    return int(np.searchsorted(chances / chances[-1], rng.random(), side="right"))


def check_clusters(k, restarts):
    """A ValueError if there is nothing to search for or with."""
    if k < 1 or restarts < 1:
        raise ValueError(f"k and restarts must be at least 1, got {k} and {restarts}")
