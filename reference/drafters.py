"""Block drafters: several tokens proposed by one forward (DFlash, DSpark, DFlash2, the prefix-attention drafter).

A drafter reads the committed prefix through the target's own hidden states, and one token, the anchor: the last one
committed, which has not been through the target yet.  With the anchor at position p it sees features of positions
0..p-1 and runs a block of B rows, the anchor and B - 1 masks (`draft_layers.py`).  The final state h of a row gives

    u = softcap(multiplier U h),        U the target's output table,

its base logits, and a head corrects them for the tokens drafted before (`draft_heads.py`).  So one forward per block
settles everything but a term of low rank, and slot k has the proposal q_k(. | X, tokens drafted so far).

Which slot a row answers for is a convention that tensor shapes do not show, hidden here: slot k is row k, which
predicts position p + k + 1 (B proposals), or, in place, row k + 1, which predicts where it stands (B - 1 proposals).

Twin: `fast/drafters.py`.  Tests: `tests/test_drafters.py` (arrays of the authors' own code, exact identities).
"""

from dataclasses import dataclass

import numpy as np

from models.checkpoint import to_float
from models.drafter_checkpoint import check_target, read_drafter
from models.drafter_config import DrafterConfig
from reference.devices import placement
from reference.draft_heads import build_head, confidence
from reference.draft_layers import Backbone, extend
from reference.laws import SamplingLaw, draw, warp
from reference.paths import check_tokens


@dataclass(frozen=True)
class TrainingBlocks:
    """The blocks of A anchors of one sequence, row by row; slot k is row k, or row k + 1 of an in-place drafter.

    hidden         [A, B, H], after the final norm
    base_logits    [A, B, V], before the head
    logits         [A, B, V], given the predecessors; -inf outside the candidates of a DFlash2 drafter
    confidence     [A, B] logits, or None without that head
    """

    hidden: np.ndarray
    base_logits: np.ndarray
    logits: np.ndarray
    confidence: np.ndarray | None


class Drafter:
    """A block drafter.

    Args: config; tensors, published name -> array, as in `config.tensor_shapes()`; embedding [V, H], the target's;
        head [Vd, H], its output table on the draft vocabulary; d2t int [Vd], target id minus draft id, where the
        draft vocabulary is smaller than the target's.
    Attributes: config; vocab_size, the target's V; gamma, tokens per block; order, how many drafted tokens a slot's
        distribution depends on, 0, 1, or None = all of the block; taps, the target's layers to be read.
    """

    def __init__(self, config, tensors, embedding, head, d2t=None):
        self.config, self.tensors, self.head = config, tensors, head
        self.vocab_size, self.gamma, self.order, self.taps = len(embedding), config.proposals, config.order, config.taps
        self.first = int(config.in_place)  # the row of slot 0
        self.lattice = config.lattice if config.family == "dflash2" else 0  # candidates per slot, 0 = all tokens
        self.ids = slice(None) if d2t is None else np.arange(len(d2t)) + d2t  # target ids of the draft vocabulary
        self.backbone, self.correction = Backbone(config, tensors, embedding), build_head(config, tensors, embedding)

    @classmethod
    def load(cls, folder, target, *, dtype="float32", device="cpu", in_place=None):
        """Read a drafter's folder (config.json and safetensors) for the target whose tables it borrows.

        Args: target, the `Decoder` it drafts for; in_place, the slot convention where config.json leaves it open.
        Raises: ConfigError or CheckpointError naming what does not fit, the target included.
        """
        _, dtype = placement(device, dtype)
        config, dtype = DrafterConfig.from_folder(folder, in_place=in_place), np.dtype(dtype)
        stored = read_drafter(folder, config)
        check_target(config, target.config, stored, target.embedding, target.head)
        tensors = {name: to_float(raw, kind, dtype) for name, kind, raw in stored.tensors()}
        d2t = stored.d2t
        head = target.head if d2t is None else target.head[np.arange(len(d2t)) + d2t]
        return cls(config, tensors, target.embedding.astype(dtype, copy=False), head.astype(dtype, copy=False), d2t)

    def context(self):
        """An empty `Context`."""
        return Context(self)

    def propose(self, context, token, law=SamplingLaw(), lattice=None):
        """Draft the block whose anchor is `token`, at position `context.length`: a `Proposal`.

        Args: context, the features of exactly the positions before the anchor; law, which shapes the proposal;
            lattice, how many candidates a slot chooses from, those of the largest base logits, 0 = all tokens
            (None: the config's number for DFlash2, 0 for every other family).
        """
        check_tokens([token], self.vocab_size)
        lattice = self.lattice if lattice is None else lattice
        if lattice < 0:
            raise ValueError(f"lattice must be 0 (all tokens) or a number of candidates, got {lattice}")
        (rows,) = self.backbone.hidden(context.cache, np.array([context.length]), np.array([token]))
        return Proposal(self, rows, self._past(context, context.length, token), token, law, lattice)

    def forward_blocks(self, features, tokens, anchors, predecessors=None):
        """The blocks of many anchors of one sequence in one forward, as in training: `TrainingBlocks`.

        The block of an anchor at position p sees the features before p and its own rows, never another block.

        Args: features [S, n * H]; tokens int [S]; anchors int [A], positions, A >= 1; predecessors int [A, B], the
            token before the one that each row predicts (None: the sequence's own; past its end, its last).
        """
        tokens, anchors, predecessors = check_blocks(self.config, features, tokens, anchors, predecessors)
        context = self.context()
        context.append(features)
        hidden = self.backbone.hidden(context.cache, anchors, tokens[anchors])
        base = self._read_out(hidden)
        logits, trust = keep_largest(base, self.lattice), []
        for a, (p, previous) in enumerate(zip(anchors, predecessors, strict=True)):
            logits[a] = self._correct(logits[a], hidden[a], previous, self._past(context, p, tokens[p]))
            trust.append(self._confidence(hidden[a], previous))
        return TrainingBlocks(hidden, base, logits, np.stack(trust) if self.config.confidence else None)

    def _read_out(self, hidden):
        """Base logits [..., V] of final states [..., H]; -inf for tokens outside the draft vocabulary."""
        u = hidden @ self.head.T * self.config.output_multiplier
        if self.config.softcap is not None:
            u = self.config.softcap * np.tanh(u / self.config.softcap)
        logits = np.full((*u.shape[:-1], self.vocab_size), -np.inf, dtype=u.dtype)
        logits[..., self.ids] = u
        return logits

    def _correct(self, base, hidden, previous, past):
        """Logits of consecutive rows of one block given the tokens before those they predict: base + R z, [m, V].

        Args: base [m, V], base logits of the last m of the rows; hidden [K, H] and previous int [K] of all of them,
            from the block's first on if the head is recurrent; past, what a prefix-attention head reads.
        """
        if self.correction is None:
            return base
        logits, latent = base.copy(), self.correction.latent(hidden, previous, past)[-len(base) :]
        logits[:, self.ids] += latent @ self.correction.readout.T
        return logits

    def _confidence(self, hidden, previous):
        """Confidence logits [K] of rows with states [K, H] and predecessors int [K], None without that head."""
        if not self.config.confidence:
            return None
        known = self.correction.embed(previous) if self.config.confidence_with_markov else None
        return confidence(self.tensors, hidden, known)

    def _past(self, context, position, token):
        """What a prefix-attention head reads in the block at this position; other heads read nothing."""
        if context.memory is None:
            return None
        return self.correction.past([part[:position] for part in context.memory], token)


