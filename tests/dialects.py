"""Small random drafters, written as each project writes them: config.json, tensor names, copies, shards.

`as_json` is the inverse of `DrafterConfig.from_dict`, so that a drafter is described once, as a `DrafterConfig`, and
written in the dialect it names.  `CASES` has one of every kind; `drafter_configs` draws others.
"""

import json
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from models.checkpoint import INDEX, SINGLE
from models.config import Rope
from models.drafter_config import DrafterConfig

DTYPES = {"float16": "F16", "float32": "F32", "float64": "F64", "int64": "I64", "bool": "BOOL"}
RULES = {"deepspec": "query", "specfloor": "query", "zlab": "query", "specforge": "context", "speculators": "anchor"}
GEMMA = {"architecture": "gemma4", "hidden_size": 36, "embedding_scale": 6.0, "head_dim": 16, "rotary_dims": 2}
HEAD = {"family": "attention", "markov_type": "attention", "markov_rank": 12, "head_heads": 2, "head_dim_attention": 6}


def tiny(dialect="deepspec", **fields):
    """A drafter of 2 layers for a target of 6 layers, width 32 and 67 tokens; in place where that is the custom."""
    family = fields.get("family", "dflash")
    defaults = {
        "family": family,
        "dialect": dialect,
        "architecture": "qwen3",
        "in_place": dialect not in ("deepspec", "specfloor") and family != "dspark",
        "block_size": 5,
        "taps": (1, 2, 4),
        "mask_id": 65,
        "target_layers": None if dialect == "speculators" else 6,
        "vocab_size": 67,
        "draft_vocab_size": fields.get("vocab_size", 67),
        "hidden_size": 32,
        "intermediate_size": 40,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope": Rope(theta=1e6),
        "rotary_dims": fields.get("head_dim", 8) // 2,
        "causal": (False,) * fields.get("num_layers", 2),
        "windows": (None,) * fields.get("num_layers", 2),
        "window_rule": RULES[dialect],
    }
    if family == "dflash2":
        defaults |= {"lattice": 6, "selector_rank": 5, "short_conv": 16}
    return DrafterConfig(**(defaults | fields))


def dspark(dialect="deepspec", markov_type="vanilla", **fields):
    """A drafter with a Markov head and a confidence head that sees the predecessor."""
    head = {"markov_type": markov_type, "markov_rank": 6, "confidence": True, "confidence_with_markov": True}
    return tiny(dialect, family="dspark", **(head | fields))


CASES = {
    "deepspec-dflash": tiny(),
    "deepspec-vanilla": dspark(),
    "deepspec-gated": dspark(markov_type="gated", taps=(-1, 3), confidence_with_markov=False),
    "deepspec-rnn": dspark(markov_type="rnn", confidence=False, confidence_with_markov=False),
    "deepspec-in-place": dspark(in_place=True),
    "gemma-separate": dspark(**GEMMA, softcap=5.0),
    "gemma-shared": dspark(**GEMMA, shared_values=True, num_kv_heads=1),
    "specfloor-final": tiny("specfloor", **HEAD, head_mlp=20, lattice=6, short_conv=16, slot_embeddings=True),
    "specfloor-gate": tiny("specfloor", **HEAD, head_mlp=20, head_gate="state_output", head_anchor=True),
    "specfloor-conv": dspark("specfloor", short_conv=8),
    "specfloor-slot": dspark("specfloor", slot_embeddings=True),
    "zlab-full": tiny("zlab"),
    "zlab-causal": tiny("zlab", causal=(True, False), windows=(6, None)),
    "zlab-scaled": tiny("zlab", windows=(6, 6), embedding_scale=1.75, output_multiplier=0.6, softcap=3.5),
    "zlab-from-anchor": tiny("zlab", in_place=False),
    "zlab-dflash2": tiny("zlab", family="dflash2", windows=(6, 6)),
    "specforge-dflash": tiny("specforge", causal=(False, True), windows=(None, 6)),
    "specforge-dspark": dspark("specforge"),
    "specforge-rnn": dspark("specforge", markov_type="rnn", confidence=False, confidence_with_markov=False),
    "speculators-dflash": tiny("speculators", causal=(True, False), windows=(6, None)),
    "speculators-dflash-reduced": tiny("speculators", draft_vocab_size=40),
    "speculators-dspark": dspark("speculators"),
    "speculators-dspark-reduced": dspark("speculators", markov_type="rnn", draft_vocab_size=40),
    "speculators-dspark-in-place": dspark("speculators", in_place=True, confidence_with_markov=False),
    "speculators-dflash2": tiny("speculators", family="dflash2", windows=(6, None)),
}


def as_json(config):
    """The config.json that `config.dialect` writes for this drafter."""
    return WRITERS[config.dialect](config)


