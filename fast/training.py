"""Training a block drafter: one optimiser step after another on answers that its target wrote.

A step takes some sequences.  The frozen target reads each once, which gives the features of every position and the
teacher's rows; the drafter then drafts behind many random anchors of it at once.  Sequences of a step, anchors of a
sequence and initial weights are functions of the seed and of where they stand, never of how often a generator was
asked before, so a resumed run goes on bit by bit.

Normalisation.  Gradients of the loss's numerator are added up over the whole step, over all processes too, and are
divided once by the whole step's weight.  The step is the same for any number of processes and micro-batches.

Tests: `tests/test_training.py`.
"""

import math
import os
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from torch import distributed

from fast.decoder import attend_causal
from fast.draft_losses import RECIPES, block_labels, block_losses
from fast.drafters import Drafter

SLOT_SEED, READOUT_SEED = 0x510EC0DE, 0x5EEDC0DE
SPREAD = 0.02  # deviation of a fresh linear map's weights


class Sequence(NamedTuple):
    """A prompt and the target's answer: token ids [S], and which of them the answer holds, bool [S]."""

    tokens: np.ndarray
    supervised: np.ndarray


@dataclass(frozen=True)
class Settings:
    """What decides the course of a training.

    steps          optimiser steps in all
    sequences      sequences of a step, over all processes
    anchors        most anchors of a sequence
    at_once        anchors whose vocabulary rows are held at a time, 0 = all; the loss does not depend on it
    learning_rate  after the warm-up, which takes the share `warm_up` of the steps; a cosine to 0 follows
    clip           largest norm of a step's gradient
    seed           of sequences, anchors and initial weights
    """

    steps: int
    sequences: int = 512
    anchors: int = 512
    at_once: int = 0
    learning_rate: float = 6e-4
    warm_up: float = 0.04
    clip: float = 1.0
    seed: int = 42


class Step(NamedTuple):
    """What a step reports: loss, tau in tokens per round along the labels, norm of the gradient, the loss's terms.

    `tokens` is how many it read, over all processes, and `counts` holds the sums that it also took (`Trainer.sums`).
    """

    loss: float
    tau: float
    norm: float
    terms: dict[str, float]
    tokens: int
    counts: dict[str, float]


