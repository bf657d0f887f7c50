"""The heads of block drafters in PyTorch.

A head adds R z to a slot's base logits, where R [V, r] is its `readout` and the latent z depends on the predecessor
token, the slot's state and, in the prefix-attention head, on the committed prefix.  Every head maps states
[rows, T, H] and predecessors [rows, T] of T consecutive slots to latents [rows, T, r]; all but the recurrent one treat
the slots one by one.

Twin: `reference/draft_heads.py`, where the formulas are.  Tests: `tests/test_drafter_twins.py`.
"""

from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from fast.decoder import Linear, RMSNorm, read_out
from fast.draft_layers import attend_blocks, unseen_context

HEAD_EPS = 1e-6  # of the prefix-attention head's norms, whatever the backbone's is


class Past(NamedTuple):
    """What a prefix-attention head reads: keys, values [C, heads, S, d] and each row's anchor, position and token."""

    keys: torch.Tensor
    values: torch.Tensor
    anchors: torch.Tensor
    tokens: torch.Tensor

    def repeat(self, rows):
        """That of one row for several."""
        return self._replace(anchors=self.anchors.expand(rows), tokens=self.tokens.expand(rows))


class MarkovHead(nn.Module):
    """Vanilla: z = W1[predecessor]."""

    def __init__(self, config):
        super().__init__()
        self.markov_w1 = nn.Embedding(config.vocab_size, config.markov_rank)
        self.markov_w2 = Linear(config.markov_rank, config.draft_vocab_size, bias=False)

    @property
    def readout(self):
        return self.markov_w2.weight

    def embed(self, predecessors):
        """What the confidence head sees of a predecessor, [..., r]."""
        return self.markov_w1(predecessors)

    def forward(self, hidden, predecessors, past):
        return self.embed(predecessors)


class GatedHead(MarkovHead):
    """z = sigmoid(W_g [h; e] + b) * e,  e = W1[predecessor]."""

    def __init__(self, config):
        super().__init__(config)
        self.gate_proj = Linear(config.hidden_size + config.markov_rank, config.markov_rank)

    def forward(self, hidden, predecessors, past):
        e = self.embed(predecessors)
        return torch.sigmoid(self.gate_proj(torch.cat([hidden, e], dim=-1))) * e


class RecurrentHead(MarkovHead):
    """z = tanh(o) with a state s that runs along the block, from zero:

    [g, c, o] = W [s; e; h] + b,    s <- sigmoid(g) s + (1 - sigmoid(g)) tanh(c).
    """

    def __init__(self, config):
        super().__init__(config)
        self.joint_proj = Linear(2 * config.markov_rank + config.hidden_size, 3 * config.markov_rank)

    def forward(self, hidden, predecessors, past):
        embedded, latents = self.embed(predecessors), []
        state = torch.zeros_like(embedded[:, 0])
        for e, h in zip(embedded.unbind(1), hidden.unbind(1), strict=True):
            g, c, o = self.joint_proj(torch.cat([state, e, h], dim=-1)).chunk(3, dim=-1)
            state = torch.sigmoid(g) * state + torch.sigmoid(-g) * torch.tanh(c)
            latents.append(torch.tanh(o))
        return torch.stack(latents, dim=1)


