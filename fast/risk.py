"""Drafter risk in PyTorch.  Twin: `reference/risk.py`, where it is explained.

Total variations are taken row by row, which stays in cache, and added up in float64.
"""

import numpy as np
import torch

from fast.distance import distributions, total_variation
from reference.floors import count_paths
from reference.risk import CHUNK, Gap, exposure, gap

__all__ = ["Gap", "exposure", "gap", "paired_self_risk", "prefix_risks", "propagate", "proposals", "risk", "self_risk"]


def risk(slot, draft_probs):
    """Risk of a proposal, weighted mean of TV(p_k, q_k) over the slot's prefixes: see `reference.risk.risk`.

    Args: slot, a `Slot` with a tensor of rows; draft_probs, tensor [V] or [U, V].  Returns: float.
    """
    weights = count_paths(slot)
    return float(weights @ prefix_risks(slot, draft_probs).double().cpu().numpy() / weights.sum())


def prefix_risks(slot, draft_probs):
    """TV(p_k, q_k) at each prefix, [U] in the dtype of the rows."""
    rows, q = distributions(slot.rows), proposals(slot, draft_probs)
    return _distances(rows, q.expand_as(rows))


def proposals(slot, draft_probs):
    """Proposals at a slot as distributions [1, V] or [U, V], or a ValueError that says what is wrong with them."""
    wanted, shape = tuple(slot.rows.shape), tuple(draft_probs.shape)
    if shape not in (wanted, wanted[1:]):
        raise ValueError(f"draft_probs must be [V] or [U, V] of {wanted}, got shape {shape}")
    return distributions(draft_probs.reshape(-1, wanted[1]))


def self_risk(slot, conditionals, marginal):
    """Risk of an order-1 proposal on its own predecessors: see `reference.risk.self_risk`.

    Args: slot; conditionals, tensor [A, V] or a function from int64 [n] on the device of the rows to [n, V];
        marginal, tensor [A].
    Returns: float.
    """
    marginal, drafted = _marginal(marginal, conditionals)
    weights, total = count_paths(slot), 0.0
    for share, risks in zip(marginal[drafted].tolist(), _risks_after(slot, conditionals, drafted), strict=True):
        total += share * (weights @ risks)
    return float(total / weights.sum())


def paired_self_risk(slot, conditionals, predecessors):
    """R^self from one drafted predecessor per path: see `reference.risk.paired_self_risk`.

    Args: slot, sampled; conditionals as for `self_risk`; predecessors int [M], NumPy.
    """
    if slot.path_node is None or np.shape(predecessors) != slot.path_node.shape:
        raise ValueError(f"every sampled path needs one predecessor, got shape {np.shape(predecessors)}")
    alive = slot.path_node >= 0
    drafted, which = np.unique(np.asarray(predecessors)[alive], return_inverse=True)
    counts = np.zeros((len(drafted), len(slot.rows)))
    np.add.at(counts, (which, slot.path_node[alive]), 1)
    drafted = torch.from_numpy(drafted).to(slot.rows.device)
    pairs = zip(counts, _risks_after(slot, conditionals, drafted), strict=True)
    return float(sum(count @ risks for count, risks in pairs) / counts.sum())


def propagate(marginal, conditionals):
    """The drafter's token law one slot on, m_k = sum_a m_{k-1}(a) q_k(. | a): see `reference.risk.propagate`.

    Returns: [V], float64 or as the marginal is.
    """
    shares, drafted = _marginal(marginal, conditionals)
    after = sum(shares[chunk] @ _rows_after(conditionals, chunk).double() for chunk in drafted.split(CHUNK))
    return after.to(marginal.dtype)


def _risks_after(slot, conditionals, predecessors):
    """Yield TV(p_k, q_k(. | a)) at each prefix, float64 [U] on the host, for one predecessor a after the other."""
    rows = distributions(slot.rows)
    for chunk in predecessors.to(rows.device).split(CHUNK):
        after = _rows_after(conditionals, chunk)
        if after.shape[1] != rows.shape[1]:
            raise ValueError(f"proposals over {after.shape[1]} tokens cannot meet rows over {rows.shape[1]}")
        yield from (_distances(rows, q.expand_as(rows)).double().cpu().numpy() for q in after)


def _distances(rows, q):
    return torch.stack([total_variation(p, r) for p, r in zip(rows, q, strict=True)])


def _rows_after(conditionals, predecessors):
    count = np.inf if callable(conditionals) else len(conditionals)
    outside = (predecessors < 0) | (predecessors >= count)
    if outside.any():
        raise ValueError(f"predecessor {int(predecessors[outside][0])} is no token that has a proposal")
    rows = conditionals(predecessors) if callable(conditionals) else conditionals[predecessors]
    if len(rows) != len(predecessors):
        raise ValueError(f"{len(predecessors)} predecessors need as many rows, got {len(rows)}")
    try:
        return distributions(rows)
    except ValueError as error:
        raise ValueError(f"of the proposals after tokens {predecessors.tolist()}, {error}") from error


def _marginal(marginal, conditionals):
    """A marginal in float64 scaled to sum one, and the predecessors that have mass."""
    if marginal.ndim != 1 or not (callable(conditionals) or len(conditionals) == len(marginal)):
        raise ValueError(f"the marginal must be [A], one entry per conditional row, got shape {tuple(marginal.shape)}")
    marginal = marginal.double()
    if not (marginal.isfinite().all() and (marginal >= 0).all() and marginal.sum() > 0):
        raise ValueError("the marginal must be finite and non-negative with a positive sum")
    return marginal / marginal.sum(), marginal.nonzero()[:, 0]
