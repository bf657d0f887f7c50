"""reference/records.py: a file that is appended to, cut anywhere, resumed and fought over (field case J3)."""

import json
import os
import signal
import subprocess
import sys
from copy import deepcopy
from pathlib import Path

import pytest

from reference.protocol import Design
from reference.records import RecordError, RecordFile, read

ROOT = Path(__file__).resolve().parents[1]
PROVENANCE = {
    "target": "dépôt/toy",
    "revision": "a" * 40,
    "design": Design().provenance(),
    "thinking": "off",
    "template": "0123456789abcdef",
    "stop_ids": [151645, 151643],
}
ROWS = [{"kind": "answer", "prompt": f"chat:{i}", "tokens": [i, i + 1], "text": "naïve → 日本"} for i in range(4)]
HEAD = 1  # lines before the rows


@pytest.fixture
def path(tmp_path):
    return tmp_path / "runs" / "records.jsonl"


def write(path, rows=ROWS, provenance=PROVENANCE):
    """Write a whole record file in one go; returns its lines with their line breaks."""
    with RecordFile(path, provenance) as records:
        for row in rows:
            records.append(row)
    return path.read_bytes().splitlines(keepends=True)


def changed(key, value):
    """The provenance with one entry, nested or not, set to another value; and the value it had."""
    provenance = deepcopy(PROVENANCE)
    *parents, last = key.split(".")
    holder = provenance
    for parent in parents:
        holder = holder[parent]
    old, holder[last] = holder[last], value
    return provenance, old


def test_a_file_is_provenance_then_one_strict_json_object_a_line(path):
    lines = write(path)
    parsed = [json.loads(line, parse_constant=pytest.fail) for line in lines]
    assert parsed == [{"kind": "provenance", **PROVENANCE}, *ROWS]
    assert all(line.endswith(b"\n") for line in lines)
    assert read(path) == (parsed[0], ROWS)
    with RecordFile(path, PROVENANCE) as records:
        assert records.rows == ROWS
        assert records.notes == []
    assert path.read_bytes() == b"".join(lines)


def test_line_breaks_inside_texts_break_no_line(path):
    row = {"kind": "answer", "text": "a\nb\r\nc\u2028d\u0085e\x0bf\x0cg\x1ch"}
    assert len(write(path, [row])) == HEAD + 1
    assert read(path)[1] == [row]


def test_rows_are_on_disk_before_the_file_is_closed_and_can_be_read_meanwhile(path):
    with RecordFile(path, PROVENANCE) as records:
        for count, row in enumerate(ROWS, start=1):
            records.append(row)
            assert read(path)[1] == ROWS[:count]
            assert records.rows == ROWS[:count]


def test_a_last_line_cut_at_any_byte_is_dropped_and_written_again(path):  # J3 (a), (h)
    whole = b"".join(lines := write(path))
    kept = len(whole) - len(lines[-1])
    cuts = range(kept, len(whole))
    assert any(whole[cut] & 0xC0 == 0x80 for cut in cuts)  # some of them inside a multi-byte character
    for cut in cuts:
        path.write_bytes(whole[:cut])
        assert read(path)[1] == ROWS[:-1]
        with RecordFile(path, PROVENANCE) as records:
            assert records.rows == ROWS[:-1]
            notes = [f"{path}: dropped a half-written last line of {cut - kept} bytes"] if cut > kept else []
            assert records.notes == notes
            records.append(ROWS[-1])
        assert path.read_bytes() == whole


def test_a_last_line_without_its_line_break_counts_as_half_written(path):
    whole = b"".join(write(path))
    path.write_bytes(whole[:-1])
    with RecordFile(path, PROVENANCE) as records:
        assert records.rows == ROWS[:-1]
        assert len(records.notes) == 1
        records.append(ROWS[-1])
    assert path.read_bytes() == whole


def test_a_fragment_of_the_provenance_line_starts_the_file_again(path):  # J3 (b)
    (line,) = write(path, rows=[])
    for cut in (*range(0, len(line), 23), line.index(b"\xc3") + 1, len(line) - 1):
        path.write_bytes(line[:cut])
        with pytest.raises(RecordError, match="no finished line"):
            read(path)
        with RecordFile(path, PROVENANCE) as records:
            assert records.rows == []
            assert len(records.notes) == (cut > 0)
        assert path.read_bytes() == line


