"""From anchors to numbers: which positions are measured, how they are weighted, how sure the answer is.

The population is every eligible position of every answer the target wrote.  It is split into strata (context
length x relative position), each stratum is sampled without replacement, and every mean is a Hajek mean

    sum_i y_i / pi_i  /  sum_i 1 / pi_i

with pi_i the probability that anchor i was measured, over all sampling stages (paper App. B.2).  Anchors of one
prompt share their text, so intervals resample prompts, never anchors.

Everything here is NumPy and used by both backends.  Tests: `tests/test_stats.py`.
"""

import warnings
from collections import defaultdict
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

CONTEXT_EDGES = (512, 2048, 4096, 8192, 16384)  # tokens before the anchor
POSITION_EDGES = (1 / 3, 2 / 3)  # of the answer


@dataclass(frozen=True)
class Anchor:
    """A position inside an answer: its prefix is the prompt and the answer's first `position` tokens.

    `context` counts the tokens of that prefix; `stratum` is (context bucket, position bin); `inclusion` is the
    probability that the design measures it.
    """

    domain: str
    prompt: str
    position: int
    context: int
    stratum: tuple[int, int]
    inclusion: float = 1.0


@dataclass(frozen=True)
class Interval:
    """An estimate with the 2.5th and 97.5th percentiles of its prompt bootstrap; floats, or arrays alike."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Concentration:
    """How unevenly a total is spread over anchors; shares in [0, 1].

    below      share of the anchors whose value is below the threshold
    carried    share of the total that these carry
    top        share of the total carried by the anchors from the upper quantile up
    """

    below: float
    carried: float
    top: float


def eligible(answer, gamma, special_ids, stopped=True):
    """Positions t of an answer that can be anchors: the block answer[t : t + gamma] is whole and ordinary.

    An answer cut by the length cap (`stopped` False) loses its last gamma candidates, whose blocks are censored;
    a block that holds a special token is dropped (App. B.2).

    Args: answer, token ids without the stop id; special_ids, set of ids.  Returns: list of int.
    """
    usable = len(answer) - gamma - (0 if stopped else gamma)
    special = [token in special_ids for token in answer]
    return [t for t in range(usable + 1) if not any(special[t : t + gamma])]


def stratum(context, position, length):
    """(context bucket, position bin) of an anchor `position` tokens into an answer of `length` tokens."""
    return (
        int(np.searchsorted(CONTEXT_EDGES, context, side="right")),
        int(np.searchsorted(POSITION_EDGES, position / max(1, length), side="right")),
    )


def sample_anchors(population, budget, seed):
    """Draw about `budget` anchors of one domain, stratified, with their inclusion probabilities (App. B.2).

    Every populated stratum gets floor(budget / strata) places, at least one, filled by simple random sampling
    without replacement: pi = n_s / N_s.  Places a small stratum cannot fill are not given to others.  If there
    are more strata than places, a second stage keeps `budget` of the drawn anchors and pi shrinks accordingly.

    Args: population, list of `Anchor`; budget >= 1; seed, int.
    Returns: list of `Anchor` in random order, so that any first part of it is a random subsample.
    """
    if budget < 1:
        raise ValueError(f"the budget must be at least one anchor, got {budget}")
    rng = np.random.default_rng(seed)
    strata = defaultdict(list)
    for anchor in population:
        strata[anchor.stratum].append(anchor)
    places = max(1, budget // max(1, len(strata)))
    drawn = []
    for key in sorted(strata):
        cell = strata[key]
        n = min(places, len(cell))
        drawn += [replace(cell[i], inclusion=n / len(cell)) for i in rng.choice(len(cell), n, replace=False)]
    return subsample([drawn[i] for i in rng.permutation(len(drawn))], budget)


def subsample(anchors, count):
    """The first `count` of randomly ordered anchors, as a further sampling stage: pi x count / how many there are."""
    if count >= len(anchors):
        return list(anchors)
    return [replace(a, inclusion=a.inclusion * count / len(anchors)) for a in anchors[:count]]


def hajek(values, inclusion):
    """Hajek mean sum(y / pi) / sum(1 / pi) over axis 0 (App. B.2).

    Args: values [N, ...]; inclusion [N] in (0, 1].  NaN marks an absent value and takes no part.
    Returns: float or [...]; NaN where every value is absent.
    """
    numerator, denominator = hajek_sums(values, inclusion)
    return _ratio(numerator.sum(axis=0), denominator.sum(axis=0))[()]


def hajek_sums(values, inclusion):
    """Each anchor's part (y / pi, 1 / pi) in a Hajek mean: two arrays [N, ...], zero where y is NaN.

    The change of paired values, such as floors of the same anchors from M and from 4M paths, is the Hajek mean of
    their difference: `hajek_sums(after - before, inclusion)`.
    """
    values = np.asarray(values, dtype=np.float64)
    inclusion = check_inclusion(inclusion, len(values))
    weight = (1 / inclusion).reshape(-1, *[1] * (values.ndim - 1))
    present = ~np.isnan(values)
    return np.where(present, values, 0) * weight, present * weight


def check_inclusion(inclusion, count):
    """Inclusion probabilities as float64 [count], or a ValueError if they are not as many or lie outside (0, 1]."""
    inclusion = np.asarray(inclusion, dtype=np.float64)
    if inclusion.shape != (count,):
        raise ValueError(f"{count} anchors need as many inclusion probabilities, got shape {inclusion.shape}")
    if not ((inclusion > 0) & (inclusion <= 1)).all():
        raise ValueError("inclusion probabilities must lie in (0, 1]")
    return inclusion


def prompt_bootstrap(numerator, denominator, prompts, *, strata=None, combine=None, replicates=10_000, seed=20260818):
    """A ratio of sums over anchors with its 95% prompt-bootstrap interval (App. B.2).

    Statistic: sum(numerator) / sum(denominator), column by column - a Hajek mean with the two arrays of
    `hajek_sums`, a ratio of Hajek means with two numerators.  With `strata` it is the mean of the strata's ratios
    (equal-domain means), prompts being resampled within their stratum; `combine` replaces that mean.

    Whole prompts are drawn with replacement, as many as there are (in each stratum).  How often each is drawn is a
    multinomial count, so all replicates are one product of a matrix of counts [replicates, prompts] with the
    per-prompt sums.

    Args: numerator, denominator [N, ...]; prompts, N labels; strata, N labels or None; combine, maps ratios
        [replicates + 1, strata, ...] to statistics [replicates + 1, ...].
    Returns: `Interval` of floats or arrays [...]; NaN where a denominator is zero.  The ends are NaN if a stratum has
        a single prompt: one prompt says nothing about the spread between prompts.
    """
    numerator, denominator = (np.asarray(a, dtype=np.float64) for a in (numerator, denominator))
    shape, strata = numerator.shape[1:], np.zeros(len(numerator)) if strata is None else np.asarray(strata)
    sums = []
    for here in (strata == name for name in np.unique(strata)):
        _, prompt = np.unique(np.asarray(prompts)[here], return_inverse=True)
        sums.append(np.zeros((2, prompt.max() + 1, int(np.prod(shape)))))
        np.add.at(sums[-1][0], prompt, numerator[here].reshape(here.sum(), -1))
        np.add.at(sums[-1][1], prompt, denominator[here].reshape(here.sum(), -1))
    counts = tuple(part.shape[1] for part in sums)
    draws = zip(_resample(counts, replicates, seed), sums, strict=True)
    ratios = np.stack(
        [_ratio(times @ top, times @ bottom).reshape(-1, *shape) for times, (top, bottom) in draws], axis=1
    )
    statistic = ratios.mean(axis=1) if combine is None else combine(ratios)
    low = high = np.full(statistic.shape[1:], np.nan)
    if min(counts) > 1:
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a column without any value
            low, high = np.nanpercentile(statistic[1:], [2.5, 97.5], axis=0)
    return Interval(statistic[0][()], low[()], high[()])


@lru_cache(maxsize=2)  # the statistics of a report resample the same prompts
def _resample(counts, replicates, seed):
    """How often each prompt of each stratum is drawn: a list of [replicates + 1, prompts], every prompt once first."""
    rng = np.random.default_rng(seed)
    drawn = [rng.multinomial(n, np.full(n, 1 / n), size=replicates) for n in counts]
    return [np.concatenate([np.ones((1, n)), times]) for n, times in zip(counts, drawn, strict=True)]


def _ratio(numerator, denominator):
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(denominator > 0, numerator / denominator, np.nan)


def weighted_quantile(values, weights, q):
    """Smallest value whose cumulative weight share reaches q (1, 2, 3 with weights 1, 1, 2 has median 2)."""
    values, weights = np.asarray(values, dtype=np.float64), np.asarray(weights, dtype=np.float64)
    order = np.argsort(values, kind="stable")
    share = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][min(np.searchsorted(share, q - 1e-12), len(order) - 1)])


def concentration(values, weights, threshold=0.01, quantile=0.9):
    """Who carries a weighted total: the many small values, and the few large ones (paper Sec. 3.1).

    Args: values [N], not negative, such as an anchor's floor at one slot; NaN marks an absent value; weights [N],
        1 / inclusion; threshold, below which a value is small; quantile, the weighted quantile from which on (ties
        included) a value is large.
    Returns: `Concentration`; shares of a total that is zero are NaN.
    """
    values, weights = _present(weights, values)
    if (values < 0).any():
        raise ValueError(f"shares of a total need values that are not negative, got {values.min()}")
    carries, small = weights * values, values < threshold
    large = values >= weighted_quantile(values, weights, quantile)
    carried, top = _ratio(np.array([carries[small].sum(), carries[large].sum()]), carries.sum())
    return Concentration(float(weights[small].sum() / weights.sum()), float(carried), float(top))


def weighted_correlation(x, y, weights):
    """Pearson correlation of x and y [N] under weights [N], in [-1, 1] (paper App. D.1).

    NaN marks an absent value and leaves its pair out; the correlation is NaN where x or y does not vary.
    """
    x, y, weights = _present(weights, x, y)
    x, y = x - x[0], y - y[0]  # exact zeros where nothing varies
    x, y = (a - weights @ a / weights.sum() for a in (x, y))
    xx, xy, yy = ((weights * a) @ b for a, b in ((x, x), (x, y), (y, y)))
    return float(np.clip(_ratio(xy, np.sqrt(xx * yy)), -1, 1))


def _present(weights, *columns):
    """Columns [N] and their weights in float64, less the places with a NaN or without weight: (column, .., weights)."""
    columns = np.stack([np.asarray(a, dtype=np.float64) for a in columns])
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape != columns.shape[1:] or not ((weights >= 0) & (weights < np.inf)).all():
        raise ValueError(f"{columns.shape[1]} values need as many weights, finite and not negative")
    present = ~np.isnan(columns).any(axis=0) & (weights > 0)
    if not present.any():
        raise ValueError("no value is present with a positive weight")
    return *columns[:, present], weights[present]
