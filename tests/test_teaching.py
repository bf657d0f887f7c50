"""The teaching examples: what they claim, in both backends, the output their docstrings show, and no torch in NumPy."""

import importlib
import json
import subprocess
import sys
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from examples import dreal_toy, verify_toy
from models import toy
from reference.laws import warp
from tests.agreement import assert_agree
from tests.test_objectives import exact_slope, expected_drafts
from tests.test_serving import accepted_drafts

ROOT = Path(__file__).resolve().parents[1]
SMALL = {  # the example's flags for a short run
    "toy_floors": ["--paths", "24", "--repetitions", "3", "--budgets", "9", "200"],
    "parity": ["--tokens", "3"],
    "dreal_toy": ["--steps", "12", "--blocks", "8"],
    "verify_toy": ["--seed", "1"],
}
each_backend = pytest.mark.parametrize(
    "backend", ["reference", pytest.param("fast", marks=pytest.mark.filterwarnings("default"))]
)


def run(capsys, name, backend="reference", flags=()):
    """An example's table, line by line, and its JSON document."""
    if backend == "fast":
        pytest.importorskip("torch")
    importlib.import_module(f"examples.{name}").main(["--backend", backend, *flags])
    *lines, last = capsys.readouterr().out.splitlines()
    return lines, json.loads(last, parse_constant=pytest.fail)


def numbers(document):
    """All numbers of a JSON document, in order."""
    if isinstance(document, dict | list):
        values = document.values() if isinstance(document, dict) else document
        return [number for value in values for number in numbers(value)]
    return [float(document)] if isinstance(document, int | float) else []


@pytest.fixture(scope="module")
def whole():
    """Every example as its docstring says to run it."""
    found = {}
    for name in SMALL:
        command = [sys.executable, ROOT / "examples" / f"{name}.py"]
        process = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert process.returncode == 0, process.stderr
        *lines, last = process.stdout.splitlines()
        found[name] = lines, json.loads(last)
    return found


@pytest.mark.parametrize("name", SMALL)
def test_the_docstring_shows_what_comes_out(name, whole):
    paragraphs = importlib.import_module(f"examples.{name}").__doc__.split("\n\n")
    (commands,) = [i for i, text in enumerate(paragraphs) if text.startswith("    python examples/")]
    shown = [line.removeprefix("    ") for line in paragraphs[commands + 1].splitlines()]
    assert len(shown) > 4
    assert set(shown) <= set(whole[name][0])
    for command in paragraphs[commands].splitlines():
        assert command.split()[1] == f"examples/{name}.py"


@pytest.mark.parametrize("name", SMALL)
def test_backends_agree(name, capsys):
    lines, mine = run(capsys, name, "reference", SMALL[name])
    others, theirs = run(capsys, name, "fast", SMALL[name])
    assert lines == others
    assert_agree(numbers(theirs), numbers(mine), "golden")  # after a dozen steps of training
    assert len(numbers(mine)) > 8


@pytest.mark.parametrize("name", SMALL)
def test_the_reference_needs_no_torch(name):
    program = (
        "import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = 'examples';"
        f"runpy.run_module('examples.{name}', run_name='__main__')"
    )
    process = subprocess.run([sys.executable, "-c", program, *SMALL[name]], capture_output=True, text=True, cwd=ROOT)
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout.splitlines()[-1])["example"] == name


@pytest.mark.parametrize(
    ("name", "flag", "value"),
    [
        *((name, "--seed", "-1") for name in SMALL),
        ("toy_floors", "--repetitions", "0"),
        ("toy_floors", "--budgets", "2"),
        ("parity", "--tokens", "0"),
        ("parity", "--tokens", "-1"),
        ("dreal_toy", "--blocks", "0"),
        ("dreal_toy", "--steps", "-1"),
        ("dreal_toy", "--rate", "nan"),
    ],
)
def test_what_cannot_be_run_is_one_line(name, flag, value, capsys):
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"examples.{name}").main([flag, value])
    assert end.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"error: {flag} must be" in last
    assert last.endswith(f"got {value}")


@each_backend
def test_parity(backend, capsys):
    """App. G.2: nothing is hidden, and a blind proposal is rejected half of the time whatever it is."""
    for flags in (["--tokens", "2"], ["--tokens", "5", "--seed", "3"]):
        classes = run(capsys, "parity", backend, flags)[1]["classes"]
        for parts in classes.values():
            assert parts["floor"] == 0.0
            assert_agree(parts["floor"] + parts["slack"] + parts["training"], parts["risk"], "float64")
            assert parts["slack"] >= 0
        for view in ("nothing", "all but the first", "the last token"):
            for proposal in ("best", "untrained"):
                parts = classes[f"{view}, {proposal}"]
                assert_agree([parts["risk"], parts["slack"], parts["training"]], [0.5, 0.5, 0.0], "float64")
        assert classes["everything, best"]["risk"] == 0.0
        untrained = classes["everything, untrained"]
        assert_agree(untrained["training"], untrained["risk"], "float64")
        assert untrained["risk"] > 0.1


