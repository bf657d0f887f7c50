"""Several processes measure together: their one record file is the one that a single process writes."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

import reference
from examples import floor_qwen3_4b, gap_qwen3_4b, serve_compare
from models.toy import random_table
from reference import protocol, shared_records
from reference.protocol import Design, EncodedPrompt, measure
from reference.records import RecordError, RecordFile, key_of, line, read
from reference.shared_records import SharedRecords, ranks

ROOT = Path(__file__).resolve().parents[1]
TOY = random_table(7, depth=2, seed=21, stop_ids=(6,))
PROMPTS = [EncodedPrompt(f"{name}:{i}", name, (i, 1)) for i in range(5) for name in ("sums", "tälk")]
DESIGN = Design(anchors=6, paths=8, gamma=3, answer_tokens=14, seed=7)
PROVENANCE = {"design": DESIGN.provenance()}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Small batches, no commit (another process may be working on this checkout), no launcher's variables."""
    monkeypatch.setattr(protocol, "ANSWERS_AT_ONCE", 2)
    monkeypatch.setenv("GIT_DIR", "no-git")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def counting():
    """The reference backend, which counts the answers and the walks that it is asked for."""
    asked = Counter()

    def walk(target, prefix, *rest):
        asked["anchor"] += 1
        return reference.walk(target, prefix, *rest)

    def write_answers(target, prompts, *rest):
        asked["batch"] += 1
        return reference.write_answers(target, prompts, *rest)

    return SimpleNamespace(**{**vars(reference), "walk": walk, "write_answers": write_answers}), asked


