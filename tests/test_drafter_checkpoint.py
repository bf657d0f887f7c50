"""models/drafter_checkpoint.py: every dialect's files read strictly, aliases undone, a wrong target refused by name."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.checkpoint import SINGLE, Checkpoint, CheckpointError, to_float
from models.config import ConfigError, DecoderConfig
from models.drafter_checkpoint import check_target, read_drafter
from models.drafter_config import DrafterConfig
from tests.agreement import assert_agree
from tests.dialects import (
    CASES,
    as_json,
    drafter_configs,
    on_bf16_grid,
    published,
    random_d2t,
    random_tables,
    random_tensors,
    save,
    write_drafter,
)
from tests.strategies import seeds
from tests.test_drafter_config import FILES

# Those with weights beside the config; the others hold a second config for the same weights.
WEIGHTS = [name for name in FILES if not name.endswith(("served", "normalized"))]
OF_TIED = [name for name in WEIGHTS if name.startswith(("deepspec-d", "specfloor")) and "gemma" not in name]
OF_UNTIED = [name for name in WEIGHTS if name.startswith(("specforge", "speculators", "zlab"))]
WITH_COPIES = [name for name in OF_UNTIED if name.startswith("speculators") and "full-vocab/saved" not in name]


def load(folder, *, in_place=None):
    """A folder's config, and its own tensors as float32 by normalised name."""
    config = DrafterConfig.from_folder(folder, in_place=in_place)
    stored = read_drafter(folder, config)
    tensors = {name: to_float(raw, dtype) for name, dtype, raw in stored.tensors()}
    assert {name: array.shape for name, array in tensors.items()} == config.tensor_shapes()
    return config, stored, tensors


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert_agree(actual[name], array, "exact")


def refused(message):
    return pytest.raises(CheckpointError, match=message)


def target_config(config, **changes):
    """The config of a target that the drafter fits."""
    raw = {
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": 40,
        "num_hidden_layers": config.target_layers or 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rope_theta": 1e6,
        "max_position_embeddings": 512,
    }
    return DecoderConfig.from_dict(raw | changes)


def stored_target(folder):
    """A target's config, embedding and head, read without a decoder."""
    config = DecoderConfig.from_folder(folder)
    tensors = {name: to_float(raw, dtype) for name, dtype, raw in Checkpoint(folder).read(config.tensor_shapes())}
    embedding = tensors["model.embed_tokens.weight"]
    return config, embedding, embedding if config.tied else tensors["lm_head.weight"]


# Files of the projects themselves


