"""Losses that block drafters are trained with, row by row of a block, and the weights under which they are averaged.

Row k of the block behind an anchor at position p predicts the token at p + k + 1, or at p + k where it drafts in place.
That token is its label, the target's row there its teacher, and it counts while it and every label before it belong to
an answer.  With s the slot (k, in place k - 1) a loss is

    L = sum w l / sum w,      w = exp(-s / decay) where a row counts, else 0,

both sums over all blocks of an optimiser step.  They are kept apart (`BlockLosses`), so the loss does not depend on how
the step's sequences are dealt out to micro-batches and processes.

Tests: `tests/test_training.py` (slopes in closed form, values of the authors' own code).
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from fast.distance import total_variation

TERMS = ("cross_entropy", "total_variation", "divergence", "confidence", "nomination", "selector")


@dataclass(frozen=True)
class Recipe:
    """Coefficients of the terms of a loss, 0 = left out, and how rows are weighted.

    cross_entropy    -log q(label)
    total_variation  TV(p, q); the L1 norm of other projects is twice that
    divergence       KL(p || q)
    confidence       binary cross-entropy of the confidence logit against the acceptance 1 - TV(p, q)
    nomination       cross-entropy of the base logits against the teacher's largest `candidates` words (`nominate`)
    selector         cross-entropy among the drafter's own candidates, the label put in (`select`); the terms above
                     then read the base logits, which choose the candidates
    decay            of the weights, in slots
    smoothing        D-PACE weights with this smoothing instead, divided by the number of blocks (None: the decay's)
    teacher_labels   labels are the teacher's likeliest words, not the sequence's
    unweighted       divide by the number of rows that count, not by their weights
    candidates       words that nomination and selector look at
    """

    cross_entropy: float = 0.0
    total_variation: float = 0.0
    divergence: float = 0.0
    confidence: float = 0.0
    nomination: float = 0.0
    selector: float = 0.0
    decay: float = 4.0
    smoothing: float | None = None
    teacher_labels: bool = False
    unweighted: bool = False
    candidates: int = 16

    @property
    def terms(self):
        """Names of the terms that are weighed."""
        return [name for name in TERMS if getattr(self, name)]


RECIPES = {
    "dflash": Recipe(cross_entropy=1.0),
    "dspark": Recipe(cross_entropy=0.1, total_variation=1.8, confidence=1.0),
    "attention": Recipe(cross_entropy=0.1, total_variation=1.8, confidence=1.0, nomination=0.1),
    "dflash2": Recipe(cross_entropy=0.1, total_variation=0.9, selector=1.0, teacher_labels=True, unweighted=True),
    "dpace": Recipe(cross_entropy=1.0, smoothing=0.5),
}


class Labels(NamedTuple):
    """What the rows of A blocks predict, NumPy [A, B] each: positions, the tokens there, and which rows count."""

    places: np.ndarray
    tokens: np.ndarray
    counted: np.ndarray


@dataclass(frozen=True)
class BlockLosses:
    """Sums over blocks, scalar tensors: `terms` over `weight` are losses, `length` over `blocks` is a mean length.

    terms     {name: sum of w l}, the terms that the recipe weighs; gradients flow
    weight    sum of w, or the number of rows or blocks: see `Recipe`
    length    sum over blocks of 1 + sum_s prod_{i <= s} (1 - TV_i), expected tokens per round along the labels
    blocks    number of blocks with a row that counts
    """

    terms: dict[str, torch.Tensor]
    weight: torch.Tensor
    length: torch.Tensor
    blocks: torch.Tensor

    def total(self, recipe):
        """sum of coefficient times term, not yet divided by `weight`."""
        return sum(getattr(recipe, name) * term for name, term in self.terms.items())


def block_labels(tokens, supervised, anchors, block_size, in_place, chained=True):
    """What every row of the blocks predicts, and whether it counts: `Labels`.

    Args: tokens int [S]; supervised bool [S], the answer's; anchors int [A], positions; chained, whether a row also
        needs every row before it to count (SpecForge's DFlash does not).
    """
    places = anchors[:, None] + np.arange(block_size) + (not in_place)
    inside = np.minimum(places, len(tokens) - 1)
    counted = (places < len(tokens)) & supervised[inside]
    if chained:
        counted[:, in_place:] = np.logical_and.accumulate(counted[:, in_place:], axis=1)
    counted[:, :in_place] = False  # row 0 predicts nothing
    return Labels(inside, tokens[inside], counted)


def block_losses(recipe, blocks, labels, teacher_logits, in_place=False, selector=None):
    """The losses of A blocks: `BlockLosses`.

    Args: blocks, `TrainingBlocks` without -inf among the logits that the recipe reads; labels; teacher_logits
        [A, B, V], the target's at each row's place; selector, latents [A, B, r] and readout [V, r] of a candidate
        selector, where the recipe weighs it.
    """
    counted = torch.as_tensor(labels.counted, device=blocks.hidden.device)
    logits = blocks.base_logits if recipe.selector else blocks.logits
    wanted = torch.as_tensor(labels.tokens, device=counted.device)
    if recipe.teacher_labels:
        wanted = teacher_logits.argmax(dim=-1)
    p, entropy = torch.softmax(teacher_logits, dim=-1), cross_entropy(logits, wanted)
    with torch.set_grad_enabled(torch.is_grad_enabled() and recipe.total_variation > 0):
        risk = total_variation(p, torch.softmax(logits, dim=-1))
    terms = {
        "cross_entropy": lambda: entropy,
        "total_variation": lambda: risk,
        "divergence": lambda: divergence(logits, teacher_logits),
        "confidence": lambda: confidence(blocks.confidence, risk),
        "nomination": lambda: nominate(blocks.base_logits, teacher_logits, recipe.candidates),
        "selector": lambda: select(blocks.base_logits, *selector, wanted, recipe.candidates),
    }
    kept = counted.any(dim=-1).sum()
    if recipe.smoothing is not None:
        weights, weight = continuation_value(entropy, counted, recipe.smoothing), kept
    else:
        weights = counted * row_weights(counted.shape[1], recipe.decay, in_place).to(p)
        weight = counted.sum() if recipe.unweighted else weights.sum()
    sums = {name: (weights * terms[name]().masked_fill(~counted, 0)).sum() for name in recipe.terms}
    with torch.no_grad():
        if recipe.selector:  # what is served is chosen among the candidates
            risk = total_variation(p, torch.softmax(blocks.logits, dim=-1))
        drafts = torch.where(counted, 1 - risk, 0)[:, int(in_place) :].cumprod(dim=-1).sum()
    return BlockLosses(sums, weight.to(p.dtype), drafts + kept, kept)


def row_weights(block_size, decay, in_place):
    """exp(-s / decay) of the slot s that each row drafts, float64 [B]; 0 for row 0 in place."""
    weights = torch.exp(-(torch.arange(block_size, dtype=torch.float64) - int(in_place)) / decay)
    weights[: int(in_place)] = 0
    return weights


def continuation_value(entropy, counted, smoothing):
    """D-PACE weights of rows, [A, B], without gradient:

        w_k = sum_{t >= k} P_t,   P_t = prod_{i <= t} s_i,   s_i = smoothing + (1 - smoothing) q_i(label),

    a row that does not count having s = 1 and P = 0 (see `objectives.dpace`).
    """
    sure = smoothing + (1 - smoothing) * torch.exp(-entropy.detach())
    survival = torch.where(counted, sure, 1).cumprod(dim=-1) * counted
    return survival.flip(-1).cumsum(dim=-1).flip(-1) * counted


def cross_entropy(logits, labels):
    """-log softmax(logits)(label), in nats: [..., V] and int [...] -> [...].  Slope in the logits: q - e_label."""
    return torch.logsumexp(logits, dim=-1) - logits.gather(-1, labels[..., None])[..., 0]


def divergence(logits, teacher_logits):
    """KL(p || q) of two softmaxes, in nats: [..., V] -> [...].  Slope in the logits: q - p."""
    log_p, log_q = (torch.log_softmax(z, dim=-1) for z in (teacher_logits, logits))
    return (log_p.exp() * (log_p - log_q)).sum(dim=-1)


def confidence(logits, risk):
    """Binary cross-entropy of confidence logits [...] against the acceptance 1 - risk, held fixed: [...]."""
    return F.binary_cross_entropy_with_logits(logits, (1 - risk.detach()).clamp(0, 1), reduction="none")


def nominate(base_logits, teacher_logits, k):
    """logsumexp(u) - sum_S p(v) u(v): S the teacher's k largest words, p its softmax among them: [..., V] -> [...].

    It asks of the base logits that they hold the teacher's likely words among their own largest.
    """
    largest, words = teacher_logits.topk(min(k, teacher_logits.shape[-1]))
    wanted = (torch.softmax(largest, dim=-1) * base_logits.gather(-1, words)).sum(dim=-1)
    return torch.logsumexp(base_logits, dim=-1) - wanted


def select(base_logits, latents, readout, labels, k):
    """Cross-entropy of the label among the k words of the largest base logits (`with_label`): [...].

    Args: base_logits u [..., V]; latents z [..., r]; readout S [V, r]; labels int [...].  A word scores u + <z, S>.
    """
    candidates = with_label(base_logits.topk(k).indices, labels)
    scores = base_logits.gather(-1, candidates) + (F.embedding(candidates, readout) @ latents[..., None])[..., 0]
    return cross_entropy(scores, (candidates == labels[..., None]).int().argmax(dim=-1))


def with_label(candidates, labels):
    """Candidates int [..., k], best first, with the label in place of the last where it is missing."""
    missing = (candidates != labels[..., None]).all(dim=-1)
    last = torch.where(missing, labels, candidates[..., -1])
    return torch.cat([candidates[..., :-1], last[..., None]], dim=-1)
