"""From a hub id or a folder to verified weights, one NumPy array at a time.

`locate` turns the one thing a user types, a folder or a hub id, into a folder on disk and the commit it holds.
`Checkpoint` reads the safetensors headers of that folder and checks every file's length and layout before any weight is
used; `Checkpoint.read` then checks names and shapes against what the model needs, and streams the arrays.

A safetensors file is an 8-byte little-endian length n, n bytes of JSON that give each tensor's dtype, shape and byte
range, and then the bytes.  They are read here without the safetensors package, whose NumPy reader knows no BF16 and has
one message for every damaged file.  BF16 stays uint16 until `to_float` shifts it into float32, which is exact.
Tests: tests/test_checkpoint.py.
"""

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

TINY = Path(__file__).resolve().parent / "tiny"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
HUB_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "*.safetensors",
    "*.safetensors.index.json",
]
HUB_LEFT_OUT = ["*/*", "consolidated*"]  # second copies of the weights, in subfolders or under another naming
HUB_SECONDS = 10.0
HEADER_LIMIT = 100_000_000  # the format's own limit, in bytes
COMPARED_AT_ONCE = 1 << 24  # bytes
DTYPES: dict[str, type] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "U8": np.uint8,
    "BOOL": np.bool_,
}
FLOATS = ("F64", "F32", "F16", "BF16")


class CheckpointError(ValueError):
    """A checkpoint that cannot be found, is damaged or incomplete, or does not hold the tensors of the model."""


@dataclass(frozen=True)
class Snapshot:
    """A checkpoint folder, the name to report it by, and the hub commit it holds (None: not from the hub)."""

    folder: Path
    name: str
    revision: str | None


@dataclass(frozen=True)
class TensorInfo:
    """One stored tensor: safetensors dtype name, shape, and its bytes [begin, end) counted from the start of file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int


def locate(target: str, *, revision: str | None = None) -> Snapshot:
    """The folder of a checkpoint named by a folder or a hub id; what the hub's cache lacks is downloaded.

    "tiny" is the embedded target and "tiny/NAME" one of its drafters (`models/tiny`); ./tiny is a folder of one's own.
    An existing folder wins over the hub and never touches it.  A hub id goes through the huggingface_hub package, whose
    settings (HF_HOME, HF_HUB_OFFLINE, tokens) hold; where the hub cannot be reached, its cached snapshot serves.
    Pickled weights are never fetched.  CheckpointError is one sentence that says what to do.
    """
    if target == "tiny" or target.startswith("tiny/"):
        return _embedded(target, revision)
    folder = Path(target).expanduser()
    if target and folder.is_dir():
        if revision is not None:
            raise CheckpointError(f"{target} is a folder, and a revision applies only to a hub id: leave it out")
        return _folder_snapshot(folder)
    if target and folder.exists():
        raise CheckpointError(f"{target} is a file: name the folder that holds config.json and the weights")
    if target.startswith((".", "/", "~")) or target.endswith("/") or "\\" in target or target.count("/") > 1:
        raise CheckpointError(f"no such folder: {target}")

    folder = _fetch(target, revision)
    missing = [file.name for file in (folder / "config.json", *_shards(folder)) if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"the snapshot of {target} in {folder} is incomplete, missing {', '.join(missing)}: run again with the "
            "network on to complete it (only safetensors weights are read)"
        )
    return Snapshot(folder, target, folder.name)


def _embedded(target: str, revision: str | None) -> Snapshot:
    """One of the small networks that the project ships."""
    known = {"tiny" if f.name == "target" else f"tiny/{f.name}": f for f in sorted(TINY.iterdir()) if f.is_dir()}
    if target not in known:
        raise CheckpointError(f"the project ships no {target!r}; it has {', '.join(known)}")
    if revision is not None:
        raise CheckpointError(f"{target} is shipped with the project, and a revision applies only to a hub id")
    return Snapshot(known[target], target, None)


def _folder_snapshot(folder: Path) -> Snapshot:
    """A local folder; one inside the hub's cache, models--owner--name/snapshots/commit, keeps its name and commit."""
    full = folder.resolve()
    if full.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", full.name):
        return Snapshot(folder, full.parent.parent.name.removeprefix("models--").replace("--", "/"), full.name)
    return Snapshot(folder, full.name, None)


