"""examples/gap_qwen3_4b.py on the toy, and networks of every dialect in the protocol: both backends agree."""

import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

import reference
from examples import floor_qwen3_4b, gap_qwen3_4b
from models.config import ConfigError, DecoderConfig
from reference import program
from reference.protocol import Design, EncodedPrompt, measure
from reference.records import read
from reference.shared_records import SharedRecords
from tests.agreement import TOLERANCES, assert_agree
from tests.dialects import CASES, on_bf16_grid, save, write_drafter

FLAGS = ["--target", "toy", "--paths", "16", "--gamma", "3", "--quiet"]


def run(out, capsys, *more, backend="reference", example=gap_qwen3_4b):
    some = [] if "--anchors-from" in more else ["--anchors", "2"]
    example.main([*FLAGS, *some, "--backend", backend, "--out", str(out), *more])
    return json.loads(capsys.readouterr().out.splitlines()[-1])


def test_both_backends_give_the_same_tables(tmp_path, capsys):
    pytest.importorskip("torch")
    options = ["--drafter", "parallel", "chained", "--also", "response", "information"]
    slow, fast = (run(tmp_path / b, capsys, *options, backend=b) for b in ("reference", "fast"))
    assert slow["tables"].keys() == fast["tables"].keys()
    wanted = ("drafter", "serving", "dependence", "responses", "sweeps")
    assert {f"{table} {drafter}" for table in wanted for drafter in ("parallel", "chained")} <= slow["tables"].keys()
    for name, table in slow["tables"].items():
        pairs = zip(_numbers(table["rows"]), _numbers(fast["tables"][name]["rows"]), strict=True)
        for mine, theirs in pairs:
            assert_agree(float(theirs), float(mine), "golden")


def _numbers(cells):
    for cell in cells:
        if isinstance(cell, list):
            yield from _numbers(cell)
        elif isinstance(cell, int | float):
            yield cell


def test_risk_is_floor_plus_gap(tmp_path, capsys):
    table = run(tmp_path / "a", capsys, "--drafter", "parallel")["tables"]["drafter parallel"]
    columns = dict(zip(table["columns"], zip(*table["rows"], strict=True), strict=True))
    for floor, risk, gap in zip(columns["T0"], columns["R"], columns["gap"], strict=True):
        assert_agree(risk, floor + gap, "float64")
        assert gap >= 0


def test_the_same_anchors_under_another_law(tmp_path, capsys):  # App. C.7
    first, second = tmp_path / "first", tmp_path / "second"
    run(first, capsys, "--drafter", "chained")
    again = ["--anchors-from", str(first), "--temperature", "0.7", "--top-k", "20", "--top-p", "0.8", "--paths", "32"]
    summary = run(second, capsys, "--drafter", "chained", *again)
    places = [[(r["prompt"], r["position"]) for r in read(f)[1] if r["kind"] == "anchor"] for f in (first, second)]
    assert places[0] == places[1]
    columns = summary["tables"]["drafter chained"]["columns"]
    assert "R tempered only" in columns

    from reference import report

    report.main([str(first), "--against", str(second)])
    tables = json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]
    before, after, change = (
        [row[tables["against: R chained"]["columns"].index(c)] for row in tables["against: R chained"]["rows"]]
        for c in ("first", "second", "change")
    )
    for a, b, c in zip(before, after, change, strict=True):
        assert_agree(c, b - a, "float64")


