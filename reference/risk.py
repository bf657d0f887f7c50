"""Drafter risk: how often a given proposal is rejected, how much of it is avoidable, and at whose predecessor.

The risk of a proposal at slot k is its expected total variation to the target row of a target path,

    R_k = E[ TV(p_k, q_k) ]                                       (paper Sec. 2, App. B.5)

and the rest above the floor is the model gap G = R - T.  A proposal of order 1 also reads a predecessor, and
there are two to give it: the token Z_{k-1} that the target realised (R^oracle, which the order-1 floor bounds) or
a token a of its own drafting, which the target path knows nothing of:

    R_k^self = E_a E[ TV(p_k, q_k(. | a)) ] = sum_a m_{k-1}(a) E[ TV(p_k, q_k(. | a)) ],      E = R^self - R^oracle.

The chain a_0, a_1, .. is independent of the path, so all that matters of it is its law m_{k-1} at one slot:
m_k = sum_a m_{k-1}(a) q_k(. | a).  Summing over that law is exact where drawing one chain per path is noisy.

Proposals come warped by the caller.  Twin: `fast/risk.py`.  Tests: `tests/test_risk.py` (enumeration).
"""

from dataclasses import dataclass

import numpy as np

from reference.distance import distributions, total_variation
from reference.floors import count_paths

CHUNK = 64  # predecessors whose proposals are held at a time


@dataclass(frozen=True)
class Gap:
    """Risk above the floor: against its fitted side (leans high) and its held-out side (leans low; None without)."""

    fit: float
    held_out: float | None


def risk(slot, draft_probs):
    """Risk of a proposal: weighted mean of TV(p_k, q_k) over the slot's prefixes (paper Sec. 3.3, App. B.5).

    Args:
        slot: a `Slot`.
        draft_probs: q_k [V], one proposal for every path (order 0); or [U, V], one row per prefix, the proposal
            given that prefix's realised tokens (oracle conditioning).
    Returns: float in [0, 1], over the paths that are alive; 0 where q = p on every prefix.
    Raises: ValueError for another shape, or naming the row that is no distribution.
    """
    weights = count_paths(slot)
    return float(weights @ prefix_risks(slot, draft_probs) / weights.sum())


def prefix_risks(slot, draft_probs):
    """TV(p_k, q_k) at each prefix, float64 [U].  Args: as for `risk`."""
    return total_variation(distributions(slot.rows), proposals(slot, draft_probs))


def proposals(slot, draft_probs):
    """Proposals at a slot as distributions [1, V] or [U, V], or a ValueError that says what is wrong with them."""
    draft_probs = np.asarray(draft_probs, dtype=np.float64)
    if draft_probs.shape not in (slot.rows.shape, slot.rows.shape[1:]):
        raise ValueError(f"draft_probs must be [V] or [U, V] of {slot.rows.shape}, got shape {draft_probs.shape}")
    return distributions(np.atleast_2d(draft_probs))


def self_risk(slot, conditionals, marginal):
    """Risk of an order-1 proposal on its own predecessors: R^self = sum_a m(a) E[TV(p_k, q_k(. | a))] (Sec. 3.3).

    Exact in the predecessor: every one is met by every path.  At slot 0 the predecessor is the last token of X
    for both, and R^self = R^oracle.

    Args:
        slot: a `Slot`, index k.
        conditionals: q_k(. | a), as an array [A, V] whose row a follows predecessor a, or as a function from
            predecessors int64 [n] to rows [n, V].
        marginal: [A], probabilities of the drafter's token at slot k - 1 (see `propagate`), or how often each
            was drawn; scaled to sum one.  A predecessor without mass is never evaluated.
    Returns: float in [0, 1].
    Raises: ValueError for a bad marginal or shape, or naming the row that is no distribution.
    """
    marginal, drafted = _marginal(marginal, conditionals)
    weights, total = count_paths(slot), 0.0
    for share, risks in zip(marginal[drafted], _risks_after(slot, conditionals, drafted), strict=True):
        total += share * (weights @ risks)
    return float(total / weights.sum())


