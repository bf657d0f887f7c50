"""One record file, written by as many processes as a launcher starts: the work is dealt, the rows are gathered.

Processes need nothing in common but a file system.  A launcher such as `torchrun` tells each of them its RANK and the
WORLD_SIZE.  Rank r of N takes the pieces of work r, r + N, r + 2N, ... and writes their rows to RECORDS.rank-r-of-N, a
record file of its own; rank 0 copies all rows into RECORDS, in the order in which one process would have written them:

    pieces       0     1     2     3     4     5  ...
    rank 0 of 2  own         own         own            -> RECORDS.rank-0-of-2  --+
    rank 1 of 2        own         own         own      -> RECORDS.rank-1-of-2  --+-> RECORDS, by rank 0 as they come

What a piece gives must depend on the piece alone, not on who makes it.  Then RECORDS is byte for byte the file of one
process, and a run may be stopped and go on with another number of processes: every row that is on disk, of any number
of ranks, counts.  When all is gathered the ranks' own files are removed.  One process alone writes to RECORDS directly.

Tests: `tests/test_parallel_measuring.py`.
"""

import os
import re
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from tqdm import tqdm

from reference.records import RecordError, RecordFile, check_same, key_of, line, lock, parse

PATIENCE = 60  # seconds that a process waits for others before it says so


def ranks():
    """(rank, number of processes) by the environment variables RANK and WORLD_SIZE; (0, 1) without a launcher."""
    rank, size = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if not (rank.isdecimal() and size.isdecimal() and int(rank) < int(size)):
        raise ValueError(f"RANK {rank} and WORLD_SIZE {size} name no process of a group; unset them or use a launcher")
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        raise ValueError("only one of RANK and WORLD_SIZE is set: unset it or use a launcher")
    return int(rank), int(size)


class SharedRecords:
    """The record file of a run, open in one of its processes.

    Args: path of the record file; provenance, a JSON-able dict, the same in all processes; rank, size, as of `ranks`.
    Attributes: rows, all finished rows that this process knows of, whoever made them; notes, what was repaired.
    Raises: RecordError as `RecordFile` does, for every file of the run, and for a row that two files hold differently.
    """

    def __init__(self, path, provenance, rank=0, size=1):
        self.path, self.rank, self.size, self._known = Path(path), rank, size, {}
        files = [self.path.with_name(f"{self.path.name}.rank-{r}-of-{size}") for r in range(size)]
        part = re.compile(re.escape(self.path.name) + r"\.rank-\d+-of-\d+")  # of this run or a stopped one
        found = [file for file in self.path.parent.glob("*") if part.fullmatch(file.name)]
        self._parts = sorted({*files, *found}) if size > 1 else found
        own = files[rank] if size > 1 else self.path
        with ExitStack() as opened:
            self._out = opened.enter_context(RecordFile(self.path, provenance)) if rank == 0 else None
            mine = {own, self.path} if self._out else {own}
            self._tails = [Tail(file, provenance) for file in (self.path, *self._parts) if file not in mine]
            for file in set(found) - set(files if size > 1 else ()):  # a process of a stopped run may still be alive
                with open(file, "ab") as other:
                    lock(other, file)
            self._know(self._out.rows if self._out else [], self.path)
            self._look()  # refuses what does not fit before a file of its own is there
            self._own = opened.enter_context(RecordFile(own, provenance)) if size > 1 else self._out
            self._know(self._own.rows, own)
            self._merged = {key_of(row) for row in self._out.rows} if self._out else set()
            self._opened = opened.pop_all()

    @property
    def rows(self):
        return list(self._known.values())

    @property
    def notes(self):
        files = [self._own] if self._out in (None, self._own) else [self._out, self._own]
        return [note for file in files for note in file.notes]

    def share(self, pieces):
        """The pieces of work of this process."""
        return pieces[self.rank :: self.size]

    def deal(self, pieces):
        """This process's pieces one after the other, each with what is left of it to do: (piece, [missing keys]).

        The caller appends a row for every missing key before it asks for the next piece.  The loop ends when the rows
        of all pieces are known, those of other processes too.

        Args: pieces, a list of lists of keys (`key_of`), the same in all processes.
        """
        for piece in self.share(pieces):
            self._gather(pieces)
            yield piece, [key for key in piece if key not in self._known]
        self._wait(pieces)

    def append(self, row):
        """Write one finished row and put it on disk."""
        self._own.append(row)
        self._know([row], self._own.path)
        if self._own is self._out:
            self._merged.add(key_of(row))

    def close(self):
        """Release all files (and their locks)."""
        self._opened.close()

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        try:
            if kind is None:
                self._tidy()
        finally:
            self.close()

    def _know(self, rows, path):
        for row in rows:
            known = self._known.setdefault(key_of(row), row)
            if known is not row and line(known) != line(row):
                about = ", ".join(str(part) for part in key_of(row) if part is not None)
                raise RecordError(f"{path} has another row for {about} than the other files of its run; remove one")

    def _look(self):
        """Take in what others have written since the last look; whether there was anything."""
        before = len(self._known)
        for tail in self._tails:
            self._know(tail.new_rows(), tail.path)
        return len(self._known) > before

    def _gather(self, pieces):
        """Look, and on rank 0 copy into the record file what is next in order, as far as it is known."""
        found = self._look()
        for key in (key for piece in pieces for key in piece) if self._out else ():
            if key not in self._known:
                break
            self._merge(key)
        return found

    def _merge(self, key):
        if key not in self._merged:
            self._out.append(self._known[key])
            self._merged.add(key)

    def _wait(self, pieces):
        """Gather until the rows of all pieces are known; after a minute without any, say who is waited for."""
        since, patience = time.monotonic(), PATIENCE
        while True:
            if self._gather(pieces):
                since, patience = time.monotonic(), PATIENCE
            missing = [i for i, piece in enumerate(pieces) if any(key not in self._known for key in piece)]
            if not missing:
                return
            waited = time.monotonic() - since
            if waited > patience:
                those = ", ".join(str(rank) for rank in sorted({i % self.size for i in missing}))
                tqdm.write(
                    f"rank {self.rank} has waited {waited / 60:.0f} min for {len(missing)} pieces of work of rank "
                    f"{those}; if one has ended, stop all: the same command goes on where they were",
                    file=sys.stderr,
                )
                patience *= 2
            time.sleep(min(1, 0.05 + waited / 20))

    def _tidy(self):
        """At the end of a whole run: nothing known is left out of the record file, and it alone is left."""
        if self._out:
            for key in self._known:
                self._merge(key)
        for part in self._parts:
            if self._out or (part == self._own.path and not self._own.rows):
                part.unlink(missing_ok=True)


class Tail:
    """A record file that another process may be writing: its finished rows, as they come."""

    def __init__(self, path, provenance):
        self.path, self._provenance, self._at, self._lines = path, provenance, 0, 0

    def new_rows(self):
        """The rows finished since the last call; none while the file is not there.  RecordError as `RecordFile`."""
        try:
            with open(self.path, "rb") as file:
                file.seek(self._at)
                data = file.read()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise RecordError(f"{self.path} cannot be read: {error.strerror}; use another --out") from None
        data = data[: data.rfind(b"\n") + 1]
        if not data:
            return []
        found, rows = parse(data, self.path, self._lines + 1)
        if not rows:  # a file without rows may yet be started afresh
            return []
        if found is not None:
            check_same(found, self._provenance, self.path)
        self._at, self._lines = self._at + len(data), self._lines + data.count(b"\n")
        return rows
