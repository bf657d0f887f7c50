"""A drafter's tensors from any public checkpoint under one set of names, and whether the target is the right one.

Every dialect stores the same tensors with small differences: fused projections, `_orig_mod.` left behind by
torch.compile, `logit_head.` before the heads, `.weight` behind the codebooks.  `read_drafter` undoes them and then
demands exactly the tensors of the config: one tensor dropped in silence, a convolution say, still gives a drafter that
runs, only a much worse one.

A drafter borrows the target's embedding and output head, but some files carry copies.  They are never used; a sample
of their rows is compared with the target's, on the bfloat16 grid because either side may have been rounded to it, and
within the range of the stored dtype.
Tests: tests/test_drafter_checkpoint.py.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from models.checkpoint import DTYPES, Checkpoint, CheckpointError, TensorInfo, first_few, to_float
from models.config import DecoderConfig
from models.drafter_config import DrafterConfig

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
TO_TARGET, TO_DRAFT = "d2t", "t2d"
OTHER_DRAFTERS = {"prefix_gru.": "Domino", "embed_proj.": "Domino"}
ROWS_COMPARED = 256


class StoredDrafter:
    """The tensors of a drafter's folder under normalised names, all checked against the config before any is read.

    `d2t`, int64 [draft vocabulary] as stored: draft id i stands for target id i + d2t[i]; None where both
    vocabularies are the same.  See `read_drafter`.
    """

    def __init__(self, folder: Path, config: DrafterConfig) -> None:
        self.folder, self.checkpoint = Path(folder), Checkpoint(folder)
        self.parts: dict[str, tuple[TensorInfo, slice]] = {}  # normalised name -> stored tensor and the rows of it
        for info in self.checkpoint.tensors.values():
            if not info.name.endswith("rotary_emb.inv_freq"):
                self._add(info, config)
        self._check_names_and_shapes(config)
        self.own = tuple(config.tensor_shapes())
        self.d2t = self._read_d2t(config)

    def _add(self, info: TensorInfo, config: DrafterConfig) -> None:
        """Enter one stored tensor under its normalised name, or under several where projections are fused."""
        name = info.name.replace("_orig_mod.", "").removeprefix("logit_head.")
        for start, drafter in OTHER_DRAFTERS.items():
            if name.startswith(start):
                raise CheckpointError(f"{self.folder} is a {drafter} drafter ({info.name}), which is not supported")
        if name.endswith("_codebook.weight"):
            name = name.removesuffix(".weight")
        parts = _split(name, info, config)
        for part, rows in parts.items():
            if part in self.parts:
                first = self.parts[part][0].name
                raise CheckpointError(f"{self.folder}: {part} is stored twice, as {first} and as {info.name}")
            self.parts[part] = info, rows

    def _check_names_and_shapes(self, config: DrafterConfig) -> None:
        """Report every missing, unexpected and wrongly shaped tensor in one CheckpointError."""
        draft, hidden = config.draft_vocab_size, config.hidden_size
        expected = config.tensor_shapes()
        optional = {EMBEDDING: (config.vocab_size, hidden), HEAD: (draft, hidden), TO_DRAFT: (config.vocab_size,)}
        (expected if draft < config.vocab_size else optional)[TO_TARGET] = (draft,)
        allowed = expected | optional
        reshaped = [
            f"{name} {shape}, expected {allowed[name]}"
            for name, shape in ((name, self._shape(name)) for name in self.parts)
            if name in allowed and shape != allowed[name]
        ]
        problems = [
            *first_few("missing", [name for name in expected if name not in self.parts]),
            *first_few("unexpected", [name for name in self.parts if name not in allowed]),
            *first_few("of another shape", reshaped),
        ]
        if problems:
            raise CheckpointError(f"{self.folder} does not fit its config: {'; '.join(problems)}")

    def _shape(self, name: str) -> tuple[int, ...]:
        info, rows = self.parts[name]
        return (len(range(*rows.indices(info.shape[0]))), *info.shape[1:]) if info.shape else ()

    def _read_d2t(self, config: DrafterConfig) -> np.ndarray | None:
        """The vocabulary map, after checking that it leads to distinct ids of the target, those of t2d if stored."""
        if TO_TARGET not in self.parts:
            return None
        offsets = self.read(TO_TARGET)[1].astype(np.int64)
        ids = np.arange(len(offsets)) + offsets
        reached = np.zeros(config.vocab_size, dtype=bool)
        reached[ids[(ids >= 0) & (ids < config.vocab_size)]] = True
        if reached.sum() != len(ids):
            raise CheckpointError(f"{self.folder}: d2t does not lead to {len(ids)} distinct ids of the target")
        if TO_DRAFT in self.parts and (self.read(TO_DRAFT)[1].astype(bool) != reached).any():
            raise CheckpointError(f"{self.folder}: d2t and t2d disagree on which ids of the target are drafted")
        return offsets

    def read(self, name: str) -> tuple[str, np.ndarray]:
        """One tensor by its normalised name: (safetensors dtype, raw array), BF16 as uint16 words."""
        info, rows = self.parts[name]
        return info.dtype, self.checkpoint.raw(info.name)[rows]

    def tensors(self) -> Iterator[tuple[str, str, np.ndarray]]:
        """Stream (name, dtype, raw array) for exactly `config.tensor_shapes()`, file by file, one array at a time.

        CheckpointError, naming the tensor, for weights that are NaN or infinite.
        """
        for name in sorted(self.own, key=lambda name: (self.parts[name][0].file, self.parts[name][0].begin)):
            dtype, raw = self.read(name)
            if not np.isfinite(to_float(raw, dtype)).all():
                raise CheckpointError(
                    f"{self.parts[name][0].file}: {name} holds NaN or infinity; its training diverged"
                )
            yield name, dtype, raw

    def rows(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Some rows of a stored table as float32, without reading the others."""
        info, _ = self.parts[name]
        table = np.memmap(info.file, DTYPES[info.dtype], "r", info.begin, info.shape)
        return to_float(np.array(table[rows]), info.dtype)