def test_a_figure(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run(tmp_path / "a", capsys, "--drafter", "parallel", "chained", "--plot", str(tmp_path / "gaps.png"))
    assert (tmp_path / "gaps.png").stat().st_size > 1000


def test_a_figure_of_one_prompt_has_no_intervals(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    options = ["--drafter", "chained", "--limit", "1", "--domains", "open", "--plot", str(tmp_path / "gaps.png")]
    assert run(tmp_path / "a", capsys, *options)["anchors"] == 1
    assert (tmp_path / "gaps.png").stat().st_size > 1000


def test_the_figure_does_not_take_the_place_of_the_records(tmp_path, capsys):
    with pytest.raises(SystemExit, match="is the record file"):
        run(tmp_path / "a.png", capsys, "--drafter", "chained", "--plot", str(tmp_path / "a.png"))


def test_answers_of_another_target_are_refused(tmp_path, capsys):
    run(tmp_path / "a", capsys, "--drafter", "chained")
    text = (tmp_path / "a").read_text().replace('"target":"toy"', '"target":"Qwen/Qwen3-4B"')
    (tmp_path / "b").write_text(text)
    with pytest.raises(SystemExit, match="holds answers of target Qwen/Qwen3-4B, not toy"):
        run(tmp_path / "c", capsys, "--anchors-from", str(tmp_path / "b"), "--drafter", "chained")
    assert not (tmp_path / "c").exists()


def test_a_refused_run_does_not_stand_in_the_way(tmp_path, capsys):
    with pytest.raises(SystemExit, match="no position can be an anchor"):
        run(tmp_path / "a", capsys, "--drafter", "chained", "--gamma", "600", "--answer-tokens", "20")
    with pytest.raises(SystemExit, match=r"another design\.gamma"):  # its answers are kept
        run(tmp_path / "a", capsys, "--drafter", "chained")
    (tmp_path / "b").write_bytes((tmp_path / "a").read_bytes().splitlines(keepends=True)[0])
    assert run(tmp_path / "b", capsys, "--drafter", "chained")["anchors"] == 4


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--drafter", "tall"], "the toy has no drafter 'tall'; it has parallel, chained"),
        (["--drafter", "chained", "--also", "response", "--paths", "4"], "response needs at least 8 paths"),
        (["--anchors-from", "nowhere.jsonl", "--drafter", "chained"], "nowhere.jsonl: No such file"),
        (["--anchors-from", "a", "--limit", "1", "--drafter", "chained"], "--limit means nothing with --anchors-from"),
        (["--drafter", "chained", "chained"], "drafter chained is given twice"),
    ],
)
def test_bad_commands_are_told_what_to_do(tmp_path, capsys, options, complaint):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path / "a", capsys, *options)
    assert complaint in str(exit_.value)


def test_responses_need_a_drafter(tmp_path, capsys):
    with pytest.raises(SystemExit, match="give one"):
        run(tmp_path / "a", capsys, "--also", "response", example=floor_qwen3_4b)


# --- networks: a random target and a random drafter in every dialect ----------------------------------------------

