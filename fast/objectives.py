"""Training objectives of block drafters in PyTorch.  Twin: `reference/objectives.py`, where they are derived.

Losses are differentiable in the draft logits and every other argument is held fixed.  `min(p, q)` is written as a
choice between q and p, so that its slope is that of the chosen side also where they are equal.
"""

import torch

from fast.laws import warp
from reference.objectives import SMALLEST_BEHAVIOUR, Objective, check_shapes, slot_weights
from reference.objectives import refuse as refuse_on_host

__all__ = ["Objective", "accepted_drafts", "dpace", "dreal", "static_decay", "tv_static", "until_stop"]


def static_decay(draft_logits, labels, decay=4.0, counted=None):
    """Cross-entropy with exponentially falling weights: see `reference.objectives.static_decay`.

    Args: draft_logits, floating [..., K, V], 16-bit ones are read as float32; labels, int64 [..., K]; counted, bool.
    Returns: `Objective` whose loss is a scalar tensor.
    """
    entropy, counted = _cross_entropy(draft_logits, labels, counted)
    weights = counted * _slot_weights(entropy, decay)
    total = weights.sum()
    return Objective((weights * entropy).sum() / torch.where(total > 0, total, 1.0))


def dpace(draft_logits, labels, smoothing=0.5, counted=None):
    """D-PACE: see `reference.objectives.dpace`.  Args and result as for `static_decay`."""
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing must lie in [0, 1], got {smoothing}")
    entropy, counted = _cross_entropy(draft_logits, labels, counted)
    survival = (smoothing + (1 - smoothing) * torch.exp(-entropy.detach())).cumprod(dim=-1) * counted  # P_t
    weights = survival.flip(-1).cumsum(dim=-1).flip(-1)  # w_k
    return Objective((weights * entropy).sum(dim=-1).mean())


def tv_static(draft_logits, target_probs, decay=4.0, counted=None):
    """Overlap under exponentially falling weights: see `reference.objectives.tv_static`.

    Args: draft_logits as for `static_decay`; target_probs, floating [..., K, V].
    Returns: `Objective` whose loss is a scalar tensor.
    """
    p, q, _ = _rows(draft_logits, target_probs, counted)
    overlap = _least(p, q).sum(dim=-1)
    return Objective(1 - (_slot_weights(overlap, decay) * overlap).mean())


def dreal(draft_logits, target_probs, tokens, behaviour, counted=None):
    """D-REAL: see `reference.objectives.dreal`.

    Args: draft_logits and target_probs as for `tv_static`; tokens, int64 [..., K]; behaviour, floating [..., K].
    Returns: `Objective` whose loss is a scalar tensor.
    """
    p, q, counted = _rows(draft_logits, target_probs, counted)
    check_shapes(q, tokens=tokens, behaviour=behaviour)
    tokens = _ids(tokens, counted, q.shape[-1])[..., None]
    behaviour = torch.where(counted, behaviour.detach().to(q.dtype), 1.0)
    _refuse(~((behaviour >= 0) & (behaviour <= 1 + 1e-4)), "behaviour is no probability")
    drawn = _least(p.gather(-1, tokens), q.gather(-1, tokens))[..., 0]
    drafts = accepted_drafts(_least(p, q).sum(dim=-1), drawn / behaviour.clamp(min=SMALLEST_BEHAVIOUR))
    return Objective(1 - drafts.mean() / q.shape[-2])


def accepted_drafts(overlap, ratio):
    """J = sum_k a_k prod_{j<k} r_j, [...], with finite slopes also where factors are zero.

    Args: overlap a and ratio r, floating [..., K].
    """
    drafts = torch.zeros_like(overlap[..., 0])
    for a, r in zip(reversed(overlap.unbind(-1)), reversed(ratio.unbind(-1)), strict=True):
        drafts = a + r * drafts
    return drafts


def until_stop(tokens, stop_ids):
    """All slots up to and including the first stop id, bool [..., K]: see `reference.objectives.until_stop`."""
    stops = torch.isin(tokens, torch.tensor(list(stop_ids), dtype=tokens.dtype, device=tokens.device)).long()
    return stops.cumsum(dim=-1) - stops == 0


def _cross_entropy(draft_logits, labels, counted):
    """-log q(label) [..., K], zero where a slot is not counted, and the counted slots."""
    counted = _counted(draft_logits, counted)
    check_shapes(draft_logits, labels=labels, counted=counted)
    labels = _ids(labels, counted, draft_logits.shape[-1])[..., None]
    _refuse(~draft_logits.detach().amax(dim=-1).isfinite(), "draft_logits has no finite maximum")
    entropy = -torch.log_softmax(_wide(draft_logits), dim=-1).gather(-1, labels)[..., 0]
    _refuse(counted & entropy.isinf(), "the draft gives its label no mass")
    return torch.where(counted, entropy, 0.0), counted


def _rows(draft_logits, target_probs, counted):
    """Target rows, zero where a slot is not counted, and draft rows, both [..., K, V]; and the counted slots."""
    counted = _counted(draft_logits, counted)
    check_shapes(draft_logits, target_probs=target_probs, counted=counted)
    q = warp(_wide(draft_logits))
    p = target_probs.detach().to(q.dtype).masked_fill(~counted[..., None], 0)
    _refuse(~((p.amin(dim=-1) >= 0) & (p.sum(dim=-1) <= 1 + 1e-4)), "target_probs is no law")
    return p, q, counted


def _least(p, q):
    return torch.where(q < p, q, p)


def _wide(logits):
    return logits if logits.dtype == torch.float64 else logits.float()


def _counted(draft_logits, counted):
    if counted is None:
        return torch.ones(draft_logits.shape[:-1], dtype=torch.bool, device=draft_logits.device)
    return counted.bool()


def _ids(tokens, counted, vocab_size):
    """Token ids [..., K] with 0 standing in where a slot is not counted."""
    _refuse(counted & ((tokens < 0) | (tokens >= vocab_size)), f"a token outside the vocabulary of {vocab_size}")
    return torch.where(counted, tokens, 0)


def _slot_weights(like, decay):
    return torch.from_numpy(slot_weights(like.shape[-1], decay)).to(like)


def _refuse(bad, what):
    refuse_on_host(bad.cpu().numpy(), what)