def read_drafter(folder: Path, config: DrafterConfig) -> StoredDrafter:
    """Open a drafter's folder: `.tensors()` streams the drafter's own tensors, `.d2t` maps a smaller vocabulary.

    CheckpointError for a damaged file, and for a missing, unexpected, doubly stored or wrongly shaped tensor.
    """
    return StoredDrafter(folder, config)


def check_target(
    config: DrafterConfig, target: DecoderConfig, stored: StoredDrafter, embedding: Any, head: Any
) -> None:
    """Refuse a target that the drafter was not trained on.

    Compares width, vocabulary and layer count, and a sample of rows where the file carries its own copy of the
    embedding or the head.  Args: config, target; stored, from `read_drafter`; embedding, head, the target's tables
    [vocab, hidden], NumPy or torch.  CheckpointError names what differs.
    """
    differing = [
        f"{name} {wanted} against {found}"
        for name, wanted, found in (
            ("hidden size", config.hidden_size, target.hidden_size),
            ("vocabulary", config.vocab_size, target.vocab_size),
            ("number of layers", config.target_layers or target.num_layers, target.num_layers),
        )
        if wanted != found
    ]
    if differing:
        raise CheckpointError(f"{stored.folder} was trained on another target: {', '.join(differing)} of this one")
    if config.taps[-1] >= target.num_layers - 1:
        raise CheckpointError(
            f"{stored.folder} reads the target's layer {config.taps[-1]}, but this target's layers below the last end "
            f"at {target.num_layers - 2}: it was trained on another target"
        )
    for name, table in ((EMBEDDING, embedding), (HEAD, head)):
        if name in stored.parts:
            _compare_rows(stored, name, table)


def _compare_rows(stored: StoredDrafter, name: str, table: Any) -> None:
    """Compare a sample of rows, equal in every run, of a stored copy and the target's table."""
    count = stored.parts[name][0].shape[0]
    rows = np.sort(np.random.default_rng(0).permutation(count)[:ROWS_COMPARED])
    theirs = rows + stored.d2t[rows] if name == HEAD and stored.d2t is not None else rows
    expected = _host(table[theirs.tolist()])
    if stored.parts[name][0].dtype == "F16":  # has less range than bfloat16: writing it has changed what lies beyond
        with np.errstate(over="ignore"):
            expected = expected.astype(np.float16).astype(np.float32)
    differing = (_on_bf16_grid(stored.rows(name, rows)) != _on_bf16_grid(expected)).any(axis=1)
    if differing.any():
        raise CheckpointError(
            f"{stored.folder} was trained on another target: its copy of {name} differs from this target's in "
            f"{differing.sum()} of {len(rows)} rows compared"
        )


def _host(rows: Any) -> np.ndarray:
    """Rows of a NumPy or torch table as float32."""
    return np.asarray(rows.detach().float().cpu().numpy() if hasattr(rows, "detach") else rows, dtype=np.float32)


def _on_bf16_grid(values: np.ndarray) -> np.ndarray:
    """The nearest bfloat16 words, ties to even."""
    words = values.view(np.uint32)
    return (words + 0x7FFF + (words >> 16 & 1)) >> 16


def _split(name: str, info: TensorInfo, config: DrafterConfig) -> dict[str, slice]:
    """The tensors that a stored one holds, as rows of it: itself, or the parts of a fused projection in their order."""
    q, kv, f = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim, config.intermediate_size
    fused = {
        "self_attn.qkv_proj.weight": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "mlp.gate_up_proj.weight": {"gate_proj": f, "up_proj": f},
    }
    for ending, sizes in fused.items():
        if name.endswith(ending) and info.shape and info.shape[0] == sum(sizes.values()):
            first, parts = 0, {}
            for part, size in sizes.items():
                parts[name.replace(ending.split(".")[1], part)] = slice(first, first + size)
                first += size
            return parts
    return {name: slice(None)}
