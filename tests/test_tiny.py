"""models/tiny: the embedded target as it is shipped - found by name, whole, small, and read alike by both backends."""

import json

import numpy as np
import pytest

import reference
from examples import floor_qwen3_4b
from models.checkpoint import TINY, CheckpointError, locate
from models.config import DecoderConfig
from models.text import Text, builtin_prompts, read_prompts
from tests.agreement import assert_agree

FOLDER = TINY / "target"


def test_it_is_found_by_name():
    assert locate("tiny").folder == FOLDER
    assert locate("tiny").name == "tiny"
    with pytest.raises(CheckpointError, match="the project ships no 'tiny/none'; it has tiny"):
        locate("tiny/none")
    with pytest.raises(CheckpointError, match="a revision applies only to a hub id"):
        locate("tiny", revision="main")


def test_it_is_small_and_has_a_card():
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) <= 8e6
    card = (FOLDER / "README.md").read_text()
    for said in ("bits per byte", "seed", "python examples/train_tiny_target.py", "Limits"):
        assert said in card


def test_both_backends_read_it_alike():
    pytest.importorskip("torch")
    import fast

    tokens = Text.from_folder(FOLDER).encode("def mean(values):\n    return sum(values) / len(values)\n")
    mine, theirs = (b.Decoder.load(FOLDER, dtype="float64").logits(tokens) for b in (reference, fast))
    assert_agree(theirs, mine, "golden")


def test_it_answers_in_its_domains_and_stops():
    text = Text.from_folder(FOLDER)
    target = reference.Decoder.load(FOLDER, stop_ids=text.stop_ids)
    (prompt,) = [p for p in read_prompts(builtin_prompts(), domains=["arithmetic"])][:1]
    tokens = text.chat([{"role": "user", "content": prompt.text}])
    (answer,) = reference.write_answers(target, [tokens], np.zeros((1, 200)), reference.SamplingLaw(0))
    assert answer.stopped
    assert any(digit in text.decode(answer.tokens) for digit in "0123456789")


def test_it_has_learnt_to_write():
    """Far fewer bits per byte than a uniform guess over its tokens, on text that it has not read."""
    text = Text.from_folder(FOLDER)
    tokens = text.encode("If the list is empty, the function returns None and leaves the file as it is.\n")
    logits = reference.Decoder.load(FOLDER).logits(tokens)
    rows = reference.warp(logits[:-1])
    bits = -np.log2(rows[np.arange(len(rows)), tokens[1:]]).mean()
    assert bits < 0.75 * np.log2(DecoderConfig.from_folder(FOLDER).vocab_size)


def test_the_main_job_runs_on_it(tmp_path, capsys):
    pytest.importorskip("torch")
    flags = ["--target", "tiny", "--limit", "1", "--paths", "16", "--answer-tokens", "64"]
    floor_qwen3_4b.main([*flags, "--quiet", "--out", str(tmp_path / "a.jsonl")])
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(summary["measured"]) == {"arithmetic", "code", "instructions", "chat"}
