"""The log-loss companion of the floors: how many nats the realised tokens of a block tell about the next one.

A proposal that never sees Z_<k and is charged -log q(Z_k) does best with the mean row, and what it loses against
the target itself is a mutual information (paper App. A.3),

    I(Z_k; Z_<k | X) = H(pbar) - E[H(p_k)] = E[ KL(p_k || pbar) ],        pbar = E[p_k | X].

Seeing the last m realised tokens wins back I(Z_k; last m | X): the same divergence with every row replaced by the
mean row of its information cell, and the ratio of the two is the recovery rho_{k,m} (Sec. 3.2).  The rows of a
slot hold all of this.  The paper instead scores the one token the corpus realised, through the log of a mean over
paths; that form (`jackknife`, `ce_realised`) has the same expectation and a far larger spread per anchor.

Twin: `fast/information.py`.  Tests: `tests/test_information.py` (closed forms, enumeration).
"""

from dataclasses import dataclass

import numpy as np

from reference.distance import distributions
from reference.floors import cells_of
from reference.stats import check_inclusion


def mutual_information(slot, order=None):
    """I(Z_k; last m realised tokens | X) at one anchor and slot, in nats (App. A.3, divergence form).

        sum_c W_c KL(pbar_c || pbar) = H(pbar) - sum_c W_c H(pbar_c)

    over the cells c of prefixes that agree on their last `order` tokens.  Tokens without mass contribute nothing.
    From M sampled paths the whole (order None) leans low by O(1/M); a small order leans high where cells are thin.

    Args: slot, a `Slot`; order m, or None for the whole realised history (the same as any m >= k).
    Returns: float, at least 0; exactly 0 at slot 0 and for order 0.
    """
    rows, weights = distributions(slot.rows), slot.weight / slot.weight.sum()
    cells = cells_of(slot, slot.index if order is None else order)
    mean = _mean(rows, weights)
    information = 0.0
    for cell in np.unique(cells[weights > 0]):
        here = cells == cell
        information += weights[here].sum() * _divergence(_mean(rows[here], weights[here]), mean)
    return max(0.0, float(information))


def _mean(rows, weights):
    return weights @ rows / weights.sum()


def _divergence(p, q):  # KL(p || q); q is positive wherever p is
    held = p > 0
    return (p[held] * np.log(p[held] / q[held])).sum()


