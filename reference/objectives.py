"""Objectives that block drafters are trained with, and their gradients, worked out by hand.

Verification ends at the first rejection, so slot k matters only if every slot before it was accepted.  Four
objectives say so in four ways (D-REAL paper, Sec. 3 and 5.3):

    static_decay   cross-entropy along a written continuation, slot k weighted by exp(-k / decay)
    dpace          the same, weighted by the drafter's own confidence in that continuation
    tv_static      overlap with the target's rows in place of cross-entropy, weighted by exp(-k / decay)
    dreal          overlap along tokens that the drafter drew, weighted by the chance that they survive

Slopes.  All go through q = softmax(z), where dL/dq = g becomes dL/dz = q (g - <g, q>).  So

    -log q(y)                slopes by  q - e_y
    a = sum_v min(p, q)(v)   slopes by  q (g - <g, q>)  with  g(v) = 1[q(v) < p(v)]
    r = min(p, q)(d) / b     slopes by  1[q(d) < p(d)] q(d) / b (e_d - q),  b held fixed

and where p = q the slope of the constant side, 0, is taken.  The expected number of accepted drafts is
J = sum_k a_k prod_{j<k} r_j.  Read it forwards and backwards,

    R_k = prod_{j<k} r_j,      A_k = a_k + r_k A_{k+1},  A_K = 0,      J = A_0,

and J is, for every k, what the slots before k add plus R_k A_k: dJ/da_k = R_k and dJ/dr_k = R_k A_{k+1}.  No
product is divided by one of its factors, so a slot that accepts nothing leaves every slope finite.

Twin: `fast/objectives.py`, where autograd takes the slopes.  Tests: `tests/test_objectives.py` (enumeration).
"""

from dataclasses import dataclass

import numpy as np

from reference.laws import warp

SMALLEST_BEHAVIOUR = 1e-8


@dataclass(frozen=True)
class Objective:
    """`loss`, to be made small, and `grad`, its slope in the draft logits, float64 [..., K, V] (None: ask autograd)."""

    loss: float
    grad: np.ndarray | None = None


def static_decay(draft_logits, labels, decay=4.0, counted=None):
    """Cross-entropy with exponentially falling weights (D-REAL paper Sec. 2; the loss DFlash is trained with).

        L = sum_k w_k (-log q_k(y_k)) / sum_k w_k,   w_k = exp(-k / decay),   sums over all counted slots

    Args:
        draft_logits: float [..., K, V], one or more blocks.
        labels: int [..., K], the continuation y.
        decay: in slots, positive.
        counted: bool [..., K], the slots that have a label (None: all); the others may hold any label.
    Returns: `Objective`; loss in nats, 0 if no slot is counted.
    Raises: ValueError for a wrong shape, and naming the slot whose logits are no law or give its label no mass.
    """
    entropy, slope, counted = _cross_entropy(draft_logits, labels, counted)
    weights = counted * slot_weights(counted.shape[-1], decay)
    weights /= weights.sum() or 1.0
    return Objective(float((weights * entropy).sum()), weights[..., None] * slope)


def dpace(draft_logits, labels, smoothing=0.5, counted=None):
    """D-PACE: cross-entropy weighted by what slot k and its successors are worth (D-REAL paper Sec. 3.2, Eq. 14).

        L = sum_k w_k (-log q_k(y_k)),   w_k = sum_{t>=k} P_t,   P_t = prod_{i<=t} s_i,
        s_i = smoothing + (1 - smoothing) q_i(y_i)

    The weights are held fixed.  Without smoothing the slope is then that of -sum_t prod_{i<=t} q_i(y_i): the
    continuation stands in for the drafts, so this is not the expected accepted length.

    Args: as for `static_decay`; smoothing in [0, 1].  A slot that is not counted has confidence 1 and adds nothing.
    Returns: `Objective`, averaged over the blocks; loss in nats.
    Raises: as `static_decay`.
    """
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must lie in [0, 1], got {smoothing}")
    entropy, slope, counted = _cross_entropy(draft_logits, labels, counted)
    survival = np.cumprod(smoothing + (1 - smoothing) * np.exp(-entropy), axis=-1) * counted  # P_t
    weights = np.flip(np.cumsum(np.flip(survival, -1), axis=-1), -1) / _blocks(counted)  # w_k
    return Objective(float((weights * entropy).sum()), weights[..., None] * slope)


