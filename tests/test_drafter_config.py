"""models/drafter_config.py and drafter_dialects.py: each dialect read right, totals, slot conventions, refusals."""

import json
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import ConfigError, Rope
from models.drafter_config import DrafterConfig
from models.drafter_dialects import spread_taps
from tests.agreement import assert_agree
from tests.dialects import CASES, as_json, drafter_configs, dspark, tiny

COMMON = {
    "architecture": "qwen3",
    "in_place": True,
    "block_size": 7,
    "taps": (1, 2, 4),
    "mask_id": 95,
    "target_layers": 6,
    "vocab_size": 97,
    "draft_vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope": Rope(theta=1e6),
    "rotary_dims": 8,
    "causal": (False, False),
    "windows": (None, None),
    "window_rule": "query",
    "embedding_scale": 1.0,
    "output_multiplier": 1.0,
    "softcap": None,
    "shared_values": False,
    "markov_rank": 0,
    "markov_type": "",
    "confidence": False,
    "confidence_with_markov": False,
    "head_heads": 0,
    "head_dim_attention": 0,
    "head_mlp": 0,
    "head_gate": "none",
    "head_anchor": False,
    "lattice": 0,
    "selector_rank": 0,
    "short_conv": 0,
    "conv_taps": 2,
    "slot_embeddings": False,
    "notes": (),
}
MARKOV = {"family": "dspark", "markov_rank": 8, "confidence": True, "confidence_with_markov": True}
DEEPSPEC = {"dialect": "deepspec", "in_place": False}
VANILLA = DEEPSPEC | MARKOV | {"markov_type": "vanilla"}
GEMMA = VANILLA | {
    "architecture": "gemma4",
    "taps": (0, 2, 5, 6),
    "mask_id": 4,
    "target_layers": 9,
    "vocab_size": 89,
    "draft_vocab_size": 89,
    "hidden_size": 36,
    "intermediate_size": 52,
    "head_dim": 32,
    "rotary_dims": 4,
    "embedding_scale": 6.0,
    "softcap": 5.0,
}
SPECFLOOR = VANILLA | {"dialect": "specfloor"}
PREFIX_HEAD = SPECFLOOR | {
    "family": "attention",
    "markov_type": "attention",
    "markov_rank": 24,
    "head_heads": 2,
    "head_dim_attention": 10,
    "head_mlp": 40,
}
FINAL = PREFIX_HEAD | {"lattice": 6, "short_conv": 16, "slot_embeddings": True}
ZLAB = {"family": "dflash", "dialect": "zlab"}
DFLASH2 = {"family": "dflash2", "lattice": 5, "selector_rank": 8, "short_conv": 16}
SPECFORGE = {"family": "dflash", "dialect": "specforge", "window_rule": "context"}
FORGED = SPECFORGE | MARKOV | {"in_place": False, "markov_type": "vanilla"}
SPECULATORS = {"family": "dflash", "dialect": "speculators", "window_rule": "anchor", "target_layers": None}
SPECULATED = SPECULATORS | MARKOV | {"in_place": False, "markov_type": "vanilla", "draft_vocab_size": 64}
FILES = {
    "deepspec-dflash": DEEPSPEC | {"family": "dflash"},
    "deepspec-dspark-fitted": VANILLA,
    "deepspec-dspark-gated": VANILLA | {"markov_type": "gated"},
    "deepspec-dspark-gemma4/separate-v": GEMMA,
    "deepspec-dspark-gemma4/shared-kv": GEMMA | {"num_kv_heads": 1, "shared_values": True},
    "deepspec-dspark-rnn": VANILLA | {"markov_type": "rnn"},
    "deepspec-dspark-vanilla": VANILLA,
    "deepspec-dspark-vanilla/bf16": VANILLA,
    "specfloor-attn/final": FINAL,
    "specfloor-attn/final/served": FINAL,
    "specfloor-attn/head-anchor-gate": PREFIX_HEAD | {"head_gate": "state_output", "head_anchor": True},
    "specfloor-attn/vanilla-shortconv": SPECFLOOR | {"short_conv": 16},
    "specfloor-attn/vanilla-slotembed": SPECFLOOR | {"slot_embeddings": True},
    "specforge-dflash/full": SPECFORGE,
    "specforge-dflash/full/normalized": SPECFORGE,
    "specforge-dflash/sliding": SPECFORGE | {"causal": (False, True), "windows": (None, 6)},
    "specforge-dflash/sliding/normalized": SPECFORGE | {"causal": (False, True), "windows": (None, 6)},
    "specforge-dspark/rnn": FORGED | {"markov_type": "rnn"},
    "specforge-dspark/rnn/normalized": FORGED | {"markov_type": "rnn"},
    "specforge-dspark/vanilla": FORGED,
    "specforge-dspark/vanilla/normalized": FORGED,
    "speculators-dflash/draft-vocab-sliding": SPECULATORS
    | {"draft_vocab_size": 64, "causal": (True, False), "windows": (6, None)},
    "speculators-dflash/full-vocab": SPECULATORS,
    "speculators-dflash/full-vocab/saved-by-0.9.0": SPECULATORS,
    "speculators-dflash2/sliding": SPECULATORS | DFLASH2 | {"windows": (6, 6)},
    "speculators-dspark/draft-vocab": SPECULATED,
    "speculators-dspark/draft-vocab/saved-by-0.9.0": SPECULATED,
    "speculators-dspark/in-place-gated": SPECULATED
    | {"in_place": True, "markov_type": "gated", "draft_vocab_size": 97, "confidence_with_markov": False},
    "zlab-dflash/full": ZLAB,
    "zlab-dflash/sliding-causal": ZLAB | {"causal": (True, False), "windows": (6, None)},
    "zlab-dflash/sliding-noncausal-scaled": ZLAB
    | {"windows": (6, 6), "embedding_scale": 1.75, "output_multiplier": 0.6, "softcap": 3.5},
    "zlab-dflash2/full-scaled": ZLAB | DFLASH2 | {"output_multiplier": 0.8, "softcap": 6.0},
    "zlab-dflash2/sliding": ZLAB | DFLASH2 | {"windows": (6, 6)},
}