class Trainer:
    """A drafter, its optimizer and the sequences; everything that a resumed run needs.

    Args: target, the frozen `Decoder`; drafter, trained in place, float32 or float64; sequences, a list of `Sequence`;
        settings; recipe (None: its family's); autocast, a dtype that products are computed in (None: the drafter's);
        detached, whether the confidence term trains the confidence head only.
    Attributes: step, how many are done; totals, a Counter over all of them, resumed ones too: "tokens" read, "seconds"
        taken, and `sums`; seconds, where the time of this process went, by part.
    """

    sums: tuple[str, ...] = ("weight", "length", "blocks")  # what losses give besides their terms

    def __init__(self, target, drafter, sequences, settings, recipe=None, autocast=None, detached=False):
        if drafter.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"weights are trained in float32 or float64, not {drafter.dtype}; see autocast")
        if drafter.ids is not None:
            raise ValueError("drafters with a vocabulary of their own are not trained here; leave draft_vocab_size out")
        usable = [s for s in sequences if len(anchor_places(s.supervised))]
        if not usable or len(usable) < settings.sequences:
            raise ValueError(
                f"{len(usable)} answers of two tokens or more cannot fill a step of {settings.sequences}: take fewer"
            )
        self.target, self.drafter, self.sequences, self.settings = target, drafter, usable, settings
        self.recipe, self.detached = self.fit(recipe), detached
        self.autocast, self.step, self.seconds, self.totals = autocast, 0, Counter(), Counter()
        self.parameters = [p for p in drafter.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=settings.learning_rate, weight_decay=0.0)

    def fit(self, recipe):
        """The recipe that the losses follow; ValueError where it is none for this drafter."""
        config = self.drafter.config
        return fit_recipe(recipe or RECIPES[config.family], config)

    def update(self):
        """One AdamW step: `Step`.  ValueError where loss or gradient is not finite, before any weight has changed."""
        settings, (rank, processes), begin = self.settings, place(), time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        order = sequences_of(self.step, len(self.sequences), settings.sequences, settings.seed)
        sums: Counter[str] = Counter()
        for i in range(rank, settings.sequences, processes):
            sums.update(self.accumulate(self.sequences[order[i]], [settings.seed, self.step, i]))
        with self.timed("exchange"):
            sums = self._exchange(sums)
        weight, length, blocks = sums["weight"], sums["length"], sums["blocks"]
        terms = {name: sums[name] / weight for name in self.recipe.terms}
        loss = sum(getattr(self.recipe, name) * value for name, value in terms.items())
        if not math.isfinite(loss):
            raise ValueError(f"the loss is {loss} at step {self.step}; start anew with a smaller learning rate")
        with self.timed("optimizer"):
            for p in self.parameters:
                p.grad /= weight
            norm = float(torch.nn.utils.clip_grad_norm_(self.parameters, settings.clip))
            if not math.isfinite(norm):
                raise ValueError(
                    f"the gradient's norm is {norm} at step {self.step}; start anew with a smaller learning rate"
                )
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(self.step, settings)
            self.optimizer.step()
        self.step += 1
        counts = {name: sums[name] for name in self.sums}
        read = sum(len(self.sequences[i].tokens) for i in order)
        self.totals.update(counts | {"tokens": read, "seconds": time.perf_counter() - begin})
        return Step(loss, length / blocks, norm, terms, read, counts)

    def accumulate(self, sequence, seed):
        """Add a sequence's share to the gradients of the loss's numerator; returns its sums by name."""
        with self.timed("target"), torch.no_grad():
            reading = self.read(sequence.tokens, seed)
        anchors = draw_anchors(sequence.supervised, self.settings.anchors, np.random.default_rng(seed))
        sums: Counter[str] = Counter()
        for some in np.array_split(anchors, math.ceil(len(anchors) / (self.settings.at_once or len(anchors)))):
            with self.timed("drafter and loss"):
                losses = self.losses(sequence, some, *reading)
                total = losses.total(self.recipe)
            with self.timed("backward"):
                total.backward()
            sums.update({name: float(term.detach()) for name, term in losses.terms.items()})
            sums.update({name: float(getattr(losses, name)) for name in self.sums})
        return sums

    def read(self, tokens, seed):
        """What the losses of a sequence need beside it and its anchors: arguments of `losses`."""
        return read_target(self.target, tokens, self.drafter.taps)

    def losses(self, sequence, anchors, hidden, features):
        """`BlockLosses` of some anchors of a sequence, given what the target read in it; differentiable."""
        drafter, c = self.drafter, self.drafter.config
        labels = block_labels(*sequence, anchors, c.block_size, c.in_place)
        places, of_row = np.unique(np.maximum(labels.places - 1, 0), return_inverse=True)  # blocks overlap
        of_row = torch.from_numpy(of_row.reshape(labels.places.shape))  # flat before NumPy 2
        teacher_logits = self.target.read_out(hidden[torch.from_numpy(places)])[of_row]
        with torch.autocast(drafter.device.type, self.autocast, enabled=self.autocast is not None):
            blocks, selector = drafter.forward_blocks(features, sequence.tokens, anchors), None
            before = torch.from_numpy(sequence.tokens[np.maximum(labels.places - 1, anchors[:, None])])
            before = before.to(drafter.device)
            if self.recipe.selector:
                selector = drafter.correction(blocks.hidden, before, None), drafter.correction.readout
            if self.detached:
                blocks = replace(blocks, confidence=detached_confidence(drafter, blocks.hidden, before))
            return block_losses(self.recipe, blocks, labels, teacher_logits.to(drafter.dtype), c.in_place, selector)

    @contextmanager
    def timed(self, part):
        """Add the time that the block takes to `seconds`."""
        begin = time.perf_counter()
        yield
        if self.drafter.device.type == "cuda":
            torch.cuda.synchronize()
        self.seconds[part] += time.perf_counter() - begin

    def _exchange(self, sums):
        """Add up gradients and sums over the processes; a weight without a gradient has the gradient zero."""
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        if place()[1] == 1:
            return sums
        names = [*self.recipe.terms, *self.sums]
        numbers = torch.tensor([sums[name] for name in names], dtype=torch.float64, device=self.drafter.device)
        for tensor in (numbers, *(p.grad for p in self.parameters)):
            distributed.all_reduce(tensor)
        return dict(zip(names, numbers.tolist(), strict=True))

    def summary(self, step):
        """The few numbers of a `Step` that show how a training goes."""
        return {"loss": step.loss, "tau": step.tau, "norm": step.norm}

    def state(self):
        """Everything that a resumed run needs, as `torch.save` stores it."""
        networks = {"drafter": self.drafter.state_dict(), "optimizer": self.optimizer.state_dict()}
        return {"step": self.step, "totals": dict(self.totals)} | networks

    def restore(self, state):
        """Go on from what `state` gave."""
        self.step, self.totals = state["step"], Counter(state["totals"])
        self.drafter.load_state_dict(state["drafter"])
        self.optimizer.load_state_dict(state["optimizer"])


