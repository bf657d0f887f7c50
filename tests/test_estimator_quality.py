"""The comparison of the estimators on a few repetitions: its lines, its verdicts, both backends."""

import json

import numpy as np
import pytest

import reference
from examples import estimator_quality as example
from tests.agreement import assert_agree


@pytest.fixture
def small(monkeypatch):
    """Smaller systems and fewer paths; the lines and the code behind them stay."""
    monkeypatch.setattr(example, "M", 32)
    monkeypatch.setattr(example, "GAMMA", 4)
    monkeypatch.setattr(example, "SYSTEMS", {"4 states": example.toy.states(4, 9, seed=5)})
    monkeypatch.setattr(example, "CONCENTRATED", example.DIFFUSE[:1])
    monkeypatch.setattr(example, "DIFFUSE", example.DIFFUSE[1:])


def lines(capsys, *arguments):
    example.main(["--repetitions", "8", *arguments])
    out = capsys.readouterr().out.splitlines()
    document = json.loads(out[-1])
    assert len(out) == len(document["lines"]) + 1 == 9
    for text, line in zip(out, document["lines"], strict=False):
        assert text.startswith(line["quantity"])
        assert text.endswith("  met") == line["met"]
        assert np.isfinite([line["value"], line["se"]]).all()
    return document["lines"]


def test_every_line_is_printed_and_the_backends_agree(small, capsys):
    mine = lines(capsys)
    by_name = {line["quantity"]: line for line in mine}
    assert by_name["certified bracket holds T"]["value"] == 1.0
    assert by_name["soft T1, 4 states: sd"]["met"]
    assert by_name["divergence form, 4 states: sd"]["met"]
    pytest.importorskip("torch")
    theirs = lines(capsys, "--backend", "fast")
    assert_agree(np.array([x["value"] for x in theirs]), np.array([x["value"] for x in mine]), "golden")


def test_a_repetition_depends_on_its_number_and_the_seed_only():
    few, many, other = (example.Repeat(*which)(lambda rng: rng.random()) for which in ((2, 5), (3, 5), (3, 6)))
    assert_agree(many[:2], few, "exact")
    assert not np.isin(many, other).any()


def test_the_standard_error_of_a_mean():
    """Resampled, it is that of the textbook up to the 200 resamples (a twentieth; here 6 of them)."""
    samples = np.random.default_rng(0).random(100)
    value, error = example.Repeat(100, 0).judge(np.mean, samples)
    assert_agree(value, samples.mean(), "float64")
    assert abs(error / (samples.std() / 10) - 1) < 6 / 20


def test_the_order_one_truth_is_the_exact_floor():
    target = example.toy.states(3, 4, seed=1)
    truth, samples = example.order_one(reference, target, example.Repeat(2, 0))
    assert_agree(truth, example.toy.exact_floor(target, (0,), 2, 1), "golden")
    assert samples.shape == (2, 2)


@pytest.mark.parametrize(("flag", "value", "least"), [("--repetitions", "7", 8), ("--seed", "-1", 0)])
def test_too_few_repetitions_and_a_negative_seed_are_refused(flag, value, least, capsys):
    with pytest.raises(SystemExit) as end:
        example.main([flag, value])
    assert end.value.code == 2
    assert f"{flag} must be at least {least}" in capsys.readouterr().err
