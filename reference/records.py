"""The record file behind every number: JSON lines, append-only, resumable.

The first line is the provenance: everything that, if it changed, would make later lines mean something else.
Each further line is one finished piece of work, on disk before the next one starts.  A killed run leaves at
most one half-written last line, which is dropped; the same command then carries on where it stopped.

Tests: `tests/test_records.py`.
"""

import json
import os
from contextlib import suppress
from pathlib import Path

HEAD = b'{"kind":"provenance",'  # how every record file begins
IDENTITY = ("kind", "drafter", "temperature", "concurrency", "prompt", "position")


class RecordError(ValueError):
    """A record file that cannot be used as asked; the message says why and what to do."""


def key_of(row):
    """What a row is about, as a hashable value: no two rows of a file are about the same."""
    return tuple(row.get(name) for name in IDENTITY)


class RecordFile:
    """A record file opened for writing, new or resumed.

    Args: path; provenance, a JSON-able dict.
    Attributes: rows, the finished rows so far; notes, what was repaired on opening.
    Raises: RecordError if another process writes the file, if its provenance differs (naming the field), or if
        a line other than the last is broken.
    """

    def __init__(self, path, provenance):
        self.path, self.rows, self.notes = Path(path), [], []
        if self.path.exists() and not self.path.is_file():
            raise RecordError(f"{self.path} cannot be written: it is not a file; use another --out")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(self.path, "a+b")  # noqa: SIM115 - closed by close()
        except OSError as error:
            raise RecordError(f"{self.path} cannot be written: {error.strerror}") from None
        try:
            lock(self._file, self.path)
            self._repair()
            self._file.seek(0)
            lines = self._file.read()
            if lines:
                found, self.rows = parse(lines, self.path)
            if self.rows:
                check_same(found, provenance, self.path)
            else:  # new, or refused before anything was measured
                self._file.truncate(0)
                self._write({"kind": "provenance", **provenance})
        except BaseException:
            self.close()
            raise

    def append(self, row):
        """Write one finished row and put it on disk.  NaN and infinity are refused: absent values are None."""
        self._write(row)
        self.rows.append(row)

    def close(self):
        """Release the file (and its lock)."""
        with suppress(OSError):  # a disk that is full has been told of, and closing tries to write again
            self._file.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def _write(self, row):
        try:
            self._file.write(line(row))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordError(
                f"{self.path} cannot be written: {error.strerror}; what is finished is kept, the same command goes on"
            ) from None

    def _repair(self):
        """Cut off a last line without its line break: the run was stopped while writing it."""
        self._file.seek(0)
        data = self._file.read()
        if data[: len(HEAD)] != HEAD[: len(data)]:
            raise RecordError(f"{self.path}, line 1: not a record file; it was left as it is, use another --out")
        whole, _, fragment = data.rpartition(b"\n")
        if fragment:
            self._file.truncate(len(whole) + 1 if whole else 0)
            self.notes.append(f"{self.path}: dropped a half-written last line of {len(fragment)} bytes")


def read(path):
    """Read a record file without writing: (provenance, rows).  A half-written last line is left out."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    whole, newline, _ = data.rpartition(b"\n")
    if not newline:
        raise RecordError(f"{path} holds no finished line: it is not a record file, or its run never started")
    return parse(whole + newline, path)


def parse(data, path, first=1):
    """Whole lines of a record file: (provenance, rows); RecordError with the line number for a broken one.

    `first` is the number of the first line; without line 1 the provenance is None.
    """
    rows = []
    for number, text in enumerate(data.splitlines(), start=first):
        try:
            row = json.loads(text, parse_constant=_no_constant)
        except ValueError as error:
            raise RecordError(
                f"{path}, line {number}: broken record ({error}); restore the file or start a new one"
            ) from None
        if not isinstance(row, dict) or (row.get("kind") == "provenance") != (number == 1):
            raise RecordError(f"{path}, line {number}: not a record file (provenance first, then one object a line)")
        rows.append(row)
    return (rows[0], rows[1:]) if first == 1 else (None, rows)


def line(row):
    """A row as it stands in a file, a line of UTF-8 bytes; RecordError for what strict JSON cannot hold."""
    try:
        return json.dumps(row, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    except UnicodeEncodeError:
        raise RecordError(f"refused to record text that is not Unicode (a file name?): {row!a}") from None
    except ValueError:
        raise RecordError(f"refused to record NaN or infinity (absent values are None): {row}") from None


def _no_constant(name):
    raise ValueError(f"{name} is not strict JSON")


def check_same(found, provenance, path):
    """RecordError, naming the fields, unless the provenance found in a file is the one that a run has now."""
    wanted = json.loads(line({"kind": "provenance", **provenance}))
    found, wanted = dict(_fields(found)), dict(_fields(wanted))
    changed = [
        f"{name} ({found.get(name)!r}, now {wanted.get(name)!r})"
        for name in {**found, **wanted}
        if found.get(name) != wanted.get(name)
    ]
    if changed:
        raise RecordError(
            f"{path} was written with another {', another '.join(changed)}; "
            "use the same settings to resume, or another --out to start afresh"
        )


def _fields(value, name=""):
    """Every leaf of a nested dict with its dotted name."""
    if not isinstance(value, dict):
        yield name, value
        return
    for key, part in value.items():
        yield from _fields(part, f"{name}.{key}" if name else key)


def lock(file, path):
    """Take the only writer's lock, which the system drops when the process ends, however it ends."""
    try:
        try:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:  # Windows
            import msvcrt

            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
    except OSError:
        raise RecordError(f"{path} is being written by another process; wait for it or use another --out") from None
