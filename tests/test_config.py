"""models/config.py: every dialect of config.json, every refusal, and agreement with transformers."""

import json
import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from models.config import ConfigError, DecoderConfig, Rope

# Float32 against float64 on the same formula: relative error at most a few units in the last place.
FLOAT32 = {"rtol": 2e-6, "atol": 0}
# Values quoted to six significant digits.
QUOTED = {"rtol": 1e-5, "atol": 0}

QWEN3_4B = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_scaling": None,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "use_sliding_window": False,
    "sliding_window": None,
    "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "eos_token_id": 2,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


def config(base=QWEN3_4B, *, without=(), **changes):
    return DecoderConfig.from_dict({key: value for key, value in {**base, **changes}.items() if key not in without})


def small(model_type="llama", **changes):
    return config(SMALL, model_type=model_type, **changes)


def test_qwen3_4b():
    qwen = config()
    shapes = qwen.tensor_shapes()
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (4096, 2560)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (1024, 2560)
    assert shapes["model.layers.35.self_attn.v_proj.weight"] == (1024, 2560)
    assert shapes["model.layers.35.self_attn.o_proj.weight"] == (2560, 4096)
    assert shapes["model.layers.0.self_attn.q_norm.weight"] == (128,)
    assert "lm_head.weight" not in shapes
    assert qwen.kv_bytes_per_token(itemsize=2) == 147_456
    assert qwen.parameter_count() == 4_022_468_096
    assert qwen.eos_ids == (151645,)
    assert qwen.dtype == "bfloat16"
    assert qwen.notes == ()


def test_missing_head_dim_is_128_for_qwen3():
    qwen = config(without=["head_dim"])
    assert qwen.head_dim == 128
    assert qwen.tensor_shapes() == config().tensor_shapes()
    assert any("head_dim" in note for note in qwen.notes)


@pytest.mark.parametrize("model_type", ["qwen2", "llama", "mistral"])
def test_missing_head_dim_is_hidden_over_heads_elsewhere(model_type):
    assert small(model_type, head_dim=None).head_dim == 8
    with pytest.raises(ConfigError, match="head_dim is missing and 6 heads do not divide hidden_size 50"):
        small(model_type, head_dim=None, hidden_size=50)


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "default"}},
        {"rope_parameters": {"rope_type": "default"}, "rope_theta": 1_000_000},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}, "sliding_attention": None}},
    ],
)
def test_plain_rope_in_every_spelling(spelling):
    rope = config(without=["rope_theta", "rope_scaling"] - spelling.keys(), **spelling).rope
    frequencies, attention = rope.frequencies(128)
    assert rope == Rope("default", 1e6)
    assert frequencies.dtype == np.float64
    assert frequencies.shape == (64,)
    assert_allclose(frequencies[63], 1.24094e-6, **QUOTED)
    assert attention == 1.0


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "yarn", **YARN}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_parameters": {kind: {"type": "yarn", **YARN} for kind in ("full", "sliding")}},
    ],
)
def test_yarn_in_every_spelling(spelling):
    scaled = config(**spelling)
    frequencies, attention = scaled.rope.frequencies(128)
    plain, _ = Rope("default", 1e6).frequencies(128)
    assert frequencies[0] == 1.0
    assert_allclose(frequencies[32], 6.02941e-4, **QUOTED)
    assert_allclose(frequencies[63], 3.10234e-7, **QUOTED)
    assert_allclose(attention, 1.138629, **QUOTED)
    assert_array_equal(frequencies[:24], plain[:24])
    assert_array_equal(frequencies[40:], plain[40:] / 4)
    ratio = frequencies[23:41] / plain[23:41]
    assert (np.diff(ratio) < 0).all()
    assert scaled.notes == ()


