"""Block drafters in PyTorch, CPU and CUDA: one block for a measurement, many anchors of a sequence for training.

Modules carry the published tensor names, so loading is one loop.  A `Context` keeps every layer's keys and values of
the committed prefix; `propose` runs one block over it, `forward_blocks` runs many over a context that they share, with
gradients.  A `Proposal` reads histories out in groups of one size, so that the bits of a row do not depend on the
others it is asked with: the row that is verified is the row that was sampled from.  Products narrower than 16 on CPUs
are the exception: there the last bits of a row can depend on its place in the group.

Twin: `reference/drafters.py`, where drafters are explained.  Tests: `tests/test_drafter_twins.py`.
"""

from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fast.decoder import Linear, RMSNorm, read_out, to_tensor
from fast.devices import placement
from fast.draft_heads import CandidateSelector, ConfidenceHead, Past, largest, markov_head, only
from fast.draft_layers import attend_blocks, layer_class, unseen_context, unseen_rows
from fast.laws import SamplingLaw, draw, warp
from models.drafter_checkpoint import check_target, read_drafter
from models.drafter_config import DrafterConfig
from reference.drafters import TrainingBlocks, check_blocks, check_history
from reference.paths import check_tokens

__all__ = ["Context", "Drafter", "Proposal", "TrainingBlocks"]

GROUP = 64  # histories read out together: rows of equal products round alike, but for widths below 16 on CPUs
HELD = 128  # vocabulary rows that `sample` holds at a time