@pytest.mark.parametrize("name", WEIGHTS)
def test_stored_checkpoints_hold_exactly_their_tensors(golden, name):
    config, stored, tensors = load(golden / name)
    stray = set(stored.parts) - set(tensors)
    assert stray <= {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
    for part, array in tensors.items():
        assert_agree(array, to_float(Checkpoint(golden / name).raw(part), stored.read(part)[0]), "exact")
    assert (stored.d2t is not None) == (config.draft_vocab_size < config.vocab_size)


@pytest.mark.parametrize(
    "name", ["specfloor-attn/final/served", "specforge-dspark/rnn/normalized", "specforge-dflash/sliding/normalized"]
)
def test_weights_fit_the_config_that_a_converter_wrote_beside_them(golden, name):
    config = DrafterConfig.from_folder(golden / name)
    assert len(list(read_drafter((golden / name).parent, config).tensors())) == len(config.tensor_shapes())


def test_a_bfloat16_copy_reads_the_same(golden):
    assert_same(load(golden / "deepspec-dspark-vanilla/bf16")[2], load(golden / "deepspec-dspark-vanilla")[2])


@pytest.mark.parametrize("name", ["speculators-dflash/full-vocab", "speculators-dspark/draft-vocab"])
def test_a_copy_saved_without_the_tables_reads_the_same(golden, name):
    assert_same(load(golden / name / "saved-by-0.9.0")[2], load(golden / name)[2])


@pytest.mark.parametrize(("names", "right"), [(OF_TIED, "tied"), (OF_UNTIED, "untied")], ids=["tied", "untied"])
def test_stored_drafters_know_their_target(golden, names, right):
    for name in names:
        config, stored, _ = load(golden / name)
        target, embedding, head = stored_target(golden / "target" / right)
        check_target(config, target, stored, embedding, head)


@pytest.mark.parametrize("name", OF_TIED + WITH_COPIES)
def test_stored_drafters_refuse_the_other_target(golden, name):
    config, stored, _ = load(golden / name)
    target, embedding, head = stored_target(golden / "target" / ("untied" if name in OF_TIED else "tied"))
    with refused("was trained on another target: its copy of .* differs"):
        check_target(config, target, stored, embedding, head)


# Every dialect, written and read back


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("shards", "bf16"), [(1, False), (3, False), (1, True)], ids=["one", "three", "bf16"])
def test_what_a_dialect_writes_is_read_back(tmp_path, case, shards, bf16):
    folder, tensors = write_drafter(tmp_path, CASES[case], shards=shards, bf16=bf16)
    config, stored, read = load(folder)
    assert config == CASES[case]
    assert_same(read, tensors)
    if (d2t := random_d2t(config)) is None:
        assert stored.d2t is None
    else:
        assert_agree(stored.d2t, d2t, "exact")
    check_target(config, target_config(config), stored, *random_tables(config))


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("speculators")])
def test_files_with_copies_of_the_tables_read_the_same(tmp_path, case):
    folder, tensors = write_drafter(tmp_path, CASES[case], copies=True)
    config, stored, read = load(folder)
    assert {"embed_tokens.weight", "lm_head.weight"} <= stored.parts.keys()
    assert_same(read, tensors)
    check_target(config, target_config(config), stored, *random_tables(config))


@given(drafter_configs(), seeds, st.integers(1, 4), st.booleans())
def test_any_small_drafter_is_read_back(tmp_path_factory, config, seed, shards, bf16):
    folder, tensors = write_drafter(tmp_path_factory.mktemp("drafter"), config, seed, shards=shards, bf16=bf16)
    read_config, stored, read = load(folder)
    assert read_config == config
    assert_same(read, tensors)
    check_target(config, target_config(config), stored, *random_tables(config))


@pytest.mark.parametrize(
    ("case", "dialects"),
    [
        ("zlab-full", ["zlab", "specforge", "speculators"]),
        ("zlab-dflash2", ["zlab", "speculators"]),
        ("deepspec-vanilla", ["deepspec", "specfloor", "specforge", "speculators"]),
        ("deepspec-rnn", ["deepspec", "specforge", "speculators"]),
    ],
)
def test_one_drafter_in_several_dialects(tmp_path, case, dialects):
    written = CASES[case]
    for dialect in dialects:
        config = replace(written, dialect=dialect, target_layers=None if dialect == "speculators" else 6)
        folder, tensors = write_drafter(tmp_path / dialect, config)
        read_config, _, read = load(folder)
        assert_same(read, tensors)
        assert_same(read, random_tensors(written))
        freed = {"dialect": "", "window_rule": "", "target_layers": None}
        assert replace(read_config, **freed) == replace(written, **freed)


