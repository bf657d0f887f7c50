"""What each public config.json dialect of block drafters says, under the field names of `DrafterConfig`.

Five projects write block drafters down:

    deepspec, specfloor   a copy of the target's config with the drafter's keys beside the target's
    zlab, specforge       drafter keys inside `dflash_config`, where they win over a copy beside it
    speculators           widths inside `transformer_layer_config`; taps are stored one higher than decoder layers

The one trap that no tensor shape shows is what row k of the block predicts: the token at position p + k + 1 behind an
anchor at position p ("from the anchor"), or the token at p + k itself ("in place", row 0 unused).  It follows from the
file, or the user is asked: reading it wrongly costs nearly all accepted tokens and raises no error later.
Tests: tests/test_drafter_config.py.
"""

import math
from collections.abc import Mapping
from typing import Any

from models.config import ConfigError, Rope, flag, number, read_rope, rope_fields, size

# architectures -> what kind of drafter its authors trained
KINDS = {
    "Qwen3DSparkModel": "dspark",
    "Gemma4DSparkModel": "dspark",
    "DSparkDraftModel": "dspark",
    "DFlashDraftModel": "dflash",
    "DFlash2DraftModel": "dflash2",
}
SPECFORGE_KEYS = {"draft_vocab_size", "projector_type"}
SPECFLOOR_KEYS = {"short_conv", "slot_embed", "nominate_alpha"}
MARKOV_TYPES = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn", "attn": "attention"}
GATES = ("none", "state_output")
WINDOW_RULES = {"zlab": "query", "specforge": "context", "speculators": "anchor"}
REFUSED = ("attention_bias", "enable_moe_block", "hidden_size_per_layer_input", "causal_draft_mask", "shift_label")
DEFAULT_BLOCK = 16


def read_fields(raw: Mapping[str, Any], in_place: bool | None) -> dict[str, Any]:
    """The fields of a `DrafterConfig` from one parsed config.json; ConfigError says what is wrong and what to do.

    `in_place` settles what the rows predict where the file leaves it open.
    """
    kind, dialect, fields = _recognise(raw)
    _refuse_other_drafters(fields)
    notes: list[str] = []
    vocab_size, num_layers = size(fields, "vocab_size"), size(fields, "num_hidden_layers")
    causal, windows = _visibility(kind, dialect, fields, num_layers, notes)
    return dict(
        dialect=dialect,
        in_place=_in_place(kind, dialect, fields, in_place),
        block_size=_block_size(dialect, fields, notes),
        taps=_taps(dialect, fields, num_layers, notes),
        mask_id=_token(fields, "mask_token_id"),
        target_layers=_optional_size(fields, "num_target_layers"),
        vocab_size=vocab_size,
        draft_vocab_size=_optional_size(fields, "draft_vocab_size") or vocab_size,
        hidden_size=size(fields, "hidden_size"),
        intermediate_size=size(fields, "intermediate_size"),
        num_layers=num_layers,
        num_heads=size(fields, "num_attention_heads"),
        rms_norm_eps=number(_noted(fields, "rms_norm_eps", 1e-6, notes), "rms_norm_eps"),
        causal=causal,
        windows=windows,
        window_rule=WINDOW_RULES.get(dialect, "query"),
        **_layers(fields, notes),
        **_head(kind, fields),
        notes=tuple(notes),
    )


