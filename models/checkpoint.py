"""From a hub id or a folder to verified weights, one NumPy array at a time.

`locate` turns the one thing a user types, a folder or a hub id, into a folder on disk and the commit it holds.
`Checkpoint` reads the safetensors headers of that folder and checks every file's length and layout before any weight is
used; `Checkpoint.read` then checks the names and shapes against what the model needs, and streams the arrays.

A safetensors file is an 8-byte little-endian length n, n bytes of JSON that give each tensor's dtype, shape and byte
range, and then the bytes.  They are read here without the safetensors package because its NumPy reader knows no BF16 and
has one message for every damaged file.  BF16 stays uint16 until `to_float` shifts it into float32, which is exact.
Tests: tests/test_checkpoint.py.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

INDEX, SINGLE, HEAD, EMBEDDING = (
    "model.safetensors.index.json",
    "model.safetensors",
    "lm_head.weight",
    "model.embed_tokens.weight",
)
HUB_FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "*.safetensors", "*.safetensors.index.json",
]  # fmt: skip
HUB_LEAVES_OUT = ["*/*", "consolidated*"]  # second copies of the weights, in subfolders or in another naming
HUB_SECONDS = 10.0
HEADER_LIMIT = 100_000_000  # the format's own limit
CHUNK = 1 << 24
DTYPES = {
    "F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16,
    "I64": np.int64, "I32": np.int32, "I16": np.int16, "I8": np.int8, "U8": np.uint8, "BOOL": np.bool_,
}  # fmt: skip


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
    """The folder of a checkpoint named by a folder or a hub id, downloading what is not in the hub's cache.

    An existing folder wins and never touches the hub.  A hub id is looked up with the huggingface_hub package, whose
    settings (HF_HOME, HF_HUB_OFFLINE, tokens) hold; without a network its cached snapshot serves.  Pickled weights are
    never fetched.  CheckpointError is one sentence that says what to do.
    """
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
    shards = _shards(folder) or [folder / SINGLE]
    missing = [file.name for file in (folder / "config.json", *shards) if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"the snapshot of {target} in {folder} is incomplete, missing {', '.join(missing)}: run again with the "
            "network on to complete it (weights are read from safetensors only)"
        )
    return Snapshot(folder, target, folder.name)


def _folder_snapshot(folder: Path) -> Snapshot:
    """A local folder; one inside the hub's cache, models--owner--name/snapshots/commit, keeps its name and commit."""
    full = folder.resolve()
    if full.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", full.name):
        return Snapshot(folder, full.parent.parent.name.removeprefix("models--").replace("--", "/"), full.name)
    return Snapshot(folder, full.name, None)


