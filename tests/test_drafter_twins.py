"""The drafters in PyTorch: against arrays of the authors' own code, and against the reference on random drafters."""

from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.checkpoint import CheckpointError
from models.config import Rope
from models.drafter_checkpoint import read_drafter
from models.drafter_config import DrafterConfig
from reference import drafters as plain
from reference.laws import SamplingLaw
from tests.agreement import assert_agree
from tests.strategies import laws, seeds

torch = pytest.importorskip("torch")

from torch.nn import functional as F  # noqa: E402

from fast.decoder import Decoder, to_tensor  # noqa: E402
from fast.draft_heads import largest  # noqa: E402
from fast.drafters import Drafter  # noqa: E402
from fast.laws import draw, warp  # noqa: E402

RELEASED = (
    "deepspec-dflash",
    "deepspec-dspark-vanilla",
    "deepspec-dspark-vanilla/bf16",
    "deepspec-dspark-fitted",
    "deepspec-dspark-gated",
    "deepspec-dspark-rnn",
    "deepspec-dspark-gemma4/separate-v",
    "deepspec-dspark-gemma4/shared-kv",
    "specfloor-attn/final",
    "specfloor-attn/head-anchor-gate",
    "specfloor-attn/vanilla-shortconv",
    "specfloor-attn/vanilla-slotembed",
    "zlab-dflash/full",
    "zlab-dflash/sliding-causal",
    "zlab-dflash/sliding-noncausal-scaled",
    "zlab-dflash2/sliding",
    "zlab-dflash2/full-scaled",
    "specforge-dflash/full",
    "specforge-dflash/sliding",
    "specforge-dspark/vanilla",
    "specforge-dspark/rnn",
    "speculators-dflash/full-vocab",
    "speculators-dflash/full-vocab/saved-by-0.9.0",
    "speculators-dflash/draft-vocab-sliding",
    "speculators-dspark/draft-vocab",
    "speculators-dspark/draft-vocab/saved-by-0.9.0",
    "speculators-dspark/in-place-gated",
    "speculators-dflash2/sliding",
)
COPIES = ("bf16", "saved-by-0.9.0")  # a second file of the model one folder up
KINDS = {"float64": ("golden", "float32"), "float32": ("walk32", "walk32")}  # for float64 arrays and rounded ones


# Stored drafters and their arrays


@cache
def load(golden, name, dtype):
    """A stored drafter on its target, or, where no target of its kind exists, on its own copies of the tables."""
    folder = golden / name
    if "gemma4" in name:
        config = DrafterConfig.from_folder(folder)
        stored, of = read_drafter(folder, config), getattr(torch, dtype)
        tensors = {name: to_tensor(raw, kind, of, "cpu") for name, kind, raw in stored.tensors()}
        tables = (stored.read(table) for table in ("embed_tokens.weight", "lm_head.weight"))
        return Drafter(config, tensors, *(to_tensor(raw, kind, of, "cpu") for kind, raw in tables))
    target = Decoder.load(golden / "target" / ("tied" if "deepspec" in name or "specfloor" in name else "untied"))
    return Drafter.load(folder, target, dtype=dtype)


@cache
def load_arrays(golden, name):
    folder = Path(name).parent if Path(name).name in COPIES else name
    with np.load(golden / folder / "golden.npz") as arrays:
        arrays = dict(arrays)
    for key in ("input_ids", "target_features"):  # two sequences where an array is for training
        arrays[f"all_{key}"] = arrays[key] if name.startswith("specforge") else arrays[key][None]
        arrays[key] = arrays[f"all_{key}"][0]
    return arrays


@pytest.fixture(params=RELEASED)
def name(request):
    return request.param


@pytest.fixture(params=KINDS)
def stored(golden, name, request):
    """A stored drafter in one precision, its arrays, and the tolerances for exact and rounded ones."""
    exact, rounded = KINDS[request.param]
    drafter, arrays = load(golden, name, request.param), load_arrays(golden, name)
    return SimpleNamespace(name=name, drafter=drafter, exact=exact, rounded=rounded, **arrays)


def has(stored, *names):
    return all(hasattr(stored, name) for name in names)


def proposals(stored, law=SamplingLaw(), lattice=None):
    """A proposal for each stored prefix, over one context that grows."""
    context = stored.drafter.context()
    for p in stored.prefix_lengths:
        context.append(stored.target_features[context.length : p])
        yield stored.drafter.propose(context, stored.input_ids[p], law, lattice)


def blocks(stored, predecessors=None):
    return stored.drafter.forward_blocks(stored.target_features, stored.input_ids, stored.prefix_lengths, predecessors)


def in_vocabulary(stored, logits):
    """Logits over a smaller draft vocabulary in the places of the target's ids."""
    if stored.drafter.ids is None:
        return logits
    spread = np.full((*logits.shape[:-1], stored.drafter.vocab_size), -np.inf)
    spread[..., stored.drafter.ids.numpy()] = logits
    return spread


def histories(stored, tokens):
    """Per prefix and slot the history that leads there: the anchor, then the tokens [P, gamma] drafted."""
    anchors = stored.input_ids[stored.prefix_lengths]
    return np.concatenate([anchors[:, None], tokens], axis=1)


# Against the authors' arrays


def test_context_features(stored):
    if not has(stored, "context_features"):
        return
    assert_agree(stored.drafter.fuse(stored.target_features), stored.context_features, stored.exact)


