"""The target: a Qwen3 or Llama decoder in plain NumPy, from token ids to next-token logits.

One pre-norm transformer layer, repeated:

    x <- x + W_o attention(rope(norm(W_q n)), rope(norm(W_k n)), W_v n),   n = rms_norm(x)
    x <- x + W_down (silu(W_gate m) * W_up m),                              m = rms_norm(x)

(the per-head norms of q and k are Qwen3's; Llama has none).  Several query heads share one key/value head.
Keys and values depend only on a token's own past, so a session computes them once: the prefix's are shared by
every node of the tree of continuations, and a new node attends to the prefix, its ancestors and itself.

Twin: `fast/decoder.py`.  Tests: `tests/test_decoder.py` (against transformers and against itself uncached).
"""

import numpy as np

from models.checkpoint import Checkpoint, to_float
from models.config import DecoderConfig
from reference.devices import placement
from reference.paths import check_growth, check_tokens


class Decoder:
    """A causal language model with the target interface of `paths.walk`.

    Args: config; tensors, hub name -> array, as in `config.tensor_shapes()`; stop_ids, ids that end an answer.
    """

    def __init__(self, config, tensors, stop_ids=()):
        self.config, self.tensors, self.stop_ids = config, tensors, tuple(stop_ids)
        self.vocab_size = config.vocab_size
        self.embedding = tensors["model.embed_tokens.weight"]
        self.head = self.embedding if config.tied else tensors["lm_head.weight"]
        self.frequencies, self.rope_scale = config.rope.frequencies(config.head_dim)

    @classmethod
    def load(cls, folder, *, dtype="float32", device="cpu", stop_ids=None):
        """Read a hub-style folder (config.json and safetensors) into arrays of float32 or float64.

        `stop_ids` None takes the end-of-sequence ids of config.json.
        """
        _, dtype = placement(device, dtype)
        config = DecoderConfig.from_folder(folder)
        stored = Checkpoint(folder).read(config.tensor_shapes(), tied=config.tied)
        tensors = {name: to_float(raw, kind, np.dtype(dtype)) for name, kind, raw in stored}
        return cls(config, tensors, config.eos_ids if stop_ids is None else stop_ids)

    def open(self, prefix, taps=()):
        """Prefill a prefix and return the `Session` in which its continuations grow.

        `taps`: layers whose outputs the session keeps as `features` [S, n * H], see `check_taps`.
        """
        return Session(self, check_tokens(prefix, self.vocab_size), check_taps(taps, self.config.num_layers))

    def logits(self, tokens):
        """Next-token logits after every position of a sequence, without a cache: [S, V]."""
        tokens = check_tokens(tokens, self.vocab_size)
        causal = np.tri(len(tokens), dtype=bool)
        hidden, _ = self.forward(tokens, np.arange(len(tokens)), self.empty_cache(), causal)
        return hidden @ self.head.T

    def empty_cache(self):
        """No keys and values yet: per layer a pair of arrays [0, kv heads, head dim]."""
        nothing = np.empty((0, self.config.num_kv_heads, self.config.head_dim), dtype=self.embedding.dtype)
        return [(nothing, nothing)] * self.config.num_layers

    def forward(self, tokens, positions, cache, visible, outputs=None):
        """Run new tokens through every layer.

        Args: tokens int [n]; positions int [n]; cache, per layer the keys and values of s earlier tokens;
            visible bool [n, s + n], which earlier and new tokens each new one attends to; outputs, a dict
            that receives what leaves each layer that is a key of it, [n, H], -1 being the embeddings.
        Returns: (hidden states after the final norm [n, H], the cache with the new tokens appended).
        """
        x, grown = self.embedding[tokens], []
        outputs = {} if outputs is None else outputs
        if -1 in outputs:
            outputs[-1] = x
        angles = np.outer(positions, self.frequencies)
        cos, sin = (self.rope_scale * f(angles)[:, None].astype(x.dtype) for f in (np.cos, np.sin))
        for layer in range(self.config.num_layers):
            normed = self._norm(x, layer, "input_layernorm")
            q, k, v = (self._heads(normed, layer, part) for part in ("q", "k", "v"))
            keys = np.concatenate([cache[layer][0], rotate(k, cos, sin)])
            values = np.concatenate([cache[layer][1], v])
            mixed = attend(rotate(q, cos, sin), keys, values, visible)
            x = x + self._linear(mixed, layer, "self_attn.o_proj")
            x = x + self._mlp(self._norm(x, layer, "post_attention_layernorm"), layer)
            grown.append((keys, values))
            if layer in outputs:
                outputs[layer] = x
        return rms_norm(x, self.tensors["model.norm.weight"], self.config.rms_norm_eps), grown

    def _heads(self, x, layer, part):
        """Project to [n, heads, head dim]; Qwen3 normalises each head of q and k."""
        heads = self._linear(x, layer, f"self_attn.{part}_proj").reshape(len(x), -1, self.config.head_dim)
        if self.config.qk_norm and part != "v":
            heads = self._norm(heads, layer, f"self_attn.{part}_norm")
        return heads

    def _mlp(self, x, layer):
        gate, up = self._linear(x, layer, "mlp.gate_proj"), self._linear(x, layer, "mlp.up_proj")
        silu = gate * (1 + np.tanh(gate / 2)) / 2  # gate * sigmoid(gate), without overflow
        return self._linear(silu * up, layer, "mlp.down_proj")

    def _linear(self, x, layer, name):
        out = x @ self.tensors[f"model.layers.{layer}.{name}.weight"].T
        bias = self.tensors.get(f"model.layers.{layer}.{name}.bias")
        return out if bias is None else out + bias

    def _norm(self, x, layer, name):
        return rms_norm(x, self.tensors[f"model.layers.{layer}.{name}.weight"], self.config.rms_norm_eps)


