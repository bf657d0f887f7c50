"""The target in PyTorch: Qwen3 and Llama decoders, CPU and CUDA, float32, bfloat16 or float64.

Modules carry the hub's weight names, so loading is one loop.  Three forwards share the layers: `prefill` (one
prefix, causal), `extend` (a few new tokens for each of many sequences; `step` for one) and `grow` (one forward of n
new tree nodes, each attending to the shared prefix and its own ancestors).  What they attend to lives in
`fast/kv_cache.py`.

Twin: `reference/decoder.py`, where the layer's formula is.  Tests: `tests/test_decoder.py`.
"""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from fast.devices import placement
from fast.kv_cache import KVCache
from models.checkpoint import Checkpoint
from models.config import DecoderConfig
from reference.decoder import check_taps
from reference.paths import check_growth, check_tokens

BUCKETS = (8, 16, 32, 64, 128, 256)  # row counts a tree step is padded to on CUDA
SCORES = 2**26  # attention scores held at a time by a tree step
FEW = 4  # rows of a product that take hardly more time than one
SLAB = 2**20  # weights converted at a time where bfloat16 products run in float32


class Linear(nn.Linear):
    """A linear map.  bfloat16 on a CPU multiplies in float32: exact products, and much faster for several rows."""

    def forward(self, x):
        if x.dtype != torch.bfloat16 or x.is_cuda or x.shape[:-1].numel() <= 2:
            return super().forward(x)
        return linear_in_float32(x, self.weight, self.bias).to(x.dtype)


class Packed(nn.Module):
    """Float32 linear maps of one input on a CPU as one, their weights laid out as oneDNN reads them: outputs in a row.

    Reading the weights takes most of the time while rows are few, and other layouts are read at half the speed.
    """

    def __init__(self, weights, bias=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weights), requires_grad=False)
        self.bias = bias

    @staticmethod
    def available():
        """Whether this PyTorch has the operators, which are not part of its public interface."""
        names = ("_reorder_linear_weight", "_linear_pointwise")
        return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.mkldnn, name) for name in names)

    @classmethod
    def of(cls, *maps):
        """Made of `Linear` maps."""
        bias = None if maps[0].bias is None else torch.cat([part.bias for part in maps])
        return cls(torch.cat([part.weight for part in maps]), bias)

    def forward(self, x):
        """[n, in] -> [n, out of all maps]; RuntimeError where a gradient should flow."""
        if torch.is_grad_enabled() and x.requires_grad:
            raise RuntimeError("a packed decoder passes no gradients on: make the Decoder without `pack`")
        rows = x.shape[0]
        if rows == 1:  # a product with a single row is not the fastest
            x = x.expand(FEW, -1)
        return torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")[:rows]