class Context:
    """What a drafter keeps of the committed positions, in order; appending never changes what is there.

    length     how many positions
    cache      per layer their keys and values, [length, kv heads, d] each
    memory     those of the prefix-attention head, None without it
    """

    def __init__(self, drafter):
        c, dtype = drafter.config, drafter.head.dtype
        self.drafter, self.length = drafter, 0
        nothing = np.empty((0, c.num_kv_heads, c.head_dim), dtype)
        self.cache = [(nothing, nothing)] * c.num_layers
        nothing = np.empty((0, c.head_heads, c.head_dim_attention), dtype)
        self.memory = (nothing, nothing) if c.family == "attention" else None

    def append(self, features):
        """Add the next s positions: features [s, n * H], the target's hidden states at the taps."""
        drafter, backbone = self.drafter, self.drafter.backbone
        features, width = np.asarray(features, drafter.head.dtype), drafter.tensors["fc.weight"].shape[1]
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(f"features of the taps {drafter.taps} are [s, {width}], got {features.shape}")
        fused, positions = backbone.fuse(features), self.length + np.arange(len(features))
        self.cache = [extend(old, backbone.keys_values(i, fused, positions)) for i, old in enumerate(self.cache)]
        if self.memory is not None:
            self.memory = extend(self.memory, drafter.correction.memorise(fused))
        self.length += len(features)


