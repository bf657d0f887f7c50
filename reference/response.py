"""Best responses: how much longer the accepted block gets when one slot's proposal is made as good as it can be.

With accept factors a_j and reach W_j = a_0 ... a_j, the accepted length splits at slot k,

    tau - 1 = kappa_k + E[ W_{k-1} a_k F_k ],    kappa_k = E[ sum_{j<k} W_j ],    F_k = 1 + a_{k+1} F_{k+1}

(paper Sec. 3.5, App. F.4), because W_j = W_{k-1} a_k (a_{k+1} ... a_j) from slot k on.  Neither kappa_k nor the
credit c = W_{k-1} F_k contains q_k, so the best q_k of one information cell maximises

    sum_r c_r min(1, q(z_r) / p_r)      over the paths r of the cell and the probability vectors q.

That is one concave, piecewise linear function per token: at q(v) it rises by sum of c_r / p_r over the paths that
drew v with p_r >= q(v).  Only sum_v q(v) = 1 ties the tokens together, so one unit of mass is poured over the
segments of all tokens, steepest first.  What is poured on no segment follows the proposal that was there before.

Scored on the paths it was fitted to, a response looks too good.  So the paths are halved, one half fits and the
other scores, and both directions are averaged (App. F.5).  Every cell and anchor gets an action of its own: the
gain is that of an oracle within the drafter's information class, not headroom for training.

Twin: `fast/response.py`.  Tests: `tests/test_response.py` (closed forms, linear programmes, enumeration).
"""

from dataclasses import dataclass

import numpy as np

from reference.serving import accept_factors, reach


@dataclass(frozen=True)
class BlockPaths:
    """What one anchor's M sampled paths met in the block; all [M, gamma], paths in the order of their ids.

    token         Z_k of each path
    target_p      p_k(Z_k)
    draft_p       q_k(Z_k), the drafter's proposal at the same token
    predecessor   what the proposal sees of the block, as a label; for order 1 the token Z_{k-1}
    alive         False once a path has stopped; its other entries are then ignored and its accept factor is 0
    """

    token: np.ndarray
    target_p: np.ndarray
    draft_p: np.ndarray
    predecessor: np.ndarray
    alive: np.ndarray


@dataclass(frozen=True)
class BestResponse:
    """Gains in accepted length (tokens per round) from one slot's best response, averaged over the two folds.

    train             on the half that was fitted: leans high, never negative up to rounding
    held_out          on the other half: leans low; negative if the half was too small to fit on
    leftover          mass poured on no segment, averaged over the cells
    effective_paths   (sum c)^2 / sum c^2 over the living paths of the half that was fitted
    """

    train: float
    held_out: float
    leftover: float
    effective_paths: float


@dataclass(frozen=True)
class Sweep:
    """Gains in accepted length over the recorded proposal after each round, averaged over the two folds.

    train      [rounds], on the half that was fitted: never falls
    held_out   [rounds], on the other half
    """

    train: tuple[float, ...]
    held_out: tuple[float, ...]


def water_fill(tokens, probs, credit):
    """The distribution that maximises sum_r credit_r min(1, q(token_r) / prob_r), exactly (App. F.4).

    Steepest slopes are filled first; ties between slopes go to the smaller token.  A path without probability or
    without credit takes no part.

    Args: tokens, int [n]; probs, target probabilities [n] of those tokens; credit [n], not negative.
    Returns: (allocation {token: mass}, leftover), together 1; leftover is positive only if every path that takes
        part is accepted for certain.
    Raises: ValueError if the arrays do not match or hold something negative or not finite.
    """
    tokens, probs, credit = check_fill(tokens, probs, credit)
    segments = []  # (slope, token, width)
    for token in np.unique(tokens[probs > 0]):
        here = np.flatnonzero((tokens == token) & (probs > 0))
        here = here[np.argsort(-probs[here], kind="stable")]
        slopes = np.cumsum(credit[here] / probs[here])  # below each probability, the paths at or above it still gain
        widths = -np.diff(probs[here], append=0)
        segments += zip(slopes.tolist(), [int(token)] * len(here), widths.tolist(), strict=True)
    segments = [segment for segment in segments if segment[0] > 0]
    segments.sort(key=lambda segment: -segment[0])

    allocation, filled = {}, 0.0
    for _, token, width in segments:
        if (mass := min(width, 1 - filled)) > 0:
            allocation[token] = allocation.get(token, 0.0) + mass
        filled += width
    return allocation, max(0.0, 1 - filled)