class Drafter(nn.Module):
    """A block drafter: see `reference.drafters.Drafter`.

    Args: config; tensors, published name -> tensor, as in `config.tensor_shapes()`; embedding [V, H], the target's;
        head [Vd, H], its output table on the draft vocabulary; d2t int [Vd], target id minus draft id, where the
        draft vocabulary is smaller than the target's.
    """

    def __init__(self, config, tensors, embedding, head, d2t=None):
        super().__init__()
        self.config, self.vocab_size, self.gamma = config, len(embedding), config.proposals
        self.order, self.taps, self.first = config.order, config.taps, int(config.in_place)  # first: the row of slot 0
        hidden, eps = config.hidden_size, config.rms_norm_eps
        with torch.device("meta"):
            self.fc = Linear(len(config.taps) * hidden, hidden, bias=False)
            self.hidden_norm, self.norm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
            self.layers = nn.ModuleList(layer_class(config)(config) for _ in range(config.num_layers))
            if config.slot_embeddings:
                self.slot_embed = nn.Parameter(torch.empty(config.block_size - 1, hidden))
            self.markov_head = markov_head(config, embedding.detach())
            self.candidate_selector = CandidateSelector(config) if config.family == "dflash2" else None
            self.confidence_head = ConfidenceHead(config) if config.confidence else None
        self.load_state_dict(tensors, strict=True, assign=True)
        frequencies, self.rope_scale = config.frequencies()
        tables = {
            "embedding": embedding.detach(),
            "head": head.detach(),
            "frequencies": torch.from_numpy(np.concatenate([frequencies] * 2)),
            "ids": None if d2t is None else torch.as_tensor(d2t) + torch.arange(len(d2t)),  # of the draft vocabulary
        }
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)
        self.to(embedding.device)

    @classmethod
    def load(cls, folder, target, *, dtype="float32", device="cpu", in_place=None):
        """Read a drafter's folder (config.json and safetensors) for the target whose tables it borrows.

        Args: target, the `Decoder` it drafts for; dtype, device as for `Decoder.load`; in_place, the slot convention
            where config.json leaves it open.
        Raises: CheckpointError naming what does not fit, the target included.
        """
        device, dtype = placement(device, dtype)
        config, dtype = DrafterConfig.from_folder(folder, in_place=in_place), getattr(torch, dtype)
        stored = read_drafter(folder, config)
        check_target(config, target.config, stored, target.embedding, target.head)
        tensors = {name: to_tensor(raw, kind, dtype, device) for name, kind, raw in stored.tensors()}
        embedding, head = (table.detach().to(device, dtype) for table in (target.embedding, target.head))
        if stored.d2t is not None:
            head = head[torch.from_numpy(stored.d2t).to(device) + torch.arange(len(stored.d2t), device=device)]
        return cls(config, tensors, embedding, head, stored.d2t)

    @property
    def dtype(self):
        return self.embedding.dtype

    @property
    def device(self):
        return self.embedding.device

    @property
    def correction(self):
        """The head that reads predecessors, or None (DFlash)."""
        return self.markov_head if self.candidate_selector is None else self.candidate_selector

    @property
    def lattice(self):
        """Candidates per slot unless `propose` is told otherwise, 0 = all tokens."""
        return self.config.lattice if self.config.family == "dflash2" else 0

    def context(self):
        """An empty `Context`."""
        return Context(self)

    @torch.no_grad()
    def propose(self, context, token, law=SamplingLaw(), lattice=None):
        """Draft the block whose anchor is `token`, at position `context.length`: a `Proposal`.

        Args: context, the features of exactly the positions before the anchor; law, which shapes the proposal;
            lattice, how many candidates a slot chooses from, those of the largest base logits, 0 = all tokens
            (None: the config's number for DFlash2, 0 for every other family).
        """
        lattice = self.lattice if lattice is None else lattice
        if lattice < 0:
            raise ValueError(f"lattice must be 0 (all tokens) or a number of candidates, got {lattice}")
        tokens = torch.from_numpy(check_tokens([token], self.vocab_size)).to(self.device)
        anchors, memory = torch.tensor([context.length], device=self.device), context.memory()
        (rows,) = self.hidden(memory, anchors, tokens)
        return Proposal(self, rows, self.past(memory, anchors, tokens), int(token), law, lattice)

    def forward_blocks(self, features, tokens, anchors, predecessors=None):
        """The blocks of many anchors of one sequence in one forward, as in training: `TrainingBlocks`, differentiable.

        The block of an anchor at position p sees the features before p and its own rows, never another block.

        Args: features [S, n * H]; tokens int [S]; anchors int [A], positions, A >= 1; predecessors int [A, B], the
            token before the one that each row predicts (None: the sequence's own; past its end, its last).
        """
        tokens, anchors, predecessors = check_blocks(self.config, features, tokens, anchors, predecessors)
        memory = self.memorise(features[: anchors.max()], 0)
        tokens, anchors, predecessors = (
            torch.from_numpy(ids).to(self.device) for ids in (tokens[anchors], anchors, predecessors)
        )
        hidden = self.hidden(memory, anchors, tokens)
        base = self.scores(hidden)
        logits, candidates = base, largest(base, self.lattice) if self.lattice else None
        if self.correction is not None:
            latent = self.correction(hidden, predecessors, self.past(memory, anchors, tokens))
            logits = self.correct(base, latent, candidates)
        trust = self.confidence(hidden, predecessors)
        return TrainingBlocks(hidden, self.spread(base), self.spread(logits), trust)

    def fuse(self, features):
        """Context features c = norm(W_fc f) of tapped features: [s, n * H] -> [s, H]."""
        features, width = torch.as_tensor(features, dtype=self.dtype, device=self.device), self.fc.in_features
        if features.ndim != 2 or features.shape[1] != width:
            raise ValueError(f"features of the taps {self.taps} are [s, {width}], got {tuple(features.shape)}")
        return self.hidden_norm(self.fc(features))

    def memorise(self, features, start):
        """Keys and values of the positions from `start` on, of each layer and of a prefix-attention head.

        Args: features [s, n * H].  Returns: a list of pairs, keys and values [1, kv heads, s, d].
        """
        pairs = self.keys_values(features, start + torch.arange(len(features), device=self.device))
        return [tuple(t.transpose(0, 1)[None] for t in pair) for pair in pairs]

    def keys_values(self, features, positions):
        """What `memorise` gives, of features [s, n * H] at any positions int [s]: pairs [s, kv heads, d]."""
        fused = self.fuse(features)
        turn = self._turn(positions)
        pairs = [layer.self_attn.keys_values(fused, *turn) for layer in self.layers]
        if self.config.family == "attention":
            pairs.append(self.markov_head.memorise(fused))
        return pairs

    def hidden(self, memory, anchors, tokens):
        """Final states [A, B, H] of the blocks at positions `anchors` [A] whose anchor tokens are `tokens` [A].

        Args: memory, as from `memorise`; its keys and values may be those of C contexts, A / C blocks in a row each.
        """
        c = self.config
        block = tokens.new_full((len(tokens), c.block_size), c.mask_id)
        block[:, 0] = tokens
        x = F.embedding(block, self.embedding)
        if c.embedding_scale != 1:
            x = x * torch.tensor(c.embedding_scale, dtype=self.dtype)  # rounded to the dtype first
        if c.slot_embeddings:
            x = x + F.pad(self.slot_embed, (0, 0, 1, 0))
        turn = self._turn(anchors[:, None] + torch.arange(c.block_size, device=self.device))
        for layer, (keys, values), causal, window in zip(self.layers, memory, c.causal, c.windows, strict=False):
            unseen = unseen_context(anchors, c.block_size, keys.shape[2], window, c.window_rule)
            own_unseen = unseen_rows(c.block_size, causal, window, c.window_rule, self.device)
            attend = partial(attend_blocks, keys=keys, values=values, unseen=unseen, own_unseen=own_unseen)
            x = layer(x, *turn, attend)
        return self.norm(x)

    def scores(self, hidden):
        """Base logits over the draft vocabulary, float32 or float64: [..., H] -> [..., Vd]."""
        scores = read_out(hidden, self.head) * self.config.output_multiplier
        cap = self.config.softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def correct(self, base, latent, candidates=None):
        """Base logits [..., Vd] plus what a head's latents [..., r] add, -inf outside the candidates [..., K]."""
        readout = self.correction.readout
        if candidates is None:
            return base + read_out(latent, readout)
        added = (F.embedding(candidates, readout) @ latent[..., None])[..., 0]
        return only(candidates, base.gather(-1, candidates) + added, base)

    def spread(self, logits):
        """Logits [..., Vd] of the draft vocabulary over the target's, -inf where it has no token: [..., V]."""
        if self.ids is None:
            return logits
        return logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf).index_copy(-1, self.ids, logits)

    def confidence(self, hidden, predecessors):
        """Confidence logits [...] of slots with states [..., H] and predecessors [...], None without that head."""
        return self.confidence_head and self.confidence_head(hidden, predecessors, self.markov_head)

    def slot_logits(self, base, hidden, seen, past, candidates=None):
        """Logits [n, Vd] of one slot of n blocks, -inf outside the candidates [n, K].

        Args: base [n, Vd]; hidden [n, T, H], states of the rows up to the slot's whose predecessors are seen [n, T].
        """
        if self.correction is None:
            return base if candidates is None else only(candidates, base.gather(-1, candidates), base)
        return self.correct(base, self.correction(hidden, seen, past)[:, -1], candidates)

    def past(self, memory, anchors, tokens):
        """What a prefix-attention head reads, None for the other families."""
        return Past(*memory[-1], anchors, tokens) if self.config.family == "attention" else None

    def _turn(self, positions):
        angles = positions[..., None].double() * self.frequencies
        return [(self.rope_scale * f(angles))[..., None, :].to(self.dtype) for f in (torch.cos, torch.sin)]


