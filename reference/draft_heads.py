"""The heads of block drafters: how the tokens drafted so far correct the logits of the next slot.

The backbone sees none of them, so its logits u_k stay the same whatever was drafted.  A head adds a low-rank term in
which the predecessor a of slot k appears, and every head published so far has one form:

    l_k = u_k + R z,        R [V, r] a table, the `readout`;  z [r] the `latent` of (h_k, a)

    vanilla      z = W1[a]                                     one bigram bias for every slot       (DSpark)
    gated        z = sigmoid(W_g [h_k; W1[a]] + b) * W1[a]     the slot decides how much of it      (DSpark)
    recurrent    z = tanh(o), a gated state carried along the block: all predecessors count         (DSpark)
    selector     z = P[a] * (W_h h_k)                          bilinear in predecessor and candidate (DFlash2)
    attention    z = one small layer whose query, made of a and h_k, reads the committed prefix     (prefix attention)

`latent` takes consecutive slots of one block at a time, hidden [K, H] and predecessors [K]; only the recurrent head
needs all of them from the first on.  Where a drafter proposes from a few candidates, the largest u_k, their scores
are these same l_k.

Twin: `fast/draft_heads.py`.  Tests: `tests/test_drafters.py` (arrays of the authors' own code).
"""

import numpy as np

from reference.decoder import attend, rms_norm

HEAD_EPS = 1e-6  # of the norms of the prefix-attention head, whatever the backbone's is


def build_head(config, tensors, embedding):
    """The head that a drafter's config asks for, or None (DFlash).

    Args: config, a `DrafterConfig`; tensors, published name -> array; embedding [V, H], the target's.
    """
    heads = {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead, "attention": AttentionHead}
    if config.family == "dflash2":
        return CandidateSelector(tensors)
    return heads[config.markov_type](config, tensors, embedding) if config.markov_rank else None


class MarkovHead:
    """z = W1[a]: the readout adds one bias per pair of predecessor and token, the same at every slot."""

    def __init__(self, config, tensors, embedding=None):
        self.tensors = tensors
        self.table, self.readout = tensors["markov_head.markov_w1.weight"], tensors["markov_head.markov_w2.weight"]

    def embed(self, previous):
        """What the confidence head knows of the predecessors [K]: their rows of W1, [K, r]."""
        return self.table[previous]

    def latent(self, hidden, previous, past=None):
        """Latents [K, r] of consecutive slots with states [K, H] and predecessors [K]."""
        return self.embed(previous)


class GatedHead(MarkovHead):
    """z = sigmoid(W_g [h; W1[a]] + b) * W1[a]."""

    def latent(self, hidden, previous, past=None):
        known = self.embed(previous)
        joint = np.concatenate([hidden, known], axis=-1)
        return known * sigmoid(affine(self.tensors, "markov_head.gate_proj", joint))


class RecurrentHead(MarkovHead):
    """z = tanh(o),  s <- g s + (1 - g) tanh(c),  [g', c, o] = W [s; W1[a]; h] + b,  g = sigmoid(g');  s starts at 0.

    The state s carries every earlier predecessor of the block, and o is formed before it is renewed.
    """

    def latent(self, hidden, previous, past=None):
        known = self.embed(previous)
        latents, state = np.empty_like(known), np.zeros_like(known[0])
        for k, (h, e) in enumerate(zip(hidden, known, strict=True)):
            joint = affine(self.tensors, "markov_head.joint_proj", np.concatenate([state, e, h]))
            gate, candidate, out = np.split(joint, 3)
            latents[k] = np.tanh(out)
            state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        return latents


class CandidateSelector:
    """z = P[a] * (W_h h), read out by the successor codebook."""

    def __init__(self, tensors):
        self.predecessors = tensors["candidate_selector.predecessor_codebook"]
        self.projection = tensors["candidate_selector.hidden_projection.weight"]
        self.readout = tensors["candidate_selector.successor_codebook"]

    def latent(self, hidden, previous, past=None):
        """Latents [K, r] of consecutive slots with states [K, H] and predecessors [K]."""
        return self.predecessors[previous] * (hidden @ self.projection.T)


