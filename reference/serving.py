"""What verification does with a block: reach, accepted length, and the risk that is met while serving.

A drafted block is verified from the left until the first rejection; J is the number of tokens accepted.  Seen
from a target path Z_0, Z_1, .. the same law reads as a product of accept factors,

    a_k = min(1, q_k(Z_k) / p_k(Z_k)),     W_k = a_0 .. a_k  (reach),     P(J > k) = E[W_k] = S_k  (survival),

because p min(1, q / p) = q min(1, p / q) = min(p, q) for every token, slot after slot (paper Sec. 2).  So the
accepted length is tau = 1 + sum_k S_k, the bonus token counted.  Averaging a_k over Z_k leaves 1 - TV(p_k, q_k),
hence S_k = E[W_{k-1} (1 - TV_k)]: the same number with the noise of the last token removed.  The risk met while
serving weights each path by its chance to get there (Eq. 6), and is the hazard of the survival:

    R_k^serve = E[W_{k-1} TV_k] / E[W_{k-1}] = 1 - S_k / S_{k-1}.

Stops: a stop token that is accepted counts as an accepted token, and no draft after it does (the bonus token is
counted in every round).  A path that has stopped does not arrive at later slots: its factors are 0 there, and
E[W_{k-1}] is everywhere the arrival E[W_{k-1}; path alive at slot k], over all paths.  The same number divides an
anchor's rejections and weighs the anchor in the pool, so R_k^serve = 1 - S_k / arrival_k holds exactly, pooled or
not; without stops arrival_k = S_{k-1}.

Twin: `fast/serving.py`.  Tests: `tests/test_serving.py` (enumeration of paths and of verification itself).
"""

from dataclasses import dataclass

import numpy as np

from reference.distance import distributions
from reference.risk import prefix_risks, proposals


@dataclass(frozen=True)
class Serving:
    """How an anchor's paths fare, slot by slot: arrays [gamma], or [N, gamma] for N anchors.

    alive       share of the paths that have not stopped before the slot
    risk        R_k, mean TV over those paths; NaN if there are none
    arrival     E[W_{k-1}], stopped paths counting 0
    rejected    E[W_{k-1} TV_k] likewise
    survival    S_k = E[W_{k-1} (1 - TV_k)], the conditional-expectation form
    hazard      R_k^serve of each anchor by itself; NaN where it is never reached
    """

    alive: np.ndarray
    risk: np.ndarray
    arrival: np.ndarray
    rejected: np.ndarray

    @property
    def survival(self):
        return self.arrival - self.rejected

    @property
    def hazard(self):
        with np.errstate(invalid="ignore"):
            return self.rejected / self.arrival


@dataclass(frozen=True)
class ServingRisk:
    """Pooled serving risk, [gamma] each: risk = free + within + between.

    risk        ratio of sums over anchors, sum_i w_i E_i[W TV] / sum_i w_i E_i[W]
    free        weighted mean of R_k: every path counts, reached or not
    within      path selection: mean change from R_k to the hazard inside each anchor
    between     anchor composition: what weighting anchors by their arrival adds
    """

    risk: np.ndarray
    free: np.ndarray
    within: np.ndarray
    between: np.ndarray


@dataclass(frozen=True)
class Dependence:
    """Joint survival over the product of marginal acceptances, [gamma] each: ratio = within x between."""

    ratio: np.ndarray
    within: np.ndarray
    between: np.ndarray


def accept_factors(target_p, draft_p):
    """Chance that a target token survives verification: a = min(1, q(Z) / p(Z)) (paper Sec. 2).

    Args: target_p, p(Z) [...]; draft_p, q(Z) [...], broadcast against each other.
    Returns: float64 [...] in [0, 1]; 1 exactly where q(Z) >= p(Z).  Where p(Z) = 0 no token was drawn - mark the
        slots after a stop this way - and the factor is 0, which ends the path.
    Raises: ValueError for NaN or values outside [0, 1].
    """
    target_p, draft_p = np.broadcast_arrays(_unit("target_p", target_p), _unit("draft_p", draft_p))
    return np.divide(np.minimum(target_p, draft_p), target_p, out=np.zeros(target_p.shape), where=target_p > 0)


def path_factors(slot, draft_probs):
    """Accept factor a_k and TV(p_k, q_k) of every sampled path at one slot.

    Args: slot, a sampled `Slot`; draft_probs [V] or [U, V], as for `risk`.
    Returns: (factors [M], risks [M]), float64, both 0 for a path that has stopped.
    """
    if slot.path_node is None:
        raise ValueError("an enumerated slot has no paths")
    rows = distributions(slot.rows)
    q = np.broadcast_to(proposals(slot, draft_probs), rows.shape)
    alive = slot.path_node >= 0
    node, token = slot.path_node[alive], slot.drawn[alive]
    factors, risks = np.zeros(len(alive)), np.zeros(len(alive))
    factors[alive] = accept_factors(rows[node, token], q[node, token])
    risks[alive] = prefix_risks(slot, draft_probs)[node]
    return factors, risks