def read(case, without=(), nested=None, **changes):
    """A case's config.json, changed at top level or inside `nested`, and read."""
    raw = as_json(CASES[case])
    block = raw if nested is None else raw[nested]
    for key in without:
        del block[key]
    block.update(changes)
    return DrafterConfig.from_dict(raw)


def refused(message):
    return pytest.raises(ConfigError, match=message)


# Files of the projects themselves


@pytest.mark.parametrize("name", FILES)
def test_stored_configs_are_read_to_these_values(golden, name):
    assert asdict(DrafterConfig.from_folder(golden / name)) == asdict(DrafterConfig(**(COMMON | FILES[name])))


def test_no_stored_config_is_left_out(golden):
    found = {str(path.parent.relative_to(golden)) for path in golden.rglob("config.json")}
    assert found - {"target/tied", "target/untied"} == set(FILES)


@pytest.mark.parametrize(
    ("name", "gamma", "order"),
    [
        ("deepspec-dflash", 7, 0),
        ("deepspec-dspark-vanilla", 7, 1),
        ("deepspec-dspark-gated", 7, 1),
        ("deepspec-dspark-rnn", 7, None),
        ("specfloor-attn/final", 7, 1),
        ("zlab-dflash/full", 6, 0),
        ("zlab-dflash2/sliding", 6, 1),
        ("speculators-dspark/in-place-gated", 6, 1),
    ],
)
def test_what_a_block_proposes_and_looks_back_at(name, gamma, order):
    config = DrafterConfig(**(COMMON | FILES[name]))
    assert (config.proposals, config.order) == (gamma, order)


@given(drafter_configs())
def test_what_a_dialect_writes_is_read_back(config):
    assert DrafterConfig.from_dict(json.loads(json.dumps(as_json(config)))) == config


@pytest.mark.parametrize("case", CASES)
def test_every_case_is_read_back(case):
    assert DrafterConfig.from_dict(as_json(CASES[case])) == CASES[case]


# Shapes and totals of the published drafters