def test_states_and_base_logits(stored):
    if not has(stored, "hidden"):
        return
    first, together = stored.drafter.first, blocks(stored)
    base = in_vocabulary(stored, stored.base_logits)
    assert_agree(together.hidden, stored.hidden, stored.exact)
    assert_agree(together.base_logits, base, stored.exact)
    for i, proposal in enumerate(proposals(stored)):
        assert_agree(proposal.hidden, stored.hidden[i, first:], stored.exact)
        assert_agree(proposal.base_logits, base[i, first:], stored.exact)


def test_layer_outputs(stored):
    if not has(stored, "layer_outputs_prefix1"):
        return
    if stored.drafter.dtype == torch.float32:  # some reach 267, where float32 has no such digits
        return
    outputs = []

    def listen(layer, inputs, output):
        outputs.append(output[1])

    handles = [layer.register_forward_hook(listen) for layer in stored.drafter.layers]
    blocks(stored)
    for handle in handles:
        handle.remove()
    assert_agree(torch.stack(outputs), stored.layer_outputs_prefix1, stored.exact)


@pytest.mark.parametrize("kind", ["", "_alt"])
def test_logits_and_confidence_given_predecessors(stored, kind):
    if not has(stored, f"corrected_logits{kind}"):
        return
    arrays, first = vars(stored), stored.drafter.first
    previous, confidence = arrays[f"prev_token_ids{kind}"], arrays.get(f"confidence_logits{kind}")
    logits = in_vocabulary(stored, arrays[f"corrected_logits{kind}"])
    together = blocks(stored, previous)
    assert_agree(together.logits, logits, stored.exact)
    if confidence is not None:
        assert_agree(together.confidence, confidence, stored.exact)
    for i, proposal in enumerate(proposals(stored)):
        for slot in range(proposal.gamma):
            history = previous[i, first : first + slot + 1][None]
            assert_agree(proposal.logits(slot, history)[0], logits[i, first + slot], stored.exact)
            if confidence is not None:
                assert_agree(proposal.confidence(slot, history)[0], confidence[i, first + slot], stored.exact)


def test_stored_predecessors_are_the_sequence_s_own(stored):
    if not has(stored, "corrected_logits", "prev_token_ids"):
        return
    assert_agree(blocks(stored).logits, blocks(stored, stored.prev_token_ids).logits, stored.exact)


def test_greedy_chains(stored):
    if not has(stored, "greedy_tokens"):
        return
    greedy, arrays = stored.greedy_tokens, vars(stored)
    seen = histories(stored, greedy)
    for i, proposal in enumerate(proposals(stored, SamplingLaw(0))):
        assert_agree(proposal.sample(np.zeros((1, proposal.gamma)))[0], greedy[i], "exact")
        for slot in range(proposal.gamma):
            history = seen[i : i + 1, : slot + 1]
            if "greedy_logits" in arrays:
                assert_agree(proposal.logits(slot, history)[0], arrays["greedy_logits"][i, slot], stored.exact)
            if "greedy_confidence" in arrays:
                assert_agree(proposal.confidence(slot, history)[0], arrays["greedy_confidence"][i, slot], stored.exact)


def test_greedy_chains_of_the_attention_head_over_the_full_vocabulary(stored):
    if not has(stored, "fullvocab_greedy_tokens"):
        return
    greedy = stored.fullvocab_greedy_tokens
    for i, proposal in enumerate(proposals(stored, SamplingLaw(0))):
        assert_agree(proposal.sample(np.zeros((1, proposal.gamma)))[0], greedy[i], "exact")
        for slot in range(proposal.gamma):
            history = histories(stored, greedy)[i : i + 1, : slot + 1]
            assert_agree(proposal.logits(slot, history)[0], stored.fullvocab_greedy_logits[i, slot], stored.exact)


def test_sampled_chains(stored):
    if not has(stored, "sampled_tokens", "sampling_temperature"):
        return
    law = SamplingLaw(float(stored.sampling_temperature))
    for i, proposal in enumerate(proposals(stored, law)):
        assert_agree(proposal.sample(stored.sampled_uniforms[i : i + 1])[0], stored.sampled_tokens[i], "exact")


def test_filtered_proposals(stored):
    """These authors count the mass for top-p after top-k has renormalised it, so the law is applied in two steps."""
    if not has(stored, "proposal_probs_T07_topk9_topp08"):
        return
    for i, proposal in enumerate(proposals(stored, SamplingLaw(0.7, top_k=9))):
        for slot in range(proposal.gamma):
            kept = proposal.probs(slot, np.array([[0]])).log()
            expected = stored.proposal_probs_T07_topk9_topp08[i, slot]
            assert_agree(warp(kept, SamplingLaw(top_p=0.8))[0], expected, stored.exact)


# Candidates


def scattered(logits, candidates, vocab_size):
    """Scores [K] of candidates as logits [V]."""
    row = np.full(vocab_size, -np.inf)
    row[candidates] = logits
    return row