def test_an_empty_file_is_a_new_one(path):
    path.parent.mkdir()
    path.touch()
    with pytest.raises(RecordError, match="no finished line"):
        read(path)
    write(path)
    assert read(path)[1] == ROWS


def test_a_record_missing_in_the_middle_is_just_not_there(path):  # J3 (c); the protocol measures it again
    lines = write(path)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with RecordFile(path, PROVENANCE) as records:
        assert records.rows == [ROWS[0], *ROWS[2:]]
        records.append(ROWS[1])
    assert path.read_bytes() == b"".join([*lines[:2], *lines[3:], lines[2]])


OTHER_SETTINGS = [
    ("design.anchors", 97),
    ("design.paths", 512),
    ("design.gamma", 16),
    ("design.answer_tokens", 8192),
    ("design.seed", 31),
    ("design.law.temperature", 0.7),
    ("design.law.top_p", 0.8),
    ("design.law.top_k", 20),
    ("revision", "b" * 40),
    ("thinking", "on"),
    ("template", "fedcba9876543210"),
    ("stop_ids", [151645]),
]


@pytest.mark.parametrize(("key", "value"), OTHER_SETTINGS)
def test_a_file_with_other_settings_is_refused_with_both_values(path, key, value):  # J3 (d)
    whole = b"".join(write(path))
    provenance, old = changed(key, value)
    with pytest.raises(RecordError) as refusal:
        RecordFile(path, provenance)
    message = str(refusal.value)
    for part in (str(path), key.split(".")[-1], repr(old), repr(value)):
        assert part in message
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("key", "value"), [("design.seed", 31), ("design.law.top_p", 0.8), ("revision", "b" * 40)])
def test_the_refusal_names_only_the_field_that_differs(path, key, value):
    # was once: a change inside the design prints the whole old and new design, and the reader looks for the field
    write(path)
    with pytest.raises(RecordError) as refusal:
        RecordFile(path, changed(key, value)[0])
    fields = {"anchors", "paths", "answer_tokens", "seed", "temperature", "top_k", "revision", "thinking"}
    for other in fields - {key.split(".")[-1]}:
        assert f"'{other}'" not in str(refusal.value)


def test_a_setting_that_only_one_side_has_is_a_difference(path):
    whole = b"".join(write(path))
    fewer = {k: v for k, v in PROVENANCE.items() if k != "thinking"}
    for provenance, name in ((fewer, "thinking"), ({**PROVENANCE, "device": "cuda"}, "device")):
        with pytest.raises(RecordError, match=f"another {name} "):
            RecordFile(path, provenance)
    assert path.read_bytes() == whole


def test_tuples_and_lists_are_the_same_setting(path):
    whole = b"".join(write(path))
    RecordFile(path, {**PROVENANCE, "stop_ids": tuple(PROVENANCE["stop_ids"])}).close()
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "broken",
    [
        b'{"kind":"answer","prompt":"ch\n',
        b"\xff\xfe\n",
        b"\n",
        b"[1, 2]\n",
        b'{"kind":"anchor","value":NaN}\n',
        b'{"kind":"anchor","value":-Infinity}\n',
        b'{"kind":"provenance"}\n',
        b'{"kind":"answer"}{"kind":"answer"}\n',
    ],
)
def test_a_broken_line_in_the_middle_is_refused_with_its_number(path, broken):  # J3 (e)
    lines = write(path)
    lines[2] = broken
    path.write_bytes(b"".join(lines))
    for use in (read, lambda path: RecordFile(path, PROVENANCE)):
        with pytest.raises(RecordError, match="line 3: ") as refusal:
            use(path)
        assert str(path) in str(refusal.value)
    assert path.read_bytes() == b"".join(lines)


