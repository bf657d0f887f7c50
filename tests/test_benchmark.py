"""The benchmark's rows on tiny shapes: they run, add up, and nothing is timed where both sides disagree."""

import json

import pytest

torch = pytest.importorskip("torch")

from examples import benchmark, benchmark_engine, benchmark_random, benchmark_training  # noqa: E402


def test_random_weights_on_a_cpu(capsys):
    benchmark.main(["--random-weights", "tiny", "--device", "cpu", "--tokens", "3"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    anchor, *decoding = report["rows"]
    phases = sum(anchor[f"{part}_s"] for part in ("prefill", "walk", "floors", "drafter"))
    assert abs(anchor["total_s"] - phases) < 0.01
    assert [row["graphs"] for row in decoding] == [False] * 3
    assert all(0 < row["share_of_limit"] < 1 for row in decoding)
    assert {"hardware", "dtype", "threads", "torch", "commit", "seed"} <= report.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device")
def test_a_device_that_is_not_there(capsys):
    with pytest.raises(SystemExit, match="sees no CUDA device"):
        benchmark.main(["--random-weights", "qwen3-4b", "--device", "cuda"])


def test_the_shape_is_qwens():
    config = benchmark_random.config_of("qwen3-4b")
    assert config.parameter_count() == 4_022_468_096
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (36, 32, 8, 128)


def test_the_share_of_a_round_outside_the_models():
    logits = benchmark_engine.Blocks.logits
    row = benchmark_engine.overhead_row(benchmark_random.random_target("tiny", "cpu", "float32", 0), 0, 6, 1)
    assert row["block_ms"] + row["head_ms"] + row["target_ms"] < row["round_ms"]
    assert 0 < row["outside_the_models"] < 1
    assert benchmark_engine.Blocks.logits is logits


def test_texts_that_differ_are_not_timed(monkeypatch):
    target = benchmark_random.random_target("tiny", "cpu", "float32", 0)
    prompts = [(1, 2, 3)]
    (mine,), _ = benchmark_engine.decode(target, prompts, 4)
    least = int(target.logits(prompts[0])[-1].argmin())
    monkeypatch.setattr(benchmark_engine, "generate", lambda model, prompts, count: [[least, *mine[1:]]])
    with pytest.raises(SystemExit, match="differ at token 0"):
        benchmark_engine.plain_row(target, None, prompts, 4, 1)


@pytest.fixture
def few_steps(monkeypatch):
    sizes = {"DRAFTERS": ("tiny/dflash",), "ANSWERS": 8, "ANSWER_TOKENS": 12, "ANCHORS": 4, "STEPS": 1}
    for name, size in sizes.items():
        monkeypatch.setattr(benchmark_training, name, size)


def test_a_training_step_against_another(few_steps, monkeypatch):
    monkeypatch.setattr(benchmark_training, "peak_of", lambda objective, *_: 3.0 if objective == "dreal" else 2.0)
    (row,) = benchmark_training.training_rows(0)
    assert row["cost"] > 0 and 0 < row["reused"] <= 1 and row["memory"] == 1.5


def test_the_memory_of_training_steps(few_steps, monkeypatch, capsys):
    peaks = iter([1.0, 1.25])
    monkeypatch.setattr(benchmark_training, "peak_memory", lambda: next(peaks))
    benchmark_training.measure("dreal", "tiny/dflash", 0, torch.get_num_threads())
    assert json.loads(capsys.readouterr().out) == 0.25