def _fetch(name: str, revision: str | None) -> Path:
    """Download a snapshot, or find it in the hub's cache when the hub does not give it."""
    from huggingface_hub import HfApi, errors, snapshot_download

    download = partial(
        snapshot_download, name, revision=revision, allow_patterns=HUB_FILES, ignore_patterns=HUB_LEFT_OUT
    )
    local = "name a local folder"
    try:
        # One request without retries: offline, snapshot_download alone would retry a pinned commit for 20 seconds.
        HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)
        return Path(download())
    except errors.HFValidationError:
        raise CheckpointError(f"{name!r} is neither an existing folder nor a hub id like owner/name") from None
    except errors.GatedRepoError:
        reason = f"{name} is gated: accept its terms on the hub and log in with `hf auth login`, or {local}"
    except errors.RepositoryNotFoundError:
        reason = f"no folder {name} here, and no such model on the hub (or it is private): check the name, or {local}"
    except errors.RevisionNotFoundError:
        reason = f"{name} has no revision {revision!r} on the hub: check the branch, tag or commit"
    except Exception as error:  # every release of the hub client has network errors of its own
        detail = f"{type(error).__name__}: {error}".splitlines()[0]
        wanted = name if revision is None else f"{name} at revision {revision!r}"
        reason = f"the hub cannot be reached and no snapshot of {wanted} is cached: {local} ({detail})"
    try:
        return Path(download(local_files_only=True))
    except errors.LocalEntryNotFoundError as error:
        if getattr(error, "snapshot_path", None):
            incomplete = str(error).split(". ")[0]
            reason = f"{incomplete}: run again with the network on to complete it, or {local}"
        raise CheckpointError(reason) from None


