"""examples/export_drafter.py: every dialect to every layout that can hold it, with the same weights and proposals."""

import json
import shlex
import shutil

import numpy as np
import pytest

import reference
from examples import export_drafter
from models.checkpoint import Checkpoint
from models.drafter_checkpoint import read_drafter
from models.drafter_config import DrafterConfig
from reference.laws import SamplingLaw
from tests.agreement import assert_agree
from tests.dialects import CASES, dspark, random_tables, tiny, write_drafter
from tests.test_gap import FITTING, models  # noqa: F401 - a fixture

# case: why the layout cannot hold it
NOT_SGLANG = {
    "deepspec-in-place": "this drafter predicts in place",
    "speculators-dspark-in-place": "this drafter predicts in place",
    "speculators-dflash-reduced": "no draft vocabulary",
    "speculators-dspark-reduced": "no draft vocabulary",
}
NOT_SPECULATORS = {
    **{name: "speculators has no such convolutions" for name in FITTING if name.startswith("specfloor")},
    "zlab-scaled": "speculators has no input_embedding_scale, output_multiplier, final_logit_softcapping",
}
EXPORTS = [
    pytest.param(name, layout, id=f"{name}-{layout}")
    for layout, refused in (("sglang", NOT_SGLANG), ("speculators", NOT_SPECULATORS))
    for name in FITTING
    if name not in refused
]
REFUSALS = [
    pytest.param(name, layout, why, id=f"{name}-{layout}")
    for layout, refused in (("sglang", NOT_SGLANG), ("speculators", NOT_SPECULATORS))
    for name, why in refused.items()
]


def export(capsys, folder, out, layout, *more, target):
    arguments = ["--target", target, "--drafter", folder, "--layout", layout, "--out", out, *more]
    export_drafter.main([str(a) for a in arguments])
    *_, command, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert report["command"] == command
    return report


def proposals(folder, target, length):
    """Every slot's rows after one history, behind a context of `length` positions, and the confidence there is."""
    drafter = reference.Drafter.load(folder, target, dtype="float64")
    context = drafter.context()
    context.append(np.random.default_rng(3).standard_normal((length, len(drafter.taps) * drafter.config.hidden_size)))
    proposal, history = drafter.propose(context, 7, SamplingLaw(0.8)), np.arange(3, 3 + drafter.gamma)[None]
    rows = [proposal.probs(k, np.insert(history[:, :k], 0, 7, axis=1)) for k in range(drafter.gamma)]
    trust = [proposal.confidence(k, np.insert(history[:, :k], 0, 7, axis=1)) for k in range(drafter.gamma)]
    return np.concatenate(rows), trust


@pytest.mark.parametrize(("name", "layout"), EXPORTS)
def test_the_exported_drafter_is_the_same(models, tmp_path, capsys, name, layout):  # noqa: F811
    report = export(capsys, models / name, tmp_path / "out", layout, target=models / "target")
    source, config = CASES[name], DrafterConfig.from_folder(tmp_path / "out")
    assert config.in_place == source.in_place and config.taps == source.taps and config.proposals == source.proposals
    before, after = read_drafter(models / name, source), read_drafter(tmp_path / "out", config)
    for tensor in source.tensor_shapes():
        assert before.read(tensor)[0] == after.read(tensor)[0]
        assert_agree(after.read(tensor)[1], before.read(tensor)[1], "exact")
    unusual = layout == "speculators" and source.in_place == (source.family == "dspark")
    assert unusual == any("sample_from_anchor" in note for note in report["notes"])
    recounted = any("windows" in note for note in report["notes"])
    assert recounted == (any(source.windows) and config.window_rule != source.window_rule)
    target = reference.Decoder.load(models / "target", dtype="float64")
    rows, trust = proposals(models / name, target, 1 if recounted else 9)
    rows_again, trust_again = proposals(tmp_path / "out", target, 1 if recounted else 9)
    assert_agree(rows_again, rows, "exact")
    for mine, theirs in zip(trust_again, trust, strict=True):
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert_agree(mine, theirs, "exact")


@pytest.mark.parametrize(("name", "layout", "why"), REFUSALS)
def test_what_a_layout_cannot_hold_is_refused(models, tmp_path, capsys, name, layout, why):  # noqa: F811
    with pytest.raises(SystemExit, match=why):
        export(capsys, models / name, tmp_path / "out", layout, target=models / "target")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_there_and_back(models, tmp_path, capsys, layout):  # noqa: F811
    """DSpark through the other layout and home again: the same config but for who wrote it, the same bits."""
    other = {"sglang": "speculators", "speculators": "sglang"}[layout]
    export(capsys, models / "deepspec-vanilla", tmp_path / "a", layout, target=models / "target")
    export(capsys, tmp_path / "a", tmp_path / "b", other, target=models / "target")
    export(capsys, tmp_path / "b", tmp_path / "c", layout, target=models / "target")
    assert (tmp_path / "a/config.json").read_text() == (tmp_path / "c/config.json").read_text()
    target = reference.Decoder.load(models / "target", dtype="float64")
    assert_agree(proposals(tmp_path / "c", target, 9)[0], proposals(models / "deepspec-vanilla", target, 9)[0], "exact")