def credit(factors, slot):
    """What an accepted draft at one slot is worth on each path: c = W_{k-1} F_k in tokens, float64 [M] (App. F.4).

    tau changes by mean(c (a'_k - a_k)) when the slot's factors change from a_k to a'_k.

    Args: factors, accept factors [M, gamma]; slot k.
    """
    factors = np.asarray(factors, dtype=np.float64)
    if not 0 <= slot < factors.shape[1]:
        raise ValueError(f"slot {slot} lies outside a block of {factors.shape[1]}")
    arrive = onward = np.ones(len(factors))
    for j in range(slot):
        arrive = arrive * factors[:, j]
    for j in range(factors.shape[1] - 1, slot, -1):
        onward = 1 + factors[:, j] * onward  # F_{j-1} = 1 + a_j F_j
    return arrive * onward


def fit_proposal(paths, credit, slot, order, fit):
    """Fit one slot's best response on some paths and read it at every path's token (App. F.4).

    Each information cell (order 0: all paths; order 1: those with one predecessor) has its own water fill, and its
    leftover follows the recorded proposal: q = fill + leftover * q_base.  A cell without a fitted path keeps q_base.

    Args: paths, `BlockPaths`; credit [M], see `credit`; slot; order, 0 or 1; fit, bool [M], the paths to fit on.
    Returns: (q, float64 [M]; the leftover averaged over the fitted cells, 1 if there are none).
    """
    paths = check_paths(paths, slot, order)
    token, p, base = paths.token[:, slot], paths.target_p[:, slot], paths.draft_p[:, slot]
    cell = paths.predecessor[:, slot] if order else np.zeros(len(token))
    q, leftovers = base.copy(), []
    for here in (cell == u for u in np.unique(cell[fit & (p > 0)])):
        seen = here & fit
        allocation, leftover = water_fill(token[seen], p[seen], credit[seen])
        q[here] = np.array([allocation.get(int(v), 0.0) for v in token[here]]) + leftover * base[here]
        leftovers.append(leftover)
    return q, float(np.mean(leftovers or [1.0]))


def best_response(paths, slot, order=0, smoothing=0.0):
    """Cross-fitted gain in accepted length from the best proposal at one slot, the others as recorded (App. F.5).

    Args:
        paths: `BlockPaths` of at least 8 paths.  The recorded proposal must itself be of the given order, or its
            gain may be negative even where it was fitted.
        slot: k.
        order: 0, one proposal per anchor; 1, one per predecessor.
        smoothing: share eps of the recorded proposal in (1 - eps) q_fit + eps q_base; 1 changes nothing.
    Returns: `BestResponse`, in tokens per round.
    """
    paths = check_paths(paths, slot, order)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing is a share between 0 and 1, got {smoothing}")
    factors = accept_factors(paths.target_p, paths.draft_p)
    worth, folds = credit(factors, slot), []
    for fit in halve(len(factors)):
        q, leftover = fit_proposal(paths, worth, slot, order, fit)
        q = (1 - smoothing) * q + smoothing * paths.draft_p[:, slot]
        gain = worth * (accept_factors(paths.target_p[:, slot], q) - factors[:, slot])
        here = worth[fit & paths.alive[:, slot]]
        squares = (here**2).sum()
        effective = here.sum() ** 2 / squares if squares > 0 else 0.0
        folds.append([gain[fit].mean(), gain[~fit].mean(), leftover, effective])
    return BestResponse(*np.mean(folds, axis=0).tolist())