def reach(factors):
    """Reach W_k = a_0 a_1 .. a_k of every path.  Args: factors [..., gamma].  Returns: float64 [..., gamma]."""
    return np.cumprod(_unit("factors", factors), axis=-1)


def survival(factors, weights=None):
    """S_k = P(J > k) from the realised tokens: weighted mean of W_k over the paths.

    Same mean as the `survival` of `serve`, which needs the TV of each path and is less noisy.

    Args: factors [..., M, gamma], 0 after a stop; weights [M] or [..., M], multiplicities or exact probabilities
        (None = equal).
    Returns: float64 [..., gamma], non-increasing.
    """
    return _mean(reach(factors), weights)


def serve(factors, risks, alive=None, weights=None):
    """Everything serving needs of one anchor (or of N at once), from the factors and TVs of its paths.

    Args:
        factors: a_k [..., M, gamma]; risks: TV(p_k, q_k) at each path's prefix, [..., M, gamma] (`path_factors`).
        alive: bool [..., M, gamma], False after a stop, where the other two are ignored; None = no path stops.
        weights: [M] or [..., M], multiplicities or exact probabilities; None = equal.
    Returns: `Serving` with arrays [..., gamma].
    Raises: ValueError for values outside [0, 1], shapes that differ, or a path that comes back to life.
    """
    alive = np.ones(np.shape(factors), dtype=bool) if alive is None else np.asarray(alive, dtype=bool)
    if not np.shape(factors) == np.shape(risks) == alive.shape:
        raise ValueError(f"shapes differ: factors {np.shape(factors)}, risks {np.shape(risks)}, alive {alive.shape}")
    if (alive[..., 1:] > alive[..., :-1]).any():
        raise ValueError("a path is alive again after it stopped")
    factors, risks = _unit("factors", np.where(alive, factors, 0)), _unit("risks", np.where(alive, risks, 0))
    before = np.concatenate([np.ones_like(factors[..., :1]), reach(factors)[..., :-1]], axis=-1) * alive  # W_{k-1}
    share = _mean(alive.astype(np.float64), weights)
    return Serving(share, _ratio(_mean(risks, weights), share), _mean(before, weights), _mean(before * risks, weights))


def accepted_length(reach, weights=None):
    """Expected tokens per round, tau = 1 + sum_k S_k: **the bonus token is counted** (paper Sec. 2).

    Args: reach, W [M, gamma] with weights [M] (None = equal), or a survival S [gamma].
    Returns: float in [1, gamma + 1].
    """
    reach = np.atleast_2d(_unit("reach", reach))
    if reach.ndim > 2:
        raise ValueError(f"reach must be [M, gamma] or [gamma], one anchor at a time, got shape {reach.shape}")
    return float(1 + _mean(reach, weights).sum())


def accepted_length_product(risks, alive=None):
    """Accepted length if acceptances were independent: 1 + sum_k alive_k prod_{i<=k} (1 - R_i) (paper F.2).

    Independent of each other and of stopping.  The paper has no alive_k; without stops the two agree.

    Args: risks, R_k [gamma], pooled; alive, share of the paths that reach each slot [gamma] (None = all).
    Returns: float.
    """
    return float(1 + _independent(_unit("risks", risks), 1.0 if alive is None else alive).sum())


def serving_risk(serving, weights=None):
    """Serving risk R_k^serve pooled over anchors, and why it differs from the free risk (paper Eq. 6, F.1).

    Pooled is the ratio of sums sum_i w_i rejected_i / sum_i w_i arrival_i; its bootstrap takes these two arrays.
    It differs from the free risk for two reasons: inside an anchor the paths that arrive are the ones the drafter
    handles well (within), and anchors that are reached often are easy anchors (between).  An anchor never reached
    has nothing to select from and counts with its free risk.

    Args: serving, a `Serving` [gamma] or [N, gamma]; weights, 1 / inclusion [N] (None = equal).
    Returns: `ServingRisk`; NaN at a slot that no anchor reaches.
    """
    risk, arrival, rejected = (np.atleast_2d(a) for a in (serving.risk, serving.arrival, serving.rejected))
    weights = _weights(weights, len(risk))[:, None]
    present = ~np.isnan(risk) * weights  # anchors with a path at the slot
    hazard = np.where(arrival > 0, _ratio(rejected, arrival), risk)
    free, alone = (_ratio((np.nan_to_num(a) * present).sum(0), present.sum(0)) for a in (risk, hazard))
    pooled = _ratio((weights * rejected).sum(0), (weights * arrival).sum(0))
    return ServingRisk(pooled, free, alone - free, pooled - alone)


