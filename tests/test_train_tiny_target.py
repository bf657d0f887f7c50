"""The tiny target's recipe: its corpus, its tokenizer, and a training that can be stopped anywhere and goes on."""

import json
import random
import re
from collections import Counter

import numpy as np
import pytest

from models import arithmetic, corpus
from models.text import Text, builtin_prompts, read_prompts
from tests.agreement import assert_agree

torch = pytest.importorskip("torch")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

import fast  # noqa: E402
import reference  # noqa: E402
from examples import train_tiny_target as example  # noqa: E402

SHORT = ["--limit", "8", "--steps", "4"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a model after four steps on a sliver of the corpus."""
    folder = tmp_path_factory.mktemp("tiny") / "target"
    example.main(["--out", str(folder), *SHORT])
    return folder


# The corpus


def test_corpus_has_four_domains_and_is_the_same_every_time():
    documents = corpus.build(seed=3, limit=12)
    assert documents == corpus.build(seed=3, limit=12)
    assert documents != corpus.build(seed=4, limit=12)
    assert {d.domain for d in documents} == set(corpus.DOMAINS)
    assert all(d.question.strip() and d.answer.strip() and "<|" not in d.question + d.answer for d in documents)


def test_a_source_is_held_out_or_trained_on_as_a_whole():
    documents = corpus.build(limit=60)
    held_out = {d.source for d in documents if d.held_out}
    assert held_out and held_out.isdisjoint(d.source for d in documents if not d.held_out)


def test_every_equation_in_the_arithmetic_holds():
    term = r"(?:[\d.$]+ [-+*/] )*\$?\d+(?:\.\d+)?"
    answers = [arithmetic.problem(random.Random(number))[1] for number in range(2000)]
    steps = [step for answer in answers for step in re.split(r"\. |\n", answer) if not re.search(r"\bx\b|\dx", step)]
    chains = [chain for step in steps for chain in re.findall(f"{term}(?: = {term})+", step)]
    assert len(chains) > len(answers)
    for chain in chains:
        sides = [float(eval(side.replace("$", ""))) for side in chain.split(" = ")]
        assert_agree(sides, [sides[0]] * len(sides), "golden")


def test_corpus_does_not_repeat_the_measurement_prompts():
    def runs(text, length=8):
        words = re.findall(r"[a-z]+|\d+", text.lower())
        return {tuple(words[i : i + length]) for i in range(len(words) - length + 1)}

    measured = set().union(*(runs(prompt.text) for prompt in read_prompts(builtin_prompts())))
    for document in corpus.build(limit=80):
        assert not measured & runs(document.question), document.question


# The model's folder


def test_both_wings_read_the_model(trained):
    tokens = np.random.default_rng(0).integers(0, example.CONFIG["vocab_size"], 40)
    models = [wing.Decoder.load(trained) for wing in (fast, reference)]
    assert_agree(models[0].logits(tokens), np.float32(models[1].logits(tokens)), "logits32")
    assert {model.stop_ids for model in models} == {(example.STOP, example.END)}
    assert sum(path.stat().st_size for path in trained.iterdir()) < 8e6


def test_text_is_the_training_text(trained):
    text = Text.from_folder(trained)
    document = corpus.Document("chat", "", "What is 12 + 30?", "```python\nsum([12,\t30])  # é, 漢\n```")
    whole = example.text_of(document)
    prompt = text.chat([{"role": "user", "content": document.question}])
    ids = text.encode(whole)
    assert_agree(ids[: len(prompt)], prompt, "exact")
    assert text.decode(ids) == whole
    assert ids[-2] == example.STOP and text.stop_ids == (example.STOP, example.END)
    assert [text.decode([i]) for i in text.encode("1230")] == ["1", "2", "3", "0"]


def test_training_forward_is_the_decoders_own(trained):
    model = fast.Decoder.load(trained)
    rows = np.random.default_rng(1).integers(0, example.CONFIG["vocab_size"], (3, 20))
    expected = torch.cat([model.logits(row) for row in rows])
    assert_agree(example.forward(model, torch.from_numpy(rows)), expected, "logits32")


# Stopping and going on


def test_stream_of_batches_is_every_document_in_turn():
    options = example.parse(["--out", "unused"])
    documents = [np.full(n, n) for n in range(1, 100)]
    trainer = example.Trainer(options, documents, "")
    inputs, targets = zip(*(trainer.batch(step, 512) for step in range(24)), strict=True)
    stream = torch.cat([rows.flatten() for rows in inputs])
    assert_agree(torch.cat([rows.flatten() for rows in targets])[:-1], stream[1:], "exact")
    assert_agree(np.bincount(stream[: 99 * 50]), np.array([0, *range(1, 100)]), "exact")  # one epoch: n times n
    assert_agree(trainer.batch(7, 1024)[0].flatten(), inputs[7].flatten(), "exact")


def test_killed_while_saving_and_resumed_gives_the_same_bits(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(example, "bits_per_byte", lambda *_: 1.0)
    folder, save, calls = tmp_path / "target", torch.save, []

    def killed_at_the_third(state, path):
        calls.append(path)
        if len(calls) == 3:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        save(state, path)

    monkeypatch.setattr(torch, "save", killed_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        example.main(["--out", str(folder), *SHORT, "--save-minutes", "0"])
    monkeypatch.undo()
    kept = torch.load(f"{folder}.checkpoint", weights_only=True)
    assert kept["step"] == 2
    example.main(["--out", str(folder), *SHORT, "--resume"])
    states = [torch.load(f"{path}.checkpoint", weights_only=True) for path in (folder, trained)]
    for name, weights in states[1]["model"].items():
        assert_agree(states[0]["model"][name], weights, "exact")
    assert (folder / "model.safetensors").read_bytes() == (trained / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (SHORT, "add --resume"),
        ([*SHORT, "--resume", "--seed", "1"], "another seed"),
        (["--limit", "1"], "--limit must be at least 4"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--minutes", "-1"], "--minutes must be positive"),
    ],
)
def test_bad_commands_say_what_to_do(trained, arguments, message):
    with pytest.raises(SystemExit, match=message):
        example.main(["--out", str(trained), *arguments])


def test_resume_needs_something_to_resume(tmp_path):
    with pytest.raises(SystemExit, match="leave --resume out"):
        example.main(["--out", str(tmp_path / "nothing"), *SHORT, "--resume"])


def test_last_line_is_json(trained, capsys):
    example.main(["--out", str(trained), *SHORT, "--resume"])
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 4 and set(report["held_out_bits_per_byte"]) == set(corpus.DOMAINS)
    assert "bits per byte" in (trained / "README.md").read_text("utf-8")


def test_questions_become_prompts_files_and_held_out_ones_stay_apart(tmp_path):
    written = {held: corpus.write_prompts(tmp_path / str(held), 20, held_out=held) for held in (False, True)}
    for paths in written.values():
        assert [path.stem for path in paths] == list(corpus.DOMAINS)
        assert Counter(prompt.domain for prompt in read_prompts(paths)) == dict.fromkeys(corpus.DOMAINS, 20)
    asked = [{prompt.text for prompt in read_prompts(paths)} for paths in written.values()]
    assert not asked[0] & asked[1]
    both = [p.text for p in read_prompts(corpus.write_prompts(tmp_path / "more", 5, skip=15))]
    assert len(both) == 20 and set(both) < asked[0]
    for wrong in ({"per_domain": 0}, {"per_domain": 5, "skip": -1}, {"per_domain": 5, "skip": 10**6}):
        with pytest.raises(ValueError, match=r"per_domain must be|leave none"):
            corpus.write_prompts(tmp_path / "none", **wrong)