QWEN3 = {
    "4B": {"hidden_size": 2560, "intermediate_size": 9728, "num_heads": 32, "taps": (1, 9, 17, 25, 33)},
    "8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_heads": 32, "taps": (1, 9, 17, 25, 33)},
    "14B": {"hidden_size": 5120, "intermediate_size": 17408, "num_heads": 40, "taps": (1, 10, 19, 28, 37)},
}
PREFIX_ATTENTION = {
    "family": "attention",
    "markov_type": "attention",
    "markov_rank": 512,
    "head_heads": 4,
    "head_dim_attention": 128,
    "head_mlp": 2048,
    "confidence": True,
    "confidence_with_markov": True,
}
RANK = {"markov_rank": 256, "confidence": True, "confidence_with_markov": True}
SELECTOR = {"family": "dflash2", "selector_rank": 256, "lattice": 16, "short_conv": 16}


def full_size(size="4B", dialect="deepspec", **fields):
    """A drafter of five layers for Qwen3, read from the file its dialect would write."""
    widths = {"vocab_size": 151936, "mask_id": 151669, "num_layers": 5, "num_kv_heads": 8, "head_dim": 128}
    target_layers = None if dialect == "speculators" else 40 if size == "14B" else 36
    family = fields.pop("family", "dspark" if fields.get("markov_rank") else "dflash")
    shape = {"block_size": 7, "target_layers": target_layers, **widths, **QWEN3[size], "family": family}
    return DrafterConfig.from_dict(as_json(tiny(dialect, **(shape | fields))))


def part(config, start):
    """Number of parameters whose name holds `start`."""
    return sum(int(np.prod(shape)) for name, shape in config.tensor_shapes().items() if start in name)


@pytest.mark.parametrize(
    ("size", "layer", "backbone", "borrowed", "dspark_total", "dflash_total"),
    [
        ("4B", 100_930_816, 537_427_200, 777_912_320, 1_393_133_569, 1_315_339_520),
        ("8B", 192_946_432, 1_048_626_432, 1_244_659_712, 2_371_081_729, 2_293_286_144),
        ("14B", 330_311_936, 1_782_641_920, 1_555_824_640, 3_416_263_169, 3_338_466_560),
    ],
)
def test_parameter_totals_of_the_released_drafters(size, layer, backbone, borrowed, dspark_total, dflash_total):
    dflash, markov = full_size(size), full_size(size, markov_type="vanilla", **RANK)
    tables = 2 * dflash.vocab_size * dflash.hidden_size
    assert part(dflash, "layers.3.") == layer
    assert dflash.parameter_count() == backbone
    assert tables == borrowed
    assert dflash.parameter_count() + tables == dflash_total
    assert markov.parameter_count() + tables == dspark_total
    assert part(markov, "markov_head") == 77_791_232
    assert part(markov, "confidence_head") == dflash.hidden_size + 256 + 1


def test_parameter_totals_of_the_prefix_attention_drafter():
    final = full_size(dialect="specfloor", **PREFIX_ATTENTION, lattice=16, short_conv=16, slot_embeddings=True)
    assert part(final, "markov_head") == 86_713_600
    assert part(final, "markov_head.markov_w2") == 77_791_232
    assert part(final, "conv_") == 16_486_400
    assert part(final, "slot_embed") == 15_360
    assert part(final, "confidence_head") == 3_073
    assert final.parameter_count() + 777_912_320 == 1_418_557_953


def test_parameter_totals_of_dflash2():
    second = full_size(dialect="zlab", **SELECTOR)
    assert part(second, "_conv.") == 16_486_400
    assert part(second, "candidate_selector") == 78_446_592


@pytest.mark.parametrize(
    ("config", "tensors", "borrowed"),
    [
        (full_size(dialect="zlab"), 58, 0),
        (full_size(), 60, 2),
        (full_size(markov_type="vanilla", **RANK), 64, 2),
        (full_size(dialect="zlab", **SELECTOR), 81, 0),
        (full_size(dialect="speculators", **SELECTOR), 81, 0),
        (full_size(dialect="specfloor", markov_type="vanilla", **RANK, short_conv=16), 104, 2),
        (full_size(dialect="specfloor", markov_type="vanilla", **RANK, slot_embeddings=True), 65, 2),
        (full_size(dialect="specfloor", **PREFIX_ATTENTION, head_anchor=True, head_gate="state_output"), 83, 2),
        (
            full_size(dialect="specfloor", **PREFIX_ATTENTION, head_anchor=True, short_conv=16, slot_embeddings=True),
            122,
            2,
        ),
        (full_size(dialect="specfloor", **PREFIX_ATTENTION, short_conv=16, slot_embeddings=True), 120, 2),
    ],
)
def test_tensor_counts_of_the_released_drafters(config, tensors, borrowed):
    assert len(config.tensor_shapes()) + borrowed == tensors