@each_backend
def test_verification_is_lossless_with_the_row_drawn_from(backend, capsys):
    """The law of the text is the target's; the mean round is 1 + what the drafts' recursion says is accepted."""
    found = run(capsys, "verify_toy", backend)[1]["drafters"]
    *lossless, faulty = found.values()
    assert len(lossless) == 4
    for row in lossless:
        assert_agree(row["distance"], 0.0, "float64")
    assert faulty["distance"] > 0.1
    target, draft = (toy.random_table(3, 3, seed=i, concentration=2.0) for i in (0, 1))
    expected = 1 + accepted_drafts(target, (), draft.next_token, verify_toy.SLOTS)
    assert_agree(found["another table"]["committed"], float(expected), "float64")
    assert_agree(found["the target itself"]["committed"], verify_toy.SLOTS + 1.0, "float64")


@each_backend
def test_dreal_has_no_bias(backend, capsys):
    found = run(capsys, "dreal_toy", backend, SMALL["dreal_toy"])[1]["objectives"]
    assert list(found) == ["exact", *dreal_toy.OBJECTIVES]
    assert_agree([found["dreal"][part] for part in ("bias", "cosine", "scale")], [0.0, 1.0, 1.0], "float64")
    for name in ("dpace", "tv_static", "static_decay"):
        assert found[name]["bias"] > 0.05
        assert found[name]["cosine"] < 0.99
    for row in found.values():
        assert row["length"][0] == found["exact"]["length"][0]
        assert all(1 <= length <= dreal_toy.SLOTS + 1 for length in row["length"])


def test_who_drafts_the_longest_blocks(whole):
    """The run of the docstring: overlap ends near the exact gradient, cross-entropy does not."""
    last = {name: row["length"][-1] for name, row in whole["dreal_toy"][1]["objectives"].items()}
    assert min(last[name] for name in ("exact", "dreal", "tv_static")) > max(last["dpace"], last["static_decay"]) + 0.1
    assert min(row["length"][-1] - row["length"][0] for row in whole["dreal_toy"][1]["objectives"].values()) > 0.5


@pytest.mark.parametrize("stop_ids", [(), (2,)])
def test_the_length_and_its_slope(stop_ids):
    """Against a recursion over drafts, and its complex steps; nowhere near 0."""
    target = toy.random_table(3, 4, seed=5, concentration=2.0, stop_ids=stop_ids)
    z, prefix = np.random.default_rng(1).normal(size=(3, 3, 3)), (1,)
    length, slope = toy.drafted_length(target, prefix, z)

    def row_of(past):
        return 3 * len(past) + (prefix + tuple(past))[-1]

    def rows(past):
        return target.next_token((*prefix, *past))

    table = z.reshape(9, 3)
    drafts = expected_drafts(lambda past: warp(table[row_of(past)]), rows, 3, stop_ids)
    assert_agree(length, 1 + float(drafts), "float64")
    expected = exact_slope(table, row_of, rows, 3, stop_ids).reshape(3, 3, 3)
    assert_agree(slope, expected, "float64")
    assert np.abs(slope).max() > 0.05


@each_backend
def test_brackets_hold_the_floors(backend, capsys):
    """Orders 0 to 2: the catalogue's chain, and every bracket; with room for all prefixes it is the floor."""
    floors = run(capsys, "toy_floors", backend, SMALL["toy_floors"])[1]["floors"]
    for (target, order), expected in zip(product(floors, "012"), (0.255, 0.0428, 0.0), strict=False):
        assert_agree(floors[target][order]["exact"], expected, "golden")
    for found in (row for orders in floors.values() for row in orders.values()):
        small, large = found["estimates"]["bracket, 9"], found["estimates"]["bracket, 200"]
        assert (small["holds"], large["holds"]) == (1.0, 1.0)
        assert_agree(large["ends"], [found["exact"]] * 2, "golden")


def test_what_the_estimates_lean_to(whole):
    """The run of the docstring, order 1: by weight less noise than by chance, and less bias."""
    for orders in whole["toy_floors"][1]["floors"].values():
        found = orders["1"]["estimates"]
        for soft, grouped in (("soft", "plug-in"), ("soft, cross-fit", "cross-fit"), ("reweighted", "plug-in")):
            assert abs(found[soft]["bias"]) < abs(found[grouped]["bias"])
            assert found[soft]["sd"] < found[grouped]["sd"]


def test_too_few_paths_are_refused(capsys):
    with pytest.raises(SystemExit):
        run(capsys, "toy_floors", flags=["--paths", "16"])
    assert "at least 17" in capsys.readouterr().err
