"""models/checkpoint.py: finding a checkpoint, verifying its files, and reading exactly the tensors of the model."""

import json
import os
import re
import subprocess
import sys
import threading
import tracemalloc
from contextlib import contextmanager
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from numpy.testing import assert_array_equal

from models.checkpoint import INDEX, SINGLE, Checkpoint, CheckpointError, Snapshot, locate, to_float
from models.config import DecoderConfig

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT.parent / "shared" / "data" / "golden" / "target"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
TINY = {
    "model_type": "qwen3",
    "vocab_size": 11,
    "hidden_size": 6,
    "intermediate_size": 10,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 64,
    "eos_token_id": 1,
}
HEAD, EMBEDDING, NORM = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"


def shapes(*, tied=False):
    return DecoderConfig.from_dict({**TINY, "tie_word_embeddings": tied}).tensor_shapes()


def weights(*, tied=False):
    random = np.random.default_rng(0)
    return {name: random.standard_normal(shape, np.float32) for name, shape in shapes(tied=tied).items()}


def save(folder, tensors, *, shards=1, file=SINGLE):
    """Write tensors as a folder with config.json and one file, or with an index over several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(TINY))
    if shards == 1:
        safetensors.numpy.save_file(tensors, folder / file)
        return folder
    weight_map = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {name: tensors[name] for name in list(tensors)[shard::shards]}
        safetensors.numpy.save_file(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))
    return folder


def read(folder, *, tied=False):
    return {name: to_float(raw, dtype) for name, dtype, raw in Checkpoint(folder).read(shapes(tied=tied), tied=tied)}


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        assert actual[name].dtype == array.dtype
        assert_array_equal(actual[name], array)


def refused(message):
    return pytest.raises(CheckpointError, match=message)


# F1: the head, the prefix, and exactly the tensors of the model


def test_tied_without_head(tmp_path):
    assert_same(read(save(tmp_path, weights(tied=True)), tied=True), weights(tied=True))


def test_tied_with_an_equal_head(tmp_path, monkeypatch):
    monkeypatch.setattr("models.checkpoint.COMPARED_AT_ONCE", 100)
    tensors = weights(tied=True)
    assert_same(read(save(tmp_path, {**tensors, HEAD: tensors[EMBEDDING]}, shards=2), tied=True), tensors)


@pytest.mark.parametrize("change", ["value", "shape", "dtype"])
def test_tied_with_a_different_head(tmp_path, monkeypatch, change):
    monkeypatch.setattr("models.checkpoint.COMPARED_AT_ONCE", 100)
    tensors = weights(tied=True)
    head = tensors[EMBEDDING].copy()
    if change == "value":
        head[0, 0] += 1
    tensors[HEAD] = {"value": head, "shape": head[:-1], "dtype": head.astype(np.float64)}[change]
    with refused(f"ties the head to the embedding, but the stored {HEAD} differs from {EMBEDDING}"):
        Checkpoint(save(tmp_path, tensors)).read(shapes(tied=True), tied=True)


def test_untied_with_head(tmp_path):
    assert_same(read(save(tmp_path, weights())), weights())


def test_untied_without_head(tmp_path):
    with refused(f"1 missing: {HEAD}; {HEAD} may be absent only where tie_word_embeddings is true"):
        read(save(tmp_path, weights(tied=True)))


def test_a_head_is_unexpected_where_nothing_says_tied(tmp_path):
    with refused(f"1 unexpected: {HEAD}"):
        Checkpoint(save(tmp_path, weights())).read(shapes(tied=True))


@pytest.mark.parametrize("shards", [1, 3])
def test_names_without_the_model_prefix(tmp_path, shards):
    tensors = weights()
    short = {name.removeprefix("model."): array for name, array in tensors.items()}
    assert_same(read(save(tmp_path, short, shards=shards)), tensors)


def test_a_tensor_under_both_names_is_refused(tmp_path):
    tensors = weights()
    with refused("does not fit the model: 1 unexpected: norm.weight$"):
        read(save(tmp_path, {**tensors, "norm.weight": tensors[NORM]}))


def test_one_stored_tensor_never_serves_two_names(tmp_path):
    checkpoint = Checkpoint(save(tmp_path, {"norm.weight": np.ones(6, np.float32)}))
    with refused(f"1 missing: {NORM}$"):
        checkpoint.read({NORM: (6,), "norm.weight": (6,)})


def test_reading_goes_through_the_files_in_order(tmp_path):
    checkpoint = Checkpoint(save(tmp_path, weights(), shards=3))
    order = [checkpoint.tensors[name] for name, _, _ in checkpoint.read(shapes())]
    assert order == sorted(order, key=lambda info: (info.file.name, info.begin))


def test_every_misfit_is_reported_before_any_weight(tmp_path):
    tensors = weights()
    del tensors["model.layers.1.self_attn.q_norm.weight"]
    tensors["model.layers.0.mlp.up_proj.bias"] = np.zeros(10, np.float32)
    tensors[NORM] = np.zeros(7, np.float32)
    checkpoint = Checkpoint(save(tmp_path, tensors))
    with pytest.raises(CheckpointError) as caught:
        checkpoint.read(shapes())
    for part in (
        "1 missing: model.layers.1.self_attn.q_norm.weight",
        "1 unexpected: model.layers.0.mlp.up_proj.bias",
        "1 of another shape: model.norm.weight (7,), expected (6,)",
    ):
        assert part in str(caught.value)


def test_a_long_list_of_misfits_is_cut(tmp_path):
    stray = {f"stray.{index}": np.zeros(1, np.float32) for index in range(5)}
    with refused(rf"24 missing: {EMBEDDING}, .*, \.\.\.; 5 unexpected: stray\.0, .*, stray\.3, \.\.\.$"):
        read(save(tmp_path, {HEAD: weights()[HEAD], **stray}))


def test_rotary_buffers_are_ignored(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)}
    assert_same(read(save(tmp_path, weights() | extra)), weights())


# F2: completeness, and files that are not what they should be


def damaged(folder, change):
    """A complete two-shard checkpoint whose second shard's bytes went through `change`."""
    save(folder, weights(), shards=2)
    assert_same(read(folder), weights())
    second = folder / "model-00002-of-00002.safetensors"
    second.write_bytes(change(second.read_bytes()))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-3], r"model-00002-of-00002\.safetensors is truncated: 3 bytes short"),
        (lambda data: data + b"??", r"model-00002-of-00002\.safetensors is padded: 2 bytes more"),
        (lambda data: data[:300], r"model-00002-of-00002\.safetensors is truncated: \d+ bytes short of the end"),
        (lambda data: data[:5], r"model-00002-of-00002\.safetensors is truncated: 5 bytes hold no"),
        (lambda data: b"", r"model-00002-of-00002\.safetensors is empty"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a Git LFS pointer"),
        (lambda data: b"\n<!DOCTYPE html><html>", "is a web page"),
        (lambda data: b"<HTML><body>not found", "is a web page"),
        (lambda data: b"PK\x03\x04" + bytes(60), "is a pickled PyTorch file"),
        (lambda data: b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "is a pickled PyTorch file"),
        (lambda data: bytes(range(64)), "is not a safetensors file"),
        (lambda data: b'{"error": "Entry not found"}', "is not a safetensors file"),
        (lambda data: data[:8] + b"{" * (len(data) - 8), "the safetensors header is not a JSON object"),
    ],
)
def test_damaged_files(tmp_path, change, message):
    with refused(message):
        Checkpoint(damaged(tmp_path, change))