@pytest.mark.parametrize("kind", ["", "_alt"])
def test_scores_of_candidates(stored, kind):
    if not has(stored, f"scores{kind}"):
        return
    arrays, drafter = vars(stored), stored.drafter
    previous, scores = arrays[f"prev_token_ids{kind}"], arrays[f"scores{kind}"]
    skipped = previous.shape[1] - drafter.gamma  # rows stored in place, slots stored otherwise
    for i, proposal in enumerate(proposals(stored)):
        for slot in range(proposal.gamma):
            row = scattered(scores[i, slot + skipped], stored.candidates[i, slot + skipped], drafter.vocab_size)
            history = previous[i : i + 1, slot + skipped, None]
            assert_agree(proposal.logits(slot, history)[0], row, stored.exact)
    if skipped:
        logits = blocks(stored, previous).logits
        for i in range(len(previous)):
            for row in range(previous.shape[1]):
                expected = scattered(scores[i, row], stored.candidates[i, row], drafter.vocab_size)
                assert_agree(logits[i, row], expected, stored.exact)


def test_lattices(stored):
    """Every candidate after every candidate of the slot before; the first slot comes after the anchor only."""
    if not has(stored, "lattice_scores"):
        return
    arrays = vars(stored)
    candidates = arrays.get("lattice_candidates", arrays.get("candidates"))
    anchors, many = stored.input_ids[stored.prefix_lengths], candidates.shape[2]
    for i, proposal in enumerate(proposals(stored, SamplingLaw(0), lattice=many)):
        for slot in range(proposal.gamma):
            before = candidates[i, slot - 1] if slot else anchors[i : i + 1]
            expected = [
                scattered(row, candidates[i, slot], 97) for row in stored.lattice_scores[i, slot, : len(before)]
            ]
            assert_agree(proposal.logits(slot, before[:, None]), np.array(expected), stored.exact)
        if "lattice_greedy_tokens" in arrays:
            chain = proposal.sample(np.zeros((1, proposal.gamma)))[0]
            assert_agree(chain, arrays["lattice_greedy_tokens"][i], "exact")


@pytest.mark.parametrize("kind", ["sampled", "sampled_T05"])
def test_walks_through_candidates(stored, kind):
    """The authors draw in the stored order of the candidates: their tokens, and their probabilities, from ours."""
    if not has(stored, f"{kind}_q"):
        return
    arrays, law = vars(stored), SamplingLaw(0.5 if kind == "sampled_T05" else 1.0)
    tokens, uniforms = arrays[f"{kind}_tokens"], stored.sampled_uniforms
    seen = histories(stored, tokens)
    for i, proposal in enumerate(proposals(stored, law)):
        for slot in range(proposal.gamma):
            q = np.asarray(proposal.probs(slot, seen[i : i + 1, : slot + 1]))[0, stored.candidates[i, slot]]
            assert_agree(q, arrays[f"{kind}_q"][i, slot], stored.exact)
            chosen = np.searchsorted(q.cumsum(), uniforms[i, slot], side="right")
            assert_agree(stored.candidates[i, slot, chosen], tokens[i, slot], "exact")


def test_convolution_of_dflash2(stored):
    if not has(stored, "conv_x"):
        return
    x, y = (torch.from_numpy(a).to(stored.drafter.dtype)[None] for a in (stored.conv_x, stored.conv_y))

    def sublayer(prepared):
        assert_agree(prepared[0], stored.conv_prepared, stored.exact)
        return y

    assert_agree(stored.drafter.layers[0].attention_conv(sublayer, x)[0], stored.conv_finished, stored.exact)


# Training


def documents(stored):
    """Per sequence or packed document: features, tokens, anchors, predecessors, and where its blocks are stored."""
    arrays = vars(stored)
    if "train_document_ids" in arrays:
        anchors = stored.train_anchor_positions
        rows = anchors[:, None] + np.arange(stored.drafter.config.block_size) - stored.drafter.first
        previous = stored.input_ids[rows.clip(anchors[:, None], len(stored.input_ids) - 1)]  # of the next document too
        for document in range(stored.train_document_ids.max() + 1):
            here = (stored.train_document_ids == document).nonzero()[0]
            where = np.isin(anchors, here).nonzero()[0]
            local = anchors[where] - here[0]
            yield stored.train_target_features[here], stored.input_ids[here], local, previous[where], where
        return
    keep, anchors = (np.atleast_2d(arrays[f"train_{part}"]) for part in ("block_keep", "anchor_positions"))
    for i, (features, tokens) in enumerate(zip(stored.all_target_features, stored.all_input_ids, strict=True)):
        where = keep[i].nonzero()[0]  # the others are fillers
        yield features, tokens, anchors[i, where], None, where if len(keep) == 1 else (i, where)


def test_training_blocks(stored):
    if not has(stored, "train_hidden"):
        return
    arrays, drafter = vars(stored), stored.drafter
    for *arguments, where in documents(stored):
        found = drafter.forward_blocks(*arguments)
        assert_agree(found.hidden, stored.train_hidden[where], stored.rounded)
        for name, logits in (("base", found.base_logits), ("corrected", found.logits)):
            if f"train_{name}_logits" in arrays:
                expected = in_vocabulary(stored, arrays[f"train_{name}_logits"][where])
                assert_agree(logits, expected, stored.rounded)
        if "train_confidence_logits" in arrays:
            assert_agree(found.confidence, stored.train_confidence_logits[where], stored.rounded)


TRAINED = [name for name in RELEASED if name.startswith(("deepspec", "specfloor")) and Path(name).name not in COPIES]