def recovery(partial, whole, inclusion=None):
    """Recovered fraction rho of the missing information, a ratio of sums (App. B.2).

        rho = sum_i partial_i / pi_i  /  sum_i whole_i / pi_i

    Args: partial, I(Z_k; last m), and whole, I(Z_k; Z_<k), in nats: [n] over anchors or [n, slots] to pool slots;
        inclusion, pi [n], None = equal.
    Returns: float.  A single anchor's `whole` may be anything as long as the sum is positive.
    Raises: ValueError if the shapes differ, something is not finite, an inclusion lies outside (0, 1], or there is
        nothing to recover.
    """
    partial, whole = np.asarray(partial, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    weight = 1 / check_inclusion(np.ones(len(whole)) if inclusion is None else inclusion, len(whole))
    if partial.shape != whole.shape:
        raise ValueError(f"shapes differ: {partial.shape} of {whole.shape}")
    if not (np.isfinite(partial).all() and np.isfinite(whole).all()):
        raise ValueError("information must be finite; leave out an anchor where it is not")
    total = (weight @ whole).sum()
    if not total > 0:
        raise ValueError(f"nothing to recover: the missing information adds up to {total} nats")
    return float((weight @ partial).sum() / total)


@dataclass(frozen=True)
class LogMean:
    """-log of the mean of n sampled probabilities, in nats.

    value         jackknifed where that is accepted, else the plug-in
    plugin        -log(mean), which leans high
    relative_se   standard error of the mean over the mean; infinite below three samples
    corrected     whether `value` is the jackknifed one
    """

    value: float
    plugin: float
    relative_se: float
    corrected: bool


def jackknife(probs):
    """-log E[p] from n draws of p, with the O(1/n) bias of the logarithm removed (App. A.3, the estimate of C_{k,0}).

        n * plugin - (n - 1) * mean of the n leave-one-out plug-ins

    The correction is accepted if it is not negative: one draw that carries the mean makes it swing far below zero.

    Args: probs, [n] in [0, 1].
    Returns: `LogMean`; NaN without samples, infinite if all are zero, the plug-in below three samples.
    Raises: ValueError for negative or NaN entries.
    """
    probs = np.asarray(probs, dtype=np.float64)
    if probs.ndim != 1 or not (probs >= 0).all():
        raise ValueError("probabilities must be a flat list of numbers that are not negative")
    n = len(probs)
    if not n:
        return LogMean(np.nan, np.nan, np.inf, False)
    mean, plugin = probs.mean(), float(_loss(probs.mean()))
    if n < 3 or mean == 0:
        return LogMean(plugin, plugin, np.inf, False)
    relative_se = float(probs.std(ddof=1) / np.sqrt(n) / mean)
    before = np.cumsum(np.append(0, probs[:-1]))
    after = np.cumsum(np.append(0, probs[:0:-1]))[::-1]
    corrected = float(n * plugin - (n - 1) * _loss((before + after) / (n - 1)).mean())
    accepted = corrected > -1e-12  # not negative, up to rounding
    return LogMean(max(0.0, corrected) if accepted else plugin, plugin, relative_se, accepted)


def _loss(probs):
    with np.errstate(divide="ignore"):  # no mass costs infinitely much
        return -np.log(probs)


@dataclass(frozen=True)
class RealisedLoss:
    """Cross-entropies of one realised token, in nats.

    blind    CE_B = C_{k,0} = -log of its mean probability over the paths
    commit   CE_commit, the mean over the paths of -log of its probability: at least the blind plug-in (Jensen)
    """

    blind: LogMean
    commit: float


def ce_realised(slot, token):
    """The published form at one slot: what the realised token costs over prefixes sampled independently of it.

    With C_{k,k} = -log p_T(y_k | x, y_<k) of the teacher-forced pass, blind.value - C_{k,k} estimates the mutual
    information of the whole history from a single token (App. A.3).

    Args: slot, a `Slot`; token, y_k.
    Returns: `RealisedLoss`.  Under exact weights nothing is sampled: value = plugin, relative_se 0.
    Raises: ValueError for a token outside the vocabulary.
    """
    if not 0 <= token < slot.rows.shape[1]:
        raise ValueError(f"token {token} lies outside the vocabulary of {slot.rows.shape[1]}")
    return summarise_loss(slot, slot.rows[:, token])


def summarise_loss(slot, probs):
    """`RealisedLoss` from the realised token's probability under each distinct prefix, float64 [U]."""
    if slot.path_node is None:
        weights = slot.weight / slot.weight.sum()
        plugin = float(_loss(weights @ probs))
        held = weights > 0
        return RealisedLoss(LogMean(plugin, plugin, 0.0, False), float(weights[held] @ _loss(probs[held])))
    probs = probs[slot.path_node[slot.path_node >= 0]]  # path by path
    return RealisedLoss(jackknife(probs), float(_loss(probs).mean()))


def effective_support(weights, paths=None):
    """Collision-equivalent number of continuations 1 / sum_z p(z)^2 (App. B.6, D.1).

    From sampled paths the collision probability is sum n (n - 1) / (m (m - 1)) over the m paths alive: unbiased.

    Args: weights, [U], `Slot.weight`: the share of the M paths on each prefix, or its probability; paths, M, or
        None for probabilities.  Stopped paths have no prefix and do not count.
    Returns: float, at least 1; the number of paths where no two of them collide.
    Raises: ValueError if the weights are no shares of M paths.
    """
    weights = np.asarray(weights, dtype=np.float64)
    if weights.ndim != 1 or not ((weights >= 0).all() and weights.sum() > 0):
        raise ValueError("weights must be a flat list, not negative, with a positive sum")
    if paths is None:
        return float(weights.sum() ** 2 / (weights**2).sum())
    counts = np.round(weights * paths)
    alive = counts.sum()
    if np.abs(weights * paths - counts).max() > 1e-6 or not 0 < alive <= paths:
        raise ValueError(f"weights must be shares of {paths} paths: whole numbers over {paths} that sum to at most 1")
    collisions = (counts * (counts - 1)).sum()
    return float(alive * (alive - 1) / collisions if collisions else alive)
