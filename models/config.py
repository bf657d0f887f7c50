"""One normalised decoder configuration from every config.json dialect.

The same model is written down in many ways: the rotary embedding under `rope_theta`, `rope_scaling` or
`rope_parameters`, `head_dim` present or implied, one stop id or a list.  `DecoderConfig.from_dict` reads them all into
one frozen record, notes every default that matters, and refuses whatever the decoders would compute wrongly.

Every rotary variant is one blend.  With w_i = theta^(-2i / d) and a share keep_i in [0, 1] of it left alone,

    inverse frequency_i = w_i * (keep_i + (1 - keep_i) / factor)

where keep is 1 (default), 0 (linear), or falls from 1 to 0 as the wavelength grows (llama3, yarn).
Tests: tests/test_config.py.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

MODEL_TYPES = ("qwen3", "qwen2", "llama", "mistral")
EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok")
ROPE_KINDS = ("default", "linear", "llama3", "yarn")
ROPE_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
ROPE_ATTENTION = ("attention_factor", "mscale", "mscale_all_dim")
ROPE_OTHERS = ("rope_type", "rope_theta", "original_max_position_embeddings", "partial_rotary_factor", "truncate")


class ConfigError(ValueError):
    """A config.json that is missing, malformed, contradictory, or describes a model the decoders do not implement."""


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding (Su et al. 2021, arXiv 2104.09864) and its long-context variants.

    `factor` is the context extension and `original_positions` the context before it, which llama3 and yarn need; the
    other fields belong to one variant each.  `attention_factor` None: computed from `factor` and the mscales.
    """

    kind: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.kind not in ROPE_KINDS:
            raise ConfigError(f"rope type {self.kind!r} is not supported; supported are {', '.join(ROPE_KINDS)}")
        if self.theta <= 1 or self.factor < 1:
            raise ConfigError(f"rope needs theta above 1 and factor of at least 1, got {self.theta} and {self.factor}")
        if self.kind in ("llama3", "yarn") and self.original_positions < 1:
            raise ConfigError(f"{self.kind} rope needs original_max_position_embeddings, the context before scaling")
        if self.low_freq_factor >= self.high_freq_factor or self.beta_slow > self.beta_fast:
            raise ConfigError("rope needs low_freq_factor below high_freq_factor and beta_slow not above beta_fast")

    def frequencies(self, head_dim: int) -> tuple[np.ndarray, float]:
        """Inverse frequencies [head_dim / 2] in float64, and the factor that multiplies cos and sin.

        Pair i turns by frequency_i * t at position t.  Keep them in float32 or better: in bf16 the angle at position
        30,000 is off by 34 radians.
        """
        plain = self.theta ** -(np.arange(0, head_dim, 2) / head_dim)  # [head_dim / 2]
        if self.kind == "default":
            return plain, 1.0
        if self.kind == "linear":
            return plain / self.factor, 1.0
        keep = self._llama3_keep(plain) if self.kind == "llama3" else self._yarn_keep(head_dim)
        return plain * (keep + (1 - keep) / self.factor), self._attention()

    def _llama3_keep(self, plain: np.ndarray) -> np.ndarray:
        """Llama 3.1: linear in the number of turns that a pair makes within the original context."""
        turns = self.original_positions * plain / (2 * math.pi)
        return np.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0, 1)

    def _yarn_keep(self, head_dim: int) -> np.ndarray:
        """YaRN (Peng et al. 2023, arXiv 2309.00071, section 3.2): linear in the pair index between two turn counts."""

        def index_of(turns: float) -> float:
            return head_dim * math.log(self.original_positions / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        width = high - low or 0.001  # the published code's guard
        return 1 - np.clip((np.arange(head_dim // 2) - low) / width, 0, 1)

    def _attention(self) -> float:
        """YaRN, section 3.4: 0.1 ln(factor) + 1, or the ratio of two such terms when both mscales are given."""
        if self.kind != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        growth = 0.1 * math.log(self.factor)
        if self.mscale and self.mscale_all_dim:
            return (self.mscale * growth + 1) / (self.mscale_all_dim * growth + 1)
        return growth + 1


@dataclass(frozen=True)
class DecoderConfig:
    """A dense Qwen3, Qwen2, Llama or Mistral decoder, in one vocabulary.

    `tied`: the output head is the embedding.  `qk_norm`: RMSNorm on each head's query and key (Qwen3).  `max_positions`
    is `max_position_embeddings` as written.  `notes`: one sentence for each default taken that could matter.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_positions: int
    tied: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    eos_ids: tuple[int, ...]
    dtype: str
    notes: tuple[str, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Read folder/config.json; ConfigError, naming the file, where it is missing, not JSON, or refused."""
        path = Path(folder) / "config.json"
        try:
            return cls.from_dict(json.loads(path.read_bytes()))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}; a model folder needs a config.json") from None
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not valid JSON ({error})") from None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Self:
        """Normalise one parsed config.json; ConfigError says what is wrong and what to do."""
        if not isinstance(raw, Mapping):
            raise ConfigError(f"a config is a JSON object, got {type(raw).__name__}")
        model_type = raw.get("model_type")
        if model_type not in MODEL_TYPES:
            raise ConfigError(f"model_type {model_type!r} is not supported; supported are {', '.join(MODEL_TYPES)}")
        _refuse_other_layers(raw)
        _refuse_sliding_window(raw)

        notes: list[str] = []

        def noted(key: str, default: Any) -> Mapping[str, Any]:
            if raw.get(key) is not None:
                return raw
            notes.append(f"{key} is missing: taken as {default}")
            return {key: default}

        num_heads = size(raw, "num_attention_heads")
        num_kv_heads = size(noted("num_key_value_heads", num_heads), "num_key_value_heads")
        if num_heads % num_kv_heads:
            raise ConfigError(f"{num_heads} attention heads cannot share {num_kv_heads} key-value heads evenly")
        hidden_size = size(raw, "hidden_size")
        # Qwen3's default is a constant, not hidden_size / num_attention_heads.
        implied, rest = (128, 0) if model_type == "qwen3" else divmod(hidden_size, num_heads)
        if raw.get("head_dim") is None and rest:
            raise ConfigError(f"head_dim is missing and {num_heads} heads do not divide hidden_size {hidden_size}")
        head_dim = size(noted("head_dim", implied), "head_dim")
        if head_dim % 2:
            raise ConfigError(f"head_dim must be even for the rotary embedding, got {head_dim}")
        all_bias = model_type in ("qwen3", "llama") and flag(raw, "attention_bias")

        return cls(
            model_type=model_type,
            vocab_size=size(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=size(raw, "intermediate_size"),
            num_layers=size(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=number(noted("rms_norm_eps", 1e-6), "rms_norm_eps"),
            rope=read_rope(raw, notes),
            max_positions=size(raw, "max_position_embeddings"),
            tied=flag(noted("tie_word_embeddings", False), "tie_word_embeddings"),
            qk_norm=model_type == "qwen3",
            qkv_bias=model_type == "qwen2" or all_bias,
            o_bias=all_bias,
            mlp_bias=model_type == "llama" and flag(raw, "mlp_bias"),
            eos_ids=_eos_ids(raw, notes),
            dtype=str(raw.get("dtype") or raw.get("torch_dtype") or "float32"),
            notes=tuple(notes),
        )

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model by its hub name; `lm_head.weight` only when the head is a tensor of its own."""
        d, f = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        linears = {
            "self_attn.q_proj": (q, d, self.qkv_bias),
            "self_attn.k_proj": (kv, d, self.qkv_bias),
            "self_attn.v_proj": (kv, d, self.qkv_bias),
            "self_attn.o_proj": (d, q, self.o_bias),
            "mlp.gate_proj": (f, d, self.mlp_bias),
            "mlp.up_proj": (f, d, self.mlp_bias),
            "mlp.down_proj": (d, f, self.mlp_bias),
        }
        norms = {"input_layernorm": d, "post_attention_layernorm": d}
        if self.qk_norm:
            norms |= {"self_attn.q_norm": self.head_dim, "self_attn.k_norm": self.head_dim}

        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab_size, d)}
        for layer in range(self.num_layers):
            prefix = f"model.layers.{layer}."
            for name, (rows, columns, bias) in linears.items():
                shapes[f"{prefix}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{prefix}{name}.bias"] = (rows,)
            for name, width in norms.items():
                shapes[f"{prefix}{name}.weight"] = (width,)
        shapes["model.norm.weight"] = (d,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """Bytes of key-value cache that one position takes, at `itemsize` bytes per number."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * itemsize

    def parameter_count(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(math.prod(shape) for shape in self.tensor_shapes().values())


def size(raw: Mapping[str, Any], key: str) -> int:
    """A positive integer of the config, or a ConfigError."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{key} must be a positive integer, got {value!r}")
    return value


def number(raw: Mapping[str, Any], key: str) -> float:
    """A positive finite number of the config, or a ConfigError."""
    value = raw.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{key} must be a positive number, got {value!r}")
    return float(value)


def flag(raw: Mapping[str, Any], key: str, default: bool = False) -> bool:
    """A true or false of the config, the default where it says nothing, or a ConfigError."""
    value = default if raw.get(key) is None else raw[key]
    if not isinstance(value, bool):
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    return value


def _eos_ids(raw: Mapping[str, Any], notes: list[str]) -> tuple[int, ...]:
    value = raw.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(token, bool) or not isinstance(token, int) or token < 0 for token in ids):
        raise ConfigError(f"eos_token_id must be a token id, a list of them, or null, got {value!r}")
    if not ids:
        notes.append("eos_token_id is missing: the config names no stop id")
    return tuple(dict.fromkeys(ids))


def _refuse_other_layers(raw: Mapping[str, Any]) -> None:
    """Refuse what changes the layers themselves: experts, quantised weights, another activation."""
    experts = [key for key in EXPERT_FIELDS if raw.get(key)]
    if experts:
        raise ConfigError(f"{experts[0]} is set: mixture-of-experts models are not supported, use a dense model")
    if raw.get("quantization_config"):
        raise ConfigError("quantization_config is set: use the unquantised checkpoint of this model")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {raw['hidden_act']!r} is not supported, only 'silu' is")


def _refuse_sliding_window(raw: Mapping[str, Any]) -> None:
    """Refuse a window that is really used: full attention would quietly give other numbers.

    Mistral always uses its window (4096 where the field is missing, none where it is null), Qwen only under
    `use_sliding_window` and where `layer_types` does not say otherwise, Llama never.
    """
    layers = raw.get("layer_types")
    if layers is not None:
        if not isinstance(layers, list) or len(layers) != size(raw, "num_hidden_layers"):
            raise ConfigError(f"layer_types must list one type for each of num_hidden_layers, got {layers!r}")
        if set(map(str, layers)) != {"full_attention"}:
            raise ConfigError(f"layer_types holds {sorted(set(map(str, layers)))}, only full_attention is supported")

    qwen_uses_it = raw["model_type"].startswith("qwen") and flag(raw, "use_sliding_window") and layers is None
    window = raw.get("sliding_window", 4096)
    if window is not None and (qwen_uses_it or raw["model_type"] == "mistral"):
        positions = size(raw, "max_position_embeddings")
        if size({"sliding_window": window}, "sliding_window") < positions:
            raise ConfigError(
                f"a sliding window of {window} within {positions} positions is not supported, only full attention is; "
                f"for contexts that fit the window, set max_position_embeddings to {window} in a copy of the config"
            )


def read_rope(raw: Mapping[str, Any], notes: list[str]) -> Rope:
    """The rotary embedding from whichever public spelling the config uses."""
    fields = rope_fields(raw)
    if fields.get("partial_rotary_factor", 1) != 1:
        raise ConfigError(f"partial_rotary_factor {fields['partial_rotary_factor']} is not supported, only 1 is")
    unknown = sorted(fields.keys() - {*ROPE_NUMBERS, *ROPE_ATTENTION, *ROPE_OTHERS})
    if unknown:
        notes.append(f"rope fields that are not known here and not used: {', '.join(unknown)}")
    if "rope_theta" not in fields:
        notes.append("rope_theta is missing: taken as 10000")
    kind, theta = fields.get("rope_type", "default"), number({"rope_theta": 10_000} | fields, "rope_theta")
    if kind not in ROPE_KINDS or kind == "default":
        return Rope(kind, theta)

    needed = ("factor", "low_freq_factor", "high_freq_factor") if kind == "llama3" else ("factor",)
    numbers = {key: number(fields, key) for key in (*ROPE_NUMBERS, *ROPE_ATTENTION) if key in fields or key in needed}
    if kind == "linear":
        return Rope(kind, theta, numbers["factor"])
    original = {"original_max_position_embeddings": raw.get("max_position_embeddings")} | fields
    if "original_max_position_embeddings" not in fields:
        notes.append(f"{kind} rope without original_max_position_embeddings: taken as max_position_embeddings")
    return Rope(
        kind,
        theta,
        original_positions=size(original, "original_max_position_embeddings"),
        truncate=flag(fields, "truncate", default=True),
        **numbers,
    )


def rope_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Every rope field wherever it is written; a field written twice must agree with itself."""
    top = {key: raw.get(key) for key in ("rope_theta", "original_max_position_embeddings", "partial_rotary_factor")}
    fields: dict[str, Any] = {}
    for source in (top, _flat(raw, "rope_parameters"), _flat(raw, "rope_scaling")):
        for written, value in source.items():
            key = "rope_type" if written == "type" else written
            if value is not None and fields.setdefault(key, value) != value:
                raise ConfigError(f"the config gives {key} as {fields[key]!r} and as {value!r}: keep the right one")
    return fields


def _flat(raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """One rope block; blocks per attention type are folded into one when all are equal."""
    block = raw.get(key) or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{key} must be an object or null, got {block!r}")
    written = {name: value for name, value in block.items() if value is not None}
    layered = [value for value in written.values() if isinstance(value, Mapping)]
    if not layered:
        return written
    if len(layered) < len(written) or any(value != layered[0] for value in layered):
        raise ConfigError(f"{key} differs between attention types ({', '.join(written)}), only one rope is supported")
    return layered[0]
