"""D-REAL: post-training on blocks that the drafter drafts itself (D-REAL paper Sec. 3, Algorithm 1).

Verification sees blocks that the drafter drew, and stops at the first draft it rejects.  So a step drafts a block
behind each of many anchors, has the frozen target score it, and climbs the expected number of accepted drafts,

    J = E sum_k a_k prod_{j<k} r_j,    a_k = sum_v min(p_k, q_k)(v),    r_j = min(p_j, q_j)(d_j) / b_j,

whose slope is that of the surrogate in `reference.objectives.dreal`.  Whatever a drafter's q is, its rows sum to one
over what it may draft: a DFlash2 slot drafts its 16 candidates, which are held fixed while slopes are taken.  The
target's mass outside them adds nothing to a, and no slope brings a new word among them.

What the target has to do online, and why no number depends on the shortcuts:

    reused      as long as drafts repeat the sequence, the target's states are those of the sequence itself
    grown       suffixes that leave the sequence form trees on it; one forward reads every node of them once, over the
                keys and values of the sequence
    read out    logits are computed once for each different state that a slot asks for

A stop token ends its block.  Steps 1 and 7 of Algorithm 1, anchors and optimizer, are the trainer's.

Tests: `tests/test_dreal.py` (slopes against enumeration through whole networks).
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from fast import objectives, training
from fast.decoder import attend_causal
from fast.draft_heads import largest
from fast.draft_layers import attend_blocks, unseen_rows
from fast.draft_losses import RECIPES, BlockLosses, confidence
from fast.laws import draw, warp
from reference.objectives import SMALLEST_BEHAVIOUR

OBJECTIVES = ("baseline", "dpace", "tv_static", "dreal")
PARTS = 4  # suffixes attend in so many parts: those behind an early anchor look at the beginning only
DRAWS = 1  # ends the seeds of the drafts: they do not repeat the numbers that chose the anchors


@dataclass(frozen=True)
class OnlineRecipe:
    """Coefficients of the terms of a loss on drafted blocks, 0 = left out: see `draft_losses.Recipe`.

    dreal        1 - J / K, the surrogate of the expected number of accepted drafts
    tv_static    overlap along the same drafts, slot k weighted by exp(-k / decay) (Sec. 5.3)
    confidence   binary cross-entropy of the confidence logits against a, a slot's share 1 / K; it trains that head only
    """

    dreal: float = 0.0
    tv_static: float = 0.0
    confidence: float = 0.0
    decay: float = 4.0

    @property
    def terms(self):
        """Names of the terms that are weighed."""
        return [name for name in ("dreal", "tv_static", "confidence") if getattr(self, name)]


@dataclass(frozen=True)
class RoundLosses(BlockLosses):
    """Sums over blocks, as `BlockLosses`: `weight` counts blocks, and `length` is 1 + J as this step estimates it.

    overlap    sum of a over the slots that count
    slots      how many there are, and
    reused     how many of them find the target's state in the sequence
    grown      positions that the target read for the others
    read_out   rows of logits that the target gave
    """

    overlap: torch.Tensor
    slots: int
    reused: int
    grown: int
    read_out: int


class Reading(NamedTuple):
    """What the target read in a sequence: final states [S, H], features [S, n * H], and its keys and values.

    `memory` holds a pair [1, kv heads, S, d] for each layer.
    """

    hidden: torch.Tensor
    features: torch.Tensor
    memory: list


class TargetRows(NamedTuple):
    """The target's rows along drafts, [A, K, V], and what they took: see `RoundLosses`."""

    probs: torch.Tensor
    reused: int
    grown: int
    read_out: int