def test_shapes_of_the_prefix_attention_drafter():
    shapes = full_size(
        dialect="specfloor", **PREFIX_ATTENTION, head_anchor=True, head_gate="state_output", short_conv=16
    ).tensor_shapes()
    assert shapes["layers.4.conv_post_mlp.k_base"] == (2, 2560)
    assert shapes["layers.4.conv_post_mlp.corr.weight"] == (320, 2560)
    assert shapes["markov_head.in_proj.weight"] == (512, 5120)
    assert shapes["markov_head.gate_proj.weight"] == (4, 1024)
    assert shapes["confidence_head.proj.weight"] == (1, 3072)
    assert "markov_head.markov_w1.weight" not in shapes


def test_a_reduced_vocabulary_shortens_only_what_is_predicted():
    shapes = CASES["speculators-dspark-reduced"].tensor_shapes()
    assert shapes["markov_head.markov_w1.weight"] == (67, 6)
    assert shapes["markov_head.markov_w2.weight"] == (40, 6)


# Slot conventions


@pytest.mark.parametrize(
    ("case", "in_place"),
    [
        ("deepspec-dflash", False),
        ("deepspec-vanilla", False),
        ("specfloor-final", False),
        ("zlab-full", True),
        ("zlab-dflash2", True),
        ("specforge-dflash", True),
        ("specforge-dspark", False),
        ("speculators-dflash", True),
        ("speculators-dflash2", True),
    ],
)
def test_convention_without_the_key(case, in_place):
    raw = as_json(CASES[case])
    raw.pop("sample_from_anchor", None)
    assert DrafterConfig.from_dict(raw).in_place is in_place
    assert DrafterConfig.from_dict(raw, in_place=in_place).in_place is in_place
    with refused("--slot-convention .* would misplace every proposal: leave it out"):
        DrafterConfig.from_dict(raw, in_place=not in_place)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("from_anchor", [False, True])
def test_an_explicit_key_wins_over_the_custom(case, from_anchor):
    raw = as_json(CASES[case])
    raw.setdefault("dflash_config", {}).pop("sample_from_anchor", None)
    raw["sample_from_anchor"] = from_anchor
    assert DrafterConfig.from_dict(raw).in_place is not from_anchor
    with refused(f"sample_from_anchor {from_anchor}"):
        DrafterConfig.from_dict(raw, in_place=from_anchor)


@pytest.mark.parametrize("without", [["sample_from_anchor"], []])
def test_an_old_dspark_file_of_speculators_asks_the_user(without):
    raw = as_json(CASES["speculators-dspark"]) | {"sample_from_anchor": None}
    for key in without:
        del raw[key]
    with refused(r"say which one this is with --slot-convention \{anchor,in-place\}, in Python in_place="):
        DrafterConfig.from_dict(raw)
    assert [DrafterConfig.from_dict(raw, in_place=answer).proposals for answer in (False, True)] == [5, 4]


def test_the_model_type_of_speculators_is_asked_before_the_class_name():
    dflash = read("speculators-dflash", architectures=["Qwen3DSparkModel"])
    assert (dflash.dialect, dflash.family, dflash.taps) == ("speculators", "dflash", (1, 2, 4))


def test_a_dspark_projector_under_the_dflash_class_is_dspark():
    forged = read("specforge-dspark", architectures=["DFlashDraftModel"])
    assert forged == CASES["specforge-dspark"]


# Where a key stands


def test_nested_keys_win_over_top_level_ones():
    config = read("zlab-dflash2", block_size=16, mask_token_id=3, target_layer_ids=[0], selector_rank=9)
    assert config == CASES["zlab-dflash2"]


@pytest.mark.parametrize("case", ["zlab-full", "zlab-scaled", "zlab-dflash2", "specforge-dspark", "specforge-rnn"])
def test_keys_at_top_level_read_the_same(case):
    raw = as_json(CASES[case])
    assert DrafterConfig.from_dict(raw | raw.pop("dflash_config")) == CASES[case]