class AttentionHead:
    """One layer of cross-attention from (predecessor, slot) into the committed prefix.

        x = W_in [norm(E(a)); norm(h)]
        n = norm(x);  o = attention(norm(W_q n), keys, values);  x <- x + W_o o
        m = norm(x);  x <- x + W_down (silu(W_gate m) * W_up m)
        z = norm(x)

    keys = norm(W_k norm(c_t)), values = W_v norm(c_t) of the context features c_t before the anchor: no positions,
    and no slot sees another.  Two options: an anchor column, one more key and value made of norm(E(anchor)) + type;
    and a gate sigmoid(W_g [n; o] + b), one number per head, that scales its part of o.
    """

    def __init__(self, config, tensors, embedding):
        self.tensors, self.embedding, self.readout = tensors, embedding, tensors["markov_head.markov_w2.weight"]
        self.heads, self.head_dim = config.head_heads, config.head_dim_attention
        self.gated, self.anchored = config.head_gate != "none", config.head_anchor

    def memorise(self, fused):
        """Keys and values [s, heads, d] of context features [s, H]."""
        return self._keys_values(self._norm(fused, "ctx_norm"))

    def past(self, memory, token):
        """What the slots of one block attend to: the memory of the prefix and, where it is on, the anchor column."""
        if not self.anchored:
            return memory
        anchor = self._norm(self.embedding[[token]], "anchor_norm") + self.tensors["markov_head.anchor_type"]
        return tuple(map(np.concatenate, zip(memory, self._keys_values(anchor), strict=True)))

    def embed(self, previous):
        """What the confidence head knows of the predecessors [K]: their part of x, [K, r]."""
        into = self.tensors["markov_head.in_proj.weight"][:, : self.embedding.shape[1]]
        return self._norm(self.embedding[previous], "embed_norm") @ into.T

    def latent(self, hidden, previous, past):
        """Latents [K, r] of consecutive slots with states [K, H] and predecessors [K], given `past`."""
        joint = [self._norm(self.embedding[previous], "embed_norm"), self._norm(hidden, "state_norm")]
        x = self._linear(np.concatenate(joint, axis=-1), "in_proj")
        normed, (keys, values) = self._norm(x, "attn_norm"), past
        if len(keys):  # an empty prefix adds nothing
            queries = self._norm(self._split(self._linear(normed, "q_proj")), "q_norm")
            mixed = attend(queries, keys, values, np.ones((len(x), len(keys)), dtype=bool))
            if self.gated:
                joint = np.concatenate([normed, mixed], axis=-1)
                gate = sigmoid(affine(self.tensors, "markov_head.gate_proj", joint))
                mixed = (self._split(mixed) * gate[:, :, None]).reshape(mixed.shape)
            x = x + self._linear(mixed, "o_proj")
        normed = self._norm(x, "mlp_norm")
        x = x + self._linear(silu(self._linear(normed, "gate_p")) * self._linear(normed, "up"), "down")
        return self._norm(x, "out_norm")

    def _keys_values(self, normed):
        keys = self._norm(self._split(self._linear(normed, "k_proj")), "k_norm")
        return keys, self._split(self._linear(normed, "v_proj"))

    def _split(self, x):
        return x.reshape(len(x), self.heads, self.head_dim)

    def _linear(self, x, name):
        return x @ self.tensors[f"markov_head.{name}.weight"].T

    def _norm(self, x, name):
        return rms_norm(x, self.tensors[f"markov_head.{name}.weight"], HEAD_EPS)


def confidence(tensors, hidden, known=None):
    """Logits [K] of the chance that each slot is accepted if those before it were: w [h; e] + b (DSpark).

    Args: hidden [K, H]; known [K, r], the head's `embed` of the predecessors, None where the head reads h alone.
    A slot's confidence looks at the token before it, never at its own, so a block may be cut where it is low.
    """
    joint = hidden if known is None else np.concatenate([hidden, known], axis=-1)
    return affine(tensors, "confidence_head.proj", joint)[..., 0]


def affine(tensors, name, x):
    """W x + b of the linear map that is stored under `name`."""
    return x @ tensors[f"{name}.weight"].T + tensors[f"{name}.bias"]


def sigmoid(x):
    """1 / (1 + exp(-x)), without overflow."""
    return (1 + np.tanh(x / 2)) / 2


def silu(x):
    """x sigmoid(x)."""
    return x * sigmoid(x)
