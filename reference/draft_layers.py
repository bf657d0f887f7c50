"""The layers of a block drafter: from the target's hidden states and one token to a state for every row of the block.

The target's residual stream at a few tapped layers, concatenated to f_t, becomes one feature per committed position,

    c_t = norm(W_fc f_t),

and the block, the anchor's embedding and B - 1 masks at positions p..p + B - 1, runs through a few transformer layers
whose attention sees features and rows at once.  With n = norm(x) of the block's rows x,

    q = rope(norm(W_q n)),    k = rope(norm(W_k [c; n])),    v = W_v [c; n]         (c itself is not normed again)
    x <- x + W_o attention(q, k, v),    x <- x + mlp(norm(x)).

A feature attends to nothing, so the keys and values of the context are computed once and only ever grow.  Layers may
wrap both sublayers in short convolutions over the rows of the block; Gemma-4's norm and scale differently.

Twin: `fast/draft_layers.py`.  Tests: `tests/test_drafters.py`.
"""

from functools import partial

import numpy as np

from reference.decoder import attend, rms_norm, rotate
from reference.draft_heads import silu


class Backbone:
    """Feature projection, layers and final norm, for A blocks side by side.  Args as for `Drafter`."""

    def __init__(self, config, tensors, embedding):
        self.config, self.tensors, self.embedding = config, tensors, embedding
        self.gemma = config.architecture == "gemma4"
        self.frequencies, self.rope_scale = config.frequencies()

    def fuse(self, features):
        """Context features c [s, H] of tapped hidden states [s, n * H]."""
        return self._norm(features @ self.tensors["fc.weight"].T, "hidden_norm")

    def hidden(self, cache, anchors, tokens):
        """States [A, B, H] after the final norm of the blocks at positions `anchors` with anchor tokens `tokens`.

        `cache`: per layer the keys and values of context features 0..S-1, see `keys_values`; the block at position p
        reads the first p of them.
        """
        *_, x = self.layer_outputs(cache, anchors, tokens)
        return self._norm(x, "norm")

    def layer_outputs(self, cache, anchors, tokens):
        """The same blocks' residual stream [A, B, H] after each layer, one after another."""
        c = self.config
        block = np.full((len(anchors), c.block_size), c.mask_id)
        block[:, 0] = tokens
        x = c.embedding_scale * self.embedding[block]
        if c.slot_embeddings:
            x[:, 1:] += self.tensors["slot_embed"]
        for layer in range(c.num_layers):
            attention, mlp = partial(self._attention, layer, cache[layer], anchors), partial(self._mlp, layer)
            x = (self._gemma_layer if self.gemma else self._layer)(f"layers.{layer}", x, attention, mlp)
            yield x

    def _layer(self, layer, x, attention, mlp):
        x = x + self._convolved(layer, "attn", self._norm(x, f"{layer}.input_layernorm"), attention)
        return x + self._convolved(layer, "mlp", self._norm(x, f"{layer}.post_attention_layernorm"), mlp)

    def _gemma_layer(self, layer, x, attention, mlp):
        """x <- x + norm(attention(norm(x))),  x <- x + norm(mlp(norm(x))),  x <- scalar x."""
        y = attention(self._norm(x, f"{layer}.input_layernorm"))
        x = x + self._norm(y, f"{layer}.post_attention_layernorm")
        y = mlp(self._norm(x, f"{layer}.pre_feedforward_layernorm"))
        x = x + self._norm(y, f"{layer}.post_feedforward_layernorm")
        return x * self.tensors[f"{layer}.layer_scalar"]

    def keys_values(self, layer, x, positions):
        """A layer's keys and values, [n, kv heads, d] each, of context features or normed rows x [n, H].

        Gemma-4 norms the values too, and may take them from the keys' projection.
        """
        k = self._heads(x, layer, "k")
        v = k if self.config.shared_values else self._heads(x, layer, "v")
        if self.gemma:
            v = rms_norm(v, 1, self.config.rms_norm_eps)
        return rotate(self._norm(k, f"layers.{layer}.self_attn.k_norm"), *self._turn(positions)), v

    def visible(self, layer, anchors, length):
        """What each row of A blocks attends to: bool [A * B, length + A * B], the context and then all rows.

        A row at position i of the block at p sees the context t < p and its own block, but no later row if the layer
        is causal.  A window w leaves out the context t <= i - w, or t < p - w by the rule "anchor"; by "query" it
        also leaves out rows at a distance of w or more.
        """
        c, window = self.config, self.config.windows[layer]
        block = np.repeat(np.arange(len(anchors)), c.block_size)
        anchor, position = np.repeat(anchors, c.block_size)[:, None], self._positions(anchors)[:, None]
        past = np.arange(length)
        context, rows = past < anchor, block[:, None] == block
        if c.causal[layer]:
            rows &= position >= position.T
        if window is not None:
            context &= past >= anchor - window if c.window_rule == "anchor" else past > position - window
            if c.window_rule == "query":
                rows &= abs(position - position.T) < window
        return np.concatenate([context, rows], axis=1)

    def _attention(self, layer, cache, anchors, x):
        """Attention of the normed rows x [A, B, H] to context and blocks; Gemma-4 does not divide by sqrt(d)."""
        rows, positions = x.reshape(-1, x.shape[-1]), self._positions(anchors)
        q = self._norm(self._heads(rows, layer, "q"), f"layers.{layer}.self_attn.q_norm")
        q = rotate(q, *self._turn(positions)) * (self.config.head_dim**0.5 if self.gemma else 1)
        keys, values = extend(cache, self.keys_values(layer, rows, positions))
        mixed = attend(q, keys, values, self.visible(layer, anchors, len(cache[0])))
        return self._linear(mixed, layer, "self_attn.o_proj").reshape(x.shape)

    def _mlp(self, layer, x):
        """W_down (silu(W_gate x) * W_up x); Gemma-4 has gelu in place of silu."""
        gate, up = self._linear(x, layer, "mlp.gate_proj"), self._linear(x, layer, "mlp.up_proj")
        return self._linear((gelu(gate) if self.gemma else silu(gate)) * up, layer, "mlp.down_proj")

    def _convolved(self, layer, part, x, sublayer):
        """A sublayer between its short convolutions, if there are any, applied to its normed input x [A, B, H].

        The second one's coefficients come from what it is applied to; in DFlash2 from x, like the first one's.
        """
        if not self.config.short_conv:
            return sublayer(x)
        if self.config.family == "dflash2":
            name = f"{layer}.{'attention' if part == 'attn' else 'mlp'}_conv"
            base, weight = self.tensors[f"{name}.base_kernel"], self.tensors[f"{name}.kernel_projection.weight"]
            before, after = zip(base, np.split(weight, 2), strict=True)
            return short_conv(sublayer(short_conv(x, x, *before)), x, *after)
        names = (f"{layer}.conv_pre_{part}", f"{layer}.conv_post_{part}")
        before, after = ((self.tensors[f"{name}.k_base"], self.tensors[f"{name}.corr.weight"]) for name in names)
        y = sublayer(short_conv(x, x, *before))
        return short_conv(y, y, *after)

    def _heads(self, x, layer, part):
        heads, d = self._linear(x, layer, f"self_attn.{part}_proj"), self.config.head_dim
        return heads.reshape(len(x), heads.shape[1] // d, d)

    def _linear(self, x, layer, name):
        return x @ self.tensors[f"layers.{layer}.{name}.weight"].T

    def _norm(self, x, name):
        return rms_norm(x, self.tensors[f"{name}.weight"], self.config.rms_norm_eps)

    def _positions(self, anchors):
        return (anchors[:, None] + np.arange(self.config.block_size)).ravel()  # [A * B]

    def _turn(self, positions):
        angles = np.outer(positions, self.frequencies)
        return [self.rope_scale * f(angles)[:, None].astype(self.embedding.dtype) for f in (np.cos, np.sin)]


def short_conv(x, source, base, projection):
    """A convolution over the rows of each block whose taps depend on the row, in part by groups of channels.

        y_t = sum_j (base_j + (W s_t)_j) * x_{t-j},    x = 0 before the block

    Args: x, source s [A, B, H]; base [taps, H], tap 0 the row itself; projection W [taps * groups, H].
    """
    taps, width = base.shape
    grouped = (source @ projection.T).reshape(*source.shape[:-1], taps, -1)
    kernel = base + grouped.repeat(width // grouped.shape[-1], axis=-1)  # [A, B, taps, H]
    y = kernel[:, :, 0] * x
    for j in range(1, taps):
        y[:, j:] += kernel[:, j:, j] * x[:, :-j]
    return y


def gelu(x):
    """x Phi(x) in its tanh form."""
    return x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3))) / 2


def extend(known, new):
    """Keys and values, or any such pair, with those of later positions appended."""
    return tuple(map(np.concatenate, zip(known, new, strict=True)))