def random_tensors(config, seed=0):
    """Normalised name -> float32 array on the bfloat16 grid: no norm is one, no bias zero, no convolution idle."""
    random = np.random.default_rng(seed)
    drawn = {}
    for name, shape in config.tensor_shapes().items():
        values = 0.2 * random.standard_normal(shape)
        if name.endswith(("norm.weight", "layer_scalar")):
            values += 1
        if name.endswith(("base_kernel", "k_base")):
            values[..., 0, :] += 1  # the current row passes through
        drawn[name] = on_bf16_grid(values)
    return drawn


def random_tables(config, seed=1):
    """A target's embedding and output head, [V, H] each."""
    random = np.random.default_rng(seed)
    shape = config.vocab_size, config.hidden_size
    return on_bf16_grid(random.standard_normal(shape)), on_bf16_grid(random.standard_normal(shape))


def random_d2t(config, seed=2):
    """A vocabulary map for a reduced draft vocabulary, int64 [Vd] of target id minus draft id; None for a full one."""
    if config.draft_vocab_size == config.vocab_size:
        return None
    drafted = np.random.default_rng(seed).choice(config.vocab_size, config.draft_vocab_size, replace=False)
    return np.sort(drafted) - np.arange(config.draft_vocab_size)


def on_bf16_grid(values):
    """Float32 values that bfloat16 holds exactly: the lower half of each word cut off."""
    return (np.asarray(values, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def published(config, tensors, embedding, head, d2t=None, *, copies=False):
    """The tensors as the dialect stores them; `copies`: as speculators did when it still saved embedding and head."""
    stored = dict(tensors)
    reduced = d2t is not None
    if config.dialect in ("deepspec", "specfloor") or copies:
        stored["embed_tokens.weight"] = embedding
    if config.dialect in ("deepspec", "specfloor") or copies or reduced:
        stored["lm_head.weight"] = head[np.arange(len(d2t)) + d2t] if reduced else head
    if reduced:
        stored |= {"d2t": d2t, "t2d": np.isin(np.arange(config.vocab_size), np.arange(len(d2t)) + d2t)}
    return stored


def save(folder, raw, stored, *, shards=1, bf16=False):
    """Write a config.json and tensors as one file, or as several with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    if shards == 1:
        _save_file(folder / SINGLE, stored, bf16)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: stored[name] for name in list(stored)[shard::shards]}
        _save_file(folder / file, part, bf16)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return folder


def write_drafter(folder, config, seed=0, *, tables=None, shards=1, bf16=False, copies=False):
    """A random drafter in its own dialect: the folder and its tensors by normalised name."""
    tensors, (embedding, head) = random_tensors(config, seed), tables or random_tables(config)
    stored = published(config, tensors, embedding, head, random_d2t(config), copies=copies)
    return save(folder, as_json(config), stored, shards=shards, bf16=bf16), tensors


def _save_file(path, tensors, bf16):
    """A safetensors file; `bf16` stores the float32 arrays, which lie on that grid, as bfloat16."""
    header, data = {}, bytearray()
    for name, array in tensors.items():
        kind, words = DTYPES[array.dtype.name], np.ascontiguousarray(array)
        if bf16 and kind == "F32":
            kind, words = "BF16", (words.view(np.uint32) >> 16).astype(np.uint16)
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [len(data), len(data) + words.nbytes]}
        data += words.tobytes()
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def _widths(config):
    sliding = ["full_attention" if window is None else "sliding_attention" for window in config.windows]
    return {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta},
        "layer_types": sliding,
        "sliding_window": max((window for window in config.windows if window), default=None),
        "use_sliding_window": "sliding_attention" in sliding,
        "hidden_act": "silu",
        "attention_bias": False,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }


def _gemma_widths(config):
    heads = "num_global_key_value_heads" if config.shared_values else "num_key_value_heads"
    full = {
        "rope_type": "proportional",
        "rope_theta": config.rope.theta,
        "partial_rotary_factor": 2 * config.rotary_dims / config.head_dim,
    }
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    return _widths(config) | {
        "model_type": "gemma4_text",
        "hidden_act": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": config.head_dim,
        "head_dim": 4,
        "num_key_value_heads": 3,
        "num_global_key_value_heads": 3,
        heads: config.num_kv_heads,
        "attention_k_eq_v": config.shared_values,
        "rope_parameters": {"full_attention": full, "sliding_attention": sliding, "rope_theta": None},
        "sliding_window": 512,
        "final_logit_softcapping": config.softcap,
        "enable_moe_block": False,
        "hidden_size_per_layer_input": 0,
        "target_model_type": "gemma4",
    }


def _markov(config):
    """The Markov and confidence keys; the ones of a head that is switched off are not written."""
    names = {"attention": "attn"}
    keys = {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence}
    if config.confidence:
        keys["confidence_head_with_markov"] = config.confidence_with_markov
    if config.markov_rank:
        keys["markov_head_type"] = names.get(config.markov_type, config.markov_type)
    return keys


def _selector(config):
    return {
        "selector_rank": config.selector_rank,
        "selector_top_k": config.lattice,
        "conv_group_size": config.short_conv,
        "conv_kernel_size": config.conv_taps,
    }


def _block(config):
    return {"block_size": config.block_size, "mask_token_id": config.mask_id, "target_layer_ids": list(config.taps)}


def _convention(config, usual):
    return {} if config.in_place == usual else {"sample_from_anchor": not config.in_place}


def _causal(config):
    """`is_causal` only where it differs from what its absence means: sliding layers are causal."""
    if config.causal == tuple(window is not None for window in config.windows):
        return {}
    return {"is_causal": config.causal[0]}


def _deepspec(config):
    gemma = config.architecture == "gemma4"
    return {
        "architectures": ["Gemma4DSparkModel" if gemma else "Qwen3DSparkModel"],
        **(_gemma_widths(config) if gemma else _widths(config)),
        "num_target_layers": config.target_layers,
        "num_anchors": 512,
        **_block(config),
        **_markov(config),
        **_convention(config, usual=False),
    }


def _specfloor(config):
    head = {
        "markov_num_heads": config.head_heads,
        "markov_head_dim": config.head_dim_attention,
        "markov_mlp_hidden": config.head_mlp,
        "markov_gate_mode": config.head_gate,
        "markov_anchor_kv": config.head_anchor,
        "markov_out_scale": 0.35,
    }
    return _deepspec(config) | {
        **(head if config.family == "attention" else {"markov_anchor_kv": True}),
        "short_conv": config.short_conv > 0,
        "short_conv_group_size": config.short_conv or 16,
        "slot_embed": config.slot_embeddings,
        "nominate_alpha": 0.1 if config.lattice else 0.0,
        "nominate_topk": config.lattice or 16,
        "causal_draft_mask": False,
        "is_causal": False,
    }


def _zlab(config):
    scales = {
        "input_embedding_scale": config.embedding_scale,
        "output_multiplier": config.output_multiplier,
        "final_logit_softcapping": config.softcap,
    }
    second = config.family == "dflash2"
    return {
        "architectures": ["DFlash2DraftModel" if second else "DFlashDraftModel"],
        **_widths(config),
        "num_target_layers": config.target_layers,
        "dflash_config": {
            **_block(config),
            **{key: value for key, value in scales.items() if value not in (None, 1.0)},
            **(_selector(config) if second else {}),
            **_convention(config, usual=True),
        },
        **_causal(config),
    }


def _specforge(config):
    head = {"projector_type": "dspark", "attention_mode": "gqa", "confidence_head_alpha": 1.0, **_markov(config)}
    block = _block(config)
    return {
        "architectures": ["DSparkDraftModel" if config.markov_type else "DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        **_widths(config),
        "rope_theta": config.rope.theta,
        "dtype": "bfloat16",
        "num_target_layers": config.target_layers,
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": block.pop("block_size"),
        "dflash_config": {
            **block,
            **(head if config.markov_type else {}),
            **_convention(config, usual=not config.markov_type),
        },
        **_causal(config),
    }


def _speculators(config):
    kinds = {"dflash": "DFlashDraftModel", "dspark": "DSparkDraftModel", "dflash2": "DFlash2DraftModel"}
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.proposals}
    sliding = [causal for causal, window in zip(config.causal, config.windows, strict=True) if window]
    return {
        "architectures": [kinds[config.family]],
        "speculators_model_type": config.family,
        "transformer_layer_config": _widths(config),
        "draft_vocab_size": config.draft_vocab_size,
        "block_size": config.block_size,
        "mask_token_id": config.mask_id,
        "sample_from_anchor": not config.in_place,
        "aux_hidden_state_layer_ids": [tap + 1 for tap in config.taps],
        "sliding_window_non_causal": bool(sliding) and not any(sliding),
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        **(_markov(config) if config.family == "dspark" else {}),
        **(_selector(config) if config.family == "dflash2" else {}),
        "speculators_config": {"algorithm": config.family, "proposal_methods": [proposal]},
    }


WRITERS = {
    "deepspec": _deepspec,
    "specfloor": _specfloor,
    "zlab": _zlab,
    "specforge": _specforge,
    "speculators": _speculators,
}


@st.composite
def drafter_configs(draw):
    """Any kind of drafter at random small sizes: blocks of 2 to 8, 1 to 4 taps, odd vocabularies, windows."""
    case = CASES[draw(st.sampled_from(sorted(CASES)))]
    vocab = draw(st.sampled_from([17, 33, 64]))
    target_layers = None if case.target_layers is None else draw(st.sampled_from([6, 9]))
    window = draw(st.integers(1, 9))
    kv_heads = case.num_kv_heads if case.shared_values else draw(st.sampled_from([1, 2, 4]))
    return replace(
        case,
        block_size=draw(st.integers(2, 8)),
        taps=tuple(sorted(draw(st.sets(st.integers(-1, 4), min_size=1, max_size=4)))),
        mask_id=draw(st.integers(0, vocab - 1)),
        target_layers=target_layers,
        vocab_size=vocab,
        draft_vocab_size=vocab if case.draft_vocab_size == case.vocab_size else vocab - 8,
        num_kv_heads=kv_heads,
        intermediate_size=draw(st.integers(1, 20)),
        windows=tuple(window if old else None for old in case.windows),
    )