def until(condition, seconds=60):
    """Wait for a condition, which a fault may keep from ever coming true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.005)


def run_one(path, rank, size, backend=reference, **options):
    """Measure in one rank."""
    with SharedRecords(path, PROVENANCE, rank, size) as records:
        measure(backend, TOY, PROMPTS, DESIGN, records, quiet=True, **options)


def run(path, size, backend=reference, **options):
    """Measure in `size` ranks at once, each in a thread of its own: the bytes of the record file."""
    failed = []

    def work(rank):
        try:
            run_one(path, rank, size, backend, **options)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    until(lambda: failed or not any(thread.is_alive() for thread in threads))
    assert not failed, failed
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What a single process writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(protocol, "ANSWERS_AT_ONCE", 2)
        return run(tmp_path_factory.mktemp("whole") / "records.jsonl", 1)


# --- one file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 14])  # 5 batches of answers, 10 anchors
def test_every_number_of_ranks_writes_the_file_of_one(tmp_path, whole, size):
    backend, asked = counting()
    assert run(tmp_path / "records", size, backend) == whole
    assert asked == {"batch": 5, "anchor": 10}, "each piece of work is done once"
    assert [file.name for file in tmp_path.iterdir()] == ["records"]


def test_the_work_is_dealt_evenly(tmp_path):
    pieces = [[i] for i in range(12)]
    for size in (1, 2, 5):
        shares = []
        for rank in range(size):
            with SharedRecords(tmp_path / str(size), PROVENANCE, rank, size) as records:
                shares.append(records.share(pieces))
        assert sorted(piece for share in shares for piece in share) == pieces
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_anchors_of_another_file_are_dealt_too(tmp_path, whole):
    (tmp_path / "source").write_bytes(whole)
    source = read(tmp_path / "source")[1]
    files = [run(tmp_path / f"of {size}", size, source=source) for size in (1, 3)]
    assert files[0] == files[1]
    assert files[0].count(b'"kind":"anchor"') == 10


# --- stopped and gone on ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_on_disk_counts_and_the_end_is_the_same(tmp_path, whole, seed):
    """Any beginning of the record file, any other rows in ranks' files of several runs, some half-written."""
    pick = random.Random(seed)
    head, *rows = whole.splitlines(keepends=True)
    answers = [row for row in rows if b'"kind":"answer"' in row]
    merged = pick.choice([0, 1, len(answers) + 1, len(rows) - 2])
    finished = len(rows) if merged > len(answers) else len(answers)  # anchors are begun when all answers are there
    kept = set(range(merged)) | set(pick.sample(range(finished), finished // 2))
    if merged > 1:
        (tmp_path / "records").write_bytes(head + b"".join(rows[:merged]))
    parts = {name: [] for name in ("rank-0-of-2", "rank-1-of-2", "rank-2-of-3", "rank-0-of-3")}
    for i in sorted(kept):
        parts[pick.choice(list(parts))].append(rows[i])
    for name, mine in parts.items():
        text = head + b"".join(mine)
        (tmp_path / f"records.{name}").write_bytes(text[: len(text) - pick.choice([0, 3, 40])])
    whatever = [set(file.read_bytes().splitlines(keepends=True)) for file in tmp_path.iterdir()]
    missing = set(rows) - set.union(*whatever)
    backend, asked = counting()
    assert run(tmp_path / "records", pick.choice([1, 2, 3]), backend) == whole
    assert asked["anchor"] == sum(b'"kind":"anchor"' in row for row in missing)
    assert [file.name for file in tmp_path.iterdir()] == ["records"]


def test_a_whole_run_is_not_touched(tmp_path, whole):
    (tmp_path / "records").write_bytes(whole)
    backend, asked = counting()
    assert run(tmp_path / "records", 3, backend) == whole
    assert not asked
    run_one(tmp_path / "records", 1, 2)  # a rank that comes when all is done
    assert [file.name for file in tmp_path.iterdir()] == ["records"]


def test_what_was_measured_is_kept_though_the_run_that_ends_does_not_ask_for_it(tmp_path):
    path, rows = tmp_path / "records", [{"kind": "request", "prompt": i} for i in "abc"]
    with RecordFile(tmp_path / "records.rank-1-of-4", PROVENANCE) as part:
        for row in rows[1:]:
            part.append(row)
    with SharedRecords(path, PROVENANCE) as records:
        for _, missing in records.deal([[key_of(rows[0])], [key_of(rows[1])]]):
            for key in missing:
                records.append(next(row for row in rows if key_of(row) == key))
    assert read(path)[1] == rows
    assert [file.name for file in tmp_path.iterdir()] == ["records"]


# --- what is refused, and who is waited for -----------------------------------------------------------------------


def test_a_row_that_two_files_hold_differently_is_refused(tmp_path, whole):
    head, row, *_ = whole.splitlines(keepends=True)
    (tmp_path / "records").write_bytes(head + row)
    (tmp_path / "records.rank-1-of-2").write_bytes(head + row.replace(b'"tokens":[', b'"tokens":[1,'))
    for rank, size in ((0, 1), (0, 2), (1, 2)):
        with pytest.raises(RecordError, match=r"has another row for answer, sums:0 than the other files.*remove one"):
            SharedRecords(tmp_path / "records", PROVENANCE, rank, size)


@pytest.mark.parametrize("name", ["records", "records.rank-0-of-2", "records.rank-1-of-3"])
def test_a_file_with_other_settings_is_refused_before_anything_is_written(tmp_path, whole, name):
    (tmp_path / name).write_bytes(whole)
    other = {"design": DESIGN.provenance() | {"seed": 8}}
    with pytest.raises(RecordError, match=rf"{name} was written with another design\.seed \(7, now 8\)"):
        SharedRecords(tmp_path / "records", other, 1, 2)
    assert [file.name for file in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_bytes() == whole


def test_a_file_without_rows_stands_in_nobodys_way(tmp_path, whole):
    for name in ("records", "records.rank-1-of-2", "records.rank-0-of-3"):
        RecordFile(tmp_path / name, {"design": "another"}).close()
    assert run(tmp_path / "records", 2) == whole


def test_a_broken_line_is_refused_with_its_number_wherever_the_reader_was(tmp_path):
    path, row = tmp_path / "records", {"kind": "request", "prompt": "a"}
    with RecordFile(path, PROVENANCE) as records:
        tail = shared_records.Tail(path, PROVENANCE)
        assert tail.new_rows() == []  # the provenance alone may yet be another run's
        records.append(row)
        assert tail.new_rows() == [row]
        assert tail.new_rows() == []
    with open(path, "ab") as file:
        file.write(line(row)[:9])
    assert tail.new_rows() == []
    with open(path, "ab") as file:
        file.write(b"\n")
    with pytest.raises(RecordError, match="line 3: broken record"):
        tail.new_rows()


def test_who_waits_says_for_whom(tmp_path, whole, monkeypatch, capsys):
    monkeypatch.setattr(shared_records, "PATIENCE", 0.1)
    first = threading.Thread(target=run_one, args=(tmp_path / "records", 0, 2), daemon=True)
    first.start()
    told = ""

    def heard():
        nonlocal told
        told += capsys.readouterr().err
        return told

    until(heard)
    assert "rank 0 has waited 0 min for 2 pieces of work of rank 1; if one has ended, stop all" in told
    run_one(tmp_path / "records", 1, 2)
    first.join(timeout=20)
    assert (tmp_path / "records").read_bytes() == whole


def test_a_process_of_a_stopped_run_that_still_writes_is_not_joined(tmp_path, whole):
    """Its rows would be in no other file, and done again: of other seconds, where they are requests."""
    out = tmp_path / "run.jsonl"
    with SharedRecords(out, PROVENANCE, 1, 2):
        for rank, size in ((0, 1), (0, 3)):
            with pytest.raises(RecordError, match="is being written by another process"):
                SharedRecords(out, PROVENANCE, rank, size)
    SharedRecords(out, PROVENANCE, 0, 1).close()


def test_a_full_disk_is_told_of_in_one_line(tmp_path):
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)); import signal;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); from examples import floor_qwen3_4b as f;"
        f"f.main(['--target', 'toy', '--anchors', '4', '--backend', 'reference', '--out', {str(tmp_path / 'a')!r}])"
    )
    pytest.importorskip("resource")
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1 and "Traceback" not in found.stderr
    assert "cannot be written" in found.stderr.splitlines()[-1]