class Proposal:
    """One drafted block: the distribution of every slot given the tokens drafted before it.

    gamma          proposals, slots 0..gamma-1
    order          how many drafted tokens a slot's distribution depends on: 0, 1, or None = all
    law            the sampling law that `probs` and `sample` follow
    hidden         [gamma, H], final states
    base_logits    [gamma, V], before the head

    A history int [h] holds the last h tokens before slot k: its last entry is the predecessor, entry -k - 1 the
    anchor.  Histories are evaluated one by one, so the bits of a row do not depend on the others it is asked with.
    """

    def __init__(self, drafter, rows, past, token, law, lattice):
        self.gamma, self.order, self.law, self.hidden = drafter.gamma, drafter.order, law, rows[drafter.first :]
        self.base_logits = drafter._read_out(self.hidden)
        self._drafter, self._rows, self._past, self._token = drafter, rows, past, token
        self._candidates = keep_largest(self.base_logits, lattice)

    def logits(self, slot, history):
        """Logits at temperature 1 given histories int [n, h]: [n, V], -inf for what is never proposed."""
        seen, end = check_history(self._drafter.config, slot, history), self._drafter.first + slot + 1
        base, rows = self._candidates[slot : slot + 1], self._rows[end - seen.shape[1] : end]
        return np.concatenate([self._drafter._correct(base, rows, previous, self._past) for previous in seen])

    def probs(self, slot, history):
        """The proposal q under the law, float64 [n, V]: what `sample` draws from and verification divides by."""
        return warp(self.logits(slot, history), self.law)

    def confidence(self, slot, history):
        """Logits [n] of the chance that this slot is accepted if those before it were, None without that head."""
        rows = [
            self._drafter._confidence(self.hidden[slot : slot + 1], row[-1:])
            for row in check_history(self._drafter.config, slot, history)
        ]
        return None if rows[0] is None else np.concatenate(rows)

    def sample(self, uniforms):
        """Draw n independent chains of h <= gamma tokens, int64 [n, h]: token k by inverse CDF with uniforms[:, k].

        Chains whose slot sees the same tokens share one row, and one row is held at a time.
        """
        uniforms = np.asarray(uniforms, dtype=np.float64)
        if uniforms.ndim != 2 or not uniforms.size or uniforms.shape[1] > self.gamma:
            raise ValueError(f"uniforms must be [n, h] with n >= 1 and h in 1..{self.gamma}, got {uniforms.shape}")
        chains = np.full((len(uniforms), 1), self._token)
        for slot in range(uniforms.shape[1]):
            seen = check_history(self._drafter.config, slot, chains)
            if self.order == 0:
                seen = np.zeros_like(seen)
            rows, which = np.unique(seen, axis=0, return_inverse=True)
            tokens = np.empty(len(chains), dtype=np.int64)
            for i, row in enumerate(rows):
                here = which.ravel() == i
                tokens[here] = draw(self.probs(slot, row[None]), uniforms[here, slot], np.zeros(here.sum(), int))
            chains = np.concatenate([chains, tokens[:, None]], axis=1)
        return chains[:, 1:]


def keep_largest(logits, count):
    """Logits [..., V] with all but each row's `count` largest set to -inf (ties: lowest ids); 0 keeps all."""
    if not count:
        return logits.copy()
    kept, best = np.full_like(logits, -np.inf), np.argsort(-logits, axis=-1, kind="stable")[..., :count]
    np.put_along_axis(kept, best, np.take_along_axis(logits, best, axis=-1), axis=-1)
    return kept


def check_blocks(config, features, tokens, anchors, predecessors):
    """The ids of `forward_blocks` as int64 arrays, predecessors filled in, or a ValueError that says what is wrong."""
    tokens, anchors = check_tokens(tokens, config.vocab_size), np.asarray(anchors, dtype=np.int64)
    if len(features) != len(tokens):
        raise ValueError(f"each token needs its features, got {len(tokens)} tokens and {len(features)} features")
    if anchors.ndim != 1 or not anchors.size or anchors.min() < 0 or anchors.max() >= len(tokens):
        raise ValueError(f"anchors must be positions 0..{len(tokens) - 1} of the sequence, one or more, got {anchors}")
    if predecessors is None:
        places = anchors[:, None] + np.arange(config.block_size) - config.in_place
        return tokens, anchors, tokens[places.clip(anchors[:, None], len(tokens) - 1)]
    predecessors = np.asarray(predecessors, dtype=np.int64)
    if predecessors.shape != (len(anchors), config.block_size):
        raise ValueError(f"{len(anchors)} blocks need predecessors [A, {config.block_size}], got {predecessors.shape}")
    check_tokens(predecessors.ravel(), config.vocab_size)
    return tokens, anchors, predecessors


def check_history(config, slot, history):
    """What a slot reads of histories int [n, h], or a ValueError: the predecessor, int [n, 1].

    A recurrent head reads the predecessors of all rows up to the slot's, int [n, rows].  It runs from row 0 on in
    training, so it does even where that row predicts nothing: the anchor is then the predecessor of two rows.
    """
    if not 0 <= slot < config.proposals:
        raise ValueError(f"slot {slot} asked, a block has slots 0..{config.proposals - 1}")
    history, reach = np.asarray(history, dtype=np.int64), slot + 1 if config.order is None else 1
    if history.ndim != 2 or not len(history) or history.shape[1] < reach:
        raise ValueError(f"slot {slot} needs histories [n, h], n >= 1 and h >= {reach}, got {history.shape}")
    check_tokens(history.ravel(), config.vocab_size)
    seen = history[:, -reach:]
    return np.concatenate([seen[:, :1], seen], axis=1) if config.order is None and config.in_place else seen