class Context:
    """The committed positions before a block, as its layers see them; `length` of them.

    Keys and values lie in buffers that double when they are full.
    """

    @torch.no_grad()
    def __init__(self, drafter):
        self.drafter, self.length, self.capacity = drafter, 0, 0
        self.buffers = drafter.memorise(torch.empty(0, drafter.fc.in_features), 0)

    @torch.no_grad()
    def append(self, features):
        """Add the next s positions: features [s, n * H], the tapped hidden states of the target."""
        new = self.drafter.memorise(features, self.length)
        end = self.length + len(features)
        if end > self.capacity:
            self.capacity = max(end, 2 * self.capacity)
            self.buffers = [tuple(grow(t, self.capacity) for t in pair) for pair in self.buffers]
        for buffers, pair in zip(self.buffers, new, strict=True):
            for buffer, t in zip(buffers, pair, strict=True):
                buffer[:, :, self.length : end] = t
        self.length = end

    def memory(self):
        """Keys and values of the positions there are, as `Drafter.memorise` gives them."""
        return [tuple(t[:, :, : self.length] for t in pair) for pair in self.buffers]


class Contexts:
    """Committed positions of many sequences, a row each with room for `capacity`; how many count is the caller's.

    Keys and values of every layer, and of a prefix-attention head, lie in buffers [rows, kv heads, capacity, d].
    """

    @torch.no_grad()
    def __init__(self, drafter, rows, capacity):
        self.drafter = drafter
        pairs = drafter.memorise(torch.empty(0, drafter.fc.in_features), 0)
        self.buffers = [tuple(t.new_zeros(rows, t.shape[1], capacity, t.shape[3]) for t in pair) for pair in pairs]

    @torch.no_grad()
    def write(self, features, starts, first=0):
        """Put s positions into each of n rows from `first` on: features [n, s, taps * H], at starts int [n] and after.

        They need not all count: what lies at or behind an anchor is not seen.
        """
        n, new = features.shape[:2]
        rows = first + torch.arange(n, device=starts.device)[:, None]
        positions = starts[:, None] + torch.arange(new, device=starts.device)
        pairs = self.drafter.keys_values(features.flatten(0, 1), positions.flatten())
        for buffers, pair in zip(self.buffers, pairs, strict=True):
            for buffer, t in zip(buffers, pair, strict=True):
                buffer[rows, :, positions] = t.unflatten(0, (n, new))

    def memory(self, rows, span):
        """Keys and values of the first rows and positions, as `Drafter.hidden` reads them."""
        return [tuple(t[:rows, :, :span] for t in pair) for pair in self.buffers]

    def move(self, source, row, length):
        """Copy the first `length` positions of one row over another's."""
        for pair in self.buffers:
            for buffer in pair:
                buffer[row, :, :length] = buffer[source, :, :length]