def linear_in_float32(x, weight, bias=None):
    """x W^T + b in float32 from bfloat16 operands, converting the weights slab by slab: float32 [..., out]."""
    rows = max(1, SLAB // weight.shape[1])
    x = x.float()
    out = torch.cat([x @ slab.float().T for slab in weight.split(rows)], dim=-1)
    return out if bias is None else out + bias.float()


def read_out(x, table):
    """Scores x W^T of a vocabulary table [V, H], in float32, or float64 for float64 operands: [..., V]."""
    if x.dtype == torch.bfloat16 and not x.is_cuda:
        return linear_in_float32(x, table)
    scores = F.linear(x, table)
    return scores if x.dtype == torch.float64 else scores.float()


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, the mean in float32 or better."""

    def __init__(self, size, eps):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x):
        return self.weight * normalise(x, self.eps)


def normalise(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, in float32 or better, in the dtype of x."""
    accurate = x if x.dtype == torch.float64 else x.float()
    return F.rms_norm(accurate, x.shape[-1:], eps=eps).to(x.dtype)


class Attention(nn.Module):
    """Projections of one attention layer; what is attended to is the caller's: see `forward`."""

    def __init__(self, config):
        super().__init__()
        hidden, d = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, d
        self.q_proj = Linear(hidden, self.heads * d, bias=config.qkv_bias)
        self.k_proj = Linear(hidden, self.kv_heads * d, bias=config.qkv_bias)
        self.v_proj = Linear(hidden, self.kv_heads * d, bias=config.qkv_bias)
        self.o_proj = Linear(self.heads * d, hidden, bias=config.o_bias)
        self.q_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(d, config.rms_norm_eps) if config.qk_norm else nn.Identity()
        self.qkv_proj = None

    def pack(self):
        """See `Decoder.pack`."""
        self.qkv_proj, self.o_proj = Packed.of(self.q_proj, self.k_proj, self.v_proj), Packed.of(self.o_proj)
        self.qk_norm = nn.Identity()
        if isinstance(self.q_norm, RMSNorm):
            self.qk_norm = RMSNorm(self.head_dim, self.q_norm.eps)
            weights = [self.q_norm.weight] * self.heads + [self.k_norm.weight] * self.kv_heads
            self.qk_norm.weight = nn.Parameter(torch.stack(weights), requires_grad=False)
        del self.q_proj, self.k_proj, self.v_proj, self.q_norm, self.k_norm

    def forward(self, x, cos, sin, attend):
        """x [n, H]; cos, sin [n, 1, d]; attend maps q, k, v [n, heads, d] to [n, heads * d]."""
        if self.qkv_proj:
            qk, v = self.qkv_proj(x).view(len(x), -1, self.head_dim).tensor_split((self.heads + self.kv_heads,), dim=1)
            q, k = rotate(self.qk_norm(qk), cos, sin).tensor_split((self.heads,), dim=1)
        else:
            q, k, v = (proj(x).view(len(x), -1, self.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj))
            q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        return self.o_proj(attend(q, k, v))


class MLP(nn.Module):
    """W_down (activation(W_gate x) * W_up x), [..., H] -> [..., H]."""

    def __init__(self, config, bias, activation=F.silu):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=bias)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=bias)
        self.activation, self.gate_up_proj = activation, None

    def pack(self):
        """See `Decoder.pack`."""
        self.gate_up_proj, self.down_proj = Packed.of(self.gate_proj, self.up_proj), Packed.of(self.down_proj)
        del self.gate_proj, self.up_proj

    def forward(self, x):
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1) if self.gate_up_proj else (self.gate_proj(x), self.up_proj(x))
        return self.down_proj(self.activation(gate) * up)


