"""examples/floor_qwen3_4b.py end to end on a tiny random Qwen3: run, stop, kill, resume, and every bad command."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from examples import floor_qwen3_4b as example
from models.config import DecoderConfig
from reference import report
from reference.records import read
from tests.agreement import assert_agree

safetensors = pytest.importorskip("safetensors.numpy")
tokenizers = pytest.importorskip("tokenizers")

ROOT = Path(__file__).resolve().parents[1]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 304,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 192,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
    "eos_token_id": 2,
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
TEXTS = {
    "sums": ["What is 3 + 4?", "Compute 12 - 5.", "How much is 2 times 6?"],
    "talk": ["Tell me of the sea.", "Why is the sky blue, señor?", "Name a bird — any."],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model folder as the hub has them: random float32 weights, a byte-level tokenizer, a chat template."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    folder.mkdir()
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = byte_level, tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=SPECIAL, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([text for texts in TEXTS.values() for text in texts] * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": SPECIAL[2], "pad_token": SPECIAL[0], "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    stops = [2, 0, *range(40, 50)]  # a dozen of 304, so that some answers end by themselves
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    rng = np.random.default_rng(0)
    tensors = {
        name: (1 + 0.1 * rng.standard_normal(shape) if "norm" in name else 0.3 * rng.standard_normal(shape)).astype(
            np.float32
        )
        for name, shape in DecoderConfig.from_dict(CONFIG).tensor_shapes().items()
    }
    safetensors.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """Two prompts files, each a domain; both number their prompts from 0."""
    where = tmp_path_factory.mktemp("prompts")
    for domain, texts in TEXTS.items():
        rows = [json.dumps({"id": i, "turns": [text]}) for i, text in enumerate(texts)]
        (where / f"{domain}.jsonl").write_text("\n".join(rows) + "\n")
    return [where / f"{domain}.jsonl" for domain in TEXTS]


@pytest.fixture(autouse=True)
def steady(monkeypatch, tmp_path):
    """No network, no hub cache, one thread, and no commit: another process may be working on this checkout."""
    for name, value in {
        "HF_HUB_OFFLINE": "1", "HF_HOME": tmp_path / "hub", "OMP_NUM_THREADS": "1", "GIT_DIR": tmp_path / "no-git"
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def command(folder, prompts, tmp_path):
    """The arguments of a small run; keyword arguments replace or (None) drop a flag, True sets one."""

    def make(**flags):
        flags = {
            "target": folder, "prompts": prompts, "anchors": 3, "paths": 8, "gamma": 3, "answer_tokens": 16, "seed": 14,
            "backend": "reference", "dtype": "float64", "out": tmp_path / "records.jsonl",
        } | flags  # fmt: skip
        arguments = []
        for name, value in flags.items():
            if value is not None:
                values = value if isinstance(value, list) else [] if value is True else [value]
                arguments += [f"--{name.replace('_', '-')}", *map(str, values)]
        return arguments

    return make


BACKENDS = [
    "reference",
    pytest.param("fast", marks=pytest.mark.filterwarnings("default")),  # torch may warn on import
]


def need(backend):
    if backend == "fast":
        pytest.importorskip("torch")


def start(arguments):
    return subprocess.Popen(
        [sys.executable, ROOT / "examples" / "floor_qwen3_4b.py", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def program(arguments):
    """Run the example as a program of its own: (exit code, stdout, stderr)."""
    process = start(arguments)
    out, error = process.communicate(timeout=120)
    return process.returncode, out, error


def here(capsys, arguments):
    """Run the example in this process: its stdout."""
    example.main(arguments)
    return capsys.readouterr().out


def strict(text):
    return json.loads(text, parse_constant=pytest.fail)


def of_kind(rows, kind):
    return [row for row in rows if row["kind"] == kind]


# --- one run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_run_ends_in_json_and_a_second_one_adds_nothing(command, tmp_path, backend, capsys):
    need(backend)
    arguments = command(backend=backend)
    code, out, error = program(arguments)
    assert code == 0, error
    assert "Traceback" not in error
    *lines, last = out.splitlines()
    summary = strict(last)
    out_file = tmp_path / "records.jsonl"
    whole = out_file.read_bytes()
    assert summary == report.summarise(*read(out_file))
    assert report.table(summary) in out
    assert list(summary["groups"]) == ["sums", "talk", "pooled", "equal-domain"]
    assert any(line.startswith("estimate: ") for line in lines)
    assert f"records: {out_file} (0 anchors done)" in lines

    provenance, rows = read(out_file)
    assert provenance["target"] == "tiny-qwen3"
    assert provenance["backend"] == backend
    assert (provenance["dtype"], provenance["device"], provenance["thinking"]) == ("float64", "cpu", "off")
    assert provenance["stop_ids"] == [2, 0, *range(40, 50)]
    assert provenance["stop_source"] == "generation_config.json"
    answers, anchors = of_kind(rows, "answer"), of_kind(rows, "anchor")
    assert sorted(row["prompt"] for row in answers) == sorted(f"{d}:{i}" for d in TEXTS for i in range(3))
    assert {row["stopped"] for row in answers} == {True, False}
    assert len(anchors) == summary["anchors"] == sum(d["anchors"] for d in summary["plan"].values()) > 3
    assert max(max(row["distinct"]) for row in anchors) > 3  # paths that differ

    example.main(arguments)  # once more
    again = capsys.readouterr().out.splitlines()
    assert strict(again[-1]) == summary
    assert f"records: {out_file} ({len(anchors)} anchors done)" in again
    assert not any(line.startswith("estimate: ") for line in again)
    assert out_file.read_bytes() == whole


def test_backends_agree_anchor_by_anchor(command, tmp_path, capsys):
    need("fast")
    rows = {}
    for backend in ("reference", "fast"):
        here(capsys, command(backend=backend, out=tmp_path / backend, quiet=True))
        rows[backend] = read(tmp_path / backend)[1]
    assert len(rows["reference"]) == len(rows["fast"])
    compared = 0
    for mine, other in zip(rows["reference"], rows["fast"], strict=True):
        floors = [{key: row.pop(key) for key in ("order0", "order1") if key in row} for row in (mine, other)]
        assert mine == other
        for order, columns in floors[0].items():
            for name, values in columns.items():
                theirs = floors[1][order][name]
                assert [v is None for v in theirs] == [v is None for v in values]
                for one, two in zip(values, theirs, strict=True):
                    if one is not None:
                        assert_agree(two, one, "exact" if name == "support" else "golden")
                        compared += 1
    assert compared > 100


def test_the_toy_needs_no_model(command, tmp_path, capsys):
    summaries = []
    for backend in ("reference", "fast"):
        need(backend)
        flags = {"target": "toy", "prompts": None, "limit": 2, "backend": backend, "out": tmp_path / backend}
        out = here(capsys, command(**flags))
        summaries.append(strict(out.splitlines()[-1]))
        assert summaries[-1]["provenance"]["target"] == "toy"
    assert summaries[0]["anchors"] == summaries[1]["anchors"] > 2
    assert list(summaries[0]["groups"]) == [*summaries[0]["plan"], "pooled", "equal-domain"]
    for name, group in summaries[0]["groups"].items():
        for column in ("t0_fit", "t0_held_out", "t1_fit"):
            assert_agree(np.array(summaries[1]["groups"][name][column]), np.array(group[column]), "float64")


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        ({"domains": ["constrained", "poems"]}, "poems"),
        ({"device": "cuda"}, "cuda"),
        ({"dtype": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_toy_refuses_what_it_cannot_honour(command, flags, part):
    # was once: an unknown domain beside a known one is dropped in silence, and the reference backend's refusals
    # of a device and a dtype are made where a model is loaded only
    assert part in refused(command(target="toy", prompts=None, limit=1, **flags))


def test_limit_one_measures_one_anchor_of_one_prompt_in_each_domain(command, tmp_path, capsys):
    summary = strict(here(capsys, command(limit=1)).splitlines()[-1])
    _, rows = read(tmp_path / "records.jsonl")
    assert [row["prompt"] for row in of_kind(rows, "answer")] == ["sums:0", "talk:0"]
    assert summary["anchors"] == len(of_kind(rows, "anchor")) <= 2
    assert all(counts["anchors"] == min(1, counts["eligible"]) for counts in summary["plan"].values())


def test_quiet_prints_the_json_line_only(command):
    code, out, error = program(command(limit=1, quiet=True))
    assert (code, error) == (0, "")
    (line,) = out.splitlines()
    assert strict(line)["anchors"] > 0


def test_domains_selects_and_prompt_tokens_leaves_out(command, tmp_path, capsys):
    out = here(capsys, command(domains=["talk"], prompt_tokens=48))
    _, rows = read(tmp_path / "records.jsonl")
    lengths = {row["prompt"]: len(row["prompt_tokens"]) for row in of_kind(rows, "answer")}
    assert all(prompt.startswith("talk:") for prompt in lengths)
    assert 0 < len(lengths) < 3
    assert max(lengths.values()) <= 48
    assert f"note: talk: left out {3 - len(lengths)} prompts longer than 48 tokens" in out
    assert list(strict(out.splitlines()[-1])["groups"]) == ["talk", "pooled", "equal-domain"]


def test_plot_writes_the_figure(command, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    image = tmp_path / "floors.png"
    out = here(capsys, command(limit=1, plot=image))
    assert f"figure: {image}" in out
    assert image.read_bytes().startswith(b"\x89PNG")


def test_thinking_changes_the_prompt_and_is_recorded(command, tmp_path, capsys):  # G1 (a), (c)
    tokens = {}
    for thinking in ("off", "on", "unset"):
        out_file = tmp_path / thinking
        here(capsys, command(limit=1, thinking=thinking, out=out_file))
        provenance, rows = read(out_file)
        assert provenance["thinking"] == thinking
        assert len(provenance["template"]) == 16
        tokens[thinking] = of_kind(rows, "answer")[0]["prompt_tokens"]
    assert tokens["on"] == tokens["unset"] == tokens["off"][: len(tokens["on"])]
    assert len(tokens["off"]) > len(tokens["on"])
    assert tokens["on"][0] == SPECIAL.index("<|im_start|>")  # the template's own first token, no other before it


# --- kill and resume --------------------------------------------------------------------------------------------


def kill_when(process, path, size):
    """Kill a run as soon as its record file is larger than `size`; False if it was over before."""
    while process.poll() is None and (not path.exists() or path.stat().st_size <= size):
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(("backend", "kills"), [("reference", 3), pytest.param("fast", 1, marks=BACKENDS[1].marks)])
def test_a_killed_run_carries_on_and_ends_with_the_same_file(command, tmp_path, backend, kills, capsys):  # J3 (h)
    need(backend)
    whole, path = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    longer = {} if backend == "fast" else {"anchors": 12, "paths": 16, "gamma": 4, "answer_tokens": 32}
    small = {"backend": backend, **longer}
    here(capsys, command(**small, out=whole))
    ends = list(itertools.accumulate(len(line) for line in whole.read_bytes().splitlines(keepends=True)))
    pick = random.Random(3)
    killed = 0
    for _ in range(kills):
        written = path.stat().st_size if path.exists() else 0
        left = [end for end in ends if end > written]
        killed += kill_when(start(command(**small, out=path)), path, pick.choice(left[: len(left) * 2 // 3 + 1]) - 1)
        data = path.read_bytes()
        assert whole.read_bytes().startswith(data)
    assert killed
    here(capsys, command(**small, out=path))
    assert path.read_bytes() == whole.read_bytes()


def test_runs_killed_after_any_time_carry_on(command, tmp_path, capsys):
    whole, path = tmp_path / "whole.jsonl", tmp_path / "killed.jsonl"
    here(capsys, command(out=whole))
    pick = random.Random(4)
    for _ in range(4):
        process = start(command(out=path))
        time.sleep(pick.uniform(0.05, 0.7))  # before the file, in the middle, or after the end
        process.send_signal(signal.SIGKILL)
        process.communicate()
    here(capsys, command(out=path))
    assert path.read_bytes() == whole.read_bytes()


def test_two_runs_at_once_the_second_is_refused(command, tmp_path, capsys):  # J3 (f)
    from reference.records import RecordFile

    here(capsys, command(limit=1))
    provenance, _ = read(tmp_path / "records.jsonl")
    del provenance["kind"]
    with RecordFile(tmp_path / "records.jsonl", provenance):
        assert "being written by another process" in refused(command(limit=1))


# --- bad commands -----------------------------------------------------------------------------------------------


def refused(arguments):
    """The message of a run in this process that must end in `error: ...`, one line."""
    with pytest.raises(SystemExit) as end:
        example.main(arguments)
    message = end.value.code
    assert isinstance(message, str)  # sys.exit prints it on stderr and ends with code 1
    assert message.startswith("error: ")
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ({"target": "/no/such/folder"}, ["/no/such/folder"]),
        ({"target": "./tiny"}, ["./tiny"]),
        ({"domains": ["poems"]}, ["'poems'", "sums, talk"]),
        ({"answer_tokens": 4096}, ["--answer-tokens 4096", "192"]),
        ({"prompt_tokens": 3}, ["--prompt-tokens"]),
        ({"paths": 1}, ["paths", "1"]),
        ({"gamma": 0}, ["gamma", "0"]),
        ({"anchors": 0}, ["anchors", "0"]),
        ({"answer_tokens": 0}, ["answer_tokens", "0"]),
        ({"limit": -1}, ["-1"]),
        ({"temperature": -1}, ["temperature", "-1"]),
        ({"temperature": "nan"}, ["temperature", "nan"]),
        ({"top_p": 1.5}, ["top_p", "1.5"]),
        ({"top_k": -2}, ["top_k", "-2"]),
        ({"stop_ids": [9999]}, ["9999"]),
        ({"revision": "main"}, ["revision"]),
        ({"dtype": "bfloat16"}, ["reference", "bfloat16"]),
        ({"device": "cuda"}, ["reference", "cuda"]),
        ({"prompts": ["/no/such/file.jsonl"]}, ["/no/such/file.jsonl"]),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items()) if isinstance(value, dict) else "",
)
def test_bad_commands_are_one_line_that_names_the_fault(command, tmp_path, flags, parts):
    message = refused(command(**flags))
    for part in parts:
        assert part in message
    assert not (tmp_path / "records.jsonl").exists()


@pytest.mark.parametrize(("flag", "value"), [("limit", 0), ("prompt_tokens", 0), ("prompt_tokens", -1)])
def test_limits_below_one_are_refused_by_name(command, flag, value):
    # was once: 0 is taken for no limit (a smoke run becomes the whole one), and --prompt-tokens -1 is blamed on
    # --answer-tokens
    message = refused(command(**{flag: value}))
    assert flag.replace("_", "-") in message.replace("_", "-")
    assert str(value) in message


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ('{"id": 1, "turns": ["Hello"', ["line 2", "broken JSON"]),
        ('{"id": 0, "turns": ["Again"]}', ["'broken:0'", "used twice", "line 1", "line 2"]),
        ('{"id": 1}', ["line 2", "no text"]),
    ],
)
def test_a_broken_prompts_file_is_refused_with_its_line(command, tmp_path, line, parts):
    file = tmp_path / "broken.jsonl"
    file.write_text(f'{{"id": 0, "turns": ["Hello"]}}\n{line}\n')
    message = refused(command(prompts=[file]))
    for part in [str(file), *parts]:
        assert part in message
    assert not (tmp_path / "records.jsonl").exists()


def test_resuming_with_other_settings_is_refused(command, tmp_path, capsys):  # J3 (d), G1 (c)
    here(capsys, command(limit=1))
    whole = (tmp_path / "records.jsonl").read_bytes()
    for flags, parts in (
        ({"seed": 15}, ["seed", "14", "15"]),
        ({"temperature": 0.7}, ["temperature", "1.0", "0.7"]),
        ({"gamma": 4}, ["gamma", "3", "4"]),
        ({"dtype": "float32"}, ["dtype", "'float64'", "'float32'"]),
        ({"stop_ids": [2]}, ["stop", "[2]"]),
        ({"domains": ["sums"]}, ["prompts"]),
    ):
        message = refused(command(limit=1, **flags))
        for part in (str(tmp_path / "records.jsonl"), *parts):
            assert part in message
        assert (tmp_path / "records.jsonl").read_bytes() == whole


def test_the_refusal_names_the_thinking_flag(command, tmp_path, capsys):
    # was once: only the first difference in the alphabet is named, here a hash of the prompts, not the flag
    here(capsys, command(limit=1))
    message = refused(command(limit=1, thinking="on"))
    for part in ("thinking", "'off'", "'on'"):
        assert part in message


def test_resuming_with_the_same_texts_under_other_ids_is_refused(command, tmp_path, prompts, capsys):
    # was once: the provenance hashes the prompts' tokens but not their ids and domains, so a renamed prompts file
    # is resumed into the old one's records, and the report stumbles over the domain that is not in the plan
    here(capsys, command(limit=1, prompts=prompts[:1]))
    whole = (tmp_path / "records.jsonl").read_bytes()
    renamed = tmp_path / "other.jsonl"
    renamed.write_bytes(prompts[0].read_bytes())
    assert "prompts" in refused(command(limit=1, prompts=[renamed]))
    assert (tmp_path / "records.jsonl").read_bytes() == whole


def test_resuming_with_other_weights_is_refused(command, tmp_path, folder, capsys):
    # was once: a folder's weights are not in the provenance, so a run is resumed with another model's
    other = tmp_path / folder.name
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    here(capsys, command(limit=1, target=other))
    weights = safetensors.load_file(other / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"][::-1].copy()
    safetensors.save_file(weights, other / "model.safetensors")
    refused(command(limit=1, target=other))


@pytest.mark.parametrize("out", ["folder", "file/records.jsonl", "notes.txt"])
def test_records_that_cannot_be_written_are_one_line(command, tmp_path, out):
    # was once: a folder as --out, or a file where its folder should be, is an OSError with a traceback
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "notes.txt").write_text("Some notes.\n")
    assert str(tmp_path / out) in refused(command(out=tmp_path / out))
    assert (tmp_path / "notes.txt").read_text() == "Some notes.\n"


def test_a_figure_that_cannot_be_written_is_one_line(command, tmp_path):
    # was once: a folder that is not there is a traceback, after the whole measurement
    pytest.importorskip("matplotlib")
    assert "no/such" in refused(command(limit=1, plot=tmp_path / "no/such/floors.png"))


def test_devices_that_are_not_there_are_refused(command):
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert "--device cpu" in refused(command(backend="fast", device="cuda"))


def test_a_device_that_does_not_exist_is_one_line(command):
    # was once: torch's RuntimeError for an unknown device is a traceback
    pytest.importorskip("torch")
    assert "gpu" in refused(command(backend="fast", device="gpu"))


def test_without_network_the_error_names_the_way_out(command):
    code, out, error = program(command(target="Qwen/Qwen3-4B"))
    assert (code, out) == (1, "")
    (line,) = error.splitlines()
    assert line.startswith("error: ")
    assert "name a local folder" in line


def test_bad_commands_end_the_program_without_a_traceback(command):
    code, out, error = program(command(target="/no/such/folder"))
    assert (code, out) == (1, "")
    assert error == "error: no such folder: /no/such/folder\n"


def test_unknown_choices_are_refused_by_the_parser(command, capsys):
    for flags in ({"backend": "jax"}, {"dtype": "int8"}, {"thinking": "maybe"}, {"paths": "many"}):
        with pytest.raises(SystemExit) as end:
            example.main(command(**flags))
        assert end.value.code == 2
        assert next(iter(flags)) in capsys.readouterr().err.splitlines()[-1]


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as end:
        example.main(["--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    for flag in ("--target", "--backend", "--device", "--dtype", "--seed", "--limit", "--out"):
        assert flag in out


def test_the_record_file_has_a_place_of_its_own_by_default(command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    here(capsys, command(limit=1, out=None))
    assert os.listdir("runs") == ["floors-tiny-qwen3-reference.jsonl"]