def test_bfloat16_frequencies_would_lose_the_phase():
    frequencies, _ = Rope("default", 1e6).frequencies(128)
    words = frequencies.astype(np.float32).view(np.uint32)
    rounded = ((words + 0x7FFF + ((words >> 16) & 1)) & 0xFFFF0000).view(np.float32)
    drift = np.abs(rounded - frequencies) * 30_000
    assert 33 < drift.max() < 35
    assert (np.abs(frequencies.astype(np.float32) - frequencies) * 30_000).max() < 1e-3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_scaling": {"type": "foo", "factor": 2.0}}, "rope type 'foo' is not supported; supported are default"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "default"}}, "gives rope_type as 'yarn' and as 'default'"),
        ({"rope_parameters": {"rope_theta": 5e6}}, "gives rope_theta as 1000000 and as 5000000.0: keep the right one"),
        ({"rope_scaling": {"type": "linear"}}, "factor must be a positive number, got None"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor of at least 1"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive number, got '2'"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": None}}, "low_freq_factor must be a positive number"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor below high_freq_factor"),
        ({"rope_scaling": {"type": "yarn", **YARN, "beta_fast": 0.5}}, "beta_slow not above beta_fast"),
        ({"rope_scaling": {"type": "yarn", **YARN, "truncate": 1}}, "truncate must be true or false"),
        ({"rope_scaling": "yarn"}, "rope_scaling must be an object or null"),
        ({"rope_theta": math.inf}, "rope_theta must be a positive number"),
        ({"rope_theta": 1}, "theta above 1"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor 0.25"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}},
            "rope_parameters differs between attention types",
        ),
        (
            {"rope_parameters": {"factor": 2.0, "full_attention": {"rope_theta": 1e6}}},
            r"differs between attention types \(factor, full_attention\)",
        ),
    ],
)
def test_rope_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


def test_rope_built_by_hand_is_checked():
    with pytest.raises(ConfigError, match="yarn rope needs original_max_position_embeddings"):
        Rope("yarn", 1e6, factor=4.0)


def test_yarn_without_original_length_is_noted():
    scaled = config(rope_scaling={"type": "yarn", "factor": 4.0})
    assert scaled.rope.original_positions == 40960
    assert scaled.notes == (
        "yarn rope without original_max_position_embeddings: taken as max_position_embeddings",
    )  # fmt: skip


def test_unknown_rope_fields_and_missing_theta_are_noted():
    noted = config(without=["rope_theta"], rope_scaling={"type": "linear", "factor": 2.0, "finetuned": True})
    assert noted.rope == Rope("linear", 10_000.0, 2.0)
    assert any("finetuned" in note for note in noted.notes)
    assert any("rope_theta is missing" in note for note in noted.notes)


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": 2.5},
        LLAMA3,
        {**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", **YARN},
        {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 32768},
        {"rope_type": "yarn", **YARN, "beta_fast": 16, "beta_slow": 2.0},
        {"rope_type": "yarn", **YARN, "truncate": False},
        {"rope_type": "yarn", **YARN, "attention_factor": 1.3},
        {"rope_type": "yarn", **YARN, "mscale": 0.707, "mscale_all_dim": 0.5},
        {"rope_type": "yarn", **YARN, "mscale": 0.707},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 3},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 10**6, "rope_theta": 1e4},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768, "rope_theta": 2.0},
    ],
)
def test_rope_agrees_with_transformers(rope):
    pytest.importorskip("transformers")
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    theta = {"rope_theta": rope.get("rope_theta", 1e6)}
    peer = Qwen3RotaryEmbedding(Qwen3Config(head_dim=128, rope_parameters={**theta, **rope}))
    ours = config(without=["rope_theta"], rope_parameters={**theta, **rope}).rope
    frequencies, attention = ours.frequencies(128)
    assert_allclose(peer.inv_freq.numpy(), frequencies, **FLOAT32)
    assert_allclose(peer.attention_scaling, attention, rtol=1e-15)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True}),
        ("qwen2", {"head_dim": None}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
    ],
)
def test_shapes_agree_with_transformers(model_type, changes, tied):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers import AutoConfig, AutoModelForCausalLM

    raw = {**SMALL, "tie_word_embeddings": tied, **changes}
    raw = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    ours = DecoderConfig.from_dict({**raw, "model_type": model_type})
    with torch.device("meta"):
        peer = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **raw))
    expected = {name: tuple(tensor.shape) for name, tensor in peer.state_dict().items()}
    if tied:
        del expected["lm_head.weight"]
    assert ours.tensor_shapes() == expected
    assert ours.parameter_count() == peer.num_parameters()


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
def test_what_transformers_saves_reads_back(model_type, tmp_path):
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    peer = AutoConfig.for_model(model_type, **SMALL, rope_scaling={"rope_type": "yarn", **YARN})
    peer.save_pretrained(tmp_path)
    saved = DecoderConfig.from_folder(tmp_path)
    assert saved.rope == Rope("yarn", 10_000.0, 4.0, 32768)
    assert (saved.num_layers, saved.num_heads, saved.num_kv_heads, saved.head_dim) == (2, 6, 2, 16)
    assert saved.eos_ids == (2,)