def fit_recipe(recipe, config):
    """A recipe with the drafter's number of candidates; ValueError where the two are not made for each other."""
    if recipe.confidence and not config.confidence:
        raise ValueError(f"the objective trains a confidence head, which this {config.family} drafter does not have")
    if bool(recipe.selector) != (config.family == "dflash2"):
        raise ValueError(
            f"a {config.family} drafter needs its own objective: only DFlash2's trains a candidate selector"
        )
    return replace(recipe, candidates=config.lattice or recipe.candidates)


def detached_confidence(drafter, hidden, predecessors):
    """Confidence logits as `Drafter.confidence` gives them, None without the head; slopes reach that head only."""
    if drafter.confidence_head is None:
        return None
    head = SimpleNamespace(embed=lambda ids: drafter.markov_head.embed(ids).detach())
    return drafter.confidence_head(hidden.detach(), predecessors, head)


def place():
    """(rank, number) of this process among those that train together: (0, 1) alone."""
    return (distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else (0, 1)


def read_target(target, tokens, taps, attend=attend_causal):
    """One forward of the target over a sequence: (states after its final norm [S, H], features [S, n * H])."""
    positions = torch.arange(len(tokens), device=target.device)
    return target.forward(torch.from_numpy(tokens).to(target.device), positions, attend, taps)


def anchor_places(supervised):
    """Positions that may be an anchor: they and the next one belong to the answer, int [A]."""
    return np.flatnonzero(supervised[:-1] & supervised[1:])


def draw_anchors(supervised, count, rng):
    """Up to `count` different anchors of a sequence, in order, int [A]."""
    places = anchor_places(supervised)
    return np.sort(rng.choice(places, min(count, len(places)), replace=False))


def sequences_of(step, count, size, seed):
    """Which `size` of `count` sequences a step takes: each once in an epoch, whose incomplete last step is left out."""
    epoch, place = divmod(step, count // size)
    return np.random.default_rng([seed, epoch]).permutation(count)[place * size :][:size]


def learning_rate(step, settings):
    """The rate of a step, counted from 0: linear from rate / warm-up steps, then a cosine to 0."""
    warm_up = int(settings.warm_up * settings.steps)
    if step < warm_up:
        return settings.learning_rate * (step + 1) / warm_up
    return settings.learning_rate * (1 + math.cos(math.pi * (step - warm_up) / (settings.steps - warm_up))) / 2


def new_drafter(config, target, seed, dtype=torch.float32):
    """A drafter with initial weights on its target's tables, to be trained in `dtype`."""
    tensors = {name: t.to(target.device, dtype) for name, t in initial_tensors(config, target.head, seed).items()}
    return Drafter(config, tensors, target.embedding.to(dtype), target.head.to(dtype))


def initial_tensors(config, head, seed):
    """Weights to begin with: published name -> float32 tensor.

    Linear maps and codebooks are normal with deviation 0.02; norms are 1, biases 0, convolutions pass their input on.
    Slot embeddings and the readout of a prefix-attention head have seeds of their own: `slot_ramp`, `seed_readout`.
    """
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in config.tensor_shapes().items():
        end = name.removesuffix(".weight").rsplit(".", 1)[-1]
        if end.endswith("norm"):
            tensors[name] = torch.ones(shape)
        elif end in ("k_base", "base_kernel"):
            tensors[name] = torch.zeros(shape)
            tensors[name][..., 0, :] = 1
        elif end in ("bias", "corr", "kernel_projection", "anchor_type"):
            tensors[name] = torch.zeros(shape)
        elif end == "slot_embed":
            tensors[name] = slot_ramp(*shape)
        else:
            tensors[name] = SPREAD * torch.randn(shape, generator=generator)
    if config.markov_type == "attention":
        tensors["markov_head.out_norm.weight"].fill_(0.35)
        tensors["markov_head.markov_w2.weight"] = seed_readout(head, config.markov_rank)
        if config.head_gate != "none":
            tensors["markov_head.gate_proj.weight"].zero_()
            tensors["markov_head.gate_proj.bias"].fill_(4.0)
    return tensors


def slot_ramp(slots, hidden, size=0.02, share=0.4):
    """Slot embeddings [slots, H] that rise along one direction, the rest of each random: float32.

        row k = sqrt(share) a_k d + sqrt(1 - share) r_k,   |row| = size sqrt(H)

    with d, r_k unit vectors, r_k across d, and a_k from -1 to 1 evenly, scaled to mean square 1.
    """
    generator = torch.Generator().manual_seed(SLOT_SEED)
    direction = unit(torch.randn(hidden, generator=generator))
    rest = torch.randn(slots, hidden, generator=generator)
    rest = unit(rest - (rest @ direction)[:, None] * direction)
    ramp = torch.linspace(-1, 1, slots) if slots > 1 else torch.ones(1)
    ramp = ramp / ramp.square().mean().sqrt()
    return unit(share**0.5 * ramp[:, None] * direction + (1 - share) ** 0.5 * rest) * size * hidden**0.5


def seed_readout(head, rank, deviation=0.0664):
    """A readout [V, rank] that starts as a random projection of the head's directions, float32."""
    generator = torch.Generator().manual_seed(READOUT_SEED)
    projection = torch.randn(head.shape[1], rank, generator=generator)
    readout = unit(head.float().cpu()) @ (projection / projection.norm(dim=0))
    return readout * (deviation / readout.std())


def unit(rows):
    """Rows scaled to length 1."""
    return rows / rows.norm(dim=-1, keepdim=True)


def write_atomically(path, write):
    """Write a file under a temporary name and rename it: whoever looks finds the old one or the new one, whole."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.partial")
    try:
        write(temporary)
    except (RuntimeError, SafetensorError) as error:  # how some writers say that the disk is full
        raise OSError(f"{path} cannot be written ({error}); what was there is kept") from error
    with open(temporary, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(temporary, path)


def save_checkpoint(path, trainer, identity):
    """Store a training's state, with what must be equal for it to go on (`identity`, a dict of plain values)."""
    write_atomically(path, lambda temporary: torch.save(trainer.state() | {"identity": identity}, temporary))


def load_checkpoint(path, trainer, identity):
    """Go on from a stored state; ValueError naming what differs, or that the file is none or damaged."""
    try:
        state = torch.load(path, map_location=trainer.drafter.device, weights_only=True)
        found = state["identity"]
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist: there is nothing to resume") from None
    except Exception as error:  # the reader raises whatever the bytes lead it to
        raise ValueError(f"{path} is no whole checkpoint ({type(error).__name__}); restore it or start anew") from error
    if differing := sorted(key for key in identity | found if found.get(key) != identity.get(key)):
        raise ValueError(f"{path} was written with another {', '.join(differing)}; use another --out to start anew")
    trainer.restore(state)