def training_loss(drafter, arrays):
    """0.1 CE + 0.9 L1 + confidence, slot k weighted exp(-k / 4); CE alone without a head; and nomination, if stored.

    DSpark's loss as its authors wrote it down, over the valid slots of all blocks.
    """
    keep, valid = arrays["train_block_keep"], torch.from_numpy(arrays["train_eval_mask"])
    anchors, labels = arrays["train_anchor_positions"], torch.from_numpy(arrays["train_target_ids"])
    found = drafter.forward_blocks(arrays["target_features"], arrays["input_ids"], anchors[keep])
    weights = torch.exp(-torch.arange(drafter.config.block_size) / 4) * valid[keep]

    def mean(values):
        return (values * weights).sum() / weights.sum()

    ce = mean(F.cross_entropy(found.logits.flatten(0, 1), labels[keep].flatten(), reduction="none").view_as(weights))
    if drafter.correction is None:
        return ce
    rows = (anchors[keep][:, None] + np.arange(drafter.config.block_size)).clip(max=len(arrays["input_ids"]) - 1)
    teacher = drafter.scores(torch.from_numpy(arrays["target_final_hidden"][rows]).to(drafter.dtype))
    distance = (found.logits.softmax(dim=-1) - teacher.softmax(dim=-1)).abs().sum(dim=-1)
    accepted = (1 - distance / 2).clamp(0, 1).detach()
    trust = F.binary_cross_entropy_with_logits(found.confidence, accepted, reduction="none")
    loss = 0.1 * ce + 0.9 * mean(distance) + mean(trust)
    if "train_nominate_num" in arrays:
        best, at = teacher.topk(6)
        nominated = (best.softmax(dim=-1) * found.base_logits.gather(-1, at)).sum(dim=-1)
        loss = loss + 0.1 * mean(found.base_logits.logsumexp(dim=-1) - nominated)
    return loss


@pytest.mark.parametrize("name", TRAINED)
def test_gradients_of_the_authors_loss(golden, name):
    """Every trained tensor's gradient, stored whole or as its sum, norm, and product with cos(0), cos(1), ..."""
    drafter, arrays = load(golden, name, "float64"), load_arrays(golden, name)
    loss = training_loss(drafter, arrays)
    assert_agree(loss, arrays["train_loss"], "float32")
    names, parameters = zip(*drafter.named_parameters(), strict=True)
    found = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    with np.load(golden / name / "train_grads.npz") as gradients:
        assert set(gradients) == set(found)
        for tensor, expected in gradients.items():
            gradient = found[tensor]
            if expected.shape == (3,) and gradient.shape != (3,):
                flat = gradient.flatten()
                cosines = torch.arange(len(flat), dtype=flat.dtype).cos()
                gradient = torch.stack([flat.sum(), flat.norm(), flat @ cosines])
            assert_agree(gradient, expected, "float32")


# The target's side, and a whole stored run


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_taps_of_the_target(golden, kind):
    with np.load(golden / "target" / kind / "golden.npz") as arrays:
        states, tokens = arrays["hidden_states"], arrays["input_ids"]
    decoder = Decoder.load(golden / "target" / kind, dtype="float64")
    for taps in ((-1, 0, 1, 2, 3, 4), (4,), (3, -1), ()):
        session = decoder.open(tokens, taps)
        expected = np.concatenate([states[0][:, :0], *(states[tap + 1] for tap in taps)], axis=1)
        assert_agree(session.features, expected, "golden")
        assert_agree(session.root_logits, decoder.open(tokens).root_logits, "exact")


@pytest.mark.parametrize("taps", [(5,), (0, 6), (-2,)])
def test_a_layer_that_cannot_be_tapped_is_refused(golden, taps):
    decoder = Decoder.load(golden / "target" / "tied")
    with pytest.raises(ValueError, match=f"layer {taps[-1]}.* cannot be tapped"):
        decoder.open([1, 2], taps)


@pytest.mark.parametrize("run", ["greedy", "warm"])
@pytest.mark.parametrize("name", [f"deepspec-dspark-{kind}" for kind in ("vanilla", "gated", "rnn")])
def test_a_stored_run(golden, name, run):
    """Features from the target, a context that grows by what was accepted, and each round's proposal."""
    drafter = load(golden, name, "float64")
    arrays = {
        key.removeprefix(f"gen_{run}_"): a for key, a in load_arrays(golden, name).items() if f"gen_{run}_" in key
    }
    target = Decoder.load(golden / "target" / "tied", dtype="float64")
    features, context = target.open(arrays["output_ids"], drafter.taps).features, drafter.context()
    law = SamplingLaw(float(arrays["temperature"]))
    for r, start in enumerate(arrays["start"]):
        assert context.length == arrays["cache_len_before"][r]
        context.append(features[context.length : start])
        chain = np.append(arrays["verify_ids"][r, 0], arrays["chain_tokens"][r])[None]
        proposal = drafter.propose(context, int(chain[0, 0]), law)
        uniforms = np.zeros((1, drafter.gamma)) if law.temperature == 0 else arrays["u_draft"][r : r + 1]
        assert_agree(proposal.sample(uniforms), chain[:, 1:], "exact")
        for slot in range(drafter.gamma):
            history = chain[:, : slot + 1]
            confidence = proposal.confidence(slot, history)
            assert_agree(confidence, arrays["confidence_logits"][r, slot : slot + 1], "float32")
            if "draft_probs" in arrays:
                assert_agree(proposal.probs(slot, history)[0], arrays["draft_probs"][r, slot], "float32")
    if "final_draft_keys" in arrays:
        for layer, (keys, values) in enumerate(context.memory()):
            assert_agree(keys[0], arrays["final_draft_keys"][layer], "float32")
            assert_agree(values[0], arrays["final_draft_values"][layer], "float32")