class AttentionHead(nn.Module):
    """z is read out of a query made of predecessor and state, once it has attended to the committed prefix."""

    def __init__(self, config, embedding):
        super().__init__()
        hidden, rank, heads, d = config.hidden_size, config.markov_rank, config.head_heads, config.head_dim_attention
        self.register_buffer("embedding", embedding, persistent=False)
        self.heads, self.has_gate, self.has_anchor = heads, config.head_gate != "none", config.head_anchor
        self.embed_norm, self.state_norm, self.ctx_norm = (RMSNorm(hidden, HEAD_EPS) for _ in range(3))
        self.attn_norm, self.mlp_norm, self.out_norm = (RMSNorm(rank, HEAD_EPS) for _ in range(3))
        self.q_norm, self.k_norm = RMSNorm(d, HEAD_EPS), RMSNorm(d, HEAD_EPS)
        self.in_proj = Linear(2 * hidden, rank, bias=False)
        self.q_proj, self.o_proj = Linear(rank, heads * d, bias=False), Linear(heads * d, rank, bias=False)
        self.k_proj, self.v_proj = Linear(hidden, heads * d, bias=False), Linear(hidden, heads * d, bias=False)
        self.gate_p, self.up = Linear(rank, config.head_mlp, bias=False), Linear(rank, config.head_mlp, bias=False)
        self.down = Linear(config.head_mlp, rank, bias=False)
        self.markov_w2 = Linear(rank, config.draft_vocab_size, bias=False)
        if self.has_gate:
            self.gate_proj = Linear(rank + heads * d, heads)
        if self.has_anchor:
            self.anchor_type, self.anchor_norm = nn.Parameter(torch.empty(hidden)), RMSNorm(hidden, HEAD_EPS)

    @property
    def readout(self):
        return self.markov_w2.weight

    def embed(self, predecessors):
        """What the confidence head sees of a predecessor, [..., r]."""
        e = self.embed_norm(F.embedding(predecessors, self.embedding))
        return F.linear(e, self.in_proj.weight[:, : e.shape[-1]])

    def memorise(self, fused):
        """Keys and values [s, heads, d] of context features [s, H]."""
        return self._keys_values(self.ctx_norm(fused))

    def forward(self, hidden, predecessors, past):
        e = self.embed_norm(F.embedding(predecessors, self.embedding))
        x = self.in_proj(torch.cat([e, self.state_norm(hidden)], dim=-1))
        n = self.attn_norm(x)
        q = self.q_norm(self.q_proj(n).unflatten(-1, (self.heads, -1)))
        unseen = unseen_context(past.anchors, 1, past.keys.shape[2], None, "")
        own = self._anchor_column(past.tokens)
        o = attend_blocks(q, *own, q.shape[-1] ** -0.5, past.keys, past.values, unseen)
        if self.has_gate:
            gate = torch.sigmoid(self.gate_proj(torch.cat([n, o], dim=-1)))
            o = (o.unflatten(-1, (self.heads, -1)) * gate[..., None]).flatten(-2)
        x = x + self.o_proj(o)
        m = self.mlp_norm(x)
        return self.out_norm(x + self.down(F.silu(self.gate_p(m)) * self.up(m)))

    def _anchor_column(self, tokens):
        """The anchor column, keys and values [rows, 1, heads, d], or none of it, [rows, 0, heads, d]."""
        if not self.has_anchor:
            nothing = self.embedding.new_empty(len(tokens), 0, self.heads, self.q_norm.weight.shape[0])
            return nothing, nothing
        e = self.anchor_norm(F.embedding(tokens, self.embedding)) + self.anchor_type
        return self._keys_values(e[:, None])

    def _keys_values(self, normed):
        keys, values = (proj(normed).unflatten(-1, (self.heads, -1)) for proj in (self.k_proj, self.v_proj))
        return self.k_norm(keys), values


class CandidateSelector(nn.Module):
    """z = P[predecessor] * (W h), read out by the successor codebook."""

    def __init__(self, config):
        super().__init__()
        shape = config.vocab_size, config.selector_rank
        self.predecessor_codebook, self.successor_codebook = (nn.Parameter(torch.empty(shape)) for _ in range(2))
        self.hidden_projection = Linear(config.hidden_size, config.selector_rank, bias=False)

    @property
    def readout(self):
        return self.successor_codebook

    def forward(self, hidden, predecessors, past):
        return F.embedding(predecessors, self.predecessor_codebook) * self.hidden_projection(hidden)


class ConfidenceHead(nn.Module):
    """A logit of acceptance from the slot's state and, perhaps, the predecessor: w [h; e] + b."""

    def __init__(self, config):
        super().__init__()
        self.with_markov = config.confidence_with_markov
        self.proj = Linear(config.hidden_size + self.with_markov * config.markov_rank, 1)

    def forward(self, hidden, predecessors, head):
        features = torch.cat([hidden, head.embed(predecessors)], dim=-1) if self.with_markov else hidden
        return (read_out(features, self.proj.weight) + self.proj.bias)[..., 0]


def markov_head(config, embedding):
    """The Markov head that a config names, or None."""
    if not config.markov_rank:
        return None
    if config.markov_type == "attention":
        return AttentionHead(config, embedding)
    return {"vanilla": MarkovHead, "gated": GatedHead, "rnn": RecurrentHead}[config.markov_type](config)


def largest(logits, k):
    """Ids of the k largest of each row's finite entries, ties to the lowest ids, in no particular order: [..., k]."""
    k = min(k, logits.shape[-1])
    least = logits.topk(k).values[..., -1:]
    tied = logits == least
    room = k - (logits > least).sum(dim=-1, keepdim=True)
    return logits.masked_fill(tied & (tied.cumsum(dim=-1, dtype=torch.int32) > room), -torch.inf).topk(k).indices


def only(candidates, scores, logits):
    """Logits like `logits` [..., V] that hold the scores [..., K] of the candidates and -inf elsewhere."""
    return torch.full_like(logits, -torch.inf).scatter(-1, candidates, scores)