class Proposal:
    """One drafted block: see `reference.drafters.Proposal`, also for what a history is.

    Attributes: gamma; order, how many drafted tokens a slot depends on, 0, 1, or None = all; law; hidden [gamma, H],
    the slots' final states; base_logits [gamma, V], their logits before the head.
    """

    def __init__(self, drafter, rows, past, token, law, lattice):
        self.gamma, self.order, self.law, self.hidden = drafter.gamma, drafter.order, law, rows[drafter.first :]
        self._drafter, self._rows, self._past, self._token = drafter, rows, past, token
        self._base = drafter.scores(self.hidden)
        self._candidates = largest(self._base, lattice) if lattice else None

    @property
    def base_logits(self):
        return self._drafter.spread(self._base)

    @torch.no_grad()
    def logits(self, slot, history):
        """Logits at temperature 1 given histories int [n, h]: [n, V], -inf for what is never proposed."""
        seen = check_history(self._drafter.config, slot, history)
        if self.order == 0:
            return self._drafter.spread(self._slot_logits(slot, seen[:1])).expand(len(seen), -1)
        rows = self._base.new_empty(len(seen), self._drafter.vocab_size)
        for start in range(0, len(seen), GROUP):
            some = seen[start : start + GROUP]
            padded = np.concatenate([some, np.repeat(some[:1], GROUP - len(some), axis=0)])
            rows[start : start + len(some)] = self._drafter.spread(self._slot_logits(slot, padded)[: len(some)])
        return rows

    @torch.no_grad()
    def probs(self, slot, history):
        """The proposal q under the law, [n, V]: what `sample` draws from and verification divides by."""
        if self.order == 0:
            return warp(self.logits(slot, history[:1]), self.law).expand(len(history), -1)
        return warp(self.logits(slot, history), self.law)

    @torch.no_grad()
    def confidence(self, slot, history):
        """Logits [n] of the chance that this slot is accepted if those before it were, None without that head."""
        seen = self._on_device(check_history(self._drafter.config, slot, history)[:, -1])
        return self._drafter.confidence(self.hidden[slot].expand(len(seen), -1), seen)

    def sample(self, uniforms):
        """Draw n independent chains of h <= gamma tokens, int64 [n, h]: token k by inverse CDF with uniforms[:, k].

        Uniforms and chains are NumPy.  Chains whose slot sees the same tokens share one row, and some hundred rows are
        held at a time.
        """
        uniforms = np.asarray(uniforms, dtype=np.float64)
        if uniforms.ndim != 2 or not uniforms.size or uniforms.shape[1] > self.gamma:
            raise ValueError(f"uniforms must be [n, h] with n >= 1 and h in 1..{self.gamma}, got {uniforms.shape}")
        chains = np.full((len(uniforms), 1), self._token)
        for slot in range(uniforms.shape[1]):
            seen = {0: chains[:, :1], 1: chains[:, -1:], None: chains}[self.order]
            histories, which = np.unique(seen, axis=0, return_inverse=True)
            which, tokens = which.ravel(), np.empty(len(chains), dtype=np.int64)
            for start in range(0, len(histories), HELD):
                here = (which >= start) & (which < start + HELD)
                rows = self.probs(slot, histories[start : start + HELD])
                tokens[here] = draw(rows, uniforms[here, slot], which[here] - start)
            chains = np.concatenate([chains, tokens[:, None]], axis=1)
        return chains[:, 1:]

    def _slot_logits(self, slot, seen):
        """Logits [n, Vd] over the draft vocabulary given what the slot reads of n histories."""
        candidates = None if self._candidates is None else self._candidates[slot].expand(len(seen), -1)
        end = self._drafter.first + slot + 1
        hidden = self._rows[end - seen.shape[1] : end].expand(len(seen), -1, -1)
        past = self._past and self._past.repeat(len(seen))
        base = self._base[slot].expand(len(seen), -1)
        return self._drafter.slot_logits(base, hidden, self._on_device(seen), past, candidates)

    def _on_device(self, ids):
        return torch.from_numpy(np.ascontiguousarray(ids)).to(self._drafter.device)


