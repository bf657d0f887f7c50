"""Curves of trainings, from their logs: by hand, over seeds, and files that are none."""

import json

import numpy as np
import pytest

from reference import training_report
from reference.records import RecordError
from tests.agreement import assert_agree


@pytest.fixture
def log(tmp_path):
    def write(name, rows):
        path = tmp_path / f"{name}.steps.jsonl"
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        return path

    return write


def steps(*lengths, tokens=10, every=2):
    """A log that reads `tokens` a step and saves every second one."""
    rows = [{"step": 0, "tokens": 0, "held_out": lengths[0]}]
    for length in lengths[1:]:
        first = rows[-1]["step"]
        rows += [{"step": first + i, "tokens": tokens, "tau": 9.0} for i in range(1, every)]
        rows += [{"step": first + every, "tokens": tokens, "held_out": length}]
    return rows


def test_curves_by_hand(log, capsys):
    paths = [log("dreal-1", steps(2.0, 2.5, 2.25)), log("dreal-2", steps(2.0, 2.25, 2.75, tokens=20))]
    runs = training_report.runs_of([*paths, log("more", steps(2.0, 1.5))])
    saved, tokens, lengths = runs["dreal"]
    assert_agree(saved, np.array([0, 2, 4]), "exact")
    assert_agree(tokens, np.array([0.0, 30.0, 60.0]), "exact")
    assert_agree(lengths, np.array([[2.0, 2.5, 2.25], [2.0, 2.25, 2.75]]), "exact")
    first, second = training_report.table(runs).rows
    assert first == ["dreal", 2, 4, 60, 2.0, 2.5, 0.5, [0.25, 0.75], 2.5, 4]
    assert second == ["more", 1, 2, 20, 2.0, 1.5, -0.5, [-0.5, -0.5], 2.0, 0]
    training_report.main([str(path) for path in paths])
    assert "dreal" in capsys.readouterr().out


def test_the_figure(log, tmp_path):
    pytest.importorskip("matplotlib")
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
    for names in (("a",), ("x/a-1", "x/a-2", "y/b")):
        paths = [str(log(name, steps(2.0, 2.5))) for name in names]
        training_report.main([*paths, "--plot", str(tmp_path / "a.png")])
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
        (tmp_path / "a.png").unlink()


@pytest.mark.parametrize(
    ("rows", "complaint"),
    [
        ([{"step": 1, "tokens": 3}], "no held-out length; train with --held-out"),
        ([{"kind": "provenance"}], "not the log of a training"),
        ([3], "not the log of a training"),
        ([], "no held-out length"),
        ([{"step": 0, "tokens": 0, "held_out": None}], "not the log of a training"),
        ([{"step": 0, "tokens": 1e999, "held_out": 2.0}], "not the log of a training"),
        ([{"step": 0, "tokens": 0, "held_out": float("nan")}], "no held-out length"),
    ],
)
def test_files_that_are_none_are_refused(log, rows, complaint):
    with pytest.raises(SystemExit, match=complaint):
        training_report.main([str(log("a", rows))])


def test_a_missing_file_and_seeds_that_do_not_match(log, tmp_path):
    with pytest.raises(SystemExit, match="No such file"):
        training_report.main([str(tmp_path / "none")])
    with pytest.raises(SystemExit, match="different steps"):
        training_report.main([str(log("a-1", steps(2.0, 2.5))), str(log("a-2", steps(2.0)))])


def test_runs_of_several_folders_stay_apart_and_a_half_written_line_is_left_out(log, tmp_path):
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        log(f"{name}/out", steps(2.0, 2.5))
    paths = [tmp_path / name / "out.steps.jsonl" for name in ("x", "y")]
    with open(paths[0], "a") as file:
        file.write('{"step": 9, "tok')
    assert [len(run[2]) for run in training_report.runs_of(paths).values()] == [1, 1]
    with pytest.raises(SystemExit, match="given twice"):
        training_report.main([str(paths[0])] * 2)
    for names in (("lr1e-4x", "lr1e3"), ("lr1e-4", "more")):
        assert set(training_report.runs_of([log(name, steps(2.0)) for name in names])) == set(names)
    with pytest.raises(RecordError, match="rename"):
        training_report.runs_of([log(name, steps(2.0)) for name in ("more", "more-1")])
