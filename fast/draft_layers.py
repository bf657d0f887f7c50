"""The layers of block drafters in PyTorch, and how blocks attend to the context they share.

Block rows [A, B, H] of A anchors run through pre-norm layers; a short convolution may sit around each sublayer, in one
of two arrangements, and Gemma-4 norms the sublayers' outputs too.

Twin: `reference/draft_layers.py`, where the formulas are.  Tests: `tests/test_drafter_twins.py`.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fast.decoder import MLP, Linear, RMSNorm, normalise, rotate, softmax, wide

SCORES = 2**26  # attention scores held at a time


class Attention(nn.Module):
    """Projections of one layer; context features and block rows share those of keys and values."""

    def __init__(self, config):
        super().__init__()
        hidden, d, eps = config.hidden_size, config.head_dim, config.rms_norm_eps
        self.head_dim, self.scale = d, d**-0.5
        self.q_proj = Linear(hidden, config.num_heads * d, bias=False)
        self.k_proj = Linear(hidden, config.num_kv_heads * d, bias=False)
        self.v_proj = None if config.shared_values else Linear(hidden, config.num_kv_heads * d, bias=False)
        self.o_proj = Linear(config.num_heads * d, hidden, bias=False)
        self.q_norm, self.k_norm = RMSNorm(d, eps), RMSNorm(d, eps)

    def keys_values(self, x, cos, sin):
        """Keys (normed, rotated) and values [..., kv heads, d] of features or normed rows [..., H]."""
        return rotate(self.k_norm(self._heads(self.k_proj(x))), cos, sin), self._heads(self.v_proj(x))

    def forward(self, x, cos, sin, attend):
        """x [A, B, H]; cos, sin [A, B, 1, d]; attend maps queries, keys, values and a scale to [A, B, heads * d]."""
        q = rotate(self.q_norm(self._heads(self.q_proj(x))), cos, sin)
        return self.o_proj(attend(q, *self.keys_values(x, cos, sin), self.scale))

    def _heads(self, x):
        return x.unflatten(-1, (-1, self.head_dim))


class GemmaAttention(Attention):
    """Values are normed too and may come from the keys' projection; products are not scaled."""

    def __init__(self, config):
        super().__init__(config)
        self.scale, self.eps = 1.0, config.rms_norm_eps

    def keys_values(self, x, cos, sin):
        keys = self._heads(self.k_proj(x))
        values = keys if self.v_proj is None else self._heads(self.v_proj(x))
        return rotate(self.k_norm(keys), cos, sin), normalise(values, self.eps)


class Layer(nn.Module):
    """One pre-norm layer, [A, B, H] -> [A, B, H]; a subclass may do something around its sublayers."""

    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config, False)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        x = x + self.around("attn", partial(self.self_attn, cos=cos, sin=sin, attend=attend), self.input_layernorm(x))
        return x + self.around("mlp", self.mlp, self.post_attention_layernorm(x))

    def around(self, part, sublayer, x):
        return sublayer(x)


class ShortConv(nn.Module):
    """A convolution over the last rows of a block whose kernel depends on the row: base + W row, per channel group."""

    def __init__(self, config):
        super().__init__()
        self.k_base = nn.Parameter(torch.empty(config.conv_taps, config.hidden_size))
        self.corr = Linear(config.hidden_size, config.conv_taps * config.hidden_size // config.short_conv, bias=False)

    def forward(self, x):
        return convolve(x, kernels(self.k_base, self.corr(x)))


class ShortConvLayer(Layer):
    """Four convolutions: before and after each sublayer, every kernel from the convolution's own input."""

    def __init__(self, config):
        super().__init__(config)
        self.conv_pre_attn, self.conv_post_attn = ShortConv(config), ShortConv(config)
        self.conv_pre_mlp, self.conv_post_mlp = ShortConv(config), ShortConv(config)

    def around(self, part, sublayer, x):
        before, after = getattr(self, f"conv_pre_{part}"), getattr(self, f"conv_post_{part}")
        return after(sublayer(before(x)))


class TwoSidedConv(nn.Module):
    """A convolution on either side of a sublayer, both kernels from the sublayer's normed input."""

    def __init__(self, config):
        super().__init__()
        taps, hidden = config.conv_taps, config.hidden_size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = Linear(hidden, 2 * taps * hidden // config.short_conv, bias=False)

    def forward(self, sublayer, x):
        before, after = kernels(self.base_kernel, self.kernel_projection(x)).unbind(-3)
        return convolve(sublayer(convolve(x, before)), after)


class TwoSidedConvLayer(Layer):
    """DFlash2's layer: one two-sided convolution around each sublayer."""

    def __init__(self, config):
        super().__init__(config)
        self.attention_conv, self.mlp_conv = TwoSidedConv(config), TwoSidedConv(config)

    def around(self, part, sublayer, x):
        return (self.attention_conv if part == "attn" else self.mlp_conv)(sublayer, x)


class GemmaLayer(nn.Module):
    """Norms before and after each sublayer, and a stored scalar on what leaves the layer."""

    def __init__(self, config):
        super().__init__()
        self.self_attn = GemmaAttention(config)
        self.mlp = MLP(config, False, partial(F.gelu, approximate="tanh"))
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            setattr(self, f"{name}_layernorm", RMSNorm(config.hidden_size, config.rms_norm_eps))
        self.register_buffer("layer_scalar", torch.empty(1))

    def forward(self, x, cos, sin, attend):
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin, attend))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return x * self.layer_scalar