class Session:
    """One prefix and the tree of continuations grown from it; node ids count up, -1 is the prefix.

    `features` [S, n * H]: the taps' outputs at every position of the prefix, side by side.

    While there is no tree the prefix itself may be extended by several tokens at a time and cropped again, as
    speculative decoding does; `features` and `root_logits` stay those of the prefix that was opened.
    """

    def __init__(self, decoder, prefix, taps=()):
        self.decoder, self.taps, self.prefix_length, self.cache = decoder, taps, 0, decoder.empty_cache()
        self.ancestors = np.zeros((0, 0), dtype=bool)  # [nodes, nodes], a node counts as its own ancestor
        hidden, self.features = self._read(prefix)
        self.root_logits = hidden[-1] @ decoder.head.T

    def extend(self, tokens):
        """Read n more tokens of the prefix: (logits after each [n, V], features [n, taps * H])."""
        self._check_no_tree()
        hidden, features = self._read(check_tokens(tokens, self.decoder.vocab_size))
        return hidden @ self.decoder.head.T, features

    def crop(self, length):
        """Forget all but the first `length` tokens of the prefix."""
        self._check_no_tree()
        if not 0 < length <= self.prefix_length:
            raise ValueError(f"a prefix of {self.prefix_length} tokens cannot be cropped to {length}")
        self.cache = [(keys[:length], values[:length]) for keys, values in self.cache]
        self.prefix_length = length

    def grow(self, parents, tokens):
        """Add one node per (parent, token) pair: logits [n, V]."""
        parents, tokens = check_growth(parents, tokens, len(self.ancestors), self.decoder.vocab_size)
        old, new = len(self.ancestors), len(tokens)
        ancestors = np.zeros((old + new, old + new), dtype=bool)
        ancestors[:old, :old] = self.ancestors
        ancestors[old:, :old] = np.concatenate([self.ancestors, np.zeros((1, old), dtype=bool)])[parents]  # -1: none
        np.fill_diagonal(ancestors, True)
        self.ancestors = ancestors
        visible = np.concatenate([np.ones((new, self.prefix_length), dtype=bool), ancestors[old:]], axis=1)
        positions = self.prefix_length - 1 + ancestors[old:].sum(axis=1)
        hidden, self.cache = self.decoder.forward(tokens, positions, self.cache, visible)
        return hidden @ self.decoder.head.T

    def _read(self, tokens):
        """Append tokens to the prefix: final hidden states [n, H], features [n, taps * H]."""
        old, new, outputs = self.prefix_length, len(tokens), dict.fromkeys(self.taps)
        visible = np.tri(new, old + new, k=old, dtype=bool)
        hidden, self.cache = self.decoder.forward(tokens, old + np.arange(new), self.cache, visible, outputs)
        self.prefix_length += new
        return hidden, np.concatenate([hidden[:, :0], *(outputs[tap] for tap in self.taps)], axis=1)

    def _check_no_tree(self):
        if len(self.ancestors):
            raise ValueError("a prefix from which a tree has grown cannot change; open another session")


def check_taps(taps, num_layers):
    """Ids of tapped layers as a tuple, or a ValueError that names one which cannot be tapped.

    Layer l >= 0 stands for the residual stream it puts out, before any norm; -1 for the token embeddings.  The last
    layer is refused: there published conventions differ on whether its output is taken before the final norm.
    """
    taps = tuple(map(int, taps))
    for tap in taps:
        if not -1 <= tap < num_layers - 1:
            last = " (the last one, whose output is defined both before and after the final norm)"
            raise ValueError(
                f"layer {tap}{last if tap == num_layers - 1 else ''} cannot be tapped: taps of {num_layers} layers are "
                f"-1, the embeddings, to {num_layers - 2}"
            )
    return taps


def rms_norm(x, weight, eps):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis."""
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps) * weight


def rotate(x, cos, sin):
    """Rotary position embedding on the two halves of each head: x [n, heads, d]; cos, sin [n, 1, d / 2]."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attend(q, keys, values, visible):
    """softmax(q k / sqrt(d)) v over the visible tokens, each key/value head serving a group of query heads.

    Args: q [n, heads, d]; keys, values [s, kv heads, d]; visible bool [n, s].  Returns: [n, heads * d].
    """
    n, heads, d = q.shape
    kv_heads = keys.shape[1]
    q = q.reshape(n, kv_heads, heads // kv_heads, d).transpose(1, 2, 0, 3)  # [kv heads, group, n, d]
    scores = q @ keys.transpose(1, 2, 0)[:, None] / np.sqrt(d).astype(q.dtype)
    scores = np.where(visible, scores, -np.inf)
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    mixed = scores / scores.sum(axis=-1, keepdims=True) @ values.transpose(1, 0, 2)[:, None]
    return mixed.transpose(2, 0, 1, 3).reshape(n, heads * d)