def round_losses(
    recipe, target, drafter, tokens, anchors, uniforms, reading, *, reuse=True, recompute=False, autocast=None
):
    """One round behind each of A anchors: `RoundLosses`, differentiable in the drafter's weights.

    Args: tokens int [S], a sequence; anchors int [A], positions; uniforms float64 [A, K], which draw the drafts;
        reading, as from `read_sequence`; reuse, False lets the target read every draft anew; recompute, the backward
        pass runs the layers a second time and their activations are not kept; autocast, a dtype that the drafter's
        products are computed in.
    Raises: ValueError for anchors outside the sequence or uniforms that are not [A, K].
    """
    if not len(anchors) or not ((anchors >= 0) & (anchors < len(tokens))).all():
        raise ValueError(f"anchors must be positions of the sequence of {len(tokens)} tokens, one at least")
    if uniforms.shape != (len(anchors), drafter.gamma):
        raise ValueError(f"{len(anchors)} blocks of {drafter.gamma} drafts need as many uniforms, got {uniforms.shape}")
    # a context for each part: casts made without gradients must not serve, as in some releases, where slopes are wanted
    products = partial(torch.autocast, drafter.device.type, autocast, enabled=autocast is not None)
    with products():
        blocks = Blocks(drafter, reading.features, tokens, anchors, recompute)  # step 2
    with products():
        drafts, behaviour = roll_out(blocks, uniforms)  # step 3
    counted = objectives.until_stop(drafts, target.stop_ids)
    rows = target_rows(target, reading, tokens, anchors, drafts.cpu().numpy(), counted.cpu().numpy(), reuse)  # step 4
    with products():
        logits, trust = blocks.logits(drafts[:, :-1]), blocks.confidence(drafts[:, :-1])  # step 5
    p = rows.probs.to(logits.dtype)
    with torch.no_grad():
        least = torch.minimum(p, warp(logits))
        overlap = torch.where(counted, least.sum(dim=-1), 0)
        ratio = least.gather(-1, drafts[..., None])[..., 0] / behaviour.clamp(min=SMALLEST_BEHAVIOUR)
        drafted = objectives.accepted_drafts(overlap, torch.where(counted, ratio, 0)).sum()
    terms = {  # step 6, sums over blocks
        "dreal": lambda: len(anchors) * objectives.dreal(logits, p, drafts, behaviour, counted).loss,
        "tv_static": lambda: len(anchors) * objectives.tv_static(logits, p, recipe.decay, counted).loss,
        "confidence": lambda: (counted * confidence(trust, 1 - overlap)).sum() / counted.shape[1],
    }
    sums = {name: terms[name]() for name in recipe.terms}
    count = torch.tensor(len(anchors))
    return RoundLosses(sums, count, drafted + count, count, overlap.sum(), int(counted.sum()), *rows[1:])


class Blocks:
    """The blocks of A anchors: their states, computed once, and the logits of their slots along any drafts."""

    def __init__(self, drafter, features, tokens, anchors, recompute=False):
        self.drafter, self.first = drafter, drafter.first
        anchors, ids = (torch.as_tensor(a, device=drafter.device) for a in (anchors, tokens[anchors]))

        def states():
            memory = drafter.memorise(features[: anchors.max()], 0)
            return drafter.hidden(memory, anchors, ids), drafter.past(memory, anchors, ids)

        run = partial(checkpoint, states, use_reentrant=False, preserve_rng_state=False) if recompute else states
        self.hidden, self.past = run()  # [A, B, H]
        self.anchors = ids[:, None]
        self.base = drafter.scores(self.hidden[:, self.first :])  # [A, K, V]
        self.candidates = largest(self.base.detach(), drafter.lattice) if drafter.lattice else None

    def logits(self, drafts, start=0):
        """Logits at temperature 1 of the slots start..n after n drafts int [A, n]: [A, n + 1 - start, V].

        Slots are corrected side by side.
        """
        drafter, slots = self.drafter, slice(start, drafts.shape[1] + 1)
        if drafter.correction is None:
            return self.base[:, slots]
        low = 0 if drafter.order is None else self.first + start  # the recurrent head runs through every row
        seen = self._predecessors(drafts)[:, low:]
        hidden = self.hidden[:, low:][:, : seen.shape[1]]
        latents = drafter.correction(hidden, seen, self.past)[:, self.first + start - low :]
        candidates = None if self.candidates is None else self.candidates[:, slots]
        return drafter.correct(self.base[:, slots], latents, candidates)

    def confidence(self, drafts):
        """Confidence logits [A, n + 1], whose slopes end in their own head (`training.detached_confidence`)."""
        seen = self._predecessors(drafts)[:, self.first :]
        return training.detached_confidence(self.drafter, self.hidden[:, self.first :][:, : seen.shape[1]], seen)

    def _predecessors(self, drafts):
        """The token before each row's, int [A, first + n + 1]; row 0 sees the anchor, also where it drafts nothing."""
        return torch.cat([self.anchors.expand(-1, self.first + 1), drafts], dim=1)