@pytest.mark.parametrize("model_type", ["qwen3", "qwen2", "llama", "mistral"])
def test_defaults_are_those_of_transformers_and_are_noted(model_type):
    pytest.importorskip("transformers")
    from transformers import AutoConfig

    peer = AutoConfig.for_model(model_type)
    ours = small(model_type, tie_word_embeddings=None, rms_norm_eps=None, rope_theta=None)
    assert ours.tied == peer.tie_word_embeddings
    assert ours.rms_norm_eps == peer.rms_norm_eps
    assert ours.rope.theta == peer.rope_parameters["rope_theta"]
    for key in ("tie_word_embeddings", "rms_norm_eps", "rope_theta"):
        assert any(note.startswith(key) for note in ours.notes)


def test_missing_key_value_heads_mean_one_per_head():
    llama = small(num_key_value_heads=None)
    assert llama.num_kv_heads == 6
    assert llama.notes == ("num_key_value_heads is missing: taken as 6",)


@pytest.mark.parametrize(
    ("written", "ids"), [(7, (7,)), ([7, 5], (7, 5)), ([7, 5, 7], (7, 5)), (0, (0,)), (None, ()), ([], ())]
)
def test_eos_ids(written, ids):
    assert small(eos_token_id=written).eos_ids == ids
    assert any("no stop id" in note for note in small(eos_token_id=written).notes) == (not ids)


@pytest.mark.parametrize("written", ["2", [2, None], -1, True, 2.0, {"id": 2}])
def test_eos_ids_refused(written):
    with pytest.raises(ConfigError, match="eos_token_id must be a token id, a list of them, or null"):
        small(eos_token_id=written)


def test_dtype_from_either_key():
    assert small().dtype == "float32"
    assert small(torch_dtype="float16").dtype == "float16"
    assert small(dtype="bfloat16").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported; supported are qwen3, qwen2, llama, mistral"),
        ({"model_type": None}, "model_type None"),
        ({"vocab_size": None}, "vocab_size must be a positive integer, got None"),
        ({"hidden_size": 2560.0}, "hidden_size must be a positive integer, got 2560.0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive integer, got 0"),
        ({"intermediate_size": "9728"}, "intermediate_size must be a positive integer"),
        ({"num_attention_heads": True}, "num_attention_heads must be a positive integer, got True"),
        ({"max_position_embeddings": -1}, "max_position_embeddings must be a positive integer"),
        ({"num_key_value_heads": 5}, "32 attention heads cannot share 5 key-value heads"),
        ({"head_dim": 127}, "head_dim must be even"),
        ({"rms_norm_eps": 0}, "rms_norm_eps must be a positive number"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is set: use the unquantised"),
        ({"num_experts": 128}, "num_experts is set: mixture-of-experts"),
        ({"num_local_experts": 8}, "num_local_experts is set"),
        ({"use_sliding_window": True, "sliding_window": 4096}, "sliding window of 4096 within 40960 positions"),
        ({"layer_types": ["full_attention"] * 35 + ["sliding_attention"]}, "only full_attention is supported"),
        ({"layer_types": ["full_attention"] * 35}, "layer_types must list one type for each"),
        ({"model_type": "mistral", "sliding_window": 4096}, "set max_position_embeddings to 4096 in a copy"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(ConfigError, match=message):
        config(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 4096},
        {"use_sliding_window": True},
        {"use_sliding_window": True, "sliding_window": 40960},
        {"use_sliding_window": True, "sliding_window": 4096, "layer_types": ["full_attention"] * 36},
        {"model_type": "mistral", "sliding_window": 40960},
        {"model_type": "llama", "sliding_window": 4096},
        {"num_experts": 0, "quantization_config": None},
    ],
)
def test_fields_without_effect_are_accepted(changes):
    assert config(**changes).tensor_shapes().keys() >= {"model.norm.weight"}


def test_mistral_without_the_window_field_means_its_default():
    with pytest.raises(ConfigError, match="sliding window of 4096"):
        config(without=["sliding_window"], model_type="mistral")


def test_from_folder(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json: No such file or directory; a model folder needs"):
        DecoderConfig.from_folder(tmp_path)
    path = tmp_path / "config.json"
    for text, message in [
        ("{", r"config\.json: not valid JSON"),
        ("[]", r"config\.json: a config is a JSON object, got list"),
        (json.dumps({**QWEN3_4B, "model_type": "t5"}), r"config\.json: model_type 't5'"),
    ]:
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            DecoderConfig.from_folder(tmp_path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(QWEN3_4B).encode())
    assert DecoderConfig.from_folder(tmp_path) == config()