class Layer(nn.Module):
    """One pre-norm transformer layer, [n, H] -> [n, H]; the formula is in `reference/decoder.py`."""

    def __init__(self, config):
        super().__init__()
        self.self_attn, self.mlp = Attention(config), MLP(config, config.mlp_bias)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """Embedding, layers and final norm under the hub's `model.` names."""

    def __init__(self, config):
        super().__init__()
        shape = config.vocab_size, config.hidden_size
        self.embed_tokens = nn.Embedding(*shape, _weight=torch.empty(shape))  # not initialised: seconds saved
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model with the target interface of `paths.walk`.

    Args: config; tensors, hub name -> tensor, as in `config.tensor_shapes()`; stop_ids, ids that end an answer.
    """

    def __init__(self, config, tensors, stop_ids=()):
        super().__init__()
        self.config, self.vocab_size, self.stop_ids = config, config.vocab_size, tuple(stop_ids)
        with torch.device("meta"):
            self.model = Stack(config)
            if not config.tied:
                self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.load_state_dict(tensors, strict=True, assign=True)
        self.requires_grad_(False)
        self.embedding = self.model.embed_tokens.weight
        self.head = self.embedding if config.tied else self.lm_head.weight
        frequencies, self.rope_scale = config.rope.frequencies(config.head_dim)
        self.frequencies = torch.from_numpy(np.concatenate([frequencies] * 2)).to(self.head.device)
        self.buckets = BUCKETS if self.head.is_cuda else ()
        self.packed_head = None

    @classmethod
    def load(cls, folder, *, dtype="float32", device="cpu", stop_ids=None):
        """Read a hub-style folder onto a device, tensor by tensor, in float32, bfloat16 or float64.

        `stop_ids` None takes the end-of-sequence ids of config.json.
        """
        device, dtype = placement(device, dtype)
        config = DecoderConfig.from_folder(folder)
        stored = Checkpoint(folder).read(config.tensor_shapes(), tied=config.tied)
        decoder = cls(  # nothing else holds the tensors, so that packing leaves no second copy
            config,
            {name: to_tensor(raw, kind, getattr(torch, dtype), device) for name, kind, raw in stored},
            config.eos_ids if stop_ids is None else stop_ids,
        )
        return decoder.pack()

    def pack(self):
        """Join products and lay weights out for speed where that is known to help, float32 on a CPU: this decoder.

        The layers' take the same memory, and can be neither trained nor copied, cast or read back any more; the head is
        there twice.
        """
        suits = self.dtype == torch.float32 and not self.head.is_cuda and Packed.available()
        if suits and self.packed_head is None:
            for layer in self.model.layers:
                layer.self_attn.pack()
                layer.mlp.pack()
            self.packed_head = Packed(self.head)
        return self

    @property
    def dtype(self):
        return self.head.dtype

    @property
    def device(self):
        return self.head.device

    def open(self, prefix, taps=()):
        """Prefill a prefix and return the `Session` in which its continuations grow.

        `taps`: layers whose outputs the session keeps as `features` [S, n * H], see `reference.decoder.check_taps`.
        """
        return Session(self, prefix, taps)

    def open_batch(self, prompts, new_tokens):
        """Prefill several prompts and return the `Batch` that continues each by up to `new_tokens` tokens."""
        return Batch(self, prompts, new_tokens)

    def logits(self, tokens):
        """Next-token logits after every position of a sequence, without a cache: float32 or float64 [S, V]."""
        tokens = torch.as_tensor(check_tokens(tokens, self.vocab_size), device=self.device)
        hidden, _ = self.forward(tokens, torch.arange(len(tokens), device=self.device), attend_causal)
        return self.read_out(hidden)

    def cache(self, rows, capacity):
        """An empty `KVCache` for this model."""
        return KVCache(self.config, rows, capacity, dtype=self.dtype, device=self.device)

    def forward(self, tokens, positions, attend, taps=()):
        """Run new tokens through every layer.

        Args: tokens int [n]; positions int [n]; attend(layer, q, k, v) -> [n, heads * d] stores the new keys
            and values where they belong and attends; taps, layers whose outputs are kept, -1 the embeddings.
        Returns: (hidden states after the final norm [n, H], the taps' outputs side by side [n, taps * H]).
        """
        angles = positions[:, None].double() * self.frequencies
        cos, sin = ((self.rope_scale * f(angles))[:, None].to(self.dtype) for f in (torch.cos, torch.sin))
        x = self.model.embed_tokens(tokens)
        outputs = {-1: x}  # of the tapped layers
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, lambda q, k, v, i=i: attend(i, q, k, v))
            if i in taps:
                outputs[i] = x
        return self.model.norm(x), torch.cat([x[:, :0], *(outputs[tap] for tap in taps)], dim=1)

    def read_out(self, hidden):
        """Logits [n, V] of final hidden states [n, H], float32 (float64 for a float64 model)."""
        return self.packed_head(hidden) if self.packed_head else read_out(hidden, self.head)

    def prefill(self, cache, row, tokens, taps=()):
        """Write a prefix into one row of an empty cache: (logits after its last token [V], features [S, taps * H])."""
        tokens = torch.as_tensor(check_tokens(tokens, self.vocab_size), device=self.device)
        if len(tokens) > cache.capacity:
            raise ValueError(f"a prefix of {len(tokens)} tokens does not fit a cache of {cache.capacity}")

        def attend(layer, q, k, v):
            cache.keys[layer, row, :, : len(k)] = k.transpose(0, 1)
            cache.values[layer, row, :, : len(v)] = v.transpose(0, 1)
            return attend_causal(layer, q, k, v)

        positions = torch.arange(len(tokens), device=self.device)
        hidden, features = self.forward(tokens, positions, attend, check_taps(taps, self.config.num_layers))
        cache.lengths[row] = len(tokens)
        return self.read_out(hidden[-1:])[0], features

    def step(self, cache, tokens):
        """Append one token to every row of the cache: logits [rows, V]."""
        lengths = cache.lengths
        if len(tokens) != len(lengths):
            raise ValueError(f"the cache holds {len(lengths)} sequences and needs as many tokens, got {len(tokens)}")
        longest = int(lengths.max()) + 1
        if longest > cache.capacity:
            raise ValueError(f"the cache is full: a row already holds {cache.capacity} tokens")
        logits, _ = self.extend(cache, torch.as_tensor(tokens, device=self.device)[:, None], lengths, longest)
        cache.lengths = lengths + 1
        return logits[:, 0]

    def extend(self, cache, tokens, lengths, span, taps=()):
        """Run T new tokens behind each of the first n rows of a cache: (logits [n, T, V], features [n, T, taps * H]).

        Their keys and values are written behind the row's, and how many of them are kept is for the caller to say:
        `cache.lengths` is neither read nor changed.  Nothing here waits for the device.

        Args: tokens int [n, T]; lengths int [n], of what the rows hold; span, at least the greatest of lengths + T,
            how many positions of the cache are looked at.
        """
        n, new = tokens.shape
        rows = torch.arange(n, device=self.device)[:, None]
        positions = lengths[:, None] + torch.arange(new, device=self.device)
        group = self.config.num_heads // self.config.num_kv_heads
        unseen = (torch.arange(span, device=self.device) > positions[..., None]).repeat(1, group, 1)[:, None]
        mask = wide(torch.zeros_like(unseen, dtype=self.dtype))  # [n, 1, group * T, span]
        mask = mask.masked_fill(unseen, -torch.inf)
        places = cache.places(rows, positions)

        def attend(layer, q, k, v):
            cache.write(layer, places, k, v)
            keys, values = (wide(t[layer, :n, :, :span]) for t in (cache.keys, cache.values))
            q, _ = grouped(q.unflatten(0, (n, new)), k.shape[1])
            mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
            return ungrouped(mixed, group, new).flatten(0, 1).to(v.dtype)

        hidden, features = self.forward(tokens.flatten(), positions.flatten(), attend, taps)
        return self.read_out(hidden).unflatten(0, (n, new)), features.unflatten(0, (n, new))

    def grow(self, cache, parents, tokens):
        """Add tree nodes beside a one-row cache in one forward: logits [n, V]."""
        parents, tokens = check_growth(parents, tokens, cache.nodes, self.vocab_size)
        count = len(tokens)
        padding = (0, next((b for b in self.buckets if b >= count), count) - count)
        tokens = F.pad(torch.as_tensor(tokens, device=self.device), padding)
        new, path = cache.add_nodes(torch.as_tensor(parents, device=self.device))
        new, path = F.pad(new, padding, value=-1), F.pad(path, (0, 0, *padding), value=-1)  # -1: the scratch node
        length = int(cache.lengths[0])
        missing = path < 0
        positions = length - 1 + (~missing).sum(dim=1)

        def attend(layer, q, k, v):
            cache.node_keys[layer, new], cache.node_values[layer, new] = k, v
            keys, values = cache.keys[layer, 0, :, :length], cache.values[layer, 0, :, :length]
            at_once = max(1, SCORES // (q.shape[1] * length))  # nodes
            parts = zip(q.split(at_once), path.split(at_once), missing.split(at_once), strict=True)
            node_keys, node_values = cache.node_keys[layer], cache.node_values[layer]
            return torch.cat([attend_tree(q, keys, values, node_keys[i], node_values[i], gap) for q, i, gap in parts])

        hidden, _ = self.forward(tokens, positions, attend)
        return self.read_out(hidden[:count])


class Session:
    """One prefix and the tree of continuations grown from it; node ids count up, -1 is the prefix.

    `features` [S, n * H]: the taps' outputs at every position of the prefix, side by side.
    """

    def __init__(self, decoder, prefix, taps=()):
        self.decoder, self.cache = decoder, decoder.cache(1, len(prefix))
        self.root_logits, self.features = decoder.prefill(self.cache, 0, prefix, taps)

    def grow(self, parents, tokens):
        """Add one node per (parent, token) pair: logits [n, V]."""
        return self.decoder.grow(self.cache, parents, tokens)


class Batch:
    """Several prompts continued side by side, one token per sequence and step."""

    def __init__(self, decoder, prompts, new_tokens):
        self.decoder = decoder
        self.cache = decoder.cache(len(prompts), max(map(len, prompts)) + new_tokens)
        rows = [decoder.prefill(self.cache, i, prompt)[0] for i, prompt in enumerate(prompts)]
        self.root_logits = torch.stack(rows)

    def step(self, tokens):
        """Append a token to each sequence: logits [rows, V]."""
        return self.decoder.step(self.cache, tokens)

    def keep(self, rows):
        """Drop every sequence but these."""
        self.cache.keep(torch.as_tensor(rows, device=self.decoder.device))


def to_tensor(raw, kind, dtype, device):
    """A stored array (bfloat16 as raw uint16 words) as a tensor of this dtype on this device."""
    tensor = torch.from_numpy(np.array(raw))
    return (tensor.view(torch.bfloat16) if kind == "BF16" else tensor).to(device=device, dtype=dtype)


def rotate(x, cos, sin):
    """Rotary position embedding on the two halves of each head: x [n, heads, d]; cos, sin [n, 1, d]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


def attend_causal(_, q, k, v):
    """Attention of a sequence to itself, position by position: q [n, heads, d] -> [n, heads * d]."""
    q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1).flatten(1)