def test_a_generic_reader_of_the_format_sees_the_same(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    folder, tensors = write_drafter(tmp_path, CASES["specfloor-final"])
    stored = numpy.load_file(folder / SINGLE)
    assert stored.keys() - tensors.keys() == {"embed_tokens.weight", "lm_head.weight"}
    assert_same({name: stored[name] for name in tensors}, tensors)


def test_tensors_come_in_file_order_one_at_a_time(tmp_path):
    folder, tensors = write_drafter(tmp_path, CASES["zlab-full"], shards=3)
    stored = read_drafter(folder, CASES["zlab-full"])
    names = [name for name, _, _ in stored.tensors()]
    where = [(stored.checkpoint.tensors[name].file.name, stored.checkpoint.tensors[name].begin) for name in names]
    assert where == sorted(where)
    assert set(names) == set(tensors)


# Aliases


def fuse(stored):
    """The projections of every layer as serving engines fuse them."""
    fused = dict(stored)
    for layer in (0, 1):
        attention, mlp = f"layers.{layer}.self_attn.", f"layers.{layer}.mlp."
        qkv = [fused.pop(f"{attention}{part}_proj.weight") for part in "qkv"]
        fused[f"{attention}qkv_proj.weight"] = np.concatenate(qkv)
        gate_up = [fused.pop(f"{mlp}{part}_proj.weight") for part in ("gate", "up")]
        fused[f"{mlp}gate_up_proj.weight"] = np.concatenate(gate_up)
    return fused


def under_logit_head(stored):
    return {
        f"logit_head.{name}" if name.startswith(("markov_head", "confidence_head")) else name: array
        for name, array in stored.items()
    }


ALIASES = {
    "fused": fuse,
    "compiled": lambda stored: {f"_orig_mod.{name}": array for name, array in stored.items()},
    "compiled inside": lambda stored: {
        name.replace("self_attn.", "self_attn._orig_mod."): array for name, array in stored.items()
    },
    "logit head": under_logit_head,
    "codebook weights": lambda stored: {
        name.replace("_codebook", "_codebook.weight"): array for name, array in stored.items()
    },
    "rotary buffers": lambda stored: stored | {"rotary_emb.inv_freq": np.ones(4, np.float32)},
    "all at once": lambda stored: ALIASES["compiled"](under_logit_head(fuse(stored))),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("case", ["deepspec-gated", "specforge-rnn", "zlab-dflash2", "specfloor-final"])
@pytest.mark.parametrize("shards", [1, 2])
def test_aliases_read_the_same(tmp_path, case, alias, shards):
    config = CASES[case]
    tensors = random_tensors(config)
    stored = ALIASES[alias](published(config, tensors, *random_tables(config)))
    _, _, read = load(save(tmp_path, as_json(config), stored, shards=shards))
    assert_same(read, tensors)


@pytest.mark.parametrize("name", ["logit_head.prefix_gru.weight_ih_l0", "embed_proj.0.weight"])
def test_domino_is_named_and_refused(tmp_path, name):
    config = CASES["specforge-dflash"]
    stored = random_tensors(config) | {name: np.ones((2, 2), np.float32)}
    with refused(f"is a Domino drafter .{name}., which is not supported"):
        load(save(tmp_path, as_json(config), stored))


def test_a_tensor_under_two_names_is_refused(tmp_path):
    config = CASES["zlab-full"]
    stored = random_tensors(config)
    with refused(r"norm\.weight is stored twice, as norm\.weight and as _orig_mod\.norm\.weight"):
        load(save(tmp_path, as_json(config), stored | {"_orig_mod.norm.weight": stored["norm.weight"]}))


# Misfits


@pytest.mark.parametrize("case", CASES)
def test_every_tensor_is_needed(tmp_path, case):
    config = CASES[case]
    stored = published(config, random_tensors(config), *random_tables(config), random_d2t(config))
    for number, name in enumerate(config.tensor_shapes()):
        if number % 5 == 0 or not name.startswith("layers.0"):
            folder = save(tmp_path, as_json(config), {other: stored[other] for other in stored if other != name})
            with refused(f"does not fit its config: 1 missing: {name}$"):
                load(folder)


@pytest.mark.parametrize(
    ("written", "read_as", "message"),
    [
        ("specfloor-conv", "deepspec-vanilla", r"16 unexpected: layers\.0\.conv_pre_attn\.k_base, .*, \.\.\.$"),
        ("specfloor-slot", "deepspec-vanilla", "1 unexpected: slot_embed$"),
        ("zlab-dflash2", "zlab-full", "11 unexpected: layers.0.attention_conv.base_kernel"),
        ("deepspec-vanilla", "deepspec-dflash", "4 unexpected: markov_head.markov_w1.weight"),
        ("deepspec-vanilla", "deepspec-rnn", "2 missing: markov_head.joint_proj.weight, .*; 2 unexpected: confidence"),
        (
            "specfloor-gate",
            "specfloor-final",
            "17 missing: layers.0.conv_pre_attn.k_base, .*; 4 unexpected: markov_head.anchor_type",
        ),
        ("gemma-separate", "gemma-shared", r"2 unexpected: .*v_proj.weight; 2 of another shape: .*k_proj.weight \(32"),
        (
            "speculators-dspark-reduced",
            "speculators-dspark",
            r"2 unexpected: markov_head.joint.*3 of another shape: .*d2t \(40,\), expected \(67,\)",
        ),
        (
            "speculators-dspark",
            "speculators-dspark-in-place",
            r"1 of another shape: confidence_head.proj.weight \(1, 38",
        ),
    ],
)
def test_another_config_names_what_does_not_fit(tmp_path, written, read_as, message):
    folder, _ = write_drafter(tmp_path, CASES[written])
    with refused(f"does not fit its config: .*{message}"):
        read_drafter(folder, CASES[read_as])


@pytest.mark.parametrize(
    "name",
    ["layers.0.self_attn.g_proj.weight", "aux_hidden_norms.0.weight", "layers.2.mlp.up_proj.weight", "norm.bias"],
)
def test_unknown_tensors_are_named(tmp_path, name):
    config = CASES["zlab-full"]
    with refused(f"1 unexpected: {name}$"):
        load(save(tmp_path, as_json(config), random_tensors(config) | {name: np.ones(3, np.float32)}))


def test_every_misfit_is_reported_at_once(tmp_path):
    config = CASES["zlab-full"]
    stored = random_tensors(config) | {"stray": np.ones(3, np.float32)}
    del stored["norm.weight"]
    stored["fc.weight"] = stored["fc.weight"][:, :-1]
    with refused(
        r"1 missing: norm.weight; 1 unexpected: stray; 1 of another shape: fc.weight \(32, 95\), expected .32, 96"
    ):
        load(save(tmp_path, as_json(config), stored))


def test_a_fused_projection_of_another_size_is_unexpected(tmp_path):
    config = CASES["zlab-full"]
    stored = fuse(random_tensors(config))
    name = "layers.1.self_attn.qkv_proj.weight"
    stored[name] = stored[name][:-1]
    with refused(f"3 missing: layers.1.self_attn.q_proj.weight, .*1 unexpected: {name}"):
        load(save(tmp_path, as_json(config), stored))


def test_a_damaged_file_is_named(tmp_path):
    folder, _ = write_drafter(tmp_path, CASES["zlab-full"])
    path = folder / SINGLE
    path.write_bytes(path.read_bytes()[:-3])
    with refused("is truncated: 3 bytes short"):
        load(folder)


def test_a_file_in_place_read_from_the_anchor_is_caught_by_its_kind(tmp_path):
    for case in ("zlab-full", "zlab-dflash2", "specforge-dflash", "speculators-dflash"):
        folder, _ = write_drafter(tmp_path / case, CASES[case])
        with pytest.raises(ConfigError, match="the slot convention of this file is in-place"):
            load(folder, in_place=False)


# Vocabulary maps


REDUCED = CASES["speculators-dspark-reduced"]


def with_maps(folder, change):
    """A drafter with a reduced vocabulary whose stored tensors went through `change`."""
    stored = published(REDUCED, random_tensors(REDUCED), *random_tables(REDUCED), random_d2t(REDUCED))
    change(stored)
    return save(folder, as_json(REDUCED), stored)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop("d2t"), "1 missing: d2t$"),
        (lambda stored: stored.update(d2t=stored["d2t"][:-1]), r"1 of another shape: d2t \(39,\), expected \(40,\)"),
        (lambda stored: stored["d2t"].__setitem__(39, 28), "d2t does not lead to 40 distinct ids of the target"),
        (lambda stored: stored["d2t"].__setitem__(0, -1), "d2t does not lead to 40 distinct ids of the target"),
        (lambda stored: stored["d2t"].__setitem__(1, stored["d2t"][0] - 1), "does not lead to 40 distinct ids"),
        (lambda stored: stored["t2d"].__setitem__(0, not stored["t2d"][0]), "d2t and t2d disagree"),
    ],
)
def test_vocabulary_maps_refused(tmp_path, change, message):
    with refused(message):
        load(with_maps(tmp_path, change))


