"""The decoders: against transformers, against stored arrays, against themselves without a cache, and each other."""

import warnings
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import DecoderConfig
from tests.agreement import assert_agree
from tests.strategies import seeds

torch = pytest.importorskip("torch")

import fast  # noqa: E402
import reference  # noqa: E402

both_wings = pytest.mark.parametrize("wing", [reference, fast], ids=["reference", "fast"])

CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e4,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}

# Trees are lists of `grow` calls, each (parents, tokens); a parent is an earlier call's node, or -1 for the prefix.
TREE = [([-1, -1], [7, 8]), ([0, 1, 1], [9, 9, 0]), ([3, -1, 2, 0], [100, 1, 9, 9]), ([5], [2])]


# Models and trees


def random_weights(shapes, seed=0):
    """Hub name -> float32 array: no norm is one, no bias zero, and the logits are far from uniform."""
    random = np.random.default_rng(seed)
    return {
        name: (("norm" in name) + 0.2 * random.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }


def random_decoder(wing, *, seed=0, dtype="float64", stop_ids=(), **fields):
    """A random model of one wing; equal arguments give equal weights in both."""
    config = DecoderConfig.from_dict(CONFIG | fields)
    weights = {name: array.astype(dtype) for name, array in random_weights(config.tensor_shapes(), seed).items()}
    if wing is fast:
        weights = {name: torch.from_numpy(array) for name, array in weights.items()}
    return wing.Decoder(config, weights, stop_ids)


def random_tokens(count, seed=0, vocab=CONFIG["vocab_size"]):
    return np.random.default_rng(seed).integers(0, vocab, count)


def histories(prefix, tree):
    """Each node's whole history: the prefix, its ancestors and itself."""
    known = []
    for parents, tokens in tree:
        known += [[*(prefix if p < 0 else known[p]), t] for p, t in zip(parents, tokens, strict=True)]
    return known


def grow_all(session, tree):
    """The logits of every node of a tree, [nodes, V]."""
    return np.concatenate([np.asarray(session.grow(np.array(p), np.array(t))) for p, t in tree])


def uncached(logits, prefix, tree):
    """The same, from one forward over each node's whole history."""
    return np.stack([np.asarray(logits(history))[-1] for history in histories(prefix, tree)])


def grow_chain(decoder, tokens, prefilled):
    """Logits from position prefilled - 1 on: a prefill, then one node after another."""
    session = decoder.open(tokens[:prefilled])
    chain = [([i - 1], [token]) for i, token in enumerate(tokens[prefilled:])]
    return np.concatenate([np.asarray(session.root_logits)[None], grow_all(session, chain)])


def step_chain(decoder, tokens, prefilled):
    """The same through the one-row batch that writes answers."""
    batch = decoder.open_batch([tokens[:prefilled]], len(tokens) - prefilled)
    return np.concatenate([batch.root_logits, *(batch.step([token]) for token in tokens[prefilled:])])


# transformers as a peer

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PEERS = {
    "qwen3": {},
    "qwen3 tied sharded": {"tie_word_embeddings": True, "num_key_value_heads": 1, "shard": "20KB"},
    "qwen3 yarn": {"rope_scaling": YARN, "num_hidden_layers": 3},
    "qwen2 biases": {"model_type": "qwen2", "head_dim": 8, "shard": "20KB"},
    "llama": {"model_type": "llama", "num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True},
    "llama tied llama3": {
        "model_type": "llama",
        "tie_word_embeddings": True,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64},
    },
}


def save_peer(folder, fields, dtype="float32"):
    """Save a random model as transformers does, and return it."""
    transformers = pytest.importorskip("transformers")
    fields = CONFIG | fields
    shard = fields.pop("shard", "1GB")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = transformers.AutoConfig.for_model(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        parameters = dict(model.named_parameters())
        for name, values in random_weights({name: tuple(p.shape) for name, p in parameters.items()}).items():
            parameters[name].data = torch.from_numpy(values)
        model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=shard)
    return model


def peer_logits(model, tokens):
    with torch.no_grad():
        return model(torch.as_tensor(tokens)[None], use_cache=False).logits[0]


@pytest.fixture(scope="module", params=PEERS)
def peer(request, tmp_path_factory):
    """(folder of a checkpoint saved by transformers, its logits function)."""
    folder = tmp_path_factory.mktemp("peer")
    model = save_peer(folder, PEERS[request.param])
    assert (len(list(folder.glob("*.safetensors"))) > 1) == ("shard" in PEERS[request.param])
    return folder, partial(peer_logits, model)


@both_wings
def test_logits_equal_those_of_transformers(peer, wing):
    folder, expected = peer
    tokens = random_tokens(37)
    actual = wing.Decoder.load(folder).logits(tokens)
    assert_agree(actual, expected(tokens), "logits32")


@both_wings
def test_cached_logits_equal_those_of_transformers(peer, wing):
    folder, expected = peer
    tokens, decoder = random_tokens(20), wing.Decoder.load(folder)
    expected = expected(tokens)[10:]
    assert_agree(grow_chain(decoder, tokens, 11), expected, "logits32")
    if wing is fast:
        assert_agree(step_chain(decoder, tokens, 11), expected, "logits32")


@both_wings
def test_every_branch_of_a_tree_equals_its_own_forward_in_transformers(peer, wing):
    folder, expected = peer
    prefix = random_tokens(9)
    actual = grow_all(wing.Decoder.load(folder).open(prefix), TREE)
    assert_agree(actual, uncached(expected, prefix, TREE), "logits32")


def test_bfloat16_error_is_at_most_twice_that_of_transformers(tmp_path):
    """The rule for low precision: both errors against the float64 logits of the same bfloat16 weights."""
    tokens = random_tokens(30)
    plain = peer_logits(save_peer(tmp_path, {"num_hidden_layers": 3}, "bfloat16"), tokens)
    assert plain.dtype == torch.bfloat16
    exact = fast.Decoder.load(tmp_path, dtype="float64").logits(tokens)
    assert_agree(exact, reference.Decoder.load(tmp_path, dtype="float64").logits(tokens), "float64")
    decoder = fast.Decoder.load(tmp_path, dtype="bfloat16")
    assert decoder.logits(tokens).dtype == torch.float32

    def error(logits, skipped=0):
        return (torch.as_tensor(logits) - exact[skipped:]).abs().max()

    allowed = 2 * error(plain)
    assert error(decoder.logits(tokens)) <= allowed
    assert error(grow_chain(decoder, tokens, 6), 5) <= allowed
    assert error(step_chain(decoder, tokens, 6), 5) <= allowed


# Stored arrays


@pytest.fixture(params=["tied", "untied"])
def target(golden, request):
    """(folder, arrays) of a tiny Qwen3 whose float64 logits are stored."""
    folder = golden / "target" / request.param
    with np.load(folder / "golden.npz") as arrays:
        return folder, dict(arrays)


@both_wings
def test_golden_logits(target, wing):
    folder, arrays = target
    actual = wing.Decoder.load(folder, dtype="float64").logits(arrays["input_ids"])
    assert_agree(actual, arrays["logits"], "golden")


@both_wings
def test_golden_cached_logits(target, wing):
    folder, arrays = target
    first, expected = arrays["chunk_sizes"][0], arrays["chunked_logits"]
    decoder = wing.Decoder.load(folder, dtype="float64")
    assert_agree(grow_chain(decoder, arrays["input_ids"][: len(expected)], first), expected[first - 1 :], "golden")


@both_wings
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_golden_greedy_answer(target, wing, dtype):
    folder, arrays = target
    prompt, expected = np.split(arrays["greedy_ids"], [arrays["greedy_prompt_len"]])
    decoder = wing.Decoder.load(folder, dtype=dtype)
    (answer,) = wing.write_answers(decoder, [prompt], np.zeros((1, len(expected))), wing.SamplingLaw(0))
    assert_agree(answer.tokens, expected, "exact")
    assert not answer.stopped


# The two wings against each other


@st.composite
def configs(draw):
    """Fields of small random models: any head layout, three dialects, every rotary variant."""
    kv_heads, head_dim = draw(st.integers(1, 3)), 2 * draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 3))
    kind = draw(st.sampled_from(["qwen3", "qwen2", "llama"]))
    linear = {"rope_type": "linear", "factor": 2.0}
    return {
        "model_type": kind,
        "vocab_size": draw(st.integers(1, 20)),
        "hidden_size": draw(st.integers(1, 9)),
        "intermediate_size": draw(st.integers(1, 9)),
        "num_hidden_layers": draw(st.integers(1, 2)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "tie_word_embeddings": draw(st.booleans()),
        "attention_bias": draw(st.booleans()),
        "rope_scaling": draw(st.sampled_from([None, linear, YARN])),
    }


@st.composite
def trees(draw, vocab):
    """Trees grown in one to three calls; children may share a parent, a token, or both."""
    tree, nodes = [], 0
    for _ in range(draw(st.integers(1, 3))):
        call = draw(st.lists(st.tuples(st.integers(-1, nodes - 1), st.integers(0, vocab - 1)), min_size=1, max_size=5))
        tree.append(tuple(map(list, zip(*call, strict=True))))
        nodes += len(call)
    return tree


@settings(max_examples=25)
@given(st.data(), configs(), seeds)
def test_wings_agree_with_each_other_and_with_uncached_forwards(data, fields, seed):
    prefix = data.draw(st.lists(st.integers(0, fields["vocab_size"] - 1), min_size=1, max_size=6))
    tree = data.draw(trees(fields["vocab_size"]))
    plain, quick = (random_decoder(wing, seed=seed, **fields) for wing in (reference, fast))
    expected = uncached(plain.logits, prefix, tree)
    assert_agree(quick.logits(prefix), plain.logits(prefix), "float64")
    assert_agree(grow_all(plain.open(prefix), tree), expected, "float64")
    assert_agree(grow_all(quick.open(prefix), tree), expected, "float64")


LAWS = {"plain": reference.SamplingLaw(), "filtered": reference.SamplingLaw(0.7, top_k=20, top_p=0.8)}
both_laws = pytest.mark.parametrize("law", LAWS.values(), ids=LAWS)


@pytest.fixture(params=["golden", "random"])
def walks(request):
    """Makes the slots of one walk in both wings, ([reference], [fast]), over a model with frequent stop ids."""
    if request.param == "golden":
        folder, stop_ids = request.getfixturevalue("golden") / "target" / "untied", (10, 74)
        targets = [(wing, wing.Decoder.load(folder, dtype="float64", stop_ids=stop_ids)) for wing in (reference, fast)]
    else:
        targets = [(wing, random_decoder(wing, stop_ids=range(0, 101, 10))) for wing in (reference, fast)]
    prefix, uniforms = random_tokens(10, vocab=97), np.random.default_rng(1).random((64, 4))
    return lambda law: [list(wing.walk(target, prefix, 4, uniforms, law)) for wing, target in targets]


def assert_floors_agree(actual, expected, kind):
    """Floors of order 0 and 1 of a fast and a reference slot."""
    for order in (0, 1):
        ours, theirs = fast.floor(actual, order), reference.floor(expected, order)
        for name in ("fit", "held_out", "split", "lower", "upper", "covered"):
            value, other = getattr(ours, name), getattr(theirs, name)
            assert (value is None) == (other is None), name
            if value is not None:
                assert_agree(value, other, kind)


@both_laws
def test_both_wings_walk_the_same_tree(walks, law):
    """Equal uniforms: the same prefixes, draws and stops at every slot, and the same rows to rounding."""
    plain, quick = walks(law)
    for ours, theirs in zip(plain, quick, strict=True):
        for name in ("parent", "token", "path_node", "drawn", "past", "weight", "alive"):
            assert_agree(getattr(theirs, name), getattr(ours, name), "exact")
        assert_agree(theirs.rows, ours.rows, "float64")
    assert max(len(slot.token) for slot in plain) > 10 and plain[-1].alive < 1


@both_laws
def test_floors_of_one_walk_agree_between_the_wings(walks, law):
    for ours, theirs in zip(*walks(law), strict=True):
        assert_floors_agree(theirs, ours, "float64")


# What the fast decoder does its own way


def test_padding_to_buckets_changes_no_logits():
    plain, padded = random_decoder(fast), random_decoder(fast)
    prefix, padded.buckets = random_tokens(7), (8, 16)
    tree = [*TREE, ([-1, *range(8)], range(9)), ([9] * 17, range(17))]  # rows padded to 8, to 16, and not at all
    assert_agree(grow_all(padded.open(prefix), tree), grow_all(plain.open(prefix), tree), "float64")


def test_attending_a_few_nodes_at_a_time_changes_no_logits(monkeypatch):
    decoder, prefix = random_decoder(fast), random_tokens(7)
    whole = grow_all(decoder.open(prefix), TREE)
    monkeypatch.setattr("fast.decoder.SCORES", 1)
    assert_agree(grow_all(decoder.open(prefix), TREE), whole, "float64")


def test_logits_keep_the_precision_of_the_model_and_bfloat16_reads_out_in_float32():
    for dtype, expected in [("float32", "float32"), ("float64", "float64"), ("bfloat16", "float32")]:
        config = DecoderConfig.from_dict(CONFIG)
        weights = {
            k: torch.from_numpy(v).to(getattr(torch, dtype)) for k, v in random_weights(config.tensor_shapes()).items()
        }
        decoder = fast.Decoder(config, weights)
        session, batch = decoder.open([1, 2]), decoder.open_batch([[1, 2], [3]], 1)
        logits = (
            decoder.logits([1, 2]),
            session.root_logits,
            session.grow([-1], [3]),
            batch.root_logits,
            batch.step([4, 5]),
        )
        assert {str(x.dtype) for x in logits} == {f"torch.{expected}"}
    assert random_decoder(reference, dtype="float32").logits([1, 2]).dtype == np.float32


@pytest.mark.parametrize("fields", [{}, {"model_type": "qwen2"}, {"tie_word_embeddings": False}])
def test_packed_products_are_those_of_the_maps_they_hold(fields):
    """One row, few and many; with biases, QK norms and a head of its own."""
    if not fast.decoder.Packed.available():
        pytest.skip("this PyTorch cannot pack")
    plain, packed = (random_decoder(fast, dtype="float32", **fields) for _ in range(2))
    assert packed.pack() is packed and packed.pack() is packed and packed.packed_head
    for count in (1, 2, 9, 70):
        tokens = random_tokens(count)
        assert_agree(packed.logits(tokens), plain.logits(tokens), "logits32")
        assert_agree(grow_all(packed.open(tokens), TREE), grow_all(plain.open(tokens), TREE), "logits32")
    with pytest.raises(RuntimeError, match="passes no gradients on"):
        packed.model.layers[0].mlp(torch.zeros(2, plain.config.hidden_size, requires_grad=True))
    assert random_decoder(fast).pack().packed_head is None  # float64


def test_weights_in_slabs_multiply_as_a_whole(monkeypatch):
    """bfloat16 operands, exact float32 products: slabs change nothing but the rounding of float32 sums."""
    x, weight, bias = (
        torch.from_numpy(np.random.default_rng(0).normal(size=s)).bfloat16() for s in [(5, 8), (7, 8), (7,)]
    )
    expected = x.double() @ weight.double().T + bias.double()
    for slab in (1, 3 * 8, 2**20):
        monkeypatch.setattr("fast.decoder.SLAB", slab)
        actual = fast.decoder.linear_in_float32(x, weight, bias)
        assert actual.dtype == torch.float32
        assert_agree(actual, expected, "logits32")


# Refusals


@pytest.mark.parametrize(
    ("wing", "options", "message"),
    [
        (fast, {"dtype": "float16"}, "dtype must be float32, bfloat16 or float64, not float16"),
        (fast, {"device": "cuda"}, "device cuda asked, but this PyTorch sees no CUDA device"),
        (reference, {"dtype": "bfloat16"}, "float32 or float64 on the CPU, not bfloat16 on cpu"),
        (reference, {"dtype": "float16"}, "float32 or float64 on the CPU, not float16 on cpu"),
        (reference, {"device": "cuda"}, "float32 or float64 on the CPU, not float32 on cuda"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_a_dtype_or_device_that_cannot_be_had_is_refused(tmp_path, monkeypatch, wing, options, message):
    """Refused by name before the folder, here an empty one, is looked at."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=message):
        wing.Decoder.load(tmp_path, **options)


def test_a_prefix_longer_than_its_cache_is_refused():
    decoder = random_decoder(fast)
    with pytest.raises(ValueError, match="a prefix of 5 tokens does not fit a cache of 4"):
        decoder.prefill(decoder.cache(1, 4), 0, random_tokens(5))


def test_a_step_beyond_the_cache_is_refused():
    batch = random_decoder(fast).open_batch([random_tokens(3), random_tokens(2)], 1)
    batch.step([1, 2])
    with pytest.raises(ValueError, match="the cache is full: a row already holds 4 tokens"):
        batch.step([1, 2])


# A small real model

TEXT = (
    "A drafter proposes several tokens at once and the target accepts a part of them. How large that part can be is "
    "limited by what the drafter may look at, and the rest is its own fault. In short,"
)


@pytest.fixture(scope="module")
def real(smollm2):
    """SmolLM2 in float32: (reference decoder, fast decoder, token ids of a text of about forty tokens)."""
    tokenizer = pytest.importorskip("tokenizers").Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    return reference.Decoder.load(smollm2), fast.Decoder.load(smollm2), tokenizer.encode(TEXT).ids


def test_greedy_answer_of_a_real_model_equals_that_of_transformers(real, smollm2):
    """One forward of transformers over prompt and answer: greedy, token by token, means each is the largest logit."""
    transformers = pytest.importorskip("transformers")
    _, decoder, prompt = real
    (answer,) = fast.write_answers(decoder, [prompt], np.zeros((1, 64)), fast.SamplingLaw(0))
    assert not answer.stopped and len(answer.tokens) == 64
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    expected = peer_logits(model, [*prompt, *answer.tokens[:-1]])[len(prompt) - 1 :].argmax(dim=-1)
    assert_agree(answer.tokens, expected, "exact")


def test_walks_of_a_real_model_agree_between_the_wings(real):
    """Float32 from logits to floors under the filtered law, whose few tokens leave no draw at the mercy of rounding."""
    plain, quick, prefix = real
    uniforms, law = np.random.default_rng(2).random((64, 3)), LAWS["filtered"]
    walks = reference.walk(plain, prefix, 3, uniforms, law), fast.walk(quick, prefix, 3, uniforms, law)
    for ours, theirs in zip(*walks, strict=True):
        assert_agree(theirs.drawn, ours.drawn, "exact")
        assert_floors_agree(theirs, ours, "walk32")
    assert len(ours.token) > 10


def test_floors_of_a_real_model_agree_on_one_tree(real):
    """The plain law keeps a tail of tens of thousands of tokens, where a draw in a few hundred turns on the rounding of
    float32 sums; so the fast decoder grows the reference's tree, and rows and floors are compared there."""
    plain, quick, prefix = real
    session, nodes, uniforms = quick.open(prefix), np.array([-1]), np.random.default_rng(2).random((32, 3))
    for slot in reference.walk(plain, prefix, 3, uniforms):
        logits = session.grow(nodes[slot.parent], slot.token) if slot.index else session.root_logits[None]
        nodes = session.cache.nodes - len(slot.token) + np.arange(len(slot.token)) if slot.index else nodes
        rows = fast.warp(logits)
        assert_agree(fast.total_variation(rows, torch.from_numpy(slot.rows)).amax(), 0.0, "walk32")
        assert_floors_agree(replace(slot, rows=rows), slot, "walk32")
    assert len(slot.token) > 20


def test_impossible_growth_is_refused():
    """A parent must exist before the call, and there is one per token, in both wings."""
    for wing in (reference, fast):
        decoder = random_decoder(wing)
        session = decoder.open([1, 2])
        for parents, tokens in (
            ([0], [3]),
            ([-2], [3]),
            ([-1, 0], [3, 4]),
            ([-1], [3, 4]),
            ([-1], [-1]),
            ([-1], [10**6]),
        ):
            with pytest.raises(ValueError):
                session.grow(parents, tokens)
        assert len(session.grow([-1, -1], [3, 4])) == 2
        assert len(session.grow([1, 0, -1], [3, 4, 5])) == 3
        for prefix in ([], [-1], [10**6]):
            with pytest.raises(ValueError):
                decoder.open(prefix)