def test_missing_shard(tmp_path):
    save(tmp_path, weights(), shards=3)
    for shard in (2, 3):
        (tmp_path / f"model-0000{shard}-of-00003.safetensors").unlink()
    with refused(f"incomplete: {INDEX} lists model-00002-of-00003.safetensors, model-00003-of-00003.safetensors"):
        Checkpoint(tmp_path)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_index_and_header_disagree(tmp_path):
    save(tmp_path, weights(), shards=2)
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    names = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    moved = next(name for name, file in names.items() if file == first)
    with refused(f"{re.escape(moved)} is not in {second}, where the index has it"):
        Checkpoint(edit_index(tmp_path, lambda weight_map: weight_map.update({moved: second})))
    edit_index(tmp_path, lambda weight_map: weight_map.update({moved: first}))
    with refused(f"nowhere is not in {second}"):
        Checkpoint(edit_index(tmp_path, lambda weight_map: weight_map.update(nowhere=second)))


def test_a_tensor_the_index_does_not_list_is_still_seen(tmp_path):
    save(tmp_path, {**weights(), "stray": np.ones(2, np.float32)}, shards=2)
    edit_index(tmp_path, lambda weight_map: weight_map.pop("stray"))
    with refused("1 unexpected: stray"):
        read(tmp_path)