@torch.no_grad()
def roll_out(blocks, uniforms):
    """Draft a chain behind every anchor, by inverse CDF: (drafts int64 [A, K], their probabilities b [A, K])."""
    drafts, behaviour = blocks.anchors[:, :0], []
    for k in range(uniforms.shape[1]):
        rows = warp(blocks.logits(drafts, k)[:, 0])
        drawn = torch.from_numpy(draw(rows, uniforms[:, k])).to(rows.device)[:, None]
        behaviour.append(rows.gather(1, drawn))
        drafts = torch.cat([drafts, drawn], dim=1)
    return drafts, torch.cat(behaviour, dim=1)


@torch.no_grad()
def read_sequence(target, tokens, taps):
    """One forward of the target over a sequence int [S]: a `Reading`."""
    memory = []

    def attend(layer, q, k, v):
        memory.append(tuple(t.transpose(0, 1)[None] for t in (k, v)))
        return attend_causal(layer, q, k, v)

    return Reading(*training.read_target(target, tokens, taps, attend), memory)


@torch.no_grad()
def target_rows(target, reading, tokens, anchors, drafts, counted, reuse=True):
    """The target's next-token rows p_k = p(. | sequence up to the anchor, drafts before k): `TargetRows`.

    Args: drafts int [A, K]; counted bool [A, K], the slots before and at the first stop; all NumPy.  A slot that does
        not count gets some row.  reuse as for `round_losses`.
    """
    slots, length = np.arange(drafts.shape[1]), len(tokens)
    states, index = reading.hidden, anchors[:, None] + slots  # where slot k's state lies while drafts repeat the text
    own = (index + 1 < length) & (tokens[np.minimum(index + 1, length - 1)] == drafts)
    repeated = np.logical_and.accumulate(own, axis=1).sum(axis=1) if reuse else np.zeros(len(anchors), dtype=np.int64)
    left = counted & (slots > repeated[:, None])
    grown = 0
    if left.any():
        nodes, new = grow_suffixes(target, reading.memory, anchors + repeated, drafts, repeated, left.sum(axis=1))
        states, grown, index[left] = torch.cat([states, new]), len(new), length + nodes
    used, which = np.unique(index[counted], return_inverse=True)
    rows = torch.softmax(target.read_out(states[torch.from_numpy(used).to(states.device)]), dim=-1)
    place = np.zeros_like(index)
    place[counted] = which.ravel()
    probs = rows[torch.from_numpy(place).to(rows.device)]
    return TargetRows(probs, int(counted.sum() - left.sum()), grown, len(used))


def grow_suffixes(target, memory, ends, drafts, starts, lengths):
    """Final states of the target along drafts that leave a sequence, every different suffix read once.

    Args: memory, its keys and values of the sequence; ends int [A], the last position each block shares with it;
        drafts int [A, K]; starts, lengths int [A], which of them follow there.
    Returns: (each one's state, block by block, int [sum of lengths]; states [n, H]).
    """
    blocks, depth = np.flatnonzero(lengths), np.arange(lengths.max())
    ends, starts, lengths = ends[blocks, None], starts[blocks, None], lengths[blocks, None]
    suffixes = drafts[blocks[:, None], np.minimum(starts + depth, drafts.shape[1] - 1)]  # [A', W]
    real = depth < lengths
    paths = np.where(depth <= depth[:, None], suffixes[:, None], -1)  # [A', W, W], what a node has read
    keys = np.concatenate([np.broadcast_to(ends[..., None], (*real.shape, 1)), paths], axis=-1)
    _, once, which = np.unique(keys[real], axis=0, return_index=True, return_inverse=True)
    nodes = np.zeros(real.shape, dtype=np.int64)
    nodes[real] = which.ravel()
    once = np.flatnonzero(real)[once]  # one place of every node in [A', W]

    device = memory[0][0].device
    shape = torch.from_numpy(nodes).to(device)
    tokens, positions, place = (
        torch.from_numpy(a).to(device) for a in (suffixes.ravel()[once], (ends + 1 + depth).ravel()[once], once)
    )
    later, parts = unseen_rows(len(depth), True, None, "", device), []
    for some in np.array_split(np.arange(len(ends)), min(PARTS, len(ends))):
        last = torch.from_numpy(ends[some]).to(device)[..., None]
        parts.append((shape[some[0] : some[-1] + 1], torch.arange(int(ends[some].max()) + 1, device=device) > last))

    def attend(layer, q, k, v):
        mixed, scale = [], q.shape[-1] ** -0.5
        for nodes, unseen in parts:
            keys, values = (t[:, :, : unseen.shape[2]] for t in memory[layer])
            mixed.append(attend_blocks(q[nodes], k[nodes], v[nodes], scale, keys, values, unseen, later).flatten(0, 1))
        return torch.cat(mixed)[place]

    return nodes[real], target.forward(tokens, positions, attend)[0]