def _fetch(repository: str, revision: str | None) -> Path:
    """Download a snapshot, or find it in the hub's cache when the hub does not give it."""
    from huggingface_hub import HfApi, errors, snapshot_download

    folder_hint = "or pass a local folder with --target FOLDER"
    wanted = {"revision": revision, "allow_patterns": HUB_FILES, "ignore_patterns": HUB_LEAVES_OUT}
    try:
        # One request without retries: for a pinned commit, snapshot_download alone retries for 20 s when offline.
        HfApi().model_info(repository, revision=revision, timeout=HUB_SECONDS)
        return Path(snapshot_download(repository, **wanted))
    except errors.HFValidationError:
        raise CheckpointError(f"{repository!r} is neither an existing folder nor a hub id like owner/name") from None
    except errors.GatedRepoError:
        reason = f"{repository} is gated: accept its terms on the hub and log in with `hf auth login`, {folder_hint}"
    except errors.RepositoryNotFoundError:
        reason = f"no folder {repository} here and no such model on the hub, or it is private: check the name, {folder_hint}"
    except errors.RevisionNotFoundError:
        reason = f"{repository} has no revision {revision!r} on the hub: check the branch, tag or commit"
    except Exception as error:  # every release of the hub client has its own network errors
        of = "" if revision is None else f" at revision {revision!r}"
        reason = (
            f"the hub cannot be reached ({type(error).__name__}) and no snapshot of {repository}{of} is cached: "
            f"check the network, {folder_hint}"
        )
    try:
        return Path(snapshot_download(repository, local_files_only=True, **wanted))
    except errors.LocalEntryNotFoundError as error:
        if getattr(error, "snapshot_path", None):
            reason = f"{str(error).split('. ')[0]}: run again with the network on, {folder_hint}"
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
            raise CheckpointError(f"{self.folder} is incomplete: {INDEX} lists {', '.join(missing)}, not on disk")
        if not shards:
            raise CheckpointError(_what_else_is_there(self.folder))
        for file in shards:
            for name, info in _read_header(file).items():
                if name in self.tensors:
                    raise CheckpointError(f"{name} is stored twice, in {self.tensors[name].file.name} and {file.name}")
                self.tensors[name] = info
        for name, file in _weight_map(self.folder).items():
            if name not in self.tensors or self.tensors[name].file != file:
                raise CheckpointError(f"{INDEX} says {name} is in {file.name}, whose header lacks it")

    def raw(self, name: str) -> np.ndarray:
        """One tensor as stored, in memory of its own; BF16 comes as uint16 words."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.folder} holds no tensor {name}")
        info = self.tensors[name]
        return _read_bytes(info, info.begin, info.end).view(DTYPES[info.dtype]).reshape(info.shape)

    def read(
        self, shapes: Mapping[str, tuple[int, ...]], *, tied: bool = False
    ) -> Iterator[tuple[str, str, np.ndarray]]:
        """Stream (name, dtype, raw array) for exactly the tensors of `shapes`, file by file, one array at a time.

        All missing, unexpected and wrongly shaped tensors are reported in one CheckpointError by this call itself, not
        by the first step of the iteration.  A stored name may lack the "model." prefix, and rotary inv_freq buffers are
        ignored.  `tied`: the head is the embedding, so a stored head must be absent or equal to it; it is not yielded.
        """
        aliases = {name: self._alias(name) for name in shapes}
        problems = [f"missing {name}" for name, stored in aliases.items() if stored is None]
        if HEAD in shapes and aliases[HEAD] is None:
            problems[-1] += " (the config says that the head is not tied to the embedding)"
        found = {stored: name for name, stored in aliases.items() if stored is not None}
        ignored = {HEAD} if tied and HEAD not in shapes else set()
        for stored in self.tensors:
            if stored not in found and stored not in ignored and not stored.endswith("rotary_emb.inv_freq"):
                problems.append(f"unexpected {stored}")
        for stored, name in found.items():
            if self.tensors[stored].shape != tuple(shapes[name]):
                problems.append(f"{stored} has shape {self.tensors[stored].shape}, expected {tuple(shapes[name])}")
        if problems:
            more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
            raise CheckpointError(f"{self.folder} does not fit the model: {'; '.join(problems[:8])}{more}")
        if ignored and HEAD in self.tensors:
            self._check_tied_head()
        order = sorted(found, key=lambda stored: (self.tensors[stored].file, self.tensors[stored].begin))
        return ((found[stored], self.tensors[stored].dtype, self.raw(stored)) for stored in order)

    def _alias(self, name: str) -> str | None:
        """The stored name of a tensor: its own, or the one without the "model." prefix."""
        return next((stored for stored in (name, name.removeprefix("model.")) if stored in self.tensors), None)

    def _check_tied_head(self) -> None:
        """Refuse a stored head that is not, bit for bit, the embedding it is said to be."""
        embedding, head = self.tensors[self._alias(EMBEDDING) or HEAD], self.tensors[HEAD]
        same = (embedding.dtype, embedding.shape) == (head.dtype, head.shape)
        for at in range(0, head.end - head.begin if same else 0, CHUNK):
            ours, theirs = (
                _read_bytes(info, info.begin + at, min(info.begin + at + CHUNK, info.end)) for info in (head, embedding)
            )
            same = same and not (ours != theirs).any()
        if not same:
            raise CheckpointError(
                f"the config ties the head to the embedding, but {HEAD} in {head.file.name} differs from "
                f"{embedding.name}: set tie_word_embeddings to false to use the stored head"
            )


def to_float(raw: np.ndarray, dtype: str, out: type = np.float32) -> np.ndarray:
    """A stored array as `out` (float32 or float64), same shape; exact for BF16, F16 and F32.

    BF16 is the upper half of a float32: the uint16 word moves up by 16 bits.
    """
    if dtype not in ("BF16", "F16", "F32", "F64"):
        raise CheckpointError(f"dtype {dtype} holds no floating-point weights")
    if dtype == "BF16":
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return raw.astype(out, copy=False)


def _weight_map(folder: Path) -> dict[str, Path]:
    """Tensor name -> shard file as the index has it; empty without an index."""
    path = folder / INDEX
    if not path.exists():
        return {}
    try:
        weight_map = json.loads(path.read_bytes())["weight_map"]
        pairs = [(name, PurePosixPath(file)) for name, file in weight_map.items()]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise CheckpointError(f"{path}: not an index, it needs a weight_map from tensor names to files") from None
    for name, file in pairs:
        if file.is_absolute() or ".." in file.parts or "\\" in str(file) or ":" in str(file):
            raise CheckpointError(f"{path}: {name} is said to be in {file}, outside the folder")
        if file.suffix != ".safetensors":
            raise CheckpointError(f"{path}: {name} is said to be in {file}, but only safetensors files are read")
    return {name: folder / file for name, file in pairs}


def _shards(folder: Path) -> list[Path]:
    """The weight files that the folder says it has, on disk or not; [] when it says nothing."""
    if (folder / INDEX).exists():
        return sorted(set(_weight_map(folder).values()))
    return [folder / SINGLE] if (folder / SINGLE).is_file() else []


def _what_else_is_there(folder: Path) -> str:
    """The message for a folder without safetensors weights."""
    if not folder.is_dir():
        return f"no such folder: {folder}"
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in (".bin", ".pt", ".pth", ".ckpt"))
    if pickles:
        return f"{folder} holds only pickled weights ({pickles[0]}), and only safetensors is read: convert it first"
    return f"{folder} holds neither {SINGLE} nor {INDEX}"


def _read_bytes(info: TensorInfo, begin: int, end: int) -> np.ndarray:
    """The bytes [begin, end) of a tensor's file as a fresh uint8 array."""
    array = np.fromfile(info.file, np.uint8, end - begin, offset=begin)
    if array.size != end - begin:
        raise CheckpointError(f"{info.file} became shorter while it was read, at {info.name}")
    return array