def tv_static(draft_logits, target_probs, decay=4.0, counted=None):
    """Overlap with the target under exponentially falling weights (D-REAL paper Sec. 5.3, the ablation).

        L = 1 - 1/K sum_k w_k a_k,   a_k = sum_v min(p_k, q_k)(v),   w_k = exp(-k / decay)

    Args:
        draft_logits: float [..., K, V].
        target_probs: [..., K, V], p_k; a row may sum to less than one where V is only part of the target's vocabulary.
        decay, counted: as for `static_decay`; a slot that is not counted may hold any row.
    Returns: `Objective`, averaged over the blocks.
    Raises: ValueError for a wrong shape, and naming the slot whose logits or target row are no law.
    """
    p, q, counted = _rows(draft_logits, target_probs, counted)
    overlap, slope = _overlap(p, q)
    weights = slot_weights(counted.shape[-1], decay) / counted.size  # 1/K, and the mean over blocks
    return Objective(float(1 - (weights * overlap).sum()), -weights[:, None] * slope)


def dreal(draft_logits, target_probs, tokens, behaviour, counted=None):
    """D-REAL: expected accepted drafts of one round, from one drawn block (D-REAL paper Sec. 3.2, Eq. 8 to 10).

        L = 1 - 1/K sum_k a_k prod_{j<k} r_j,
        a_k = sum_v min(p_k, q_k)(v),   r_j = min(p_j, q_j)(d_j) / max(b_j, 1e-8)

    b is held fixed.  Averaged over blocks d drawn with probabilities b, 1 - L is the expected number of accepted
    drafts over K, the bonus token not counted, and so are their slopes.  This holds for verification at
    temperature 1, where p and q are the softmax of the logits as they are.

    Args:
        draft_logits: float [..., K, V], recomputed along d.
        target_probs: [..., K, V], p_k along d; as for `tv_static`.
        tokens: int [..., K], the drawn block d.
        behaviour: [..., K], the probability b_k with which d_k was drawn.
        counted: bool [..., K], see `until_stop`; a slot that is not counted accepts nothing, so the block ends there.
    Returns: `Objective`, averaged over the blocks.
    Raises: as `tv_static`, and naming the slot of a token outside the vocabulary or a b outside [0, 1].
    """
    p, q, counted = _rows(draft_logits, target_probs, counted)
    tokens, behaviour = np.asarray(tokens), np.asarray(behaviour, dtype=np.float64)
    check_shapes(q, tokens=tokens, behaviour=behaviour)
    tokens = _ids(tokens, counted, q.shape[-1])[..., None]
    behaviour = np.where(counted, behaviour, 1.0)
    refuse(~((behaviour >= 0) & (behaviour <= 1 + 1e-4)), "behaviour is no probability")
    behaviour = np.maximum(behaviour, SMALLEST_BEHAVIOUR)

    overlap, overlap_slope = _overlap(p, q)
    drawn_p, drawn_q = (np.take_along_axis(rows, tokens, axis=-1)[..., 0] for rows in (p, q))
    ratio = np.minimum(drawn_p, drawn_q) / behaviour  # Eq. 8
    ratio_slope = ((drawn_q < drawn_p) * drawn_q / behaviour)[..., None] * (_one_hot(tokens, q) - q)

    drafts, by_overlap, by_ratio = accepted_drafts(overlap, ratio)
    slope = by_overlap[..., None] * overlap_slope + by_ratio[..., None] * ratio_slope
    return Objective(float(1 - drafts.mean() / counted.shape[-1]), -slope / counted.size)  # Eq. 10


def accepted_drafts(overlap, ratio):
    """J = sum_k a_k prod_{j<k} r_j, and its slopes (D-REAL paper Eq. 9).

    Args: overlap a and ratio r, float [..., K].
    Returns: (J [...], dJ/da [..., K], dJ/dr [..., K]); finite also where factors are zero.
    """
    reached, ahead, drafts = np.ones_like(overlap), np.empty_like(overlap), np.zeros_like(overlap[..., 0])
    reached[..., 1:] = np.cumprod(ratio[..., :-1], axis=-1)  # R_k
    for k in reversed(range(overlap.shape[-1])):
        ahead[..., k] = drafts  # A_{k+1}
        drafts = overlap[..., k] + ratio[..., k] * drafts
    return drafts, reached, reached * ahead