def _recognise(raw: Mapping[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """What was trained (dflash, dspark or dflash2), who wrote the file, and all its keys on one level.

    `speculators_model_type` is asked first: the class names that speculators writes are other projects' too.
    """
    if raw.get("speculators_model_type") is not None:
        kind, widths = raw["speculators_model_type"], _block(raw, "transformer_layer_config")
        if kind not in KINDS.values():
            raise ConfigError(
                f"speculators_model_type {kind!r} is not supported; supported are dflash, dspark, dflash2"
            )
        if not widths:
            raise ConfigError("transformer_layer_config is missing, where speculators keeps the widths: restore it")
        return kind, "speculators", widths | _given(raw)

    fields = _given(raw) | _block(raw, "dflash_config")
    named = raw.get("architectures")
    architecture = str(named[0]) if isinstance(named, list) and named else ""
    if architecture not in KINDS:
        raise ConfigError(f"architectures {named!r} is not a known block drafter; known are {', '.join(KINDS)}")
    kind = "dspark" if fields.get("projector_type") == "dspark" else KINDS[architecture]
    if kind != "dflash2" and (architecture == "DSparkDraftModel" or fields.keys() & SPECFORGE_KEYS):
        return kind, "specforge", fields
    if kind == "dspark":
        return kind, "specfloor" if fields.keys() & SPECFLOOR_KEYS else "deepspec", fields
    return kind, "zlab", fields


def _block(raw: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The keys of a nested object; empty where the object is absent."""
    block = raw.get(key) or {}
    if not isinstance(block, Mapping):
        raise ConfigError(f"{key} must be an object or null, got {block!r}")
    return _given(block)


def _given(block: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that hold a value: null means absent."""
    return {key: value for key, value in block.items() if value is not None}


def _refuse_other_drafters(fields: dict[str, Any]) -> None:
    """Refuse what would load as something else: other heads, other layers, quantised weights."""
    if fields.get("projector_type") not in (None, "dflash", "dspark"):
        raise ConfigError(f"projector_type {fields['projector_type']!r} is another kind of drafter, not supported")
    if fields.get("quantization_config"):
        raise ConfigError("quantization_config is set: use the unquantised checkpoint of this drafter")
    for key in REFUSED:
        if fields.get(key):
            raise ConfigError(f"{key} is set to {fields[key]!r}: drafters with it are not supported")


def _in_place(kind: str, dialect: str, fields: dict[str, Any], asked: bool | None) -> bool:
    """Whether row k predicts position p + k: as the file says, else as its kind was trained, else as the user says."""
    if "sample_from_anchor" in fields:
        stored, reason = not flag(fields, "sample_from_anchor"), f"sample_from_anchor {fields['sample_from_anchor']}"
    elif (kind, dialect) != ("dspark", "speculators"):
        stored, reason = kind != "dspark", f"a {kind} file of {dialect} without sample_from_anchor"
    elif asked is None:
        raise ConfigError(
            "sample_from_anchor is missing, and DSpark drafters that speculators saved before July 2026 exist in both "
            "slot conventions: say which one this is with --slot-convention {anchor,in-place}, in Python in_place=; "
            "with the wrong one hardly a draft is accepted"
        )
    else:
        return asked
    if asked not in (None, stored):
        right, wrong = ("in-place", "anchor") if stored else ("anchor", "in-place")
        raise ConfigError(
            f"the slot convention of this file is {right} ({reason}): --slot-convention {wrong} (in_place={asked}) "
            "would misplace every proposal: leave it out (a file that needs it, measured beside this one, may be given "
            "sample_from_anchor in its config.json instead)"
        )
    return stored


def _block_size(dialect: str, fields: dict[str, Any], notes: list[str]) -> int:
    if dialect == "zlab":
        fields = _noted(fields, "block_size", DEFAULT_BLOCK, notes)
    return size(fields, "block_size")


def _taps(dialect: str, fields: dict[str, Any], num_layers: int, notes: list[str]) -> tuple[int, ...]:
    """Decoder layer ids; speculators stores them one higher, and old z-lab files leave them to a rule."""
    key = "aux_hidden_state_layer_ids" if dialect == "speculators" else "target_layer_ids"
    stored = fields.get(key)
    if stored is None and dialect == "zlab":
        stored = spread_taps(size(fields, "num_target_layers"), num_layers)
        notes.append(f"target_layer_ids is missing: taken as {stored}")
    if not isinstance(stored, list) or any(isinstance(tap, bool) or not isinstance(tap, int) for tap in stored):
        raise ConfigError(f"{key} must be a list of layer ids, got {stored!r}")
    return tuple(tap - (dialect == "speculators") for tap in stored)


def spread_taps(target_layers: int, taps: int) -> list[int]:
    """Where z-lab taps a target if nothing else is said: evenly from layer 1 to the fourth-last, a lone one midway."""
    most = max(1, target_layers - 3)
    if taps > most:
        raise ConfigError(f"{taps} taps do not fit into a target of {target_layers} layers: take at most {most}")
    if taps == 1:
        return [target_layers // 2]
    return [round(1 + i * (target_layers - 4) / (taps - 1)) for i in range(taps)]


def _visibility(
    kind: str, dialect: str, fields: dict[str, Any], num_layers: int, notes: list[str]
) -> tuple[tuple[bool, ...], tuple[int | None, ...]]:
    """Per layer, whether the block is causal and how wide its sliding window is."""
    layers = fields.get("layer_types")
    if layers is None:
        if flag(fields, "use_sliding_window"):
            raise ConfigError("use_sliding_window is true but layer_types does not say which layers slide: add it")
        layers = ["full_attention"] * num_layers
    if not isinstance(layers, list) or len(layers) != num_layers:
        raise ConfigError(f"layer_types must list one type for each of num_hidden_layers, got {layers!r}")
    unknown = sorted(set(map(str, layers)) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ConfigError(f"layer_types holds {unknown}, only full_attention and sliding_attention are supported")

    sliding = [layer == "sliding_attention" for layer in layers]
    if dialect in ("deepspec", "specfloor") and (any(sliding) or flag(fields, "is_causal")):
        raise ConfigError("layer_types or is_causal limits what a DeepSpec drafter sees, which always sees everything")
    if any(sliding) and fields.get("use_sliding_window") is False:
        raise ConfigError("layer_types holds sliding_attention but use_sliding_window is false: correct one of them")
    if any(sliding) and dialect == "zlab" and "use_sliding_window" not in fields:
        notes.append("use_sliding_window is missing: the window of the sliding layers is taken as written")
    windows = tuple(size(fields, "sliding_window") if slides else None for slides in sliding)

    if dialect == "speculators":
        both_ways = flag(fields, "sliding_window_non_causal", default=kind == "dflash2")
        return tuple(slides and not both_ways for slides in sliding), windows
    if "is_causal" not in fields:
        return tuple(sliding), windows
    return (flag(fields, "is_causal"),) * num_layers, windows


def _layers(fields: dict[str, Any], notes: list[str]) -> dict[str, Any]:
    """Layer type, head sizes, rotary embedding and scalings."""
    if "Gemma4DSparkModel" in (fields.get("architectures") or ()):
        return _gemma_layers(fields)
    if fields.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"hidden_act {fields['hidden_act']!r} is not supported, only 'silu' is")
    if "rope_theta" not in rope_fields(fields):
        raise ConfigError("rope_theta is missing: add the target's, at top level or in rope_parameters")
    head_dim = size(_noted(fields, "head_dim", 128, notes), "head_dim")
    return {
        "architecture": "qwen3",
        "num_kv_heads": size(fields, "num_key_value_heads"),
        "head_dim": head_dim,
        "rope": read_rope(fields, notes),
        "rotary_dims": head_dim // 2,
        "embedding_scale": number({"input_embedding_scale": 1.0} | fields, "input_embedding_scale"),
        "output_multiplier": number({"output_multiplier": 1.0} | fields, "output_multiplier"),
        "softcap": _softcap(fields),
    }


def _gemma_layers(fields: dict[str, Any]) -> dict[str, Any]:
    """Gemma-4 full-attention layers: their own head size, and only some of the rotary frequencies turn."""
    if fields.get("hidden_activation") != "gelu_pytorch_tanh":
        raise ConfigError(f"hidden_activation must be 'gelu_pytorch_tanh', got {fields.get('hidden_activation')!r}")
    rope = _block(_block(fields, "rope_parameters"), "full_attention")
    if rope.get("rope_type") != "proportional":
        raise ConfigError(f"rope_parameters.full_attention must be of rope_type 'proportional', got {rope!r}")
    head_dim, shared = size(fields, "global_head_dim"), flag(fields, "attention_k_eq_v")
    share = number(rope, "partial_rotary_factor")
    if share > 1:
        raise ConfigError(f"partial_rotary_factor must not exceed 1, got {share}")
    return {
        "architecture": "gemma4",
        "num_kv_heads": size(fields, "num_global_key_value_heads" if shared else "num_key_value_heads"),
        "head_dim": head_dim,
        "rope": Rope(theta=number(rope, "rope_theta")),
        "rotary_dims": int(share * head_dim / 2),
        "embedding_scale": math.sqrt(size(fields, "hidden_size")),
        "softcap": _softcap(fields),
        "shared_values": shared,
    }


def _softcap(fields: dict[str, Any]) -> float | None:
    return number(fields, "final_logit_softcapping") if fields.get("final_logit_softcapping") else None


def _head(kind: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What stands on the layers: family, Markov or prefix-attention head, selector, convolutions, slot embeddings."""
    rank = fields.get("markov_rank") or 0
    if rank and kind != "dspark":
        raise ConfigError(f"markov_rank {rank} in a {kind} drafter: only DSpark drafters have a Markov head")
    head: dict[str, Any] = {"family": "dflash", "slot_embeddings": flag(fields, "slot_embed")}
    if kind == "dflash2":
        return head | {
            "family": "dflash2",
            "lattice": size(fields, "selector_top_k"),
            "selector_rank": size(fields, "selector_rank"),
            "short_conv": size(fields, "conv_group_size"),
            "conv_taps": size(fields, "conv_kernel_size"),
        }

    head["short_conv"] = size(fields, "short_conv_group_size") if _has_short_conv(fields) else 0
    if "short_conv_kernel_size" in fields:
        head["conv_taps"] = size(fields, "short_conv_kernel_size")
    if kind == "dspark":
        head["confidence"] = flag(fields, "enable_confidence_head")
    if not rank:
        return head
    written = fields.get("markov_head_type")
    if written not in MARKOV_TYPES:
        raise ConfigError(f"markov_head_type must be one of {', '.join(MARKOV_TYPES)}, got {written!r}")
    head |= {
        "family": "attention" if written == "attn" else "dspark",
        "markov_rank": size(fields, "markov_rank"),
        "markov_type": MARKOV_TYPES[written],
        "confidence_with_markov": head["confidence"] and flag(fields, "confidence_head_with_markov"),
    }
    return head | _attention_head(fields) if written == "attn" else head


def _has_short_conv(fields: dict[str, Any]) -> bool:
    """Training writes `short_conv`, serving a kernel size; either switches the convolutions on."""
    served = "short_conv_kernel_size" in fields
    if served and fields.get("short_conv") is False:
        raise ConfigError("short_conv is false but short_conv_kernel_size is given: remove one of them")
    return served or flag(fields, "short_conv")


def _attention_head(fields: dict[str, Any]) -> dict[str, Any]:
    """The prefix-attention head; nothing is defaulted, because the released and the training defaults differ."""
    gate = fields.get("markov_gate_mode")
    if gate not in GATES:
        raise ConfigError(f"markov_gate_mode must be one of {', '.join(GATES)}, got {gate!r}")
    if not isinstance(fields.get("markov_anchor_kv"), bool):
        raise ConfigError(f"markov_anchor_kv must be true or false, got {fields.get('markov_anchor_kv')!r}")
    return {
        "head_heads": size(fields, "markov_num_heads"),
        "head_dim_attention": size(fields, "markov_head_dim"),
        "head_mlp": size(fields, "markov_mlp_hidden"),
        "head_gate": gate,
        "head_anchor": fields["markov_anchor_kv"],
        "lattice": size(fields, "nominate_topk") if _nominates(fields.get("nominate_alpha")) else 0,
    }


def _nominates(alpha: Any) -> bool:
    """Whether a prefix-attention drafter was trained to nominate candidates: weight nominate_alpha above 0."""
    if alpha is not None and (isinstance(alpha, bool) or not isinstance(alpha, int | float)):
        raise ConfigError(f"nominate_alpha must be a number, got {alpha!r}")
    return (alpha or 0) > 0


def _noted(fields: dict[str, Any], key: str, default: Any, notes: list[str]) -> dict[str, Any]:
    """The fields, with a default for a missing key that is noted."""
    if key not in fields:
        notes.append(f"{key} is missing: taken as {default}")
    return {key: default} | fields


def _optional_size(fields: dict[str, Any], key: str) -> int | None:
    return size(fields, key) if key in fields else None


def _token(fields: dict[str, Any], key: str) -> int:
    value = fields.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{key} must be a token id, got {value!r}")
    return value
