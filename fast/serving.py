"""Serving quantities in PyTorch.  Twin: `reference/serving.py`, where they are derived and the stops are settled.

Factors keep the dtype of their rows; products along a path and means over paths are taken in float64.
"""

import torch

from fast.distance import distributions
from fast.risk import prefix_risks, proposals
from reference.serving import Dependence, Serving, ServingRisk, largest_risk_from_length, length_from_largest_risk

__all__ = [
    "Dependence",
    "Serving",
    "ServingRisk",
    "accept_factors",
    "accepted_length",
    "accepted_length_product",
    "dependence",
    "largest_risk_from_length",
    "length_from_largest_risk",
    "path_factors",
    "reach",
    "serve",
    "serving_risk",
    "survival",
]


def accept_factors(target_p, draft_p):
    """Chance that a target token survives verification, min(1, q(Z) / p(Z)), 0 where p(Z) = 0: [...]."""
    target_p, draft_p = torch.broadcast_tensors(_unit("target_p", target_p), _unit("draft_p", draft_p))
    return torch.where(target_p > 0, torch.minimum(target_p, draft_p) / target_p, 0)


def path_factors(slot, draft_probs):
    """Accept factor and TV of every sampled path at one slot: see `reference.serving.path_factors`.

    Returns: (factors [M], risks [M]) in the dtype of the rows, on their device.
    """
    if slot.path_node is None:
        raise ValueError("an enumerated slot has no paths")
    rows = distributions(slot.rows)
    q = proposals(slot, draft_probs).expand_as(rows)
    alive = torch.from_numpy(slot.path_node >= 0).to(rows.device)
    node, token = (torch.from_numpy(a).to(rows.device)[alive] for a in (slot.path_node, slot.drawn))
    factors, risks = rows.new_zeros((2, len(alive)))
    factors[alive] = accept_factors(rows[node, token], q[node, token])
    risks[alive] = prefix_risks(slot, draft_probs)[node]
    return factors, risks


def reach(factors):
    """Reach W_k = a_0 a_1 .. a_k of every path, float64 [..., gamma]."""
    return _unit("factors", factors).cumprod(dim=-1, dtype=torch.float64)


def survival(factors, weights=None):
    """S_k from the realised tokens, weighted mean of W_k over the paths: see `reference.serving.survival`."""
    return _mean(reach(factors), weights)


def serve(factors, risks, alive=None, weights=None):
    """Everything serving needs of one anchor, or of N at once: see `reference.serving.serve`.

    Args: factors, risks [..., M, gamma]; alive, bool likewise or None; weights [M] or [..., M] or None.
    Returns: `Serving` with float64 tensors [..., gamma].
    """
    alive = torch.ones_like(factors, dtype=torch.bool) if alive is None else torch.as_tensor(alive, dtype=torch.bool)
    if not factors.shape == risks.shape == alive.shape:
        shapes = [tuple(a.shape) for a in (factors, risks, alive)]
        raise ValueError(f"shapes differ: factors {shapes[0]}, risks {shapes[1]}, alive {shapes[2]}")
    alive = alive.to(factors.device)
    if (alive[..., 1:] & ~alive[..., :-1]).any():
        raise ValueError("a path is alive again after it stopped")
    factors, risks = (torch.where(alive, a, 0) for a in (factors, risks))
    risks, reached = _unit("risks", risks).double(), reach(factors)
    before = torch.cat([torch.ones_like(reached[..., :1]), reached[..., :-1]], dim=-1) * alive  # W_{k-1}
    share = _mean(alive.double(), weights)
    return Serving(share, _mean(risks, weights) / share, _mean(before, weights), _mean(before * risks, weights))


def accepted_length(reach, weights=None):
    """Expected tokens per round, tau = 1 + sum_k S_k: **the bonus token is counted**.

    Args: reach, W [M, gamma] with weights [M], or a survival S [gamma].  Returns: float.
    """
    reach = torch.atleast_2d(_unit("reach", reach))
    if reach.ndim > 2:
        raise ValueError(f"reach must be [M, gamma] or [gamma], one anchor at a time, got shape {tuple(reach.shape)}")
    return float(1 + _mean(reach.double(), weights).sum())


def accepted_length_product(risks, alive=None):
    """Accepted length if acceptances were independent: see `reference.serving.accepted_length_product`."""
    return float(1 + _independent(_unit("risks", risks).double(), 1.0 if alive is None else alive).sum())


def serving_risk(serving, weights=None):
    """Serving risk pooled over anchors, within and between them: see `reference.serving.serving_risk`."""
    risk, arrival, rejected = (torch.atleast_2d(a) for a in (serving.risk, serving.arrival, serving.rejected))
    weights = _weights(weights, len(risk), risk.device)[:, None]
    present = ~risk.isnan() * weights  # anchors with a path at the slot
    hazard = torch.where(arrival > 0, rejected / arrival, risk)
    free, alone = ((a.nan_to_num() * present).sum(0) / present.sum(0) for a in (risk, hazard))
    pooled = (weights * rejected).sum(0) / (weights * arrival).sum(0)
    return ServingRisk(pooled, free, alone - free, pooled - alone)


def dependence(serving, weights=None):
    """Joint survival over the product of marginal acceptances: see `reference.serving.dependence`."""
    risk, share, joint = (torch.atleast_2d(a) for a in (serving.risk, serving.alive, serving.survival))
    weights = _weights(weights, len(risk), risk.device)
    present = ~risk.isnan() * weights[:, None]
    pooled_risk = (risk.nan_to_num() * present).sum(0) / present.sum(0)
    pooled = _independent(pooled_risk.nan_to_num(), _mean(share, weights))
    joint, alone = _mean(joint, weights), _mean(_independent(risk.nan_to_num(), share), weights)
    return Dependence(joint / pooled, joint / alone, alone / pooled)


def _independent(risks, alive):
    return (1 - risks).cumprod(dim=-1) * alive


def _unit(name, values):
    bad = ~((values >= 0) & (values <= 1 + 1e-4))  # float32 sums may exceed one by rounding
    if bad.any():
        raise ValueError(f"{name} must lie in [0, 1], got {float(values[bad][0])}")
    return values.clamp(max=1)


def _mean(values, weights):
    """Weighted mean over the paths (or anchors): float64 [..., M, gamma] -> [..., gamma]."""
    if values.ndim < 2 or not values.numel():
        raise ValueError(f"a path array is [..., M, gamma] and not empty, got shape {tuple(values.shape)}")
    weights = _weights(weights, values.shape[-2], values.device)
    return (weights[..., None] * values).sum(dim=-2) / weights.sum(dim=-1)[..., None]


def _weights(weights, count, device):
    if weights is None:
        return torch.ones(count, dtype=torch.float64, device=device)
    weights = torch.as_tensor(weights, dtype=torch.float64, device=device)
    if weights.shape[-1:] != (count,):
        raise ValueError(f"{count} paths or anchors need {count} weights, got shape {tuple(weights.shape)}")
    if not (weights.isfinite().all() and (weights >= 0).all() and (weights.sum(dim=-1) > 0).all()):
        raise ValueError("weights must be finite and non-negative with a positive sum")
    return weights