def test_t2d_may_be_absent(tmp_path):
    _, stored, _ = load(with_maps(tmp_path, lambda stored: stored.pop("t2d")))
    assert_agree(stored.d2t, random_d2t(REDUCED), "exact")


# The right target


@pytest.mark.parametrize("case", ["deepspec-vanilla", "zlab-full", "speculators-dspark"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 64}, "hidden size 32 against 64 of this one"),
        ({"vocab_size": 68}, "vocabulary 67 against 68 of this one"),
        ({"hidden_size": 16, "vocab_size": 9}, "hidden size 32 against 16, vocabulary 67 against 9 of this one"),
    ],
)
def test_another_width_or_vocabulary_is_refused(tmp_path, case, changes, message):
    config, stored, _ = load(write_drafter(tmp_path, CASES[case])[0])
    with refused(f"was trained on another target: {message}"):
        check_target(config, target_config(config, **changes), stored, *random_tables(config))


def test_another_layer_count_is_refused(tmp_path):
    config, stored, _ = load(write_drafter(tmp_path, CASES["zlab-full"])[0])
    with refused("number of layers 6 against 7 of this one"):
        check_target(config, target_config(config, num_hidden_layers=7), stored, *random_tables(config))


@pytest.mark.parametrize("layers", [2, 4, 5])
def test_taps_beyond_the_target_are_refused_where_the_file_gives_no_layer_count(tmp_path, layers):
    config, stored, _ = load(write_drafter(tmp_path, CASES["speculators-dflash"])[0])
    with refused(f"reads the target's layer 4, but this target's layers below the last end at {layers - 2}"):
        check_target(config, target_config(config, num_hidden_layers=layers), stored, *random_tables(config))
    check_target(config, target_config(config, num_hidden_layers=6), stored, *random_tables(config))