# Random drafters in both wings


@st.composite
def configs(draw):
    """Small drafters of every family: any head layout, window, convention and scaling, odd vocabularies."""
    kind = draw(st.sampled_from(["dflash", "vanilla", "gated", "rnn", "attention", "dflash2", "gemma4"]))
    in_place, layers, vocab = draw(st.booleans()), draw(st.integers(1, 2)), draw(st.integers(2, 23))
    channels, kv_heads, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), 2 * draw(st.integers(1, 3))
    head = "" if kind in ("dflash", "dflash2") else "vanilla" if kind == "gemma4" else kind
    gemma, attention, selector, sized = kind == "gemma4", head == "attention", kind == "dflash2", st.integers(1, 5)
    confidence = head != "" and draw(st.booleans())
    return DrafterConfig(
        family=kind if kind in ("dflash", "dflash2", "attention") else "dspark",
        dialect="zlab",
        architecture="gemma4" if gemma else "qwen3",
        in_place=in_place,
        block_size=draw(st.integers(2, 16)),
        taps=(-1, 0, 2, 3, 5)[: draw(sized)],
        mask_id=draw(st.integers(0, vocab - 1)),
        target_layers=None,
        vocab_size=vocab,
        draft_vocab_size=vocab if selector else draw(st.integers(1, vocab)),
        hidden_size=channels * draw(st.integers(1, 4)),
        intermediate_size=draw(sized),
        num_layers=layers,
        num_heads=kv_heads * draw(st.integers(1, 3)),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        rope=Rope(theta=1e4),
        rotary_dims=draw(st.integers(0, head_dim // 2)),
        causal=tuple(draw(st.booleans()) for _ in range(layers)),
        windows=tuple(draw(st.none() | sized) for _ in range(layers)),
        window_rule=draw(st.sampled_from(["query", "context", "anchor"])),
        embedding_scale=draw(st.sampled_from([1.0, 1.7])),
        output_multiplier=draw(st.sampled_from([1.0, 0.6])),
        softcap=draw(st.sampled_from([None, 3.5])),
        shared_values=gemma and draw(st.booleans()),
        markov_rank=draw(sized) if head else 0,
        markov_type=head,
        confidence=confidence,
        confidence_with_markov=confidence and draw(st.booleans()),
        head_heads=draw(sized) if attention else 0,
        head_dim_attention=draw(sized) if attention else 0,
        head_mlp=draw(sized) if attention else 0,
        head_gate=draw(st.sampled_from(["none", "state_output"])) if attention else "none",
        head_anchor=attention and draw(st.booleans()),
        lattice=draw(st.integers(1, min(5, vocab))) if selector else 0,
        selector_rank=draw(sized) if selector else 0,
        short_conv=0 if gemma or not (selector or draw(st.booleans())) else channels,
        conv_taps=draw(st.integers(1, 3)),
        slot_embeddings=draw(st.booleans()),
    )


def random_tensors(config, random):
    """Arguments of both wings' `Drafter` after the config, float64 NumPy: no norm is one, no bias zero."""
    tensors = {
        name: ("norm" in name or "scalar" in name) + 0.5 * random.standard_normal(shape)
        for name, shape in config.tensor_shapes().items()
    }
    draft, vocab = config.draft_vocab_size, config.vocab_size
    ids = np.sort(random.permutation(vocab)[:draft])
    embedding, head = (random.standard_normal((rows, config.hidden_size)) for rows in (vocab, draft))
    return tensors, embedding, head, None if draft == vocab else ids - np.arange(draft)


def as_torch(config, tensors, embedding, head, d2t, dtype=torch.float64):
    there = {name: torch.from_numpy(array).to(dtype) for name, array in tensors.items()}
    return Drafter(config, there, *(torch.from_numpy(table).to(dtype) for table in (embedding, head)), d2t)


def both_wings(config, random):
    arguments = random_tensors(config, random)
    return plain.Drafter(config, *arguments), as_torch(config, *arguments)


def random_sequence(config, random, length=12):
    """Features, tokens, anchors (the first position among them) and predecessors."""
    features = random.standard_normal((length, len(config.taps) * config.hidden_size))
    anchors = np.append(0, random.integers(0, length, 3))
    predecessors = random.integers(0, config.vocab_size, (len(anchors), config.block_size))
    return features, random.integers(0, config.vocab_size, length), anchors, predecessors


def assert_blocks_agree(actual, expected, kind="golden"):
    for name in ("hidden", "base_logits", "logits", "confidence"):
        if getattr(expected, name) is None:
            assert getattr(actual, name) is None
        else:
            assert_agree(getattr(actual, name), getattr(expected, name), kind)


@settings(max_examples=30)
@given(configs(), seeds)
def test_training_blocks_agree(config, seed):
    random = np.random.default_rng(seed)
    slow, quick = both_wings(config, random)
    *sequence, predecessors = random_sequence(config, random)
    assert_blocks_agree(quick.forward_blocks(*sequence), slow.forward_blocks(*sequence))
    assert_blocks_agree(quick.forward_blocks(*sequence, predecessors), slow.forward_blocks(*sequence, predecessors))


@settings(max_examples=30)
@given(configs(), laws(), st.integers(0, 9), st.integers(0, 4), seeds)
def test_proposals_agree(config, law, length, lattice, seed):
    """One block over a context fed in pieces: states, logits, probabilities, confidence and sampled chains."""
    random = np.random.default_rng(seed)
    wings = both_wings(config, random)
    features, tokens, *_ = random_sequence(config, random)
    lattice = None if lattice == 0 else min(lattice, config.draft_vocab_size)
    made = []
    for drafter in wings:
        context = drafter.context()
        for piece in np.split(features[:length], [length // 3, length // 2]):
            context.append(piece)
        made.append(drafter.propose(context, tokens[length], law, lattice))
    slow, quick = made
    assert (quick.gamma, quick.order, quick.law) == (slow.gamma, slow.order, slow.law)
    assert_agree(quick.hidden, slow.hidden, "golden")
    assert_agree(quick.base_logits, slow.base_logits, "golden")
    for slot in range(slow.gamma):
        history = random.integers(0, config.vocab_size, (3, slot + 1))
        assert_agree(quick.logits(slot, history), slow.logits(slot, history), "golden")
        assert_agree(quick.probs(slot, history), slow.probs(slot, history), "golden")
        if config.confidence:
            assert_agree(quick.confidence(slot, history), slow.confidence(slot, history), "golden")
        else:
            assert quick.confidence(slot, history) is None
    uniforms = random.random((20, slow.gamma))
    assert_agree(quick.sample(uniforms), slow.sample(uniforms), "exact")


@settings(max_examples=15)
@given(configs(), seeds)
def test_gradients_are_those_of_the_reference(config, seed):
    """Along a random direction: the slope of a random linear function of all outputs, by extrapolated differences."""
    random = np.random.default_rng(seed)
    tensors, *tables = random_tensors(config, random)
    sequence = random_sequence(config, random)
    quick = as_torch(config, tensors, *tables)
    outputs = [x for x in vars(quick.forward_blocks(*sequence)).values() if x is not None]
    weights = [np.where(np.isfinite(x.detach().numpy()), random.standard_normal(x.shape), 0) for x in outputs]
    total = sum((x[w != 0] * torch.from_numpy(w)[w != 0]).sum() for x, w in zip(outputs, weights, strict=True))
    names, parameters = zip(*quick.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(total, parameters), strict=True))
    direction = {name: random.standard_normal(gradient.shape) for name, gradient in gradients.items()}
    parts = np.concatenate([(gradients[name].numpy() * d).ravel() for name, d in direction.items()])

    def moved(step):
        there = {name: array + step * direction.get(name, 0) for name, array in tensors.items()}
        found = vars(plain.Drafter(config, there, *tables).forward_blocks(*sequence)).values()
        outputs = [x for x in found if x is not None]
        return sum((x[w != 0] * w[w != 0]).sum() for x, w in zip(outputs, weights, strict=True))

    wide, close = ((moved(step) - moved(-step)) / (2 * step) for step in (2e-5, 1e-5))
    assert_agree(((4 * close - wide) / 3 - parts.sum()) / (1 + abs(parts).sum()), 0.0, "float32")


# What the fast drafter does its own way


FIELDS = {
    "architecture": "qwen3",
    "dialect": "zlab",
    "in_place": False,
    "block_size": 5,
    "taps": (0, 2),
    "mask_id": 7,
    "target_layers": None,
    "vocab_size": 3001,
    "draft_vocab_size": 3001,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope": Rope(theta=1e4),
    "rotary_dims": 4,
    "causal": (False, True),
    "windows": (None, 6),
    "window_rule": "query",
}
MARKOV = {"family": "dspark", "markov_rank": 16, "confidence": True, "confidence_with_markov": True}
FAMILIES = {
    "dflash": {"family": "dflash"},
    "vanilla": {**MARKOV, "markov_type": "vanilla"},
    "rnn": {**MARKOV, "markov_type": "rnn"},
    "attention": {
        **MARKOV,
        "family": "attention",
        "markov_type": "attention",
        "head_heads": 2,
        "head_dim_attention": 16,
        "head_mlp": 20,
        "short_conv": 8,
        "slot_embeddings": True,
    },
    "dflash2": {"family": "dflash2", "selector_rank": 16, "lattice": 8, "short_conv": 8},
}
every_family = pytest.mark.parametrize("family", FAMILIES)


def example(family, dtype=torch.float32, length=40):
    """A drafter whose vocabulary is large enough for products to be tiled, with features and tokens."""
    random = np.random.default_rng(0)
    config = DrafterConfig(**FIELDS, **FAMILIES[family])
    drafter = as_torch(config, *random_tensors(config, random), dtype)
    return drafter, *random_sequence(config, random, length)[:2]


def example_proposal(family, law=SamplingLaw(), dtype=torch.float32):
    drafter, features, tokens = example(family, dtype)
    context = drafter.context()
    context.append(features[:-1])
    return drafter.propose(context, tokens[-1], law)


@every_family
def test_a_row_has_the_same_bits_in_any_company(family):
    """So a drafted token is verified with the very row that it was drawn from."""
    proposal, random = example_proposal(family), np.random.default_rng(1)
    chains = proposal.sample(random.random((40, proposal.gamma)))
    history = np.concatenate([np.full((40, 1), proposal._token), chains], axis=1)
    for slot in range(proposal.gamma):
        rows = proposal.probs(slot, history[:, : slot + 1])
        for i in (0, 17, 39):
            assert_agree(proposal.probs(slot, history[i : i + 1, : slot + 1])[0], rows[i], "exact")
        some = random.permutation(40)[:21]
        assert_agree(proposal.probs(slot, history[some, : slot + 1]), rows[some], "exact")


@every_family
def test_chains_are_drawn_from_the_rows_that_are_asked_for(family, monkeypatch):
    """Token by token, each chain alone; and holding fewer rows at a time changes nothing."""
    proposal, uniforms = example_proposal(family, SamplingLaw(4.0, top_p=0.9)), np.random.default_rng(2).random((30, 5))
    chains = proposal.sample(uniforms)
    for chain, u in zip(chains[::7], uniforms[::7], strict=True):
        history = np.array([[proposal._token]])
        for slot in range(proposal.gamma):
            token = draw(proposal.probs(slot, history), u[slot : slot + 1])
            assert_agree(token, chain[slot : slot + 1], "exact")
            history = np.append(history, token[None], axis=1)
    monkeypatch.setattr("fast.drafters.HELD", 3)
    assert_agree(proposal.sample(uniforms), chains, "exact")
    assert len(np.unique(chains, axis=0)) > 10


@every_family
def test_few_blocks_at_a_time_give_the_same_blocks_and_gradients(family, monkeypatch):
    drafter, features, tokens = example(family, torch.float64)
    anchors, names = [3, 0, 39, 17, 17], [name for name, _ in drafter.named_parameters()]

    def run():
        found = drafter.forward_blocks(features, tokens, anchors)
        loss = found.hidden.square().sum() + found.logits[found.logits.isfinite()].square().sum()
        return found, torch.autograd.grad(loss, list(drafter.parameters()), allow_unused=True)

    (whole, gradients) = run()
    monkeypatch.setattr("fast.draft_layers.SCORES", 1)
    parts, again = run()
    assert_blocks_agree(parts, whole)
    with torch.no_grad():
        assert_blocks_agree(drafter.forward_blocks(features, tokens, anchors), whole)
    for name, g, h in zip(names, gradients, again, strict=True):
        assert (g is None) == (h is None) == name.startswith("confidence_head"), name
        if g is not None:
            assert_agree(h / (1 + g.norm()), g / (1 + g.norm()), "golden")


def test_blocks_of_several_contexts_run_side_by_side():
    """Two prefixes of different length in one forward, the shorter one's places beyond its end filled with junk."""
    drafter, features, tokens = example("attention", torch.float64)
    long, short = (drafter.memorise(features[:n], 0) for n in (30, 30))
    anchors, expected = torch.tensor([30, 21]), []
    for p in anchors:
        expected.append(drafter.forward_blocks(features, tokens, p[None]).hidden)
    pairs = [
        [torch.cat([a, torch.where(torch.arange(30)[:, None] < 21, b, 1e3)]) for a, b in zip(*both, strict=True)]
        for both in zip(long, short, strict=True)
    ]
    found = drafter.hidden(pairs, anchors, torch.from_numpy(tokens[anchors]))
    assert_agree(found, torch.cat(expected), "float64")


@every_family
def test_a_context_grows_in_place(family):
    """What was appended in pieces equals what is appended at once."""
    drafter, features, _ = example(family, torch.float64, length=100)
    whole, pieces = drafter.context(), drafter.context()
    whole.append(features)
    for piece in (features[:10], features[10:11], features[11:11], features[11:64], features[64:]):
        pieces.append(piece)
    assert pieces.length == whole.length == 100
    for mine, theirs in zip(pieces.memory(), whole.memory(), strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert_agree(a, b, "float64")


@every_family
def test_an_empty_context_is_a_context(family):
    """A prefix of one token: the anchor is all there is."""
    drafter, features, tokens = example(family, torch.float64)
    proposal, history = drafter.propose(drafter.context(), tokens[0]), tokens[None, :1]
    blocks = drafter.forward_blocks(features, tokens, [0])
    assert_agree(proposal.hidden, blocks.hidden[0], "golden")
    assert_agree(proposal.logits(0, history)[0], blocks.logits[0, 0], "golden")


@every_family
def test_bfloat16_error_is_at_most_twice_that_of_plain_bfloat16(family, monkeypatch):
    """Plain: every product in bfloat16.  Both errors against float64 with the same bfloat16 weights."""
    drafter, features, tokens = example(family, torch.bfloat16)
    config, anchors = drafter.config, range(1, 40)
    weights = {name: tensor.detach().double() for name, tensor in drafter.state_dict().items()}
    exact = Drafter(config, weights, drafter.embedding.double(), drafter.head.double())

    def states(of):
        with torch.no_grad():
            blocks = of.forward_blocks(features, tokens, anchors)
        outputs = [x for x in (blocks.logits, blocks.base_logits, blocks.confidence) if x is not None]
        assert {x.dtype for x in outputs} == {torch.float64 if of is exact else torch.float32}
        assert blocks.hidden.dtype == of.dtype and not any(x.isnan().any() for x in outputs)
        return blocks.hidden.double()

    truth, ours = states(exact), states(drafter)
    monkeypatch.setattr("fast.decoder.Linear.forward", torch.nn.Linear.forward)
    monkeypatch.setattr("fast.draft_layers.wide", lambda x: x)
    plain_error = (states(drafter) - truth).square().mean()
    assert 0 < (ours - truth).square().mean() <= 4 * plain_error


@every_family
def test_autocast_trains_float32_weights(family):
    """Products in bfloat16, logits and confidence in float32, every gradient there and finite."""
    drafter, features, tokens = example(family)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        blocks = drafter.forward_blocks(features, tokens, [0, 5, 20])
    outputs = [x for x in (blocks.logits, blocks.base_logits, blocks.confidence) if x is not None]
    assert {x.dtype for x in outputs} == {torch.float32}
    loss = sum(x[x.isfinite()].square().mean() for x in outputs)
    for gradient in torch.autograd.grad(loss, list(drafter.parameters())):
        assert gradient.dtype == torch.float32 and gradient.isfinite().all()


@every_family
def test_nothing_at_or_after_an_anchor_changes_its_block(family):
    """Nor does another block, however close its anchor is."""
    drafter, features, tokens = example(family)
    features, tokens = torch.from_numpy(features).float(), tokens.copy()
    predecessors = np.random.default_rng(0).integers(0, drafter.vocab_size, (3, 5))
    before = drafter.forward_blocks(features, tokens, [10, 12, 39], predecessors)
    features[10:], tokens[11:] = 7 - features[10:], tokens[11:] // 2
    predecessors[1:] = 0
    after = drafter.forward_blocks(features, tokens, [10, 12, 39], predecessors)
    for name, value in vars(before).items():
        if value is not None:
            assert_agree(getattr(after, name)[0], value[0], "exact")
            assert (getattr(after, name)[1] != value[1]).any()


def test_ties_go_to_the_lowest_ids():
    logits = torch.tensor([[1.0, 2, 1, 2, 1, 0], [0, 0, 0, 0, 0, 0], [-9, 3, -9, 1, 2, 1]])
    for k in range(1, 9):
        expected = np.sort(np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :k])
        assert_agree(largest(logits, k).sort(dim=1).values, expected, "exact")


def test_only_the_drafter_is_trained():
    """The borrowed tables are no parameters, and a measurement keeps no graph."""
    drafter, features, tokens = example("attention")
    assert {name for name, _ in drafter.named_parameters()} == set(drafter.config.tensor_shapes())
    assert set(drafter.state_dict()) == set(drafter.config.tensor_shapes())
    blocks = drafter.forward_blocks(features, tokens, [3])
    assert blocks.logits.requires_grad and blocks.confidence.requires_grad
    proposal = example_proposal("attention")
    history = np.array([[1]])
    for tensor in (proposal.hidden, proposal.base_logits, proposal.probs(0, history), proposal.confidence(0, history)):
        assert not tensor.requires_grad


# Refusals


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.logits(-1, [[0]]), "slot -1 asked, a block has slots 0..4"),
        (lambda p: p.probs(5, [[0]]), "slot 5 asked, a block has slots 0..4"),
        (lambda p: p.logits(1, [[0]]), r"slot 1 needs histories .* h >= 2, got \(1, 1\)"),
        (lambda p: p.confidence(0, [0]), r"slot 0 needs histories .* got \(1,\)"),
        (lambda p: p.logits(0, [[3001]]), "outside the vocabulary of 3001"),
        (lambda p: p.sample(np.zeros((2, 6))), r"uniforms must be \[n, h\] with n >= 1 and h in 1..5"),
        (lambda p: p.sample(np.zeros((0, 5))), "n >= 1"),
        (lambda p: p.sample(np.ones((1, 5))), "uniforms must lie in"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call(example_proposal("rnn"))


def test_wrong_features_anchors_and_lattices_are_refused():
    drafter, features, tokens = example("vanilla")
    context = drafter.context()
    with pytest.raises(ValueError, match=r"features of the taps .* are \[s, 48\], got \(40, 47\)"):
        context.append(features[:, 1:])
    with pytest.raises(ValueError, match="got 40 tokens and 39 features"):
        drafter.forward_blocks(features[1:], tokens, [3])
    for anchors in ([-1], [40], [], 3):
        with pytest.raises(ValueError, match=r"anchors must be positions 0\.\.39"):
            drafter.forward_blocks(features, tokens, anchors)
    with pytest.raises(ValueError, match=r"2 blocks need predecessors \[A, 5\], got \(1, 5\)"):
        drafter.forward_blocks(features, tokens, [3, 4], [[0] * 5])
    for token in (-1, 3001):
        with pytest.raises(ValueError, match="outside the vocabulary of 3001"):
            drafter.forward_blocks(features, tokens, [3], [[0, 0, 0, 0, token]])
    with pytest.raises(ValueError, match="outside the vocabulary of 3001"):
        drafter.propose(context, 3001)
    with pytest.raises(ValueError, match=r"lattice must be 0 .* got -1"):
        drafter.propose(context, 0, lattice=-1)


@pytest.mark.parametrize("options", [{"dtype": "float16"}, {"device": "cuda"}, {"device": "nowhere"}])
def test_a_dtype_or_device_that_cannot_be_had_is_refused(tmp_path, monkeypatch, options):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=str(*options.values())):
        Drafter.load(tmp_path, None, **options)


def test_the_wrong_target_is_refused(golden):
    with pytest.raises(CheckpointError, match="embed_tokens"):
        Drafter.load(golden / "deepspec-dspark-vanilla", Decoder.load(golden / "target" / "untied"))


def test_a_missing_or_unknown_tensor_is_refused():
    config, random = DrafterConfig(**FIELDS, **FAMILIES["dflash2"]), np.random.default_rng(0)
    tensors, *tables = random_tensors(config, random)
    del tensors["layers.1.mlp_conv.base_kernel"]
    with pytest.raises(RuntimeError, match=r"Missing key.*layers\.1\.mlp_conv\.base_kernel"):
        as_torch(config, tensors, *tables)