def dependence(serving, weights=None):
    """How far acceptances hang together: D_k = S_k / (alive_k prod_{i<=k} (1 - R_i)), pooled (paper F.2).

    1 if slots accept independently of each other and of stopping.  Two anchors, one easy and one hard, push D above
    1 without any dependence inside either, so it is split into factors,

        within  = sum_i w_i S_ik / sum_i w_i P_ik       with P_ik = alive_ik prod_{j<=k} (1 - R_ij),
        between = mean_i P_ik / (alive_k prod_{j<=k} (1 - R_j))       on the pooled alive share and risks.

    The paper's D has no alive_k; without stops the two agree.  A stop token that is accepted more rarely or more often
    than others still shows.

    Args: as for `serving_risk`.  Returns: `Dependence`; NaN where nothing is ever accepted.
    """
    risk, share, joint = (np.atleast_2d(a) for a in (serving.risk, serving.alive, serving.survival))
    weights = _weights(weights, len(risk))[:, None]
    present = ~np.isnan(risk) * weights
    pooled_risk = _ratio((np.nan_to_num(risk) * present).sum(0), present.sum(0))
    pooled = _independent(np.nan_to_num(pooled_risk), _mean(share, weights[:, 0]))
    joint, alone = _mean(joint, weights[:, 0]), _mean(_independent(np.nan_to_num(risk), share), weights[:, 0])
    return Dependence(_ratio(joint, pooled), _ratio(joint, alone), _ratio(alone, pooled))


def length_from_largest_risk(risk, gamma):
    """Least accepted length that a largest per-slot risk r allows: f(r) = 1 + sum_{j<gamma} [1 - (j+1) r]_+ (F.3).

    By the union bound S_j >= 1 - (R_0 + .. + R_j) >= 1 - (j + 1) r, whatever the dependence between slots.

    Args: risk in [0, 1]; gamma, block length.  Returns: float in [1, gamma + 1], falling in risk.
    """
    _check_bound("risk", risk, 0, 1, gamma)
    return 1.0 + sum(max(0.0, 1 - (j + 1) * risk) for j in range(gamma))


def largest_risk_from_length(tau, gamma):
    """Lower bound on the largest per-slot risk from an observed accepted length: f^-1(tau) (paper F.3).

    With n terms positive f is the line 1 + n - n (n + 1) r / 2, which holds for tau from (n + 1) / 2 up, so the
    inverse is closed.  At gamma = 1 it is the risk itself, R_0 = 2 - tau.

    Args: tau in [1, gamma + 1], bonus token counted; gamma, block length.  Returns: float in [0, 1].
    """
    _check_bound("accepted length (bonus token counted)", tau, 1, gamma + 1, gamma)
    n = min(gamma, int(2 * tau - 1))
    return float(2 * (1 + n - tau) / (n * (n + 1)))


def _check_bound(name, value, low, high, gamma):
    if gamma < 1:
        raise ValueError(f"block length gamma must be at least 1, got {gamma}")
    if not low <= value <= high:
        raise ValueError(f"{name} must lie in [{low}, {high}], got {value}")


def _independent(risks, alive):
    return np.cumprod(1 - risks, axis=-1) * alive


def _unit(name, values):
    values = np.asarray(values, dtype=np.float64)
    bad = ~((values >= 0) & (values <= 1 + 1e-4))  # float32 sums may exceed one by rounding
    if bad.any():
        raise ValueError(f"{name} must lie in [0, 1], got {values[bad][0]}")
    return np.minimum(values, 1)


def _mean(values, weights):
    """Weighted mean over the paths (or anchors): [..., M, gamma] -> [..., gamma]."""
    if values.ndim < 2 or not values.size:
        raise ValueError(f"a path array is [..., M, gamma] and not empty, got shape {values.shape}")
    weights = _weights(weights, values.shape[-2])
    return (weights[..., None] * values).sum(axis=-2) / weights.sum(axis=-1)[..., None]


def _weights(weights, count):
    if weights is None:
        return np.ones(count)
    weights = np.asarray(weights, dtype=np.float64)
    if weights.shape[-1:] != (count,):
        raise ValueError(f"{count} paths or anchors need {count} weights, got shape {weights.shape}")
    if not (np.isfinite(weights).all() and (weights >= 0).all() and (weights.sum(axis=-1) > 0).all()):
        raise ValueError("weights must be finite and non-negative with a positive sum")
    return weights


def _ratio(numerator, denominator):
    """Elementwise, NaN where the denominator is zero."""
    nothing = np.full(np.shape(denominator), np.nan)
    return np.divide(numerator, denominator, out=nothing, where=np.asarray(denominator) > 0)