def test_a_null_means_that_the_key_is_absent():
    assert read("zlab-full", is_causal=None, quantization_config=None, output_multiplier=None) == CASES["zlab-full"]
    nulls = {"block_size": None, "target_layer_ids": None}
    assert read("zlab-full", nested="dflash_config", **nulls).block_size == 16


def test_block_size_of_an_old_zlab_file_is_16_and_noted():
    config = read("zlab-full", nested="dflash_config", without=["block_size"])
    assert (config.block_size, config.notes) == (16, ("block_size is missing: taken as 16",))
    with refused("block_size must be a positive integer, got None"):
        read("deepspec-vanilla", without=["block_size"])


def test_serving_keys_alone_switch_the_specfloor_modules_on():
    served = {"slot_embed": True, "short_conv_kernel_size": 2, "short_conv_group_size": 16}
    raw = as_json(CASES["specfloor-final"])
    for key in ("short_conv", "short_conv_group_size", "slot_embed"):
        del raw[key]
    assert DrafterConfig.from_dict(raw | {"dflash_config": served}) == CASES["specfloor-final"]
    with refused("short_conv is false but short_conv_kernel_size is given"):
        DrafterConfig.from_dict(raw | {"short_conv": False, "dflash_config": served})


# Taps


def zlab_without_taps(target_layers, num_layers):
    raw = as_json(tiny("zlab", num_layers=num_layers, target_layers=None)) | {"num_target_layers": target_layers}
    del raw["dflash_config"]["target_layer_ids"]
    return DrafterConfig.from_dict(raw)


@pytest.mark.parametrize(
    ("target_layers", "num_layers", "taps"),
    [
        (36, 5, (1, 9, 17, 25, 33)),
        (40, 5, (1, 10, 19, 28, 37)),
        (28, 5, (1, 7, 13, 19, 25)),
        (36, 1, (18,)),
        (7, 2, (1, 4)),
    ],
)
def test_taps_of_an_old_zlab_file_follow_its_rule(target_layers, num_layers, taps):
    config = zlab_without_taps(target_layers, num_layers)
    assert config.taps == taps
    assert config.notes == (f"target_layer_ids is missing: taken as {list(taps)}",)


def test_more_taps_than_fit_are_refused():
    assert spread_taps(6, 3) == [1, 2, 3]
    for layers, taps, most in ((6, 4, 3), (4, 2, 1), (2, 3, 1)):
        with refused(f"{taps} taps do not fit into a target of {layers} layers: take at most {most}"):
            spread_taps(layers, taps)


@given(st.integers(1, 60), st.integers(1, 8))
def test_taps_by_rule_are_distinct_layers_below_the_last_or_refused(target_layers, num_layers):
    try:
        taps = zlab_without_taps(target_layers, num_layers).taps
    except ConfigError:
        assert target_layers < num_layers + 4  # room between layer 1 and the fourth-last
        return
    assert all(a < b for a, b in pairwise((-2, *taps, target_layers - 1)))


@pytest.mark.parametrize(
    ("taps", "message"),
    [
        ([], "taps must be increasing decoder layer ids"),
        ([2, 2], "taps must be increasing decoder layer ids"),
        ([4, 2], "taps must be increasing decoder layer ids"),
        ([-2, 1], "taps must be increasing decoder layer ids"),
        ([1, 5], r"tap 5 of a target with 6 layers: the last one is 5, .* taps must lie below it"),
        ([1, 6], r"tap 6 of a target with 6 layers"),
        ("1,2", "target_layer_ids must be a list of layer ids, got '1,2'"),
        ([1, 2.0], "target_layer_ids must be a list of layer ids"),
        ([True], "target_layer_ids must be a list of layer ids"),
        (None, "target_layer_ids must be a list of layer ids, got None"),
    ],
)
def test_taps_refused(taps, message):
    with refused(message):
        read("deepspec-vanilla", target_layer_ids=taps)


def test_taps_of_speculators_are_stored_one_higher():
    assert read("speculators-dspark", aux_hidden_state_layer_ids=[0, 2, 10]).taps == (-1, 1, 9)
    with refused("aux_hidden_state_layer_ids must be a list"):
        read("speculators-dspark", aux_hidden_state_layer_ids=None)