class Blocks:
    """One block for each of n sequences, drafted side by side: what `Proposal` is for one.

    Args: rows [n, B, H], final states; base [n, gamma, Vd]; candidates [n, gamma, K] or None; past, as `Drafter.past`.
    """

    def __init__(self, drafter, rows, base, candidates, past):
        self.drafter, self.rows, self.base, self.candidates, self.past = drafter, rows, base, candidates, past

    def logits(self, slot, chains):
        """Logits [n, V] at temperature 1 of a slot after chains int [n, slot + 1], anchors first."""
        end = self.drafter.first + slot + 1
        seen = chains[:, -1:]
        if self.drafter.order is None:  # the recurrent head runs from row 0 on, see `check_history`
            seen = torch.cat([chains[:, : self.drafter.first], chains], dim=1)
        candidates = None if self.candidates is None else self.candidates[:, slot]
        hidden = self.rows[:, end - seen.shape[1] : end]
        logits = self.drafter.slot_logits(self.base[:, slot], hidden, seen, self.past, candidates)
        return self.drafter.spread(logits)

    def confidence(self, slot, chains):
        """Confidence logits [n] of the slot, None without that head."""
        return self.drafter.confidence(self.rows[:, self.drafter.first + slot], chains[:, -1])


def grow(buffer, capacity):
    """A buffer [1, heads, S, d] with room for `capacity` positions."""
    return F.pad(buffer, (0, 0, 0, capacity - buffer.shape[2]))