def test_ranks_are_the_launchers(monkeypatch):
    assert ranks() == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert ranks() == (3, 8)
    for rank in ("8", "-1", "first"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(ValueError, match=f"RANK {rank} and WORLD_SIZE 8 name no process of a group"):
            ranks()


# --- programs, as a launcher starts them ----------------------------------------------------------------------------


def launch(size, script, *arguments):
    """Start a script of `examples` in `size` processes."""
    return [
        subprocess.Popen(
            [sys.executable, ROOT / "examples" / script, *map(str, arguments)],
            env=os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # what runs in the background ignores it
        )
        for rank in range(size)
    ]


def ended(processes):
    """[(exit code, stdout, stderr)] of processes."""
    outputs = [process.communicate(timeout=120) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def report_of(processes):
    """The report, which the first process alone prints; the others print nothing at all."""
    (code, out, _), *others = ended(processes)
    assert (code, *others) == (0, *[(0, "", "")] * len(others))
    return json.loads(out.splitlines()[-1])


FLAGS = ["--target", "toy", "--backend", "reference", "--paths", "8", "--gamma", "3", "--anchors"]


def test_a_rank_is_killed_and_more_go_on(tmp_path, capsys):
    flags = [*FLAGS, "20", "--drafter", "parallel", "chained", "--also", "information"]
    gap_qwen3_4b.main([*flags, "--quiet", "--out", str(tmp_path / "whole")])
    summary, path = json.loads(capsys.readouterr().out), tmp_path / "records"
    killed, waiting = tmp_path / "records.rank-1-of-2", launch(2, "gap_qwen3_4b.py", *flags, "--out", path)
    until(lambda: killed.exists() and killed.read_bytes().count(b'"anchor"') > 1)
    waiting[1].send_signal(signal.SIGKILL)
    assert waiting[1].wait() == -signal.SIGKILL
    until(lambda: path.read_bytes().count(b'"anchor"') > 1)
    assert waiting[0].poll() is None, "rank 0 waits for what is missing"
    waiting[0].send_signal(signal.SIGINT)
    assert "stopped in rank 0; the same command goes on where it was" in ended(waiting)[0][2]
    assert (tmp_path / "whole").read_bytes().startswith(path.read_bytes()), "what stands there is in order"
    assert report_of(launch(3, "gap_qwen3_4b.py", *flags, "--out", path)) == summary
    assert path.read_bytes() == (tmp_path / "whole").read_bytes()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["records", "whole"]


def test_errors_name_their_rank(tmp_path):
    found = ended(launch(2, "floor_qwen3_4b.py", *FLAGS, "1", "--domains", "none", "--out", tmp_path / "records"))
    assert [code for code, *_ in found] == [1, 1]
    assert [error.split(":")[0] for _, _, error in found] == ["error in rank 0", "error in rank 1"]
    assert not list(tmp_path.iterdir())


def test_the_estimate_is_for_all_processes(capsys, tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(floor_qwen3_4b.program, "estimate", lambda *arguments: told.append(arguments[4]))
    floor_qwen3_4b.main([*FLAGS, "1", "--out", str(tmp_path / "records")])
    assert told == [1]


def test_requests_are_dealt_cell_by_cell(tmp_path, capsys):
    flags = [
        "--target",
        "toy",
        "--drafter",
        "chained",
        "--backend",
        "reference",
        "--answer-tokens",
        "30",
        "--limit",
        "3",
    ]
    serve_compare.main([*flags, "--quiet", "--out", str(tmp_path / "one")])
    alone = json.loads(capsys.readouterr().out)
    summary = report_of(launch(2, "serve_compare.py", *flags, "--out", tmp_path / "two"))
    assert (alone["engines"], summary["engines"]) == ([1], [2])
    one, two = ({key_of(row): row for row in read(tmp_path / name)[1]} for name in ("one", "two"))
    assert one.keys() == two.keys() and len(two) == summary["requests"] == 2 * 2 * 6
    clocks = ("wall", "latency", "parts", "engines")
    for key, row in one.items():
        assert [row[name] for name in row if name not in clocks] == [two[key][n] for n in row if n not in clocks]
    for name in alone["tables"]:
        if not name.startswith("speed"):
            assert summary["tables"][name] == alone["tables"][name]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one", "two"]