def test_the_keys_that_sglang_reads(models, tmp_path, capsys):  # noqa: F811
    report = export(capsys, models / "speculators-dspark", tmp_path / "dspark", "sglang", target=models / "target")
    raw = json.loads((tmp_path / "dspark/config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"] and raw["sample_from_anchor"] is True
    assert (raw["markov_rank"], raw["markov_head_type"], raw["target_layer_ids"]) == (6, "vanilla", [1, 2, 4])
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == 1e6
    assert (raw["num_target_layers"], raw["num_hidden_layers"]) == (6, 2)
    words = shlex.split(report["command"])
    assert words[words.index("--speculative-algorithm") + 1] == "DSPARK"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "6", "gamma + 1"

    report = export(capsys, models / "speculators-dflash2", tmp_path / "dflash2", "sglang", target=models / "target")
    raw = json.loads((tmp_path / "dflash2/config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel"] and raw["markov_rank"] == 0
    assert raw["dflash_config"] == {
        "block_size": 5, "mask_token_id": 65, "target_layer_ids": [1, 2, 4], "selector_rank": 5, "selector_top_k": 6,
        "conv_group_size": 16, "conv_kernel_size": 2, "sample_from_anchor": False,
    }  # fmt: skip
    words = shlex.split(report["command"])
    assert words[words.index("--speculative-algorithm") + 1] == "DFLASH"
    assert words[words.index("--speculative-num-draft-tokens") + 1] == "5", "the block"
    names = Checkpoint(tmp_path / "dflash2").tensors
    assert "candidate_selector.predecessor_codebook" in names and "embed_tokens.weight" not in names


def test_the_keys_that_speculators_reads(models, tmp_path, capsys):  # noqa: F811
    report = export(capsys, models / "deepspec-vanilla", tmp_path / "out", "speculators", target=models / "target")
    raw = json.loads((tmp_path / "out/config.json").read_text())
    assert raw["speculators_model_type"] == "dspark" and "model_type" not in raw
    assert raw["aux_hidden_state_layer_ids"] == [2, 3, 5] and raw["sample_from_anchor"] is True
    assert raw["draft_vocab_size"] == raw["transformer_layer_config"]["vocab_size"] == 67
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    assert raw["speculators_config"]["verifier"]["name_or_path"] == str(models / "target")
    words = shlex.split(report["command"])
    assert words[:3] == ["vllm", "serve", str(models / "target")]
    assert json.loads(words[-1]) == {
        "method": "dspark", "model": str(tmp_path / "out"), "num_speculative_tokens": 5,
        "draft_sample_method": "probabilistic",
    }  # fmt: skip
    assert not {"embed_tokens.weight", "lm_head.weight", "d2t"} & Checkpoint(tmp_path / "out").tensors.keys()
    export(capsys, models / "speculators-dflash-reduced", tmp_path / "small", "speculators", target=models / "target")
    assert {"lm_head.weight", "d2t", "t2d"} <= Checkpoint(tmp_path / "small").tensors.keys()


def test_a_headless_drafter_gets_a_head_that_adds_nothing(models, tmp_path, capsys):  # noqa: F811
    report = export(capsys, models / "deepspec-dflash", tmp_path / "out", "sglang", target=models / "target")
    assert "one of width 1 that is zero was added" in report["notes"][0] and "DSPARK" in report["command"]
    config = DrafterConfig.from_folder(tmp_path / "out")
    assert (config.family, config.markov_rank) == ("dspark", 1)
    stored = read_drafter(tmp_path / "out", config)
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        assert_agree(stored.read(name)[1], np.zeros((67, 1), dtype=np.float32), "exact")


def test_fused_and_sharded_bfloat16_files_are_written_plainly(models, tmp_path, capsys):  # noqa: F811
    target = reference.Decoder.load(models / "target", dtype="float64")
    tables = tuple(np.asarray(t, dtype=np.float32) for t in (target.embedding, target.head))
    folder, _ = write_drafter(tmp_path / "in", dspark(), tables=tables, shards=3, bf16=True)
    export(capsys, folder, tmp_path / "out", "speculators", target=models / "target")
    assert {info.dtype for info in Checkpoint(tmp_path / "out").tensors.values()} == {"BF16"}
    assert_agree(proposals(tmp_path / "out", target, 9)[0], proposals(folder, target, 9)[0], "exact")


def test_the_fast_wing_loads_it_too(models, tmp_path, capsys):  # noqa: F811
    torch = pytest.importorskip("torch")
    import fast

    export(capsys, models / "deepspec-vanilla", tmp_path / "out", "speculators", target=models / "target")
    target = fast.Decoder.load(models / "target", dtype="float64")
    one, other = (
        fast.Drafter.load(f, target, dtype="float64") for f in (models / "deepspec-vanilla", tmp_path / "out")
    )
    features = torch.from_numpy(np.random.default_rng(3).standard_normal((9, 96)))
    rows = []
    for drafter in (one, other):
        context = drafter.context()
        context.append(features)
        rows.append(drafter.propose(context, 7).base_logits)
    assert_agree(rows[0], rows[1], "exact")


def test_bad_commands_are_told_what_to_do(models, tmp_path, capsys):  # noqa: F811
    folder, target = models / "deepspec-vanilla", models / "target"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    with pytest.raises(SystemExit, match="is not empty; choose another --out"):
        export(capsys, folder, tmp_path / "full", "sglang", target=target)
    other = tiny(vocab_size=33, mask_id=3)
    write_drafter(tmp_path / "other", other, tables=random_tables(other))
    with pytest.raises(SystemExit, match="trained on another target"):
        export(capsys, tmp_path / "other", tmp_path / "out", "sglang", target=target)
    shutil.copytree(models / "speculators-dspark", tmp_path / "old")
    raw = json.loads((tmp_path / "old/config.json").read_text())
    del raw["sample_from_anchor"]
    (tmp_path / "old/config.json").write_text(json.dumps(raw))
    with pytest.raises(SystemExit, match="say which one this is"):
        export(capsys, tmp_path / "old", tmp_path / "out", "sglang", target=target)
    export(capsys, tmp_path / "old", tmp_path / "out", "sglang", "--slot-convention", "anchor", target=target)
    assert not DrafterConfig.from_folder(tmp_path / "out").in_place