# Rotary embedding


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1_000_000},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6},
    ],
)
@pytest.mark.parametrize("case", ["deepspec-vanilla", "zlab-full", "specforge-dflash"])
def test_theta_from_either_place(case, spelling):
    assert read(case, **({"rope_parameters": None, "rope_theta": None} | spelling)).rope == Rope(theta=1e6)


@pytest.mark.parametrize("case", ["deepspec-vanilla", "zlab-full"])
@pytest.mark.parametrize("spelling", [None, {"rope_type": "default"}, {"rope_theta": None}])
def test_no_theta_is_an_error_and_never_a_default(case, spelling):
    with refused("rope_theta is missing: add the target's"):
        read(case, rope_parameters=spelling)


def test_two_thetas_must_agree():
    with refused(r"gives rope_theta as 10000\.0 and as 1000000\.0"):
        read("zlab-full", rope_theta=1e4)


def test_gemma_turns_a_share_of_the_frequencies():
    gemma = tiny(architecture="gemma4", hidden_size=36, embedding_scale=6.0, head_dim=32, rotary_dims=4)
    frequencies, scale = DrafterConfig.from_dict(as_json(gemma)).frequencies()
    expected = np.concatenate([1e6 ** -(np.arange(4) / 16), np.zeros(12)])
    assert_agree(frequencies, expected, "float64")
    assert scale == 1.0


def test_qwen_turns_all_frequencies():
    frequencies, scale = CASES["zlab-full"].frequencies()
    assert_agree(frequencies, 1e6 ** -(np.arange(4) / 4), "float64")
    assert scale == 1.0


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        (None, "full_attention must be of rope_type 'proportional'"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e6}}, "must be of rope_type 'proportional'"),
        ({"full_attention": {"rope_type": "proportional", "rope_theta": 1e6}}, "partial_rotary_factor must be a pos"),
        (
            {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25}},
            "rope_theta must be a positive number, got None",
        ),
        (
            {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5, "rope_theta": 1e6}},
            "partial_rotary_factor must not exceed 1",
        ),
    ],
)
def test_gemma_rope_refused(rope, message):
    with refused(message):
        read("gemma-shared", rope_parameters=rope)


# Windows


@pytest.mark.parametrize(
    ("case", "changes", "causal"),
    [
        ("zlab-causal", {}, (True, False)),
        ("zlab-causal", {"is_causal": False}, (False, False)),
        ("zlab-causal", {"is_causal": True}, (True, True)),
        ("specforge-dflash", {}, (False, True)),
        ("specforge-dflash", {"is_causal": False}, (False, False)),
        ("speculators-dflash", {}, (True, False)),
        ("speculators-dflash", {"sliding_window_non_causal": None}, (True, False)),
        ("speculators-dflash", {"sliding_window_non_causal": True}, (False, False)),
        ("speculators-dflash2", {"sliding_window_non_causal": None}, (False, False)),
        ("speculators-dflash2", {"sliding_window_non_causal": False}, (True, False)),
    ],
)
def test_which_layers_are_causal(case, changes, causal):
    config = read(case, **changes)
    assert (config.causal, config.windows) == (causal, CASES[case].windows)


def test_layers_see_everything_where_no_type_is_named():
    assert read("zlab-full", without=["layer_types"]) == CASES["zlab-full"]


def test_a_window_taken_as_written_is_noted():
    config = read("zlab-causal", without=["use_sliding_window"])
    assert config.windows == (6, None)
    assert "use_sliding_window is missing" in config.notes[0]