@torch.no_grad()
def drafted_length(target, drafter, sequence, anchors, seed, reading=None):
    """Blocks drafted behind up to `anchors` anchors of a sequence: (sum of their 1 + J, how many).

    1 + J is the expected number of tokens of a round at temperature 1, the bonus token counted, given the drafts.  The
    same seed, a sequence of int, gives the same anchors and, slot by slot, the same uniforms, whatever the drafter.
    reading, as from `read_sequence`, saves the target's forward where it was done for another drafter.
    """
    some = training.draw_anchors(sequence.supervised, anchors, np.random.default_rng(seed))
    uniforms = np.stack([np.random.default_rng([*seed, DRAWS, place]).random(drafter.gamma) for place in some])
    reading = reading or read_sequence(target, sequence.tokens, drafter.taps)
    found = round_losses(OnlineRecipe(), target, drafter, sequence.tokens, some, uniforms, reading)
    return float(found.length), int(found.blocks)


def expected_length(target, drafter, sequences, anchors, seed):
    """Mean of 1 + J over the blocks of all sequences: see `drafted_length`."""
    found = [drafted_length(target, drafter, sequence, anchors, [seed, i]) for i, sequence in enumerate(sequences)]
    length, blocks = np.sum(found, axis=0)
    return float(length / blocks)


class OnlineTrainer(training.Trainer):
    """A trainer whose losses are those of drafted blocks: see `training.Trainer` and `round_losses`.

    Args: as for `Trainer`; recipe, an `OnlineRecipe`; reuse, recompute.
    """

    sums: tuple[str, ...] = (*training.Trainer.sums, "overlap", "slots", "reused", "grown", "read_out")

    def __init__(
        self, target, drafter, sequences, settings, recipe=None, autocast=None, *, reuse=True, recompute=False
    ):
        super().__init__(target, drafter, sequences, settings, recipe, autocast)
        self.reuse, self.recompute = reuse, recompute

    def fit(self, recipe):
        config = self.drafter.config
        recipe = recipe or recipe_of("dreal", config)
        if recipe.confidence and not config.confidence:
            raise ValueError(f"this {config.family} drafter has no confidence head to train: set confidence to 0")
        return recipe

    def read(self, tokens, seed):
        uniforms = np.random.default_rng([*seed, DRAWS]).random((len(tokens), self.drafter.gamma))
        return read_sequence(self.target, tokens, self.drafter.taps), uniforms

    def losses(self, sequence, anchors, reading, uniforms):
        return round_losses(
            self.recipe, self.target, self.drafter, sequence.tokens, anchors, uniforms[anchors], reading,
            reuse=self.reuse, recompute=self.recompute, autocast=self.autocast,
        )  # fmt: skip

    def summary(self, step):
        """J, the expected number of accepted drafts; mean a; how many slots reused a state; all along drafts."""
        c, numbers = step.counts, super().summary(step)
        drafted = {"J": step.tau - 1, "a": c["overlap"] / c["slots"], "reused": c["reused"] / c["slots"]}
        return numbers | drafted


def recipe_of(objective, config):
    """The loss that an objective of `OBJECTIVES` means for a drafter; the rest of a training does not depend on it.

    "baseline" goes on with the family's own, "dpace" is cross-entropy under D-PACE weights (and DFlash2's selector
    term under them).  A confidence head, where there is one, is trained by all of them.
    """
    trust = float(config.confidence)
    if objective in ("tv_static", "dreal"):
        return OnlineRecipe(**{objective: 1.0}, confidence=trust)
    own = RECIPES[config.family]
    if objective == "dpace":
        return replace(RECIPES["dpace"], selector=own.selector, confidence=trust)
    return replace(own, confidence=trust * own.confidence)


def trainer_of(objective, target, drafter, sequences, settings, autocast=None, *, recompute=False):
    """The trainer of an objective: same sequences, anchors, optimizer and schedule for each of `OBJECTIVES`."""
    recipe = recipe_of(objective, drafter.config)
    if isinstance(recipe, OnlineRecipe):
        return OnlineTrainer(target, drafter, sequences, settings, recipe, autocast, recompute=recompute)
    return training.Trainer(target, drafter, sequences, settings, recipe, autocast, detached=objective == "dpace")