def _read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one safetensors file, after checking that they fill it exactly."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        start = stream.read(512)
        length = int.from_bytes(start[:8], "little")
        _check_kind(file, start, length, size)
        stream.seek(8)
        text = stream.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        tensors = [_tensor_info(file, 8 + length, name, entry) for name, entry in entries.items()]
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"{file}: the safetensors header is malformed ({error!r})") from None
    except UnicodeDecodeError, json.JSONDecodeError:
        raise CheckpointError(f"{file}: the safetensors header is not JSON") from None

    filled, last = 8 + length, "the header"
    for info in sorted(tensors, key=lambda info: (info.begin, info.end)):
        if info.begin != filled:
            what = "overlaps" if info.begin < filled else "leaves a gap after"
            raise CheckpointError(f"{file}: {info.name} {what} {last}")
        filled, last = info.end, info.name
    if size < filled:
        raise CheckpointError(f"{file} is truncated: {filled - size} bytes short of the {filled} its header describes")
    if size > filled:
        raise CheckpointError(f"{file} is padded: {size - filled} bytes more than the {filled} its header describes")
    return {info.name: info for info in tensors}


def _check_kind(file: Path, start: bytes, length: int, size: int) -> None:
    """Name the usual impostors, and files too short for their own header."""
    if size == 0:
        raise CheckpointError(f"{file} is empty")
    if start.startswith(b"version https://git-lfs"):
        raise CheckpointError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its repository")
    if start.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(f"{file} is a web page, not the weights: download it again")
    if start.startswith((b"PK\x03\x04", b"\x80\x02")):
        raise CheckpointError(f"{file} is a pickled PyTorch file, and only safetensors is read: convert it first")
    if size > 8 and (start[8:9] != b"{" or not 2 <= length <= HEADER_LIMIT):
        raise CheckpointError(f"{file} is not a safetensors file")
    if size < 8 + length or size < 8:
        short = 8 + length - size if size > 8 else "some"
        raise CheckpointError(f"{file} is truncated: {short} bytes short of its own header")


def _tensor_info(file: Path, offset: int, name: str, entry: Mapping) -> TensorInfo:
    dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if dtype not in DTYPES:
        raise CheckpointError(f"{file}: {name} has dtype {dtype}, which is not supported")
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in (*shape, begin, end)):
        raise CheckpointError(f"{file}: {name} has a malformed shape or byte range")
    need = math.prod(shape) * np.dtype(DTYPES[dtype]).itemsize
    if end - begin != need:
        raise CheckpointError(f"{file}: {name}, {dtype} {shape}, needs {need} bytes but its range holds {end - begin}")
    return TensorInfo(name, dtype, shape, file, offset + begin, offset + end)