def layer_class(config):
    """The kind of layer that a config asks for."""
    if config.architecture == "gemma4":
        return GemmaLayer
    if not config.short_conv:
        return Layer
    return TwoSidedConvLayer if config.family == "dflash2" else ShortConvLayer


def kernels(base, correction):
    """Kernels base + correction, each correction shared by a group of channels, in float32 or better.

    Args: base [*, taps, H]; correction [A, B, * taps groups], group fastest.  Returns: [A, B, *, taps, H].
    """
    correction = correction.unflatten(-1, (*base.shape[:-1], -1))
    correction = correction.repeat_interleave(base.shape[-1] // correction.shape[-1], dim=-1)
    return base + correction.to(torch.promote_types(base.dtype, torch.float32))


def convolve(x, kernel):
    """y_t = sum_j kernel[t, j] * x[t - j] over the rows of a block, nothing before its first: [A, B, H]."""
    rows, taps = x.shape[-2], kernel.shape[-2]
    padded = F.pad(x, (0, 0, taps - 1, 0))
    return sum(kernel[..., j, :] * padded[..., taps - 1 - j :, :][..., :rows, :] for j in range(taps)).to(x.dtype)


def unseen_context(anchors, rows, length, window, rule):
    """Which of S context positions each row of each block does not see: bool [A, B or 1, S]; see `DrafterConfig`.

    Args: anchors int [A], positions; rows B; window or None; rule "query", "context" or "anchor".
    """
    t, anchor = torch.arange(length, device=anchors.device), anchors[:, None, None]
    unseen = t >= anchor
    if window is None:
        return unseen
    if rule == "anchor":
        return unseen | (t < anchor - window)
    return unseen | (t <= anchor + torch.arange(rows, device=anchors.device)[:, None] - window)


def unseen_rows(rows, causal, window, rule, device):
    """Which rows of its own block each row does not see: bool [B, B], or None where it sees all."""
    row = torch.arange(rows, device=device)
    ahead = row - row[:, None]
    unseen = ahead > 0 if causal else None
    if window is not None and rule == "query":
        far = ahead.abs() >= window
        unseen = far if unseen is None else unseen | far
    return unseen


def attend_blocks(q, own_keys, own_values, scale, keys, values, unseen, own_unseen=None):
    """Attention of blocks of B rows, each to its context and to W rows of its own: [A, B, heads * d].

    The context is not copied for each block: A / C blocks in a row share each of C contexts.  Where there are many
    blocks they are taken a few at a time, and the backward pass computes their scores again.

    Args: q [A, B, heads, d]; own_keys, own_values [A, W, kv heads, d]; scale of the products; keys, values
        [C, kv heads, S, d]; unseen bool [A, B or 1, S]; own_unseen bool [B, W] or None.
    """
    per_block = q.shape[1] * q.shape[2] * (keys.shape[2] + own_keys.shape[1])
    at_once = max(1, SCORES // max(1, per_block))
    shared = scale, keys, values, own_unseen
    if len(keys) > 1 or len(q) <= at_once:
        return _attend(q, own_keys, own_values, unseen, *shared)
    run = _attend
    if torch.is_grad_enabled():
        run = partial(checkpoint, _attend, use_reentrant=False, preserve_rng_state=False)
    parts = zip(*(t.split(at_once) for t in (q, own_keys, own_values, unseen)), strict=True)
    return torch.cat([run(*part, *shared) for part in parts])


def _attend(q, own_keys, own_values, unseen, scale, keys, values, own_unseen):
    dtype, (contexts, kv_heads, length, _) = q.dtype, keys.shape
    q, own_keys, own_values, unseen = (t.unflatten(0, (contexts, -1)) for t in (q, own_keys, own_values, unseen))
    q = (wide(q) * scale).unflatten(3, (kv_heads, -1)).permute(0, 3, 4, 1, 2, 5)  # [C, kv heads, group, A / C, B, d]
    own_keys, own_values = (wide(t).permute(0, 3, 1, 2, 4)[:, :, None] for t in (own_keys, own_values))
    scores, own = (q.flatten(2, 4) @ wide(keys).mT).view(*q.shape[:-1], length), q @ own_keys.mT
    unseen, lowest = unseen[:, None, None], torch.finfo(scores.dtype).min
    own = own if own_unseen is None else own.masked_fill(own_unseen, lowest)
    weights = softmax(torch.cat([scores.masked_fill(unseen, lowest), own], dim=-1))
    context, own = weights.split([length, own.shape[-1]], dim=-1)
    context = context.masked_fill(unseen, 0)  # matters where a row sees nothing: it attends to nothing
    mixed = (context.flatten(2, 4) @ wide(values)).view(q.shape) + own @ own_values
    return mixed.permute(0, 3, 4, 1, 2, 5).flatten(3).flatten(0, 1).to(dtype)