class Checkpoint:
    """The tensors of a folder with model.safetensors or model.safetensors.index.json (which wins), all verified.

    `tensors` maps each stored name to its TensorInfo.  CheckpointError, before anything is used, for: a missing,
    empty, truncated or padded file; a file that is something else (Git LFS pointer, web page, pickle); a byte layout
    with gaps or overlaps; an unsupported dtype; an index that disagrees with the headers.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        shards = _shards(self.folder)
        missing = [file.name for file in shards if not file.is_file()]
        if missing:
            raise CheckpointError(f"{self.folder} {_what_is_missing(self.folder, missing)}")
        for file in shards:
            for info in _read_header(file):
                if info.name in self.tensors:
                    first = self.tensors[info.name].file.name
                    raise CheckpointError(f"{self.folder}: {info.name} is stored twice, in {first} and in {file.name}")
                self.tensors[info.name] = info
        for name, file in _weight_map(self.folder).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(f"{self.folder / INDEX}: {name} is not in {file.name}, where the index has it")

    def raw(self, name: str) -> np.ndarray:
        """One tensor as stored, read from disk into memory of its own; BF16 comes as uint16 words."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        info = self.tensors[name]
        return _read_bytes(info, info.begin, info.end).view(DTYPES[info.dtype]).reshape(info.shape)

    def read(
        self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool = False
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """Stream (name, dtype, raw array) for exactly the tensors of `shapes`, file by file, one array at a time.

        All missing, unexpected and wrongly shaped tensors are reported in one CheckpointError, by this call and not by
        the first step of the iteration.  A stored name may lack the "model." prefix; rotary inv_freq buffers are
        ignored.  `tied`: the head is the embedding, so a stored head must be absent or equal to it, and is not yielded.
        """
        stored_names = {name: self._stored_name(name, shapes) for name in shapes}
        found = {stored: name for name, stored in stored_names.items() if stored in self.tensors}
        tied_head = tied and HEAD not in shapes and HEAD in self.tensors and stored_names.get(EMBEDDING) in found

        missing = [name for name in shapes if stored_names[name] not in found]
        unexpected, reshaped = [], []
        for stored, info in self.tensors.items():
            if stored in found:
                shape = tuple(shapes[found[stored]])
                if info.shape != shape:
                    reshaped.append(f"{stored} {info.shape}, expected {shape}")
            elif not (stored.endswith("rotary_emb.inv_freq") or (tied_head and stored == HEAD)):
                unexpected.append(stored)
        problems = [
            *first_few("missing", missing),
            *first_few("unexpected", unexpected),
            *first_few("of another shape", reshaped),
        ]
        if HEAD in missing:
            problems.append(f"{HEAD} may be absent only where tie_word_embeddings is true, which the config denies")
        if problems:
            raise CheckpointError(f"{self.folder} does not fit the model: {'; '.join(problems)}")
        if tied_head:
            self._check_tied_head(self.tensors[stored_names[EMBEDDING]], self.tensors[HEAD])

        order = sorted(found, key=lambda stored: (self.tensors[stored].file, self.tensors[stored].begin))
        return ((found[stored], self.tensors[stored].dtype, self.raw(stored)) for stored in order)

    def _stored_name(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
        """The name itself, or the one without the "model." prefix where only that is stored."""
        short = name.removeprefix("model.")
        return short if name not in self.tensors and short in self.tensors and short not in shapes else name

    def _check_tied_head(self, embedding: TensorInfo, head: TensorInfo) -> None:
        """Refuse a stored head that is not, bit for bit, the embedding it is said to be."""
        same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
        for at in range(0, head.end - head.begin if same else 0, COMPARED_AT_ONCE):
            left, right = (
                _read_bytes(info, info.begin + at, min(info.begin + at + COMPARED_AT_ONCE, info.end))
                for info in (embedding, head)
            )
            same = same and left.tobytes() == right.tobytes()
        if not same:
            raise CheckpointError(
                f"{self.folder}: the config ties the head to the embedding, but the stored {head.name} differs from "
                f"{embedding.name}: set tie_word_embeddings to false to use the stored head, or remove it"
            )


def digest(folder: Path) -> str:
    """First 16 hex digits of the SHA-256 of a checkpoint's files, which identifies weights that have no revision."""
    total = hashlib.sha256()
    for file in sorted({info.file for info in Checkpoint(folder).tensors.values()}):
        with file.open("rb") as stream:
            total.update(hashlib.file_digest(stream, "sha256").digest())
    return total.hexdigest()[:16]


def to_float(raw: np.ndarray, dtype: str, out: type = np.float32) -> np.ndarray:
    """A stored array of any shape as `out`, np.float32 or np.float64; exact for BF16, F16 and F32.

    A BF16 word is the upper half of a float32.  CheckpointError for the integer dtypes.
    """
    if dtype not in FLOATS:
        raise CheckpointError(f"dtype {dtype} does not hold floating-point weights")
    if dtype == "BF16":
        words = raw.astype(np.uint32)
        words <<= 16
        raw = words.view(np.float32)
    return raw.astype(out, copy=False)


def first_few(what: str, names: list[str], few: int = 4) -> list[str]:
    """One clause on these tensors, or none."""
    more = ", ..." if len(names) > few else ""
    return [f"{len(names)} {what}: {', '.join(names[:few])}{more}"] if names else []


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name -> shard file as the index has it; empty without an index."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    try:
        pairs = [(name, PurePosixPath(file)) for name, file in json.loads(path.read_bytes())["weight_map"].items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        pairs = []
    if not pairs:
        raise CheckpointError(f"{path}: not an index, which needs a weight_map from tensor names to files")
    for name, file in pairs:
        if file.is_absolute() or ".." in file.parts or "\\" in str(file) or ":" in str(file):
            raise CheckpointError(f"{path}: {name} is said to be in {file}, outside the folder")
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{path}: {name} is said to be in {file}, but only safetensors files are read")
    return {name: folder / file for name, file in pairs}


def _shards(folder: Path) -> list[Path]:
    """The weight files that the folder should have: those of the index, or the single file."""
    return sorted(set(_weight_map(folder).values())) or [folder / SINGLE]


def _what_is_missing(folder: Path, missing: list[str]) -> str:
    if not folder.is_dir():
        return "is not a folder"
    if (folder / INDEX).is_file():
        return f"is incomplete: {INDEX} lists {', '.join(missing)}, not on disk; download it again"
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return f"holds only pickled weights ({', '.join(pickles)}), and only safetensors is read: convert them first"
    return f"is incomplete: it holds neither {SINGLE} nor {INDEX}"


def _read_bytes(info: TensorInfo, begin: int, end: int) -> np.ndarray:
    """The bytes [begin, end) of a tensor's file as a new uint8 array."""
    array = np.fromfile(info.file, np.uint8, end - begin, offset=begin)
    if array.size != end - begin:
        raise CheckpointError(f"{info.file} became shorter while it was read, at {info.name}")
    return array


def _read_header(file: Path) -> list[TensorInfo]:
    """The tensors of one safetensors file, after checking that they fill it exactly."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(512)
        _check_kind(file, start, size)
        data = 8 + int.from_bytes(start[:8], "little")
        if size < data:
            raise CheckpointError(f"{file} is truncated: {data - size} bytes short of the end of its header")
        stream.seek(8)
        text = stream.read(data - 8)
    try:
        entries = dict(json.loads(text))
    except (ValueError, TypeError):
        raise CheckpointError(f"{file}: the safetensors header is not a JSON object") from None
    entries.pop("__metadata__", None)
    tensors = [_tensor_info(file, data, name, entry) for name, entry in entries.items()]

    filled, last = data, "the header"
    for info in sorted(tensors, key=lambda info: (info.begin, info.end)):
        if info.begin != filled:
            fault = "overlaps" if info.begin < filled else "leaves a gap after"
            raise CheckpointError(f"{file}: {info.name} {fault} {last}")
        filled, last = info.end, info.name
    if size < filled:
        raise CheckpointError(f"{file} is truncated: {filled - size} bytes short of the {filled} its header describes")
    if size > filled:
        raise CheckpointError(f"{file} is padded: {size - filled} bytes more than the {filled} its header describes")
    return tensors


def _check_kind(file: Path, start: bytes, size: int) -> None:
    """Tell the usual impostors apart by their first bytes."""
    if size == 0:
        raise CheckpointError(f"{file} is empty: download it again")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{file} is a web page, not the weights: download it again")
    if size < 10:
        raise CheckpointError(f"{file} is truncated: {size} bytes hold no safetensors header")
    if start[8:9] != b"{" or not 2 <= int.from_bytes(start[:8], "little") <= HEADER_LIMIT:
        pickled = start.startswith((b"PK\x03\x04", b"\x80\x02"))
        what = "is a pickled PyTorch file: convert it to safetensors first" if pickled else "is not a safetensors file"
        raise CheckpointError(f"{file} {what}")


def _tensor_info(file: Path, data: int, name: str, entry: Any) -> TensorInfo:
    """One entry of the header; `data` is where the tensors' bytes begin."""
    try:
        dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
        sizes = all(type(number) is int and number >= 0 for number in (*shape, begin, end))
    except (ValueError, TypeError, KeyError):
        sizes = False
    if not sizes:
        raise CheckpointError(f"{file}: the header entry of {name} is malformed: {entry!r}")
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, which is not supported (only {', '.join(DTYPES)})")
    need = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if end - begin != need:
        raise CheckpointError(f"{file}: {name}, {dtype} {shape}, needs {need} bytes but its range holds {end - begin}")
    return TensorInfo(name, dtype, shape, file, data + begin, data + end)