def paired_self_risk(slot, conditionals, predecessors):
    """R^self from one drafted predecessor per path: mean of TV(p_k^(r), q_k(. | a^(r))) over the paths alive.

    The paper's estimator (App. B.5), for drafters whose marginal is out of reach.  `self_risk` with the counts of
    the same predecessors has the same mean and less noise.

    Args: slot, sampled; conditionals as for `self_risk`; predecessors int [M], a^(r)_{k-1} of each path.
    Returns: float in [0, 1].
    Raises: ValueError for a predecessor of a living path that is no token, and as `self_risk`.
    """
    if slot.path_node is None or np.shape(predecessors) != slot.path_node.shape:
        raise ValueError(f"every sampled path needs one predecessor, got shape {np.shape(predecessors)}")
    alive = slot.path_node >= 0
    drafted, which = np.unique(np.asarray(predecessors)[alive], return_inverse=True)
    counts = np.zeros((len(drafted), len(slot.rows)))
    np.add.at(counts, (which, slot.path_node[alive]), 1)
    pairs = zip(counts, _risks_after(slot, conditionals, drafted), strict=True)
    return float(sum(count @ risks for count, risks in pairs) / counts.sum())


def propagate(marginal, conditionals):
    """The drafter's token law one slot on: m_k(v) = sum_a m_{k-1}(a) q_k(v | a).

    Args: marginal [A] and conditionals as for `self_risk`.  At slot 0 the marginal is q_0 itself.
    Returns: float64 [V], summing to one.
    """
    marginal, drafted = _marginal(marginal, conditionals)
    return sum(marginal[chunk] @ _rows_after(conditionals, chunk) for chunk in _chunks(drafted))


def gap(risk, floor):
    """Model gap G = R - T against both sides of a `Floor`: `Gap` (Sec. 3.3).

    R and T must come from the same slot.  With an order-0 proposal and floor, or R^oracle and the order-1 floor,
    the proposal is one of those the floor minimises over, so gap.fit is never negative beyond rounding.
    """
    return Gap(risk - floor.fit, None if floor.held_out is None else risk - floor.held_out)


def exposure(self_risk, oracle_risk):
    """Exposure E = R^self - R^oracle, what drafting from one's own predecessors costs (Sec. 3.3); may be negative."""
    return self_risk - oracle_risk


def _risks_after(slot, conditionals, predecessors):
    """Yield TV(p_k, q_k(. | a)) at each prefix, [U], for one predecessor a after the other."""
    rows = distributions(slot.rows)
    for chunk in _chunks(predecessors):
        after = _rows_after(conditionals, chunk)
        if after.shape[1] != rows.shape[1]:
            raise ValueError(f"proposals over {after.shape[1]} tokens cannot meet rows over {rows.shape[1]}")
        yield from (total_variation(rows, q) for q in after)


def _rows_after(conditionals, predecessors):
    count = np.inf if callable(conditionals) else len(conditionals)
    outside = (predecessors < 0) | (predecessors >= count)
    if outside.any():
        raise ValueError(f"predecessor {int(predecessors[outside][0])} is no token that has a proposal")
    rows = conditionals(predecessors) if callable(conditionals) else np.asarray(conditionals)[predecessors]
    if len(rows) != len(predecessors):
        raise ValueError(f"{len(predecessors)} predecessors need as many rows, got {len(rows)}")
    try:
        return distributions(rows)
    except ValueError as error:
        raise ValueError(f"of the proposals after tokens {predecessors.tolist()}, {error}") from error


def _chunks(predecessors):
    return (predecessors[i : i + CHUNK] for i in range(0, len(predecessors), CHUNK))


def _marginal(marginal, conditionals):
    """A marginal scaled to sum one, and the predecessors that have mass."""
    marginal = np.asarray(marginal, dtype=np.float64)
    if marginal.ndim != 1 or not (callable(conditionals) or len(conditionals) == len(marginal)):
        raise ValueError(f"the marginal must be [A], one entry per conditional row, got shape {marginal.shape}")
    if not (np.isfinite(marginal).all() and (marginal >= 0).all() and marginal.sum() > 0):
        raise ValueError("the marginal must be finite and non-negative with a positive sum")
    return marginal / marginal.sum(), marginal.nonzero()[0]