def sweep(paths, order=0, rounds=8, backward=False):
    """Refit slot after slot against the latest proposals at the others, round after round (App. F.6).

    Coordinate ascent on the accepted length of the fitted half: it need not reach the joint optimum.

    Args: paths, `BlockPaths` of at least 8; order, 0 or 1; rounds; backward, visit the last slot first.
    Returns: `Sweep`, in tokens per round.
    """
    paths = check_paths(paths, 0, order)
    base = accept_factors(paths.target_p, paths.draft_p)
    slots = range(base.shape[1])[:: -1 if backward else 1]
    folds = []
    for fit in halve(len(base)):
        factors, gains = base.copy(), []
        for _ in range(rounds):
            for slot in slots:
                q, _ = fit_proposal(paths, credit(factors, slot), slot, order, fit)
                factors[:, slot] = accept_factors(paths.target_p[:, slot], q)
            gain = (reach(factors) - reach(base)).sum(axis=1)
            gains.append([gain[fit].mean(), gain[~fit].mean()])
        folds.append(gains)
    train, held_out = np.mean(folds, axis=0).reshape(rounds, 2).T.tolist()
    return Sweep(tuple(train), tuple(held_out))


def halve(count):
    """The two folds: bool [2, M], the first half of the paths and the rest."""
    if count < 8:
        raise ValueError(f"cross-fitting needs at least 8 paths, got {count}")
    first = np.arange(count) < count // 2
    return np.stack([first, ~first])


def check_fill(tokens, probs, credit):
    """The arguments of `water_fill` as arrays [n], or a ValueError that says what is wrong."""
    tokens = np.array(tokens, dtype=np.int64)
    probs, credit = np.array(probs, dtype=np.float64), np.array(credit, dtype=np.float64)
    if tokens.ndim != 1 or not tokens.shape == probs.shape == credit.shape:
        raise ValueError(f"tokens, probs and credit are all [n], got {tokens.shape}, {probs.shape}, {credit.shape}")
    for name, values in (("probs", probs), ("credit", credit)):
        if not ((values >= 0) & np.isfinite(values)).all():
            raise ValueError(f"{name} must be finite and non-negative, got {values}")
    return tokens, probs, credit


def check_paths(paths, slot, order):
    """The paths as int64, float64 and bool arrays, with probability 0 where a path has stopped; or a ValueError."""
    token, predecessor = (np.array(a, dtype=np.int64) for a in (paths.token, paths.predecessor))
    alive = np.array(paths.alive, dtype=bool)
    target_p, draft_p = (np.array(a, dtype=np.float64) for a in (paths.target_p, paths.draft_p))
    shapes = {a.shape for a in (token, target_p, draft_p, predecessor, alive)}
    if len(shapes) > 1 or token.ndim != 2 or not token.size:
        raise ValueError(f"the five arrays of the paths must all be [M, gamma], got {sorted(shapes)}")
    if not 0 <= slot < token.shape[1]:
        raise ValueError(f"slot {slot} lies outside a block of {token.shape[1]}")
    if order not in (0, 1):
        raise ValueError(f"a best response is of order 0 or 1, got {order}")
    if (alive[:, 1:] & ~alive[:, :-1]).any():
        raise ValueError("a path that has stopped must stay stopped: look at `alive`")
    target_p, draft_p = (np.where(alive, a, 0) for a in (target_p, draft_p))
    for name, values in (("target_p", target_p), ("draft_p", draft_p)):
        if not ((values >= 0) & (values <= 1 + 1e-4)).all():
            raise ValueError(f"{name} of a living path is no probability: it must lie in [0, 1]")
    return BlockPaths(token, np.minimum(target_p, 1), np.minimum(draft_p, 1), predecessor, alive)