def test_a_tensor_in_two_shards(tmp_path):
    save(tmp_path, weights(), shards=2)
    safetensors.numpy.save_file(weights(), tmp_path / "model-00002-of-00002.safetensors")
    with refused("is stored twice, in model-00001-of-00002.safetensors and in model-00002-of-00002.safetensors"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../model.safetensors", "outside the folder"),
        ("/etc/model.safetensors", "outside the folder"),
        ("..\\model.safetensors", "outside the folder"),
        ("C:/model.safetensors", "outside the folder"),
        ("pytorch_model.bin", "only safetensors files are read"),
    ],
)
def test_index_paths(tmp_path, file, message):
    save(tmp_path, weights(), shards=2)
    with refused(f"{NORM} is said to be in {re.escape(file)}, .*{message}"):
        Checkpoint(edit_index(tmp_path, lambda weight_map: weight_map.update({NORM: file})))


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}'])
def test_malformed_index(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with refused(f"{INDEX}: not an index"):
        Checkpoint(tmp_path)


def test_the_index_wins_over_the_single_file(tmp_path):
    save(tmp_path, weights(), shards=2)
    safetensors.numpy.save_file({"other": np.ones(1, np.float32)}, tmp_path / SINGLE)
    safetensors.numpy.save_file({"other": np.ones(1, np.float32)}, tmp_path / "model-00003-of-00003.safetensors")
    assert_same(read(tmp_path), weights())


def test_folders_without_safetensors(tmp_path):
    with refused("is not a folder"):
        Checkpoint(tmp_path / "absent")
    with refused(f"holds neither {SINGLE} nor {INDEX}"):
        Checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK\x03\x04")
    with refused(r"holds only pickled weights \(pytorch_model\.bin\), and only safetensors is read"):
        Checkpoint(tmp_path)


# The safetensors header


def pack(entries, payload=b"", *, pad_to=0):
    header = json.dumps(entries).encode()
    header += b" " * (pad_to - len(header))
    return len(header).to_bytes(8, "little") + header + payload


def entry(begin, end, *, dtype="F32", shape=None):
    return {"dtype": dtype, "shape": [(end - begin) // 4] if shape is None else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"a": entry(0, 4), "b": entry(8, 16)}, "b leaves a gap after a"),
        ({"a": entry(4, 16)}, "a leaves a gap after the header"),
        ({"a": entry(0, 8), "b": entry(4, 16)}, "b overlaps a"),
        ({"a": entry(0, 8), "b": entry(0, 8), "c": entry(8, 16)}, "b overlaps a"),
        ({"a": entry(0, 12)}, "is padded: 4 bytes more"),
        ({"a": entry(0, 20)}, "is truncated: 4 bytes short"),
        ({"a": entry(0, 16, shape=[2, 3])}, r"a, F32 \(2, 3\), needs 24 bytes but its range holds 16"),
        ({"a": entry(0, 16, dtype="F8_E4M3", shape=[16])}, "a has dtype F8_E4M3, which is not supported"),
        ({"a": entry(0, 16, dtype=["F32"])}, "which is not supported"),
        ({"a": entry(0, 16, shape=[-1, -4])}, "the header entry of a is malformed"),
        ({"a": entry(0, 16, shape=[4.0])}, "the header entry of a is malformed"),
        ({"a": {"dtype": "F32", "shape": [4]}}, "the header entry of a is malformed"),
        ({"a": {"dtype": "F32", "shape": [4], "data_offsets": [0, 8, 16]}}, "the header entry of a is malformed"),
        ({"a": 7}, "the header entry of a is malformed"),
        ({"a": entry(16, 0, shape=[0])}, "needs 0 bytes but its range holds -16"),
    ],
)
def test_malformed_headers(tmp_path, entries, message):
    (tmp_path / SINGLE).write_bytes(pack(entries, bytes(16)))
    with refused(message):
        Checkpoint(tmp_path)


def test_header_details_that_are_fine(tmp_path):
    values = np.arange(4, dtype=np.float32)
    entries = {"b": entry(4, 16), "__metadata__": {"format": "pt"}, "none": entry(4, 4), "a": entry(0, 4, shape=[])}
    # 640 bytes of header begin like a pickle, 80 02; 641 put the tensors at an odd address.
    for length in (640, 641):
        (tmp_path / SINGLE).write_bytes(pack(entries, values.tobytes(), pad_to=length))
        checkpoint = Checkpoint(tmp_path)
        assert checkpoint.tensors.keys() == {"a", "b", "none"}
        assert_array_equal(checkpoint.raw("b"), values[1:])
        assert checkpoint.raw("a").shape == ()
        assert checkpoint.raw("none").shape == (0,)
        assert (checkpoint.tensors["b"].begin, checkpoint.tensors["b"].end) == (8 + length + 4, 8 + length + 16)


def test_an_unknown_name_and_a_file_that_shrinks(tmp_path):
    checkpoint = Checkpoint(save(tmp_path, weights()))
    with refused("holds no tensor model.none"):
        checkpoint.raw("model.none")
    (tmp_path / SINGLE).write_bytes(b"")
    with refused(f"became shorter while it was read, at {NORM}"):
        checkpoint.raw(NORM)


# F4: dtypes


def test_bfloat16_words_are_exact(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    words = np.array([0x3F80, 0x4049, 0xC2C8, 0x7F80, 0x0001, 0x8000], np.uint16)
    stored = {
        "bf16": torch.from_numpy(words.view(np.int16)).view(torch.bfloat16),
        "f16": torch.tensor([0.1, -2.5, 65504.0], dtype=torch.float16),
        "f32": torch.tensor([[0.1, 1e-40], [3e38, -0.0]]),
        "f64": torch.tensor([0.1, -1e300], dtype=torch.float64),
        "ids": torch.tensor([3, -1]),
        "mask": torch.tensor([True, False]),
    }
    save_file(stored, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    assert {name: info.dtype for name, info in checkpoint.tensors.items()} == {
        "bf16": "BF16",
        "f16": "F16",
        "f32": "F32",
        "f64": "F64",
        "ids": "I64",
        "mask": "BOOL",
    }
    assert_array_equal(checkpoint.raw("bf16"), words)
    wide = to_float(checkpoint.raw("bf16"), "BF16")
    assert wide.dtype == np.float32
    assert_array_equal(wide, np.array([1.0, 3.140625, -100.0, np.inf, 2.0**-133, -0.0], np.float32))
    assert np.signbit(wide[-1])
    assert f"{wide[4]:.2e}" == "9.18e-41"
    for name, tensor in stored.items():
        if name in ("ids", "mask"):
            assert_array_equal(checkpoint.raw(name), tensor.numpy())
            with refused("does not hold floating-point weights"):
                to_float(checkpoint.raw(name), checkpoint.tensors[name].dtype)
        else:
            for out, torch_dtype in ((np.float32, torch.float32), (np.float64, torch.float64)):
                with np.errstate(over="ignore"):
                    ours = to_float(checkpoint.raw(name), checkpoint.tensors[name].dtype, out)
                assert ours.dtype == out
                assert_array_equal(ours, tensor.to(torch_dtype).numpy())


def test_every_bfloat16_word():
    torch = pytest.importorskip("torch")

    words = np.arange(1 << 16, dtype=np.uint16)
    peer = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).float().numpy()
    assert_array_equal(to_float(words, "BF16").view(np.uint32), peer.view(np.uint32))


def test_float8_is_refused_by_name(tmp_path):
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    save_file({NORM: torch.zeros(6).to(torch.float8_e4m3fn), "b": torch.zeros(2)}, tmp_path / SINGLE)
    with refused(f"{NORM} has dtype F8_E4M3, which is not supported"):
        Checkpoint(tmp_path)


def test_reading_holds_one_tensor_at_a_time(tmp_path):
    sizes = {f"t{index}": (256, 1024) for index in range(16)}  # 1 MiB each
    safetensors.numpy.save_file({name: np.ones(shape, np.float32) for name, shape in sizes.items()}, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    tracemalloc.start()
    for _, dtype, raw in checkpoint.read(sizes):
        to_float(raw, dtype).sum()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 2**20 < peak < 4 * 2**20


# Against transformers and the golden data


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_a_sharded_checkpoint_of_transformers(tmp_path, model_type, tied):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {key: value for key, value in TINY.items() if key != "model_type"}
    settings = AutoConfig.for_model(model_type, **raw, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(settings).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="1KB")
    assert (tmp_path / INDEX).is_file()

    config = DecoderConfig.from_folder(tmp_path)
    loaded = list(Checkpoint(tmp_path).read(config.tensor_shapes(), tied=config.tied))
    expected = model.state_dict()
    assert config.dtype == "bfloat16"
    assert sorted(name for name, _, _ in loaded) == sorted(name for name in expected if not (tied and name == HEAD))
    for name, dtype, array in loaded:
        assert dtype == "BF16"
        assert_array_equal(to_float(array, dtype), expected[name].float().numpy())


@pytest.mark.skipif(not GOLDEN.is_dir(), reason="the golden data is not beside this checkout")
@pytest.mark.parametrize("variant", ["tied", "untied"])
def test_golden_targets(variant):
    config = DecoderConfig.from_folder(GOLDEN / variant)
    expected = safetensors.numpy.load_file(GOLDEN / variant / SINGLE)
    loaded = {name: raw for name, _, raw in Checkpoint(GOLDEN / variant).read(config.tensor_shapes(), tied=config.tied)}
    assert_same(loaded, {name: array for name, array in expected.items() if not (config.tied and name == HEAD)})


# locate: folders


def test_a_folder_never_touches_the_hub(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    save(tmp_path / "Qwen" / "tiny", weights())
    monkeypatch.chdir(tmp_path)
    assert locate("Qwen/tiny") == Snapshot(Path("Qwen/tiny"), "tiny", None)
    assert locate(str(tmp_path / "Qwen" / "tiny") + "/").name == "tiny"
    with refused("a revision applies only to a hub id"):
        locate("Qwen/tiny", revision="main")
    with refused("is a file: name the folder"):
        locate("Qwen/tiny/config.json")


@pytest.mark.parametrize("target", ["./absent", "../absent", "/absent", "~/absent", "a\\b", "a/b/c", "absent/", "."])
def test_a_path_that_does_not_exist(target, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    if target == ".":
        assert locate(target).name == tmp_path.name
    else:
        with refused(f"^no such folder: {re.escape(target)}$"):
            locate(target)


def test_a_folder_of_the_hub_cache_keeps_its_commit(tmp_path):
    folder = tmp_path / "models--Qwen--Qwen3-tiny" / "snapshots" / COMMIT
    folder.mkdir(parents=True)
    assert locate(str(folder)) == Snapshot(folder, "Qwen/Qwen3-tiny", COMMIT)
    other = tmp_path / "snapshots" / "monday"
    other.mkdir(parents=True)
    assert locate(str(other)) == Snapshot(other, "monday", None)


def test_neither_torch_nor_the_hub_client_is_imported():
    script = "import sys, models.checkpoint, models.config; print({'torch', 'huggingface_hub'} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout == "set()\n"


# locate: the hub's cache, and a small hub on this machine


def cached(cache, repository, tensors, *, shards=1, only=None):
    """A hand-made hub cache entry: refs/main, blobs, and a snapshot of symbolic links."""
    entry = cache / ("models--" + repository.replace("/", "--"))
    real = save(entry / "made", tensors, shards=shards)
    snapshot = entry / "snapshots" / COMMIT
    for folder in (snapshot, entry / "blobs", entry / "refs"):
        folder.mkdir(parents=True)
    (entry / "refs" / "main").write_text(COMMIT)
    for file in real.iterdir():
        blob = entry / "blobs" / sha256(file.name.encode()).hexdigest()
        file.rename(blob)
        if only is None or file.name in only:
            (snapshot / file.name).symlink_to(Path("../..", "blobs", blob.name))
    real.rmdir()
    return snapshot


def locate_in_subprocess(home, calls, **environment):
    """Each call's answer, or its error message, from one fresh interpreter, where HF_HOME is `home`."""
    script = """
import json, sys, time
from models.checkpoint import CheckpointError, locate
for target, revision in json.loads(sys.argv[1]):
    start = time.perf_counter()
    try:
        found = locate(target, revision=revision)
        answer = [str(found.folder), found.name, found.revision]
    except CheckpointError as error:
        answer = f"{error} (chained)" if error.__cause__ or not error.__suppress_context__ else str(error)
    print(json.dumps([answer, time.perf_counter() - start]))
"""
    dropped = ("HF_", "HUGGING", "HTTP", "ALL_PROXY", "http", "all_proxy")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    result = subprocess.run(
        [sys.executable, "-c", script, json.dumps(calls)],
        env={**inherited, "PYTHONPATH": str(ROOT), "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.parametrize("environment", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_without_a_network(tmp_path, environment):
    """Offline by wish, or with nothing listening: cached snapshots serve, all else is one sentence, and at once."""
    cache = tmp_path / "hub"
    whole = cached(cache, "owner/whole", weights(), shards=2)
    cached(cache, "owner/part", weights(), shards=2, only=["config.json", INDEX, "model-00001-of-00002.safetensors"])
    cached(cache, "owner/text", weights(), only=["config.json"])
    calls = [
        ("owner/whole", None),
        ("owner/whole", COMMIT),
        ("owner/part", None),
        ("owner/text", None),
        ("owner/absent", None),
        ("owner/absent", COMMIT),
        ("owner/whole", "v2"),
        (str(whole), None),
        ("not a name", None),
        ("", None),
    ]
    answers, seconds = zip(*locate_in_subprocess(tmp_path, calls, **environment), strict=True)
    assert answers[:2] == ([str(whole), "owner/whole", COMMIT],) * 2
    assert_same(read(whole), weights())
    assert "is incomplete, missing model-00002-of-00002.safetensors: run again" in answers[2]
    assert "is incomplete, missing model.safetensors: run again" in answers[3]
    for answer, wanted in [
        (answers[4], "owner/absent"),
        (answers[5], f"owner/absent at revision '{COMMIT}'"),
        (answers[6], "owner/whole at revision 'v2'"),
    ]:
        assert answer.startswith(f"the hub cannot be reached and no snapshot of {wanted} is cached: ")
        assert "name a local folder" in answer
        assert "\n" not in answer
        assert not answer.endswith("(chained)")
    assert answers[7] == [str(whole), "owner/whole", COMMIT]
    assert answers[8] == "'not a name' is neither an existing folder nor a hub id like owner/name"
    assert answers[9] == "'' is neither an existing folder nor a hub id like owner/name"
    assert max(seconds) < 10


@contextmanager
def small_hub(files):
    """The few routes of the hub that a snapshot needs, for owner/model and some repositories that say no."""
    asked = []
    refusals = {
        "owner/gated": (403, "GatedRepo"),
        "owner/none": (404, "RepoNotFound"),
        "owner/private": (401, "RepoNotFound"),
    }

    class Hub(BaseHTTPRequestHandler):
        def answer(self, status, body=b"", **headers):
            self.send_response(status)
            for key, value in {"Content-Length": len(body), **headers}.items():
                self.send_header(key.replace("_", "-"), str(value))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.split("?")[0]
            asked.append(path)
            repository = "/".join(path.removeprefix("/api/models").split("/")[1:3])
            if repository in refusals:
                status, code = refusals[repository]
                self.answer(status, X_Error_Code=code)
            elif path.endswith("/revision/v9"):
                self.answer(404, X_Error_Code="RevisionNotFound")
            elif "/tree/" in path:
                listed = [
                    {"type": "file", "path": name, "size": len(data), "oid": sha256(data).hexdigest()}
                    for name, data in files.items()
                ]
                self.answer(200, json.dumps(listed).encode(), Content_Type="application/json")
            elif "/resolve/" in path:
                data = files[path.split(COMMIT + "/")[1]]
                self.answer(200, data, ETag=f'"{sha256(data).hexdigest()}"', X_Repo_Commit=COMMIT)
            else:
                known = {"id": "owner/model", "sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
                self.answer(200, json.dumps(known).encode(), Content_Type="application/json")

        def do_HEAD(self):
            self.do_GET()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def test_with_a_hub(tmp_path):
    """A download takes the safetensors and the texts alone; each refusal of the hub is one clear sentence."""
    source = save(tmp_path / "source", weights(), shards=2)
    files = {file.name: file.read_bytes() for file in source.iterdir()}
    wanted = set(files) | {"tokenizer.json"}
    files |= dict.fromkeys(
        ["tokenizer.json", "pytorch_model.bin", "consolidated.safetensors", "onnx/model.safetensors"], b"{}"
    )
    calls = [
        ("owner/model", None),
        ("owner/model", "v9"),
        ("owner/gated", None),
        ("owner/none", None),
        ("owner/private", COMMIT),
    ]
    with small_hub(files) as (endpoint, asked):
        answers = [answer for answer, _ in locate_in_subprocess(tmp_path, calls, HF_ENDPOINT=endpoint)]
    folder = tmp_path / "hub" / "models--owner--model" / "snapshots" / COMMIT
    assert answers[0] == [str(folder), "owner/model", COMMIT]
    assert {file.name for file in folder.rglob("*") if file.is_file()} == wanted
    assert {path.split("/")[-1] for path in asked if "/resolve/" in path} == wanted
    assert_same(read(folder), weights())
    assert answers[1] == "owner/model has no revision 'v9' on the hub: check the branch, tag or commit"
    assert answers[2].startswith("owner/gated is gated: accept its terms on the hub")
    assert answers[3].startswith("no folder owner/none here, and no such model on the hub (or it is private)")
    assert answers[4].startswith("no folder owner/private here")

    (folder / "tokenizer.json").unlink()
    (incomplete,) = locate_in_subprocess(tmp_path, [("owner/model", None)], HF_HUB_OFFLINE="1")
    assert "incomplete: 1 file(s) are missing (tokenizer.json): run again with the network on" in incomplete[0]