@pytest.mark.parametrize("case", ["deepspec-vanilla", "specfloor-final", "gemma-shared"])
@pytest.mark.parametrize(("number", "name"), [(0, "embed_tokens.weight"), (1, "lm_head.weight")])
def test_another_table_is_refused(tmp_path, case, number, name):
    config, stored, _ = load(write_drafter(tmp_path, CASES[case])[0])
    tables = list(random_tables(config))
    tables[number] = tables[number].copy()
    tables[number][3, 5] *= np.float32(1 + 2**-7)  # one step of the bfloat16 grid in one number
    with refused(f"another target: its copy of {name} differs from this target's in 1 of 67 rows compared"):
        check_target(config, target_config(config), stored, *tables)


def test_another_head_behind_a_reduced_vocabulary_is_refused(tmp_path):
    config, stored, _ = load(write_drafter(tmp_path, REDUCED)[0])
    embedding, head = random_tables(config)
    drafted = np.arange(40) + random_d2t(config)
    changed = head.copy()
    changed[np.setdiff1d(np.arange(67), drafted)] += 1  # rows the drafter never reads
    check_target(config, target_config(config), stored, embedding, changed)
    changed[drafted[7]] += 1
    with refused(r"its copy of lm_head.weight differs from this target's in 1 of 40 rows compared"):
        check_target(config, target_config(config), stored, embedding, changed)