# Refusals


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("deepspec-vanilla", {"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM'.* is not a known block draf"),
        ("deepspec-vanilla", {"architectures": None}, "architectures None is not a known block drafter"),
        ("deepspec-vanilla", {"architectures": []}, r"architectures \[\] is not a known"),
        ("speculators-dflash", {"speculators_model_type": "eagle3"}, "speculators_model_type 'eagle3' is not supp"),
        ("zlab-full", {"dflash_config": [1]}, r"dflash_config must be an object or null, got \[1\]"),
        ("zlab-full", {"projector_type": "domino"}, "projector_type 'domino' is another kind of drafter"),
        ("zlab-full", {"markov_rank": 4}, "markov_rank 4 in a dflash drafter"),
        ("zlab-full", {"quantization_config": {"bits": 4}}, "quantization_config is set"),
        ("zlab-full", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("zlab-full", {"layer_types": ["full_attention"]}, "layer_types must list one type for each"),
        ("zlab-full", {"layer_types": ["full_attention", "linear"]}, r"layer_types holds \['linear'\]"),
        ("zlab-full", {"layer_types": None, "use_sliding_window": True}, "layer_types does not say which layers"),
        ("zlab-causal", {"sliding_window": None}, "sliding_window must be a positive integer"),
        ("zlab-causal", {"use_sliding_window": False}, "but use_sliding_window is false: correct one"),
        ("deepspec-vanilla", {"layer_types": ["full_attention", "sliding_attention"]}, "always sees everything"),
        ("deepspec-vanilla", {"is_causal": True}, "always sees everything"),
        ("specfloor-conv", {"causal_draft_mask": True}, "causal_draft_mask is set to True"),
        ("deepspec-vanilla", {"attention_bias": True}, "attention_bias is set to True"),
        ("speculators-dflash", {"shift_label": True}, "shift_label is set to True"),
        ("gemma-shared", {"enable_moe_block": True}, "enable_moe_block is set"),
        ("gemma-shared", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input is set to 8"),
        ("gemma-shared", {"hidden_activation": "silu"}, "hidden_activation must be 'gelu_pytorch_tanh', got 'silu'"),
        ("deepspec-vanilla", {"markov_head_type": "lstm"}, "markov_head_type must be one of vanilla, gated, rnn, attn"),
        ("deepspec-vanilla", {"markov_head_type": None}, "markov_head_type must be one of"),
        ("specfloor-final", {"markov_gate_mode": "input"}, "markov_gate_mode must be one of none, state_output"),
        ("specfloor-final", {"markov_gate_mode": None}, "markov_gate_mode must be one of"),
        ("specfloor-final", {"markov_anchor_kv": None}, "markov_anchor_kv must be true or false, got None"),
        ("specfloor-final", {"short_conv_group_size": 7}, "groups of 7 do not divide hidden_size 32"),
        ("specfloor-final", {"nominate_topk": 68}, "68 candidates per slot exceed the 67 ids"),
        ("deepspec-vanilla", {"mask_token_id": 67}, "mask_token_id 67 is outside the vocabulary of 67"),
        ("deepspec-vanilla", {"mask_token_id": None}, "mask_token_id must be a token id, got None"),
        ("deepspec-vanilla", {"mask_token_id": -1}, "mask_token_id must be a token id, got -1"),
        ("deepspec-vanilla", {"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ("deepspec-vanilla", {"head_dim": 9}, "head_dim must be even"),
        ("deepspec-in-place", {"block_size": 1}, "block_size 1 leaves nothing to propose in place"),
        ("deepspec-vanilla", {"sample_from_anchor": "yes"}, "sample_from_anchor must be true or false, got 'yes'"),
        ("speculators-dspark", {"draft_vocab_size": 68}, "draft_vocab_size 68 exceeds the target's 67 ids"),
        ("speculators-dflash2", {"draft_vocab_size": 60}, "DFlash2 needs the target's full vocabulary"),
        ("speculators-dflash2", {"selector_top_k": None}, "selector_top_k must be a positive integer"),
        ("speculators-dflash", {"transformer_layer_config": None}, "transformer_layer_config is missing"),
    ],
)
def test_refusals(case, changes, message):
    with refused(message):
        read(case, **changes)


def test_defaults_taken_are_noted():
    config = read("zlab-full", without=["head_dim", "rms_norm_eps"])
    assert (config.head_dim, config.rms_norm_eps) == (128, 1e-6)
    assert config.notes == ("rms_norm_eps is missing: taken as 1e-06", "head_dim is missing: taken as 128")


def test_one_proposal_is_enough():
    assert dspark(block_size=1).proposals == 1
    assert dspark(block_size=2, in_place=True).proposals == 1


def test_from_folder_names_the_file(tmp_path):
    with refused(r"config\.json: No such file or directory; a drafter folder needs a config\.json"):
        DrafterConfig.from_folder(tmp_path)
    for text, message in [
        ("{", r"config\.json: not valid JSON"),
        ("[]", r"config\.json: a config is a JSON object, got list"),
        ("{}", r"config\.json: architectures None"),
    ]:
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with refused(message):
            DrafterConfig.from_folder(tmp_path)
