"""One normalised block-drafter configuration, the shapes of its tensors, and what its block proposes.

A block drafter reads the target's hidden states at a few layers (taps) and a block of B input rows, the last committed
token and B - 1 masks, and proposes the next tokens in one forward.  Every public config.json dialect is read into this
one record by `models/drafter_dialects.py`; tensor names are the published ones.
Tests: tests/test_drafter_config.py.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self

import numpy as np

from models.config import ConfigError, Rope
from models.drafter_dialects import read_fields


@dataclass(frozen=True)
class DrafterConfig:
    """A block drafter, in one vocabulary.

    family             "dflash" (no head), "dspark" (Markov head), "dflash2" (candidate selector) or "attention"
                       (prefix-attention head)
    dialect            who wrote the file: "deepspec", "specfloor", "zlab", "specforge" or "speculators"
    architecture       layer type, "qwen3" or "gemma4"
    in_place           False: row k predicts position p + k + 1, B proposals; True: position p + k, B - 1 proposals
    block_size         B, input rows: the anchor token and B - 1 masks
    taps               decoder layers of the target whose outputs are the features, counted from 0; -1: its embeddings
    target_layers      decoder layers of the target, None where the file does not say
    draft_vocab_size   ids the drafter proposes; below `vocab_size`, the target's, a stored map d2t leads to target ids
    rotary_dims        how many of the head_dim / 2 rotary frequencies turn; the others are 0 (see `frequencies`)
    causal, windows    per layer: whether a row sees only rows up to its own, and its sliding window (None: everything)
    window_rule        which keys k a windowed row q of a block anchored at p sees: "query" |pos_q - pos_k| < window in
                       context and block; "context" pos_q - pos_k < window in the context and any row of the block that
                       causality allows; "anchor" pos_k >= p - window in the context, the block as before
    embedding_scale, output_multiplier, softcap   of the embedded block, of the base logits u, then s tanh(u / s)
    shared_values      the keys' projection also gives the values (gemma4)
    markov_rank, markov_type   width r of the head; "vanilla", "gated", "rnn", "attention" or "" without one
    confidence, confidence_with_markov   a logit per slot that it is accepted; whether it sees the predecessor too
    head_*             prefix-attention head: heads, head dim, MLP width, gate ("none", "state_output"), anchor column
    lattice            candidates per slot when served, 0: the full vocabulary
    selector_rank      width of the dflash2 codebooks
    short_conv, conv_taps   channels per group (0: no convolution) and taps, the current row and those before it
    slot_embeddings    learned vectors added to the embeddings of the masked rows
    notes              one sentence for each default taken that could matter
    """

    family: str
    dialect: str
    architecture: str
    in_place: bool
    block_size: int
    taps: tuple[int, ...]
    mask_id: int
    target_layers: int | None
    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    rotary_dims: int
    causal: tuple[bool, ...]
    windows: tuple[int | None, ...]
    window_rule: str
    embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    softcap: float | None = None
    shared_values: bool = False
    markov_rank: int = 0
    markov_type: str = ""
    confidence: bool = False
    confidence_with_markov: bool = False
    head_heads: int = 0
    head_dim_attention: int = 0
    head_mlp: int = 0
    head_gate: str = "none"
    head_anchor: bool = False
    lattice: int = 0
    selector_rank: int = 0
    short_conv: int = 0
    conv_taps: int = 2
    slot_embeddings: bool = False
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.proposals < 1:
            raise ConfigError(f"block_size {self.block_size} leaves nothing to propose in place: it must be at least 2")
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.head_dim % 2:
            raise ConfigError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ConfigError(f"mask_token_id {self.mask_id} is outside the vocabulary of {self.vocab_size}")
        if self.draft_vocab_size > self.vocab_size:
            raise ConfigError(f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.vocab_size} ids")
        if self.family == "dflash2" and self.draft_vocab_size != self.vocab_size:
            raise ConfigError("DFlash2 needs the target's full vocabulary: draft_vocab_size must equal vocab_size")
        if self.short_conv and self.hidden_size % self.short_conv:
            raise ConfigError(f"convolution groups of {self.short_conv} do not divide hidden_size {self.hidden_size}")
        if self.lattice > self.draft_vocab_size:
            raise ConfigError(f"{self.lattice} candidates per slot exceed the {self.draft_vocab_size} ids there are")
        self._check_taps()

    def _check_taps(self) -> None:
        taps, layers = self.taps, self.target_layers
        if not taps or taps[0] < -1 or any(a >= b for a, b in pairwise(taps)):
            raise ConfigError(
                f"taps must be increasing decoder layer ids from -1 (the embeddings) on, got {list(taps)}"
            )
        if layers is not None and taps[-1] >= layers - 1:
            raise ConfigError(
                f"tap {taps[-1]} of a target with {layers} layers: the last one is {layers - 1}, whose output exists "
                "before and after the final norm, so taps must lie below it"
            )

    @property
    def proposals(self) -> int:
        """gamma, the number of tokens one block proposes."""
        return self.block_size - self.in_place

    @property
    def order(self) -> int | None:
        """How many drafted tokens a slot's proposal looks back at; None: all of them."""
        if self.markov_type == "rnn":
            return None
        return 0 if self.family == "dflash" else 1

    @classmethod
    def from_folder(cls, folder: Path, *, in_place: bool | None = None) -> Self:
        """Read folder/config.json; ConfigError, naming the file, where it is missing, not JSON, or refused.

        `in_place` settles what the rows predict where the file leaves it open; it must not contradict the file.
        """
        path = Path(folder) / "config.json"
        try:
            return cls.from_dict(json.loads(path.read_bytes()), in_place=in_place)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; a drafter folder needs a config.json") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error})") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], *, in_place: bool | None = None) -> Self:
        """Normalise one parsed config.json; ConfigError says what is wrong and what to do."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"a config is a JSON object, got {type(raw).__name__}")
        return cls(**read_fields(raw, in_place))

    def frequencies(self) -> tuple[np.ndarray, float]:
        """Inverse rotary frequencies [head_dim / 2], 0 where a pair does not turn, and the factor of cos and sin."""
        frequencies, scale = self.rope.frequencies(self.head_dim)
        frequencies[self.rotary_dims :] = 0
        return frequencies, scale

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the drafter by its normalised name, without the embedding and head it borrows."""
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (self.hidden_size, len(self.taps) * self.hidden_size),
            "hidden_norm.weight": (self.hidden_size,),
        }
        layer_shapes = self._layer_shapes()
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes.items()}
        return shapes | {"norm.weight": (self.hidden_size,)} | self._head_shapes()

    def _layer_shapes(self) -> dict[str, tuple[int, ...]]:
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (d,),
            "self_attn.q_proj.weight": (q, d),
            "self_attn.k_proj.weight": (kv, d),
            "self_attn.v_proj.weight": (kv, d),
            "self_attn.o_proj.weight": (d, q),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
            "post_attention_layernorm.weight": (d,),
            "mlp.gate_proj.weight": (f, d),
            "mlp.up_proj.weight": (f, d),
            "mlp.down_proj.weight": (d, f),
        }
        if self.shared_values:
            del shapes["self_attn.v_proj.weight"]
        if self.architecture == "gemma4":
            norms = ("pre_feedforward_layernorm.weight", "post_feedforward_layernorm.weight")
            shapes |= dict.fromkeys(norms, (d,)) | {"layer_scalar": (1,)}
        if self.short_conv and self.family == "dflash2":
            for conv in ("attention_conv", "mlp_conv"):  # each holds an input and an output side
                shapes[f"{conv}.base_kernel"] = (2, self.conv_taps, d)
                shapes[f"{conv}.kernel_projection.weight"] = (2 * self.conv_taps * d // self.short_conv, d)
        elif self.short_conv:
            for conv in ("conv_pre_attn", "conv_post_attn", "conv_pre_mlp", "conv_post_mlp"):
                shapes[f"{conv}.k_base"] = (self.conv_taps, d)
                shapes[f"{conv}.corr.weight"] = (self.conv_taps * d // self.short_conv, d)
        return shapes

    def _head_shapes(self) -> dict[str, tuple[int, ...]]:
        d, r, v = self.hidden_size, self.markov_rank, self.vocab_size
        shapes: dict[str, tuple[int, ...]] = {}
        if self.slot_embeddings:
            shapes["slot_embed"] = (self.block_size - 1, d)
        if self.markov_type == "attention":
            shapes |= self._attention_head_shapes()
        elif self.markov_type:
            shapes["markov_head.markov_w1.weight"] = (v, r)
        if self.markov_type == "gated":
            shapes |= {"markov_head.gate_proj.weight": (r, d + r), "markov_head.gate_proj.bias": (r,)}
        if self.markov_type == "rnn":
            shapes |= {"markov_head.joint_proj.weight": (3 * r, 2 * r + d), "markov_head.joint_proj.bias": (3 * r,)}
        if self.markov_type:
            shapes["markov_head.markov_w2.weight"] = (self.draft_vocab_size, r)
        if self.family == "dflash2":
            shapes["candidate_selector.predecessor_codebook"] = (v, self.selector_rank)
            shapes["candidate_selector.successor_codebook"] = (v, self.selector_rank)
            shapes["candidate_selector.hidden_projection.weight"] = (self.selector_rank, d)
        if self.confidence:
            shapes["confidence_head.proj.weight"] = (1, d + r * self.confidence_with_markov)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    def _attention_head_shapes(self) -> dict[str, tuple[int, ...]]:
        d, r, f = self.hidden_size, self.markov_rank, self.head_mlp
        inner = self.head_heads * self.head_dim_attention
        shapes: dict[str, tuple[int, ...]] = {
            "embed_norm.weight": (d,),
            "state_norm.weight": (d,),
            "ctx_norm.weight": (d,),
            "in_proj.weight": (r, 2 * d),  # the predecessor's columns, then the state's
            "attn_norm.weight": (r,),
            "q_proj.weight": (inner, r),
            "k_proj.weight": (inner, d),
            "v_proj.weight": (inner, d),
            "q_norm.weight": (self.head_dim_attention,),
            "k_norm.weight": (self.head_dim_attention,),
            "o_proj.weight": (r, inner),
            "mlp_norm.weight": (r,),
            "gate_p.weight": (f, r),
            "up.weight": (f, r),
            "down.weight": (r, f),
            "out_norm.weight": (r,),
        }
        if self.head_anchor:
            shapes |= {"anchor_type": (d,), "anchor_norm.weight": (d,)}
        if self.head_gate != "none":
            shapes |= {"gate_proj.weight": (self.head_heads, r + inner), "gate_proj.bias": (self.head_heads,)}
        return {f"markov_head.{name}": shape for name, shape in shapes.items()}

    def parameter_count(self) -> int:
        """Number of the drafter's own parameters, without the embedding and head it borrows."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())