FOREIGN = {
    "text": b"Some notes\nof mine.\n",
    "prompts": b'{"id": 1, "prompt": "Hello"}\n{"id": 2, "prompt": "World"}\n',
    "no provenance": b'{"kind":"answer","prompt":"chat:0"}\n',
    "a list": b"[1, 2]\n",
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_what_is_not_a_record_file_is_refused_and_left_alone(path, data):
    path.parent.mkdir()
    path.write_bytes(data)
    for use in (read, lambda path: RecordFile(path, PROVENANCE)):
        with pytest.raises(RecordError, match="line 1: "):
            use(path)
    assert path.read_bytes() == data


@pytest.mark.parametrize("data", [b"a note", b"Some notes\nof mine, unfinished", b'{"id": 1, "prompt": "Hello"}'])
def test_not_even_the_last_line_of_another_file_is_cut_off(path, data):
    # was once: the half-written last line is cut off before the file is known to be a record file, and a file
    # of one line without a line break is overwritten whole
    path.parent.mkdir()
    path.write_bytes(data)
    with pytest.raises(RecordError):
        RecordFile(path, PROVENANCE).close()
    assert path.read_bytes() == data


def test_reading_what_is_not_there_is_a_named_error(tmp_path):
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(RecordError, match=str(path)):
            read(path)


def test_reading_never_writes(path):
    whole = b"".join(write(path))
    for data in (whole, whole[:-7], b"", b"fragment"):
        path.write_bytes(data)
        os.utime(path, ns=(1, 1))
        path.chmod(0o444)
        if data.startswith(b"{"):
            read(path)
        else:
            with pytest.raises(RecordError):
                read(path)
        path.chmod(0o644)
        assert path.read_bytes() == data
        assert path.stat().st_mtime_ns == 1
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_are_refused_and_nothing_is_written(path, value):  # J3 (g)
    lines = write(path)
    with RecordFile(path, PROVENANCE) as records:
        for row in ({"kind": "anchor", "alive": value}, {"kind": "anchor", "order0": {"fit": [0.0, value]}}):
            with pytest.raises(RecordError, match="NaN or infinity"):
                records.append(row)
        assert records.rows == ROWS
        records.append({"kind": "anchor", "alive": None})
    assert path.read_bytes() == b"".join(lines) + b'{"kind":"anchor","alive":null}\n'
    with pytest.raises(RecordError, match="NaN or infinity"):
        RecordFile(path.with_name("new.jsonl"), {"temperature": value})
    assert path.with_name("new.jsonl").read_bytes() == b""


def test_text_that_is_not_unicode_is_refused_for_what_it_is(path):
    # was once: a lone surrogate (a folder whose name is not UTF-8) is reported as NaN or infinity
    with RecordFile(path, PROVENANCE) as records:
        with pytest.raises(ValueError) as refusal:
            records.append({"kind": "answer", "prompt": "\udcff"})
        assert records.rows == []
    assert "NaN" not in str(refusal.value)


def test_a_second_writer_in_the_same_process_is_refused(path):
    with RecordFile(path, PROVENANCE) as records:
        records.append(ROWS[0])
        with pytest.raises(RecordError, match="another process"):
            RecordFile(path, PROVENANCE)
        records.append(ROWS[1])
    write(path, ROWS[2:])
    assert read(path)[1] == ROWS


def test_a_refused_file_is_not_left_locked(path):
    write(path)
    with pytest.raises(RecordError, match="another thinking"):
        RecordFile(path, changed("thinking", "on")[0])
    RecordFile(path, PROVENANCE).close()


HOLD = """
import json, sys, time
from reference.records import RecordFile
records = RecordFile(sys.argv[1], json.loads(sys.argv[2]))
for row in json.loads(sys.argv[3]):
    records.append(row)
print("held", flush=True)
time.sleep(60)
"""


def test_a_second_process_is_refused_until_the_first_is_gone_even_by_kill(path):  # J3 (f)
    writer = subprocess.Popen(
        [sys.executable, "-c", HOLD, path, json.dumps(PROVENANCE), json.dumps(ROWS[:2])],
        cwd=ROOT,
        stdout=subprocess.PIPE,
    )
    try:
        assert writer.stdout.readline() == b"held\n"
        held = path.read_bytes()
        with pytest.raises(RecordError, match="being written by another process"):
            RecordFile(path, PROVENANCE)
        assert path.read_bytes() == held
        assert read(path)[1] == ROWS[:2]  # reading needs no lock
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
    with RecordFile(path, PROVENANCE) as records:  # the system dropped the lock
        assert records.rows == ROWS[:2]
        assert records.notes == []
        for row in ROWS[2:]:
            records.append(row)
    assert path.read_bytes() == b"".join(write(path.with_name("whole.jsonl")))
