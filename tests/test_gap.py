"""examples/gap_qwen3_4b.py on the toy: both backends, the same anchors again, and every bad command."""

import json

import pytest

from examples import floor_qwen3_4b, gap_qwen3_4b
from reference.records import read
from tests.agreement import assert_agree

FLAGS = ["--target", "toy", "--anchors", "2", "--paths", "16", "--gamma", "3", "--quiet"]


def run(out, capsys, *more, backend="reference", example=gap_qwen3_4b):
    example.main([*FLAGS, "--backend", backend, "--out", str(out), *more])
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


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--drafter", "tall"], "the toy has no drafter 'tall'; it has parallel, chained"),
        (["--drafter", "chained", "--also", "response", "--paths", "4"], "response needs at least 8 paths"),
        (["--anchors-from", "nowhere.jsonl", "--drafter", "chained"], "nowhere.jsonl: No such file"),
    ],
)
def test_bad_commands_are_told_what_to_do(tmp_path, capsys, options, complaint):
    with pytest.raises(SystemExit) as exit_:
        run(tmp_path / "a", capsys, *options)
    assert complaint in str(exit_.value)


def test_responses_need_a_drafter(tmp_path, capsys):
    with pytest.raises(SystemExit, match="give one"):
        run(tmp_path / "a", capsys, "--also", "response", example=floor_qwen3_4b)