def until_stop(tokens, stop_ids):
    """The slots that belong to a block: all up to and including its first stop id, bool [..., K].

    Args: tokens, int [..., K]; stop_ids, the ids that end a block (none: every slot belongs).
    """
    stops = np.isin(tokens, list(stop_ids))
    return np.cumsum(stops, axis=-1) - stops == 0


def slot_weights(slots, decay):
    """exp(-k / decay) for k = 0..slots-1, float64 [K]; a decay of infinity weights all alike."""
    if not decay > 0:
        raise ValueError(f"decay must be a positive number of slots, got {decay}")
    return np.exp(-np.arange(slots) / decay)


def check_shapes(draft_logits, **others):
    """A ValueError unless draft_logits is [..., K, V], target_probs the same and every other argument [..., K]."""
    shape = tuple(draft_logits.shape)
    if len(shape) < 2 or not all(shape):
        raise ValueError(f"draft_logits must be a non-empty [..., K, V] array, got shape {shape}")
    for name, array in others.items():
        expected = shape if name == "target_probs" else shape[:-1]
        if tuple(array.shape) != expected:
            raise ValueError(f"draft logits {shape} need {name} of shape {expected}, got {tuple(array.shape)}")


def refuse(bad, what):
    """A ValueError that names the first slot for which bad, bool [..., K], holds."""
    if bad.any():
        raise ValueError(f"{what}, at slot {tuple(map(int, np.argwhere(bad)[0]))}")


def _cross_entropy(draft_logits, labels, counted):
    """-log q(label) [..., K] and its slope [..., K, V], zero where a slot is not counted; and the counted slots."""
    draft_logits, labels = np.asarray(draft_logits, dtype=np.float64), np.asarray(labels)
    counted = _counted(draft_logits, counted)
    check_shapes(draft_logits, labels=labels, counted=counted)
    labels = _ids(labels, counted, draft_logits.shape[-1])[..., None]
    q = warp(draft_logits)
    shifted = draft_logits - draft_logits.max(axis=-1, keepdims=True)
    entropy = np.log(np.exp(shifted).sum(axis=-1)) - np.take_along_axis(shifted, labels, axis=-1)[..., 0]
    refuse(counted & np.isinf(entropy), "the draft gives its label no mass")
    slope = np.where(counted[..., None], q - _one_hot(labels, q), 0)
    return np.where(counted, entropy, 0), slope, counted


def _rows(draft_logits, target_probs, counted):
    """Target rows, zero where a slot is not counted, and draft rows, both [..., K, V]; and the counted slots."""
    draft_logits, target_probs = np.asarray(draft_logits), np.asarray(target_probs, dtype=np.float64)
    counted = _counted(draft_logits, counted)
    check_shapes(draft_logits, target_probs=target_probs, counted=counted)
    p = np.where(counted[..., None], target_probs, 0)
    refuse(~((p.min(axis=-1) >= 0) & (p.sum(axis=-1) <= 1 + 1e-4)), "target_probs is no law")
    return p, warp(draft_logits), counted


def _overlap(p, q):
    """Overlap [..., K] and its slope in the logits of q [..., K, V]."""
    under = q < p
    return np.minimum(p, q).sum(axis=-1), q * (under - (under * q).sum(axis=-1, keepdims=True))


def _counted(draft_logits, counted):
    return np.ones(draft_logits.shape[:-1], dtype=bool) if counted is None else np.asarray(counted, dtype=bool)


def _ids(tokens, counted, vocab_size):
    """Token ids [..., K] with 0 standing in where a slot is not counted."""
    refuse(counted & ((tokens < 0) | (tokens >= vocab_size)), f"a token outside the vocabulary of {vocab_size}")
    return np.where(counted, tokens, 0)


def _one_hot(tokens, q):
    return np.arange(q.shape[-1]) == tokens


def _blocks(counted):
    return counted.size // counted.shape[-1]