TARGET = {
    "model_type": "qwen3", "vocab_size": 67, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    "max_position_embeddings": 64, "tie_word_embeddings": False, "attention_bias": False, "eos_token_id": 5,
}  # fmt: skip
FITTING = [name for name in CASES if not name.startswith("gemma")]  # those are for a wider target


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A target folder without tokenizer, and a folder for each drafter, which shares its tables."""
    where = tmp_path_factory.mktemp("models")
    config, rng = DecoderConfig.from_dict(TARGET), np.random.default_rng(0)
    tensors = {
        name: on_bf16_grid(1 + 0.1 * rng.standard_normal(s) if "norm" in name else 0.4 * rng.standard_normal(s))
        for name, s in config.tensor_shapes().items()
    }
    save(where / "target", TARGET, tensors)
    tables = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    for name in FITTING:
        write_drafter(where / name, CASES[name], tables=tables)
    return where


@pytest.mark.parametrize(("flag", "in_place"), [("anchor", False), ("in-place", True)])
def test_the_flag_settles_the_slot_convention(models, tmp_path, flag, in_place):
    folder = tmp_path / "legacy"
    shutil.copytree(models / "speculators-dspark", folder)
    raw = json.loads((folder / "config.json").read_text())
    del raw["sample_from_anchor"]
    (folder / "config.json").write_text(json.dumps(raw))
    target = reference.Decoder.load(models / "target", dtype="float64")
    said = []

    def load(flag, names=(folder,)):
        options = SimpleNamespace(target="target", drafter=[str(n) for n in names], slot_convention=flag)
        design = Design(gamma=3)
        return program.load_drafters(options, design, reference, "cpu", "float64", target, said.append)

    drafters, origins = load(flag)
    assert drafters["legacy"].config.in_place is in_place
    assert drafters["legacy"].head.dtype == np.float64
    assert origins["legacy"]["family"] == "dspark" and origins["legacy"]["order"] == 1
    assert any("parameters of its own" in text for text in said)
    with pytest.raises(ConfigError, match="say which one"):
        load("auto")
    other = tmp_path / "again" / "legacy"
    shutil.copytree(folder, other)
    with pytest.raises(ValueError, match="two drafters are called 'legacy'"):
        load(flag, (folder, other))


@pytest.mark.parametrize("name", [name for name in FITTING if "reduced" in name])
def test_the_head_of_a_reduced_vocabulary_has_the_rows_of_its_ids(models, name):
    target = reference.Decoder.load(models / "target", dtype="float64")
    drafter = reference.Drafter.load(models / name, target, dtype="float64")
    assert_agree(drafter.head, target.head[drafter.ids], "exact")
    torch = pytest.importorskip("torch")
    import fast

    target = fast.Decoder.load(models / "target", dtype="float64")
    drafter = fast.Drafter.load(models / name, target, dtype="float64")
    assert_agree(drafter.head, target.head[torch.as_tensor(drafter.ids)], "exact")


def test_base_logits_are_scaled_and_then_capped(models):
    config = CASES["zlab-scaled"]
    target = reference.Decoder.load(models / "target", dtype="float64")
    drafter = reference.Drafter.load(models / "zlab-scaled", target, dtype="float64")
    context = drafter.context()
    context.append(np.random.default_rng(0).standard_normal((5, 3 * config.hidden_size)))
    proposal = drafter.propose(context, 7)
    u = config.output_multiplier * proposal.hidden @ target.head.T
    assert_agree(proposal.base_logits, config.softcap * np.tanh(u / config.softcap), "float64")


def measure_all(backend, models, records, also=()):
    """Every drafter on the same two anchors, by the protocol itself: rows of the record file."""
    target = backend.Decoder.load(models / "target", dtype="float64")
    drafters = {name: backend.Drafter.load(models / name, target, dtype="float64") for name in FITTING}
    gamma = min(drafter.gamma for drafter in drafters.values())
    design = Design(anchors=1, paths=12, gamma=gamma, answer_tokens=12, also=tuple(also))
    prompts = [EncodedPrompt(f"{d}:0", d, tuple(range(i, i + 8))) for i, d in enumerate(("sums", "talk"))]
    with SharedRecords(records, {"design": design.provenance()}) as file:
        measure(backend, target, prompts, design, file, drafters=drafters, quiet=True)
    return read(records)[1]


def test_every_dialect_is_measured_alike_by_both_backends(models, tmp_path):
    pytest.importorskip("torch")
    import fast

    mine, theirs = (measure_all(b, models, tmp_path / b.__name__, ("response",)) for b in (reference, fast))
    for row, other in zip(mine, theirs, strict=True):
        assert row.keys() == other.keys()
        if row["kind"] == "anchor":
            assert row["drafters"].keys() == other["drafters"].keys() == set(FITTING)
            for a, b in zip(_leaves(row), _leaves(other), strict=True):
                assert_agree(b, a, "golden")


def _leaves(value):
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _leaves(part)
    elif isinstance(value, int | float):
        yield float(value)


def test_no_network_beats_its_floor(models, tmp_path):
    for row in measure_all(reference, models, tmp_path / "records"):
        for name in FITTING if row["kind"] == "anchor" else ():
            entry, order = row["drafters"][name], CASES[name].order
            floor = {0: row["order0"]["fit"], 1: row["order1"]["fit"], None: [0.0] * len(entry["risk"])}[order]
            for bound, risk in zip(floor, entry["risk"], strict=True):
                assert risk is None or risk >= bound - TOLERANCES["float64"]
            assert (entry["self_risk"][0] is None) == (order == 0)