def attend_tree(q, keys, values, node_keys, node_values, missing):
    """Attention of n tree nodes to one shared prefix and each to its own ancestors: [n, heads * d].

    Args: q [n, heads, d]; keys, values [kv heads, S, d]; node_keys, node_values [n, depth, kv heads, d];
        missing bool [n, depth], true where a node has no ancestor so far up.
    """
    n, length = len(q), keys.shape[1]
    q, group = grouped(wide(q)[None] * q.shape[-1] ** -0.5, len(keys))  # [1, kv heads, group * n, d]
    own = q.view(len(keys), group, n, -1).permute(2, 0, 1, 3)  # [n, kv heads, group, d]
    own = (own @ wide(node_keys).permute(0, 2, 3, 1)).masked_fill(missing[:, None, None], -torch.inf)
    own = own.permute(1, 2, 0, 3).reshape(len(keys), group * n, -1)
    scores = softmax(torch.cat([(q @ wide(keys).mT)[0], own], dim=-1))
    shared = scores[..., :length] @ wide(values)
    own = scores[..., length:].view(len(keys), group, n, -1).permute(2, 0, 1, 3) @ wide(node_values).transpose(1, 2)
    mixed = shared + own.permute(1, 2, 0, 3).reshape(len(keys), group * n, -1)
    return ungrouped(mixed[None], group, n)[0].to(node_values.dtype)


def grouped(q, kv_heads):
    """Queries by key/value head: [B, n, heads, d] -> ([B, kv heads, group * n, d], group)."""
    batch, n, heads, d = q.shape
    q = wide(q).view(batch, n, kv_heads, heads // kv_heads, d)
    return q.permute(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, d), heads // kv_heads


def ungrouped(mixed, group, n):
    """The inverse of `grouped` on attention outputs: [B, kv heads, group * n, d] -> [B, n, heads * d]."""
    batch, kv_heads, _, d = mixed.shape
    return mixed.view(batch, kv_heads, group, n, d).permute(0, 3, 1, 2, 4).reshape(batch, n, -1)


def wide(x):
    """bfloat16 as float32 where products of bfloat16 are slow (CPU); anything else as it is."""
    return x.float() if x.dtype == torch.bfloat16 and not x.is_cuda else x


def softmax(scores):
    """Softmax over the last axis, computed in float32 or better, in the dtype of the scores."""
    return torch.softmax(scores, dim=-1, dtype=torch.float64 if scores.dtype == torch.float64 else torch.float32).to(
        scores.dtype
    )