def unrounded_tables(config):
    """An embedding and a head off the bfloat16 grid, some numbers halfway between two of its points: [2, V, H]."""
    tables = np.random.default_rng(3).standard_normal((2, config.vocab_size, config.hidden_size), np.float32)
    words = tables.view(np.uint32)
    words[..., 0] = words[..., 0] & 0xFFFF0000 | 0x8000
    return tables


@pytest.mark.parametrize("bf16", [False, True])
def test_a_target_rounded_on_either_side_is_the_same_target(tmp_path, bf16):
    """Ordinary float32 tables in the file or in the target, bfloat16 on the other side."""
    config = CASES["deepspec-vanilla"]
    exact = unrounded_tables(config)
    words = exact.view(np.uint32)
    rounded = ((words + 0x7FFF + (words >> 16 & 1)) & 0xFFFF0000).view(np.float32)
    _, stored, _ = load(write_drafter(tmp_path, config, tables=tuple(rounded if bf16 else exact), bf16=bf16)[0])
    for tables in (exact, rounded, exact.astype(np.float64)):
        check_target(config, target_config(config), stored, *tables)
    with refused("its copy of embed_tokens.weight differs"):
        check_target(config, target_config(config), stored, *on_bf16_grid(exact))  # cut off, not rounded


def test_a_copy_converted_to_float16_is_the_same_target(tmp_path):
    """Numbers below, at the lower end of and above its range included; a number within it still tells targets apart."""
    config = CASES["deepspec-vanilla"]
    tables = on_bf16_grid(unrounded_tables(config))
    tables[..., 1], tables[..., 2], tables[..., 3] = 2.0**-30, 1.5 * 2.0**-24, 2.0**17
    with np.errstate(over="ignore"):
        halves = tables.astype(np.float16)
    tensors = random_tensors(config)
    stored = published(config, tensors, *halves, None, copies=True)
    save(tmp_path / "drafter", as_json(config), stored)
    stored = read_drafter(tmp_path / "drafter", config)
    check_target(config, target_config(config), stored, *tables)
    tables[1, 3, 5] *= np.float32(1 + 2**-7)
    with refused("its copy of lm_head.weight differs from this target's in 1 of 67 rows compared"):
        check_target(config, target_config(config), stored, *tables)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_tables_of_torch_are_compared_too(tmp_path, dtype):
    torch = pytest.importorskip("torch")
    config = CASES["deepspec-vanilla"]
    exact = unrounded_tables(config)
    _, stored, _ = load(write_drafter(tmp_path, config, tables=tuple(exact))[0])
    tables = [torch.from_numpy(table).to(getattr(torch, dtype)).requires_grad_() for table in exact]
    check_target(config, target_config(config), stored, *tables)
    with refused("its copy of embed_tokens.weight differs from this target's in 67 of 67 rows"):
        check_target(config, target_config(config), stored, *reversed(tables))


def test_a_sample_of_rows_is_compared_without_reading_the_table(tmp_path, monkeypatch):
    config = CASES["deepspec-vanilla"]
    _, stored, _ = load(write_drafter(tmp_path, config)[0])
    monkeypatch.setattr("models.drafter_checkpoint.ROWS_COMPARED", 20)
    monkeypatch.setattr(stored.checkpoint, "raw", None)
    embedding, head = random_tables(config)
    check_target(config, target_config(config), stored, embedding, head)
    with refused("in 20 of 20 rows compared"):
        check_target(config, target_config(config), stored, embedding, head + 1)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
@pytest.mark.parametrize("bf16", [False, True])
def test_weights_that_are_no_numbers_are_refused(tmp_path, wrong, bf16):
    config = CASES["deepspec-vanilla"]
    tensors, (embedding, head) = random_tensors(config), random_tables(config)
    tensors["fc.weight"][1, 2] = wrong
    save(tmp_path / "drafter", as_json(config), published(config, tensors, embedding, head), bf16=bf16)
    stored = read_drafter(tmp_path / "drafter", config)
    with pytest.raises(CheckpointError, match=r"fc\.weight holds NaN or infinity"):
        list(stored.tensors())
