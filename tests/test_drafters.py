"""Block drafters: arrays of the authors' own code for every dialect, exact identities, and refusals."""

from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.checkpoint import CheckpointError, to_float
from models.config import DecoderConfig, Rope
from models.drafter_checkpoint import read_drafter
from models.drafter_config import DrafterConfig
from reference.decoder import Decoder, rms_norm
from reference.draft_heads import build_head, confidence
from reference.draft_layers import short_conv
from reference.drafters import Drafter, keep_largest
from reference.laws import SamplingLaw, draw, warp
from tests.agreement import assert_agree
from tests.strategies import seeds

# Arrays of the authors' own code

TIED = (
    "deepspec-dflash",
    "deepspec-dspark-fitted",
    "deepspec-dspark-gated",
    "deepspec-dspark-rnn",
    "deepspec-dspark-vanilla",
    "specfloor-attn/final",
    "specfloor-attn/head-anchor-gate",
    "specfloor-attn/vanilla-shortconv",
    "specfloor-attn/vanilla-slotembed",
)
GEMMA = ("deepspec-dspark-gemma4/separate-v", "deepspec-dspark-gemma4/shared-kv")
UNTIED = (
    "specforge-dflash/full",
    "specforge-dflash/sliding",
    "specforge-dspark/rnn",
    "specforge-dspark/vanilla",
    "speculators-dflash/draft-vocab-sliding",
    "speculators-dflash/full-vocab",
    "speculators-dflash2/sliding",
    "speculators-dspark/draft-vocab",
    "speculators-dspark/in-place-gated",
    "zlab-dflash/full",
    "zlab-dflash/sliding-causal",
    "zlab-dflash/sliding-noncausal-scaled",
    "zlab-dflash2/full-scaled",
    "zlab-dflash2/sliding",
)
FOLDERS = (*TIED, *GEMMA, *UNTIED)


def agree(actual, expected):
    """Stored arrays are float64, or rounded to float32."""
    assert_agree(actual, expected, "float32" if expected.dtype == np.float32 else "golden")


@cache
def target_of(golden, kind):
    return Decoder.load(golden / "target" / kind, dtype="float64")


@cache
def open_case(golden, name):
    """A drafter with the arrays of its folder; features and tokens [.., S, ..] of its first sequence."""
    folder = golden / name
    if name in GEMMA:  # no target of this kind: the file's own tables
        config = DrafterConfig.from_folder(folder)
        stored = read_drafter(folder, config)
        tables = (stored.read(table)[1].astype(np.float64) for table in ("embed_tokens.weight", "lm_head.weight"))
        tensors = {tensor: to_float(raw, kind, np.float64) for tensor, kind, raw in stored.tensors()}
        drafter = Drafter(config, tensors, *tables)
    else:
        target = target_of(golden, "tied" if name in TIED else "untied")
        drafter = Drafter.load(folder, target, dtype="float64")
    with np.load(folder / "golden.npz") as stored:
        arrays = dict(stored)
    features, tokens = arrays["target_features"].astype(np.float64), arrays["input_ids"]
    if tokens.ndim == 2:  # two sequences
        features, tokens = features[0], tokens[0]
    return SimpleNamespace(golden=golden, name=name, drafter=drafter, arrays=arrays, features=features, tokens=tokens)


@pytest.fixture(params=FOLDERS)
def case(golden, request):
    return open_case(golden, request.param)


def proposals(case, law=SamplingLaw(), lattice=None):
    """The stored prefix lengths, each with the proposal of the block behind it: (row of the arrays, `Proposal`)."""
    for i, p in enumerate(case.arrays["prefix_lengths"]):
        context = case.drafter.context()
        context.append(case.features[:p])
        yield i, case.drafter.propose(context, case.tokens[p], law, lattice)


def slots_of(case, rows):
    """Of arrays [P, B, ...] with one entry per row, those of the slots; arrays [P, gamma, ...] as they are."""
    return rows[:, rows.shape[1] - case.drafter.gamma :]


def test_context_features(case):
    if "context_features" in case.arrays:
        agree(case.drafter.backbone.fuse(case.features), case.arrays["context_features"])


def test_blocks(case):
    """States, base logits, and logits and confidence for given predecessors, all anchors in one forward."""
    arrays, ids, anchors = case.arrays, case.drafter.ids, case.arrays["prefix_lengths"]
    if "hidden" not in arrays:  # inference was never run
        return
    blocks = case.drafter.forward_blocks(case.features, case.tokens, anchors)
    if "block_token_ids" in arrays:
        rows = np.full((len(anchors), case.drafter.config.block_size), case.drafter.config.mask_id)
        rows[:, 0] = case.tokens[anchors]
        assert_agree(rows, arrays["block_token_ids"], "exact")
    agree(blocks.hidden, arrays["hidden"])
    agree(blocks.base_logits[..., ids], arrays["base_logits"])
    for suffix in ("", "_alt"):
        if "corrected_logits" + suffix in arrays:
            previous = arrays["prev_token_ids" + suffix]
            blocks = case.drafter.forward_blocks(case.features, case.tokens, anchors, previous)
            agree(blocks.logits[..., ids], arrays["corrected_logits" + suffix])
            if "confidence_logits" + suffix in arrays:
                agree(blocks.confidence, arrays["confidence_logits" + suffix])


def test_proposals(case):
    """The same numbers from one block at a time and its context, slot by slot."""
    arrays, drafter = case.arrays, case.drafter
    if "hidden" not in arrays:
        return
    for i, proposal in proposals(case):
        agree(proposal.hidden, slots_of(case, arrays["hidden"])[i])
        agree(proposal.base_logits[..., drafter.ids], slots_of(case, arrays["base_logits"])[i])
        for suffix in ("", "_alt"):
            if "corrected_logits" + suffix not in arrays:
                continue
            previous = slots_of(case, arrays["prev_token_ids" + suffix])[i]
            expected = slots_of(case, arrays["corrected_logits" + suffix])[i]
            for slot in range(drafter.gamma):
                history = previous[None, : slot + 1]
                agree(proposal.logits(slot, history)[:, drafter.ids], expected[slot][None])
                if "confidence_logits" + suffix in arrays:
                    stored = slots_of(case, arrays["confidence_logits" + suffix])
                    agree(proposal.confidence(slot, history), stored[i, slot : slot + 1])


def test_residual_stream_after_each_layer(case):
    if "layer_outputs_prefix1" in case.arrays:
        p = case.arrays["prefix_lengths"][1]
        context = case.drafter.context()
        context.append(case.features[:p])
        streams = case.drafter.backbone.layer_outputs(context.cache, np.array([p]), case.tokens[[p]])
        agree(np.concatenate(list(streams)), case.arrays["layer_outputs_prefix1"])


def test_a_block_cut_short(case):
    """Near a length limit fewer rows are run, which changes the states of those that stay."""
    if "short_hidden" in case.arrays:
        drafter = shortened(case.drafter, case.arrays["short_hidden"].shape[1])
        blocks = drafter.forward_blocks(case.features, case.tokens, case.arrays["prefix_lengths"])
        agree(blocks.hidden, case.arrays["short_hidden"])


def shortened(drafter, block_size):
    config = replace(drafter.config, block_size=block_size)
    return Drafter(config, drafter.tensors, drafter.backbone.embedding, drafter.head)


@pytest.mark.parametrize("kind", ["greedy", "fullvocab_greedy", "lattice_greedy", "sampled"])
def test_chains(case, kind):
    """Free-running chains by inverse CDF in vocabulary order, and their logits and confidence."""
    arrays, drafter = case.arrays, case.drafter
    walks_candidates = drafter.lattice and kind == "sampled"  # by inverse CDF in another order, tested below
    if kind + "_tokens" not in arrays or walks_candidates:
        return
    law = SamplingLaw(arrays["sampling_temperature"] if kind == "sampled" else 0)
    lattice = arrays["lattice_candidates"].shape[-1] if kind == "lattice_greedy" else None
    for i, proposal in proposals(case, law, lattice):
        uniforms = arrays["sampled_uniforms"][i] if kind == "sampled" else np.zeros(drafter.gamma)
        (chain,) = proposal.sample(uniforms[None])
        assert_agree(chain, arrays[kind + "_tokens"][i], "exact")
        for slot in range(drafter.gamma):
            history = np.append(case.tokens[arrays["prefix_lengths"][i]], chain[:slot])[None]
            if kind + "_logits" in arrays:
                agree(proposal.logits(slot, history), arrays[kind + "_logits"][i, slot][None])
            if kind + "_confidence" in arrays:
                agree(proposal.confidence(slot, history), arrays[kind + "_confidence"][i, slot][None])


def filtered(proposal, slot, history, temperature, top_k, top_p):
    """These authors renormalise what top-k keeps before top-p counts it, which `SamplingLaw` does not."""
    kept = warp(proposal.logits(slot, history), SamplingLaw(temperature, top_k=int(top_k)))
    with np.errstate(divide="ignore"):
        return warp(np.log(kept), SamplingLaw(top_p=top_p))


def test_filtered_proposals(case):
    if "proposal_probs_T07_topk9_topp08" in case.arrays:
        for i, proposal in proposals(case):
            for slot in range(proposal.gamma):
                probs = filtered(proposal, slot, case.tokens[None, :1], 0.7, 9, 0.8)  # any history: there is no head
                agree(probs[0], case.arrays["proposal_probs_T07_topk9_topp08"][i, slot])


def histories(previous, slot):
    """Predecessors int [n] as histories whose other entries do not matter."""
    return np.stack([np.zeros_like(previous)] * slot + [previous], axis=1)


def test_candidates(case):
    """DFlash2: which tokens, their scores and probabilities after given predecessors."""
    arrays, gamma = case.arrays, case.drafter.gamma
    if "candidates" not in arrays:
        return
    candidates = slots_of(case, arrays["candidates"])
    for i, proposal in proposals(case):
        for slot in range(gamma):
            for suffix in ("", "_alt"):
                previous = slots_of(case, arrays["prev_token_ids" + suffix])[i, slot : slot + 1]
                (logits,) = proposal.logits(slot, histories(previous, slot))
                assert_agree(np.flatnonzero(np.isfinite(logits)), np.sort(candidates[i, slot]), "exact")
                agree(logits[candidates[i, slot]], slots_of(case, arrays["scores" + suffix])[i, slot])
                if "q" in arrays:
                    (probs,) = proposal.probs(slot, histories(previous, slot))
                    agree(probs[candidates[i, slot]], arrays["q" + suffix][i, slot])


def test_lattices(case):
    """Scores of a slot's candidates after each candidate of the slot before."""
    if "lattice_scores" not in case.arrays:
        return
    candidates = case.arrays.get("lattice_candidates", case.arrays.get("candidates"))
    for i, proposal in proposals(case, lattice=candidates.shape[-1]):
        anchor = case.tokens[case.arrays["prefix_lengths"][i]]
        for slot, scores in enumerate(case.arrays["lattice_scores"][i]):
            previous = candidates[i, slot - 1] if slot else anchor[None]
            logits = proposal.logits(slot, histories(previous, slot))
            assert_agree(np.isfinite(logits).sum(axis=1), np.full(len(previous), candidates.shape[-1]), "exact")
            agree(logits[:, candidates[i, slot]], scores[: len(previous)])


@pytest.mark.parametrize(("name", "temperature"), [("sampled", 1.0), ("sampled_T05", 0.5)])
def test_walks_in_the_order_of_the_stored_candidates(case, name, temperature):
    """The authors draw among the candidates as their top-k returned them; the same walk with our probabilities."""
    arrays = case.arrays
    if not case.drafter.lattice or name + "_q" not in arrays:
        return
    for i, proposal in proposals(case, SamplingLaw(temperature)):
        token = case.tokens[arrays["prefix_lengths"][i]]
        for slot, candidates in enumerate(arrays["candidates"][i]):
            probs = proposal.probs(slot, histories(token[None], slot))[:, candidates]
            agree(probs[0], arrays[name + "_q"][i, slot])
            (place,) = draw(probs, arrays["sampled_uniforms"][i, slot : slot + 1])
            token = candidates[place]
            assert_agree(token, arrays[name + "_tokens"][i, slot], "exact")


def test_latents_of_the_prefix_attention_head(case):
    if "head_latent" in case.arrays:
        context = case.drafter.context()
        context.append(case.features)
        for i, p in enumerate(case.arrays["prefix_lengths"]):
            past = case.drafter._past(context, p, case.tokens[p])
            hidden, previous = case.arrays["hidden"][i], case.arrays["prev_token_ids"][i]
            agree(case.drafter.correction.latent(hidden, previous, past), case.arrays["head_latent"][i])


def test_one_short_convolution(case):
    """The attention convolution of layer 0: both sides take their coefficients from x."""
    if "conv_x" in case.arrays:
        x, y = case.arrays["conv_x"][None], case.arrays["conv_y"][None]
        base = case.drafter.tensors["layers.0.attention_conv.base_kernel"]
        before, after = np.split(case.drafter.tensors["layers.0.attention_conv.kernel_projection.weight"], 2)
        agree(short_conv(x, x, base[0], before)[0], case.arrays["conv_prepared"])
        agree(short_conv(y, x, base[1], after)[0], case.arrays["conv_finished"])


def test_training_forward(case):
    """All anchors of a sequence at once, teacher forced; filler anchors are left out, their stored rows are zero."""
    arrays = case.arrays
    if "train_anchor_positions" not in arrays or "train_document_ids" in arrays:
        return
    names = ("input_ids", "target_features", "train_anchor_positions", "train_block_keep")
    whole = arrays["input_ids"].ndim == 1
    for i in range(1 if whole else len(arrays["input_ids"])):
        of = {name: arrays[name] if whole else arrays[name][i] for name in arrays if np.ndim(arrays[name])}
        tokens, features, anchors, keep = (of[name] for name in names)
        blocks = case.drafter.forward_blocks(features.astype(np.float64), tokens, anchors[keep])
        compare_training(case, blocks, {name: of[name][keep] for name in TRAINED if name in of})
        for name in set(TRAINED) & set(of):
            assert not of[name][~keep].any()


TRAINED = ("train_hidden", "train_base_logits", "train_corrected_logits", "train_confidence_logits")


def compare_training(case, blocks, expected):
    ids = case.drafter.ids
    actual = (blocks.hidden, blocks.base_logits[..., ids], blocks.logits[..., ids], blocks.confidence)
    assert "train_hidden" in expected
    for name, values in zip(TRAINED, actual, strict=True):
        if name in expected:
            agree(values, expected[name])


def test_training_forward_of_packed_documents(case):
    """Documents packed in one row see only themselves, so each is a sequence of its own."""
    arrays = case.arrays
    if "train_document_ids" not in arrays:
        return
    documents, anchors = arrays["train_document_ids"], arrays["train_anchor_positions"]
    for document in np.unique(documents[anchors]):
        places, here = np.flatnonzero(documents == document), documents[anchors] == document
        features, start = arrays["train_target_features"][places].astype(np.float64), places[0]
        tokens, local = arrays["input_ids"][places], anchors[here] - start
        # the rows of the last blocks run into the next document, whose tokens are then their predecessors
        rows = anchors[here][:, None] + np.arange(case.drafter.config.block_size) - case.drafter.first
        previous = arrays["input_ids"][rows.clip(anchors[here][:, None], len(documents) - 1)]
        blocks = case.drafter.forward_blocks(features, tokens, local, previous)
        compare_training(case, blocks, {name: arrays[name][here] for name in TRAINED if name in arrays})


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("deepspec-dspark-vanilla", "bf16"),
        ("speculators-dflash/full-vocab", "saved-by-0.9.0"),
        ("speculators-dspark/draft-vocab", "saved-by-0.9.0"),
    ],
)
def test_another_file_of_the_same_model(golden, name, other):
    case, target = open_case(golden, name), target_of(golden, "tied" if name in TIED else "untied")
    again = Drafter.load(golden / name / other, target, dtype="float64")
    expected, actual = (
        drafter.forward_blocks(case.features, case.tokens, case.arrays["prefix_lengths"]).logits
        for drafter in (case.drafter, again)
    )
    assert_agree(actual, expected, "exact")


def test_float32(golden):
    target = Decoder.load(golden / "target" / "tied")
    case = open_case(golden, "specfloor-attn/final")
    drafter = Drafter.load(golden / case.name, target)
    blocks = drafter.forward_blocks(case.features, case.tokens, case.arrays["prefix_lengths"])
    assert {x.dtype for x in (blocks.hidden, blocks.logits, blocks.confidence)} == {np.dtype(np.float32)}
    assert_agree(blocks.hidden, case.arrays["hidden"], "walk32")


def rounds_of(case, run):
    """A stored generation loop: (anchor position, rows, anchor token, drafted chain, index of the round) per round."""
    arrays = {name.removeprefix(f"gen_{run}_"): a for name, a in case.arrays.items() if name.startswith(f"gen_{run}_")}
    if "start" in arrays:
        starts, blocks = arrays["start"], np.column_stack([arrays["verify_ids"][:, 0], arrays["chain_tokens"]])
        lengths = np.full(len(starts), case.drafter.config.block_size)
    else:
        starts, blocks = arrays["context_start"] + arrays["pending"], arrays["block_tokens"]
        lengths = arrays["block_len"]
    return arrays, [(s, n, b[0], b[1:], r) for r, (s, n, b) in enumerate(zip(starts, lengths, blocks, strict=True))]


def test_generation_loops(case):
    """Whole stored runs: features from the target, a context that grows by what was accepted, every round's block."""
    runs = {name.split("_prompt")[0].removeprefix("gen_") for name in case.arrays if name.endswith("_prompt")}
    for run in runs:
        arrays, rounds = rounds_of(case, run)
        target = target_of(case.golden, "tied" if case.name in TIED else "untied")
        features = target.open(arrays["output_ids"], case.drafter.taps).features
        context = case.drafter.context()
        for start, length, anchor, chain, r in rounds:
            assert_agree(np.array([context.length, start - context.length]), before(arrays, r), "exact")
            context.append(features[context.length : start])
            compare_round(case, arrays, r, context, anchor, chain, length)
        if "final_draft_keys" in arrays:
            for layer, (keys, values) in enumerate(context.cache):
                agree(keys.swapaxes(0, 1), arrays["final_draft_keys"][layer])
                agree(values.swapaxes(0, 1), arrays["final_draft_values"][layer])


def before(arrays, r):
    return np.array([arrays["cache_len_before"][r], arrays["pending"][r]])


def compare_round(case, arrays, r, context, anchor, chain, length):
    """Proposal, chain and confidence of one round; a block near the end may have fewer rows."""
    drafter = case.drafter if length == case.drafter.config.block_size else shortened(case.drafter, length)
    proposal = drafter.propose(context, anchor, SamplingLaw(arrays["temperature"]))
    for slot in range(drafter.gamma):
        history = np.append(anchor, chain[:slot])[None]
        if arrays.get("top_k", 0) and not drafter.lattice:  # DFlash filters its proposals too
            probs = filtered(proposal, slot, history, *(arrays[name] for name in ("temperature", "top_k", "top_p")))
        else:
            probs = proposal.probs(slot, history)
        if "draft_probs" in arrays and not np.isnan(arrays["draft_probs"][r, slot]).any():  # NaN: not proposed
            at = arrays["draft_candidates"][r, slot] if drafter.lattice else slice(None)
            agree(probs[0, at], arrays["draft_probs"][r, slot])
            assert_agree(probs[0, at].sum(), 1.0, "float64")
        if drafter.config.confidence:
            agree(proposal.confidence(slot, history), arrays["confidence_logits"][r, slot : slot + 1])
        if not drafter.lattice or arrays["temperature"] == 0:
            u = arrays["u_draft"][r, slot : slot + 1] if arrays["temperature"] else np.zeros(1)
            assert_agree(draw(probs, u), chain[slot : slot + 1], "exact")


# Stored arrays by what they are: read above, or no concern of the drafter's forward.
READ = """
    input_ids target_features context_features prefix_lengths block_token_ids hidden base_logits layer_outputs_prefix1
    prev_token_ids corrected_logits confidence_logits prev_token_ids_alt corrected_logits_alt confidence_logits_alt
    greedy_tokens greedy_logits greedy_confidence fullvocab_greedy_tokens fullvocab_greedy_logits lattice_greedy_tokens
    sampling_temperature sampled_uniforms sampled_tokens sampled_logits sampled_confidence sampled_q sampled_T05_tokens
    sampled_T05_q lattice_candidates lattice_scores head_latent short_hidden proposal_probs_T07_topk9_topp08 candidates
    scores q scores_alt q_alt conv_x conv_prepared conv_y conv_finished train_anchor_positions train_block_keep
    train_hidden train_base_logits train_corrected_logits train_confidence_logits train_document_ids
    train_target_features
"""
NOT_READ = """
    target_final_hidden target_last_hidden_raw teacher_logits train_target_last_hidden_raw train_loss_mask
    train_target_ids train_eval_mask train_aligned_mask train_anchor_valid train_position_ids train_nominate_num
    train_nominate_den train_hidden_grad_dflash_g4 train_hidden_grad_dpace bundled_generation_tokens
"""  # the last: from a routine that does not follow the training


def test_no_folder_and_no_array_is_left_out(golden):
    folders = {path.parent for path in golden.rglob("golden.npz")} - {
        golden / "target" / kind for kind in ("tied", "untied")
    }
    assert folders == {golden / name for name in FOLDERS}
    for folder in folders:
        with np.load(folder / "golden.npz") as arrays:
            names = {name for name in arrays if not name.startswith("gen_")}
            measures = {name for name in names if name.startswith("train_") and arrays[name].ndim == 0}  # losses
        assert names - measures <= {*READ.split(), *NOT_READ.split()}, folder


# Features of the target


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_tapped_layers(golden, kind):
    target = target_of(golden, kind)
    with np.load(golden / "target" / kind / "golden.npz") as arrays:
        tokens, states = arrays["input_ids"], arrays["hidden_states"]  # [layers + 1, S, H], the embeddings first
    for taps in [(-1, 0, 1, 2, 3, 4), (1, 2, 4), (4,), (3, -1)]:
        session = target.open(tokens, taps)
        agree(session.features, np.concatenate([states[tap + 1] for tap in taps], axis=1))
        assert_agree(session.root_logits, target.open(tokens).root_logits, "exact")
    assert target.open(tokens).features.shape == (len(tokens), 0)


def test_features_of_a_drafter_are_its_taps_of_the_target(case):
    if case.name not in GEMMA:
        target = target_of(case.golden, "tied" if case.name in TIED else "untied")
        assert_agree(target.open(case.tokens, case.drafter.taps).features, case.features, "walk32")  # stored by float32


def test_which_layer_a_tap_is():
    """Embedding 0 and layers that add 1, 10, 100, 1000: taps 0 and 2 read 1 and 111."""
    fields = dict(
        model_type="llama",
        vocab_size=3,
        hidden_size=2,
        intermediate_size=1,
        num_hidden_layers=4,
        num_attention_heads=1,
        head_dim=2,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_position_embeddings=8,
        tie_word_embeddings=True,
        mlp_bias=True,
    )
    config = DecoderConfig.from_dict(fields)
    tensors = {name: np.zeros(shape) for name, shape in config.tensor_shapes().items()}
    for layer in range(4):
        tensors[f"model.layers.{layer}.mlp.down_proj.bias"] += 10.0**layer
    target = Decoder(config, tensors)
    assert_agree(target.open([0, 1], (0, 2)).features, np.array([[1.0, 1.0, 111.0, 111.0]] * 2), "exact")
    assert_agree(target.open([0, 1], (-1,)).features, np.zeros((2, 2)), "exact")
    for tap, message in [
        (3, "layer 3 .the last one.* cannot be tapped"),
        (4, "layer 4 cannot"),
        (-2, "layer -2 cannot"),
    ]:
        with pytest.raises(ValueError, match=message):
            target.open([0, 1], (0, tap))


# Random drafters

FAMILIES = {
    "dflash": {},
    "vanilla": {"family": "dspark", "markov_rank": 3, "markov_type": "vanilla"},
    "gated": {"family": "dspark", "markov_rank": 3, "markov_type": "gated"},
    "rnn": {"family": "dspark", "markov_rank": 3, "markov_type": "rnn"},
    "dflash2": {"family": "dflash2", "selector_rank": 3, "lattice": 2, "short_conv": 2},
    "attention": {
        "family": "attention",
        "markov_rank": 3,
        "markov_type": "attention",
        "head_heads": 2,
        "head_dim_attention": 3,
        "head_mlp": 4,
    },
}


def config_of(family, **fields):
    """A small config, complete but for what is given."""
    fields = (
        {
            "family": "dflash",
            "dialect": "zlab",
            "architecture": "qwen3",
            "in_place": False,
            "block_size": 4,
            "taps": (0, 2),
            "mask_id": 1,
            "target_layers": None,
            "vocab_size": 7,
            "draft_vocab_size": 7,
            "hidden_size": 6,
            "intermediate_size": 5,
            "num_layers": 2,
            "num_heads": 2,
            "num_kv_heads": 1,
            "head_dim": 4,
            "rms_norm_eps": 1e-6,
            "rope": Rope(theta=100.0),
            "rotary_dims": 2,
            "causal": (False, False),
            "windows": (None, None),
            "window_rule": "query",
        }
        | FAMILIES[family]
        | fields
    )
    if "markov_rank" in fields:
        fields = {"confidence": True, "confidence_with_markov": True} | fields
    return DrafterConfig(**fields)


def random_tensors(config, seed):
    """Published name -> float64 array: no norm is one, no bias zero."""
    random = np.random.default_rng(seed)
    return {
        name: ("norm" in name) + 0.4 * random.standard_normal(shape) for name, shape in config.tensor_shapes().items()
    }


def random_drafter(config, seed=0, **changes):
    random = np.random.default_rng([seed, 1])
    shape, draft = (config.vocab_size, config.hidden_size), config.draft_vocab_size
    embedding, head = random.standard_normal(shape), 2 * random.standard_normal((draft, config.hidden_size))
    ids = np.sort(random.permutation(config.vocab_size)[:draft])
    d2t = None if draft == config.vocab_size else ids - np.arange(draft)
    return Drafter(config, random_tensors(config, seed) | changes, embedding, head, d2t)


def random_sequence(drafter, length, seed=0):
    """(features, tokens) of a sequence."""
    random = np.random.default_rng([seed, 2])
    width = len(drafter.taps) * drafter.config.hidden_size
    return random.standard_normal((length, width)), random.integers(0, drafter.vocab_size, length)


@st.composite
def configs(draw, families=tuple(FAMILIES)):
    """Small drafters of every kind: both conventions, windows by every rule, odd sizes, a smaller vocabulary."""
    family, layers = draw(st.sampled_from(families)), draw(st.integers(1, 2))
    vocab = draw(st.integers(2, 11))
    kv_heads, in_place = draw(st.integers(1, 2)), draw(st.booleans())
    fields = {
        "in_place": in_place,
        "block_size": draw(st.integers(1 + in_place, 6)),
        "taps": tuple(range(draw(st.integers(1, 3)))),
        "vocab_size": vocab,
        "draft_vocab_size": vocab if family == "dflash2" else draw(st.integers(2, vocab)),
        "num_layers": layers,
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw(st.integers(1, 2)),
        "causal": tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        "windows": tuple(draw(st.lists(st.sampled_from([None, 1, 2, 5]), min_size=layers, max_size=layers))),
        "window_rule": draw(st.sampled_from(["query", "context", "anchor"])),
        "output_multiplier": draw(st.sampled_from([1.0, 0.5])),
        "softcap": draw(st.sampled_from([None, 3.0])),
        "embedding_scale": draw(st.sampled_from([1.0, 2.5])),
        "slot_embeddings": draw(st.booleans()),
        "short_conv": draw(st.sampled_from([0, 1, 3])),
        "conv_taps": draw(st.integers(1, 3)),
    }
    if family in ("vanilla", "dflash") and draw(st.booleans()):
        fields |= {"architecture": "gemma4", "shared_values": draw(st.booleans()), "rotary_dims": 1, "short_conv": 0}
    if family == "attention":
        fields |= {"head_gate": draw(st.sampled_from(["none", "state_output"])), "head_anchor": draw(st.booleans())}
    if family in ("vanilla", "gated", "rnn", "attention"):
        fields["confidence_with_markov"] = draw(st.booleans())
    return config_of(family, **fields)


every_family = pytest.mark.parametrize("family", FAMILIES)


def after(drafter, features):
    """A context that holds these features."""
    context = drafter.context()
    context.append(features)
    return context


@settings(max_examples=60)
@given(configs(), seeds)
@example(config_of("rnn", in_place=True), 0)
@example(config_of("attention"), 0)  # the anchor at position 0 has no prefix to attend to
def test_blocks_of_one_sequence_are_its_proposals_one_by_one(config, seed):
    drafter = random_drafter(config, seed)
    features, tokens = random_sequence(drafter, 9, seed)
    anchors = np.array([0, 3, 4, 8])
    blocks = drafter.forward_blocks(features, tokens, anchors)
    for a, p in enumerate(anchors):
        proposal, rows = drafter.propose(after(drafter, features[:p]), tokens[p]), slice(int(config.in_place), None)
        assert_agree(proposal.hidden, blocks.hidden[a, rows], "float64")
        assert_agree(proposal.base_logits, blocks.base_logits[a, rows], "float64")
        history = tokens[(p + np.arange(drafter.gamma)).clip(max=8)][None]
        for slot in range(drafter.gamma):
            expected = blocks.logits[a, rows][slot]
            assert_agree(proposal.logits(slot, history[:, : slot + 1])[0], expected, "float64")
            if config.confidence:
                expected = blocks.confidence[a, rows][slot : slot + 1]
                assert_agree(proposal.confidence(slot, history[:, : slot + 1]), expected, "float64")


@settings(max_examples=30)
@given(configs(), seeds, st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_a_context_that_grows_is_the_one_computed_at_once(config, seed, sizes):
    """Appending nothing included."""
    drafter = random_drafter(config, seed)
    features, tokens = random_sequence(drafter, sum(sizes) + 1, seed)
    grown, whole = drafter.context(), after(drafter, features[:-1])
    for size in sizes:
        grown.append(features[grown.length : grown.length + size])
    assert_same_context(grown, whole)
    assert_agree(
        drafter.propose(grown, tokens[-1]).base_logits, drafter.propose(whole, tokens[-1]).base_logits, "float64"
    )


def assert_same_context(actual, expected):
    assert actual.length == expected.length
    pairs = [(actual.cache, expected.cache)]
    pairs += [([actual.memory], [expected.memory])] if expected.memory is not None else []
    for ours, theirs in pairs:
        for mine, others in zip(ours, theirs, strict=True):
            for part, other in zip(mine, others, strict=True):
                assert_agree(part, other, "float64")


@every_family
def test_sequences_side_by_side_are_each_alone(family):
    """Prompts of 3, 7 and 12 tokens that accept 0, 2 and 5 drafts in turn."""
    drafter = random_drafter(config_of(family, block_size=6))
    sequences = [random_sequence(drafter, 60, seed) for seed in range(3)]
    contexts = [after(drafter, features[:n]) for (features, _), n in zip(sequences, (3, 7, 12), strict=True)]
    uniforms = np.random.default_rng(3).random((6, 3, 4, drafter.gamma))
    for r in range(6):
        for i, (context, (features, tokens)) in enumerate(zip(contexts, sequences, strict=True)):
            alone = drafter.propose(after(drafter, features[: context.length]), tokens[context.length])
            together = drafter.propose(context, tokens[context.length])
            assert_agree(together.sample(uniforms[r, i]), alone.sample(uniforms[r, i]), "exact")
            accepted = (0, 2, 5)[(r + i) % 3]
            context.append(features[context.length : context.length + accepted + 1])
    assert [context.length for context in contexts] == [3 + 2 * 10, 7 + 2 * 10, 12 + 2 * 10]


@every_family
@pytest.mark.parametrize("window", [None, 3])
def test_a_block_sees_nothing_at_or_after_its_anchor(family, window):
    """Two anchors closer than a block, bit for bit; what the later block sees does change."""
    drafter = random_drafter(config_of(family, windows=(window, None)))
    features, tokens = random_sequence(drafter, 30)
    previous = np.random.default_rng(4).integers(0, 7, (2, 4))

    def run(features, tokens):
        blocks = drafter.forward_blocks(features, tokens, np.array([10, 12]), previous)
        return blocks.hidden, blocks.logits, blocks.confidence

    before = run(features, tokens)
    for start, unchanged in [(10, [0]), (12, [0, 1])]:
        changed = run(np.concatenate([features[:start], -features[start:]]), tokens)
        for ours, theirs in zip(changed, before, strict=True):
            if theirs is not None:
                assert_agree(ours[unchanged], theirs[unchanged], "exact")
        assert (changed[0][1] != before[0][1]).all() == (start == 10)
    other = tokens.copy()
    other[12] = (tokens[12] + 1) % 7  # the first row of the later block
    for ours, theirs in zip(run(features, other), before, strict=True):
        if theirs is not None:
            assert_agree(ours[0], theirs[0], "exact")


@every_family
@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_a_block_see_each_other_both_ways_or_causally(family, causal):
    config = config_of(family, causal=(causal, causal), slot_embeddings=True)
    drafter = random_drafter(config)
    features, tokens = random_sequence(drafter, 5)
    changed = drafter.tensors["slot_embed"].copy()
    changed[2] += 1  # row 3, the last
    drafters = (drafter, random_drafter(config, slot_embed=changed))
    before, now = (d.forward_blocks(features, tokens, np.array([2])).hidden[0] for d in drafters)
    assert (now[3] != before[3]).any()
    if causal:
        assert_agree(now[:3], before[:3], "exact")
    else:
        assert (now != before).any(axis=-1).all()


@given(configs(), st.integers(0, 6))
def test_visibility_by_its_definition(config, length):
    drafter, anchors = random_drafter(config), np.array([2, 0, 5])
    for layer, (causal, window) in enumerate(zip(config.causal, config.windows, strict=True)):
        expected = []
        for block, p in enumerate(anchors):
            for i in range(p, p + config.block_size):
                oldest = {"query": i - (window or 0) + 1, "context": i - (window or 0) + 1, "anchor": p - (window or 0)}
                row = [t < p and (window is None or t >= oldest[config.window_rule]) for t in range(length)]
                for other, start in enumerate(anchors):
                    for j in range(start, start + config.block_size):
                        near = window is None or config.window_rule != "query" or abs(i - j) < window
                        row.append(other == block and near and (j <= i or not causal))
                expected.append(row)
        assert_agree(drafter.backbone.visible(layer, anchors, length), np.array(expected), "exact")


# Heads and convolutions


@settings(max_examples=30)
@given(configs(("vanilla", "gated", "rnn", "attention")), seeds)
def test_a_head_that_reads_out_nothing_is_no_head(config, seed):
    zero = np.zeros((config.draft_vocab_size, config.markov_rank))
    drafter = random_drafter(config, seed, **{"markov_head.markov_w2.weight": zero})
    plain = replace(config, family="dflash", markov_rank=0, markov_type="", confidence=False)
    tensors = {name: drafter.tensors[name] for name in plain.tensor_shapes()}
    d2t = None if drafter.vocab_size == config.draft_vocab_size else drafter.ids - np.arange(len(drafter.ids))
    plain = Drafter(plain, tensors, drafter.backbone.embedding, drafter.head, d2t)
    features, tokens = random_sequence(drafter, 6, seed)
    expected = plain.forward_blocks(features, tokens, np.array([0, 4])).logits
    assert_agree(drafter.forward_blocks(features, tokens, np.array([0, 4])).logits, expected, "exact")
    contexts = (after(drafter, features), after(plain, features))
    proposals = [d.propose(c, 0) for d, c in zip((drafter, plain), contexts, strict=True)]
    uniforms = np.random.default_rng(seed).random((5, drafter.gamma))
    assert_agree(proposals[0].sample(uniforms), proposals[1].sample(uniforms), "exact")


@pytest.mark.parametrize("family", ["vanilla", "attention", "dflash2"])
@pytest.mark.parametrize("taps", [1, 2, 5])
def test_identity_convolutions_change_no_bit(family, taps):
    config = config_of(family, short_conv=3, conv_taps=taps)
    tensors, plain = random_tensors(config, 0), replace(config, short_conv=0)
    for name in tensors.keys() - plain.tensor_shapes().keys():
        tensors[name] = np.zeros_like(tensors[name])
        if name.endswith(("k_base", "base_kernel")):
            tensors[name][..., 0, :] = 1  # [taps, H], or [2, taps, H]
    drafter = random_drafter(config, 0, **tensors)
    tables = drafter.backbone.embedding, drafter.head
    plain = Drafter(plain, {name: tensors[name] for name in plain.tensor_shapes()}, *tables)
    features, tokens = random_sequence(drafter, 6)
    hidden = [d.forward_blocks(features, tokens, np.array([1, 4])).hidden for d in (drafter, plain)]
    assert_agree(hidden[0], hidden[1], "exact")


def test_a_short_convolution_by_its_definition():
    random = np.random.default_rng(0)
    x, source, base, projection = (random.normal(size=s) for s in [(2, 5, 6), (2, 5, 6), (3, 6), (9, 6)])
    expected = np.zeros_like(x)
    for a, t, i, j in np.ndindex(2, 5, 6, 3):
        if t >= j:  # channel i is in group i // 2 of three
            expected[a, t, i] += (base[j, i] + projection[3 * j + i // 2] @ source[a, t]) * x[a, t - j, i]
    assert_agree(short_conv(x, source, base, projection), expected, "float64")


def test_largest_logits():
    """Ties go to the lowest ids; 0 keeps everything."""
    logits = np.array([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, -np.inf]])
    low = -np.inf
    assert_agree(keep_largest(logits, 1), np.array([[low, 3, low, low], [5, low, low, low]]), "exact")
    assert_agree(keep_largest(logits, 3), np.array([[low, 3, 3, 2], [5, 5, 5, low]]), "exact")
    assert_agree(keep_largest(logits, 0), logits, "exact")
    many = keep_largest(np.tile([0.0, 1.0], 100), 30)
    assert_agree(np.flatnonzero(np.isfinite(many)), np.arange(1, 60, 2), "exact")


@given(configs(("dflash",)), seeds, st.integers(0, 5))
def test_layers_are_those_of_the_decoder(config, seed, length):
    """Given the context's keys and values, a block is a forward of a decoder with the same weights."""
    config = replace(
        config, architecture="qwen3", shared_values=False, rotary_dims=2, short_conv=0, embedding_scale=1.0
    )
    drafter = random_drafter(replace(config, slot_embeddings=False, draft_vocab_size=config.vocab_size), seed)
    features, tokens = random_sequence(drafter, length + 1, seed)
    context = after(drafter, features[:length])
    fields = dict(model_type="qwen3", rope_theta=100.0, max_position_embeddings=64, tie_word_embeddings=True)
    fields |= {name: getattr(config, name) for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    fields |= dict(num_hidden_layers=1, num_attention_heads=config.num_heads, num_key_value_heads=config.num_kv_heads)
    x = np.array([tokens[length]] + [config.mask_id] * (config.block_size - 1))
    positions, embedding = length + np.arange(config.block_size), drafter.backbone.embedding
    streams = drafter.backbone.layer_outputs(context.cache, np.array([length]), tokens[[length]])
    for layer, stream in enumerate(streams):  # one decoder per layer, which reads what the last one put out
        weights = {f"model.{name}": tensor for name, tensor in drafter.tensors.items()}
        weights = {name.replace(f"layers.{layer}.", "layers.0."): tensor for name, tensor in weights.items()}
        weights |= {"model.embed_tokens.weight": embedding, "model.norm.weight": np.ones(config.hidden_size)}
        decoder = Decoder(DecoderConfig.from_dict(fields), weights)
        visible = drafter.backbone.visible(layer, np.array([length]), length)
        hidden, _ = decoder.forward(x, positions, [context.cache[layer]], visible)
        assert_agree(rms_norm(stream[0], 1, 1e-6), hidden, "float64")
        embedding, x = stream[0], np.arange(config.block_size)


def test_heads_by_their_formulas():
    """Rank and width 1: numbers that can be followed by hand."""
    tensors = {
        "markov_head.markov_w1.weight": np.array([[0.4], [-0.3]]),
        "markov_head.markov_w2.weight": np.ones((2, 1)),
        "markov_head.gate_proj.weight": np.array([[2.0, 3.0]]),
        "markov_head.gate_proj.bias": np.array([0.5]),
        "markov_head.joint_proj.weight": np.array([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]),
        "markov_head.joint_proj.bias": np.array([0.1, 0.2, 0.3]),
        "candidate_selector.predecessor_codebook": np.array([[0.4], [-0.3]]),
        "candidate_selector.hidden_projection.weight": np.array([[5.0]]),
        "candidate_selector.successor_codebook": np.ones((2, 1)),
        "confidence_head.proj.weight": np.array([[2.0, 3.0]]),
        "confidence_head.proj.bias": np.array([1.0]),
    }
    hidden, previous = np.array([[0.25], [-0.5]]), np.array([0, 1])

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    state = (1 - sigmoid(0.1 + 2 * 0.4 + 3 * 0.25)) * np.tanh(0.2 + 5 * 0.4 + 6 * 0.25)  # after the first slot
    expected = {
        "vanilla": [0.4, -0.3],
        "gated": [0.4 * sigmoid(2 * 0.25 + 3 * 0.4 + 0.5), -0.3 * sigmoid(2 * -0.5 + 3 * -0.3 + 0.5)],
        "rnn": [np.tanh(0.3 + 8 * 0.4 + 9 * 0.25), np.tanh(0.3 + 7 * state + 8 * -0.3 + 9 * -0.5)],
        "dflash2": [0.4 * 5 * 0.25, -0.3 * 5 * -0.5],
    }
    for family, latents in expected.items():
        head = build_head(config_of(family), tensors, None)
        assert_agree(head.latent(hidden, previous, None)[:, 0], np.array(latents), "float64")
    known = tensors["markov_head.markov_w1.weight"][previous]
    expected = np.array([2 * 0.25 + 3 * 0.4 + 1, 2 * -0.5 + 3 * -0.3 + 1])
    assert_agree(confidence(tensors, hidden, known), expected, "float64")


def test_the_prefix_attention_head_by_its_formula():
    """One query at a time, every sum written out; a gate and an anchor column."""
    config = config_of("attention", head_gate="state_output", head_anchor=True)
    drafter = random_drafter(config)
    features, _ = random_sequence(drafter, 4)
    w = {name.removeprefix("markov_head."): tensor for name, tensor in drafter.tensors.items()}
    embedding, fused = drafter.backbone.embedding, drafter.backbone.fuse(features)
    h, a, anchor = np.linspace(-1, 1, 6), 3, 5

    def norm(x, name):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * w[f"{name}.weight"]

    seen = [norm(c, "ctx_norm") for c in fused] + [norm(embedding[anchor], "anchor_norm") + w["anchor_type"]]
    x = w["in_proj.weight"] @ np.concatenate([norm(embedding[a], "embed_norm"), norm(h, "state_norm")])
    n, mixed = norm(x, "attn_norm"), []
    for head in (slice(0, 3), slice(3, 6)):
        q = norm((w["q_proj.weight"] @ n)[head], "q_norm")
        scores = np.array([q @ norm((w["k_proj.weight"] @ s)[head], "k_norm") for s in seen]) / np.sqrt(3)
        mixed.append(sum(np.exp(t) * (w["v_proj.weight"] @ s)[head] for t, s in zip(scores, seen, strict=True)))
        mixed[-1] /= np.exp(scores).sum()
    gate = w["gate_proj.weight"] @ np.concatenate([n, *mixed]) + w["gate_proj.bias"]
    x = x + w["o_proj.weight"] @ np.concatenate([o / (1 + np.exp(-g)) for o, g in zip(mixed, gate, strict=True)])
    m = norm(x, "mlp_norm")
    up = w["gate_p.weight"] @ m
    x = x + w["down.weight"] @ (up / (1 + np.exp(-up)) * (w["up.weight"] @ m))
    past = drafter._past(after(drafter, features), 4, anchor)
    assert_agree(drafter.correction.latent(h[None], np.array([a]), past)[0], norm(x, "out_norm"), "float64")
    known = w["in_proj.weight"][:, :6] @ norm(embedding[a], "embed_norm")  # what the confidence head sees of a
    assert_agree(drafter.correction.embed(np.array([a]))[0], known, "float64")


LAYERS = {
    "plain": {"embedding_scale": 2.5, "slot_embeddings": True},
    "convolutions": {"short_conv": 3, "conv_taps": 2},
    "two-sided convolutions": {"short_conv": 3, "conv_taps": 2},
    "gemma": {"architecture": "gemma4", "rotary_dims": 1},
    "gemma with shared values": {"architecture": "gemma4", "rotary_dims": 1, "shared_values": True},
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_by_its_formulas(kind):
    """Row by row and head by head, rotations as complex numbers."""
    family = "dflash2" if kind == "two-sided convolutions" else "dflash"
    drafter = random_drafter(config_of(family, num_layers=1, causal=(False,), windows=(None,), **LAYERS[kind]))
    features, tokens = random_sequence(drafter, 5)
    c, embedding = drafter.config, drafter.backbone.embedding
    w = {name.removeprefix("layers.0."): tensor for name, tensor in drafter.tensors.items()}
    gemma = c.architecture == "gemma4"

    def normed(x, name=None):
        return x / np.sqrt(np.mean(x**2) + 1e-6) * (w[f"{name}.weight"] if name else 1)

    def turned(x, position):
        pairs = (x[:2] + 1j * x[2:]) * np.exp(
            1j * position * 100.0 ** -np.array([0, 0.5]) * (np.arange(2) < c.rotary_dims)
        )
        return np.concatenate([pairs.real, pairs.imag])

    def convolved(x, source, base, projection):  # two taps, groups of three channels
        kernel = [base + np.repeat((projection @ s).reshape(2, 2), 3, axis=1) for s in source]
        return [k[0] * x[t] + (k[1] * x[t - 1] if t else 0) for t, k in enumerate(kernel)]

    def between(part, x, sublayer):
        if c.family == "dflash2":
            base, both = (w[f"{part}_conv.{name}"] for name in ("base_kernel", "kernel_projection.weight"))
            return convolved(sublayer(convolved(x, x, base[0], both[:4])), x, base[1], both[4:])
        if not c.short_conv:
            return sublayer(x)
        name = "attn" if part == "attention" else part
        pre, post = ([w[f"conv_{side}_{name}.{end}"] for end in ("k_base", "corr.weight")] for side in ("pre", "post"))
        y = sublayer(convolved(x, x, *pre))
        return convolved(y, y, *post)

    def key(x, position):
        return turned(normed(w["self_attn.k_proj.weight"] @ x, "self_attn.k_norm"), position)

    def value(x):
        v = w["self_attn.k_proj.weight" if c.shared_values else "self_attn.v_proj.weight"] @ x
        return normed(v) if gemma else v

    def attention(rows):
        seen = [normed(w["fc.weight"] @ f, "hidden_norm") for f in features[:3]] + list(rows)
        out = []
        for i, row in enumerate(rows):
            heads = []
            for q in np.split(w["self_attn.q_proj.weight"] @ row, 2):
                q = turned(normed(q, "self_attn.q_norm"), 3 + i)
                weight = np.exp([q @ key(s, t) / (1 if gemma else 2) for t, s in enumerate(seen)])
                heads.append(sum(a * value(s) for a, s in zip(weight / weight.sum(), seen, strict=True)))
            out.append(w["self_attn.o_proj.weight"] @ np.concatenate(heads))
        return out

    def mlp(rows):
        gates = [w["mlp.gate_proj.weight"] @ row for row in rows]
        gates = [
            g * (1 + np.tanh(np.sqrt(2 / np.pi) * (g + 0.044715 * g**3))) / 2 if gemma else g / (1 + np.exp(-g))
            for g in gates
        ]
        return [
            w["mlp.down_proj.weight"] @ (g * (w["mlp.up_proj.weight"] @ row))
            for g, row in zip(gates, rows, strict=True)
        ]

    x = [c.embedding_scale * embedding[token] for token in (tokens[3], 1, 1, 1)]
    if c.slot_embeddings:
        x[1:] = x[1:] + w["slot_embed"]
    names = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    for part, sublayer in (("attention", attention), ("mlp", mlp)):
        first, last = (names[:2] if part == "attention" else names[2:]) if gemma else (names[part == "mlp"], None)
        y = between(part, [normed(row, first) for row in x], sublayer)
        x = [row + (normed(o, last) if gemma else o) for row, o in zip(x, y, strict=True)]
    x = np.array(x) * (w["layer_scalar"] if gemma else 1)
    (stream,) = drafter.backbone.layer_outputs(after(drafter, features[:3]).cache, np.array([3]), tokens[[3]])
    assert_agree(stream[0], x, "float64")


# Proposals


@pytest.mark.parametrize("family", ["dflash2", "attention"])
@pytest.mark.parametrize("in_place", [False, True])
def test_walking_a_lattice_is_the_sequential_chain(family, in_place):
    """Scores of every candidate after every candidate first, then a walk by index, as drafters are served."""
    drafter, K = random_drafter(config_of(family, in_place=in_place, block_size=5)), 3
    features, tokens = random_sequence(drafter, 8)
    proposal, t = drafter.propose(after(drafter, features), tokens[0], lattice=K), drafter.tensors
    past = drafter._past(after(drafter, features), 8, tokens[0])
    candidates = np.sort(np.argsort(-proposal.base_logits, axis=1)[:, :K], axis=1)  # in vocabulary order
    lattice = np.empty((drafter.gamma, K, K))
    for slot, h in enumerate(proposal.hidden):
        for row, a in enumerate(candidates[slot - 1] if slot else tokens[[0] * K]):
            if family == "dflash2":
                code = t["candidate_selector.predecessor_codebook"][a]
                z = code * (t["candidate_selector.hidden_projection.weight"] @ h)
                readout = t["candidate_selector.successor_codebook"]
            else:
                (z,), readout = (
                    drafter.correction.latent(h[None], np.array([a]), past),
                    t["markov_head.markov_w2.weight"],
                )
            lattice[slot, row] = proposal.base_logits[slot, candidates[slot]] + readout[candidates[slot]] @ z
    uniforms = np.random.default_rng(5).random((200, drafter.gamma))
    walked = np.empty((200, drafter.gamma), dtype=np.int64)
    index = np.zeros(200, dtype=np.int64)
    for slot in range(drafter.gamma):
        index = draw(warp(lattice[slot]), uniforms[:, slot], index)
        walked[:, slot] = candidates[slot, index]
    assert_agree(proposal.sample(uniforms), walked, "exact")


@settings(max_examples=40)
@given(configs(), seeds, st.sampled_from([SamplingLaw(), SamplingLaw(0), SamplingLaw(0.7, 3, 0.9)]))
def test_tokens_are_drawn_from_the_probabilities_that_verification_sees(config, seed, law):
    """Bit for bit, whatever other histories are asked with it; chains do not depend on each other."""
    drafter = random_drafter(config, seed)
    features, tokens = random_sequence(drafter, 5, seed)
    proposal = drafter.propose(after(drafter, features), tokens[0], law)
    uniforms = np.random.default_rng(seed).random((6, drafter.gamma))
    chains = proposal.sample(uniforms)
    assert_agree(chains[:2], proposal.sample(uniforms[:2]), "exact")
    histories = np.column_stack([np.full(6, tokens[0]), chains])
    for slot in range(drafter.gamma):
        together = proposal.probs(slot, histories[:, : slot + 1])
        assert_agree(together.sum(axis=1), np.ones(6), "float64")
        assert_agree(together, warp(proposal.logits(slot, histories[:, : slot + 1]), law), "exact")
        assert_agree(draw(together, uniforms[:, slot]), chains[:, slot], "exact")
        for row, history in zip(together, histories, strict=True):
            assert_agree(proposal.probs(slot, history[None, : slot + 1])[0], row, "exact")


@every_family
def test_a_slot_reads_as_many_tokens_as_the_order_says(family):
    drafter = random_drafter(config_of(family, block_size=5))
    features, tokens = random_sequence(drafter, 5)
    proposal = drafter.propose(after(drafter, features), tokens[0])
    history = np.array([[3, 0, 5, 2]])
    expected = proposal.logits(3, history)
    for place, dependent in enumerate([drafter.order is None] * 3 + [drafter.order != 0]):
        other = history.copy()
        other[0, place] = 6
        assert (proposal.logits(3, other) != expected).any() == dependent
    assert proposal.order == drafter.order == {"dflash": 0, "rnn": None}.get(family, 1)
    if drafter.order is not None:
        assert_agree(proposal.logits(3, history[:, -1:]), expected, "exact")


@given(configs(tuple(set(FAMILIES) - {"dflash2"})), seeds)
def test_only_the_draft_vocabulary_is_proposed(config, seed):
    drafter = random_drafter(config, seed)
    features, tokens = random_sequence(drafter, 4, seed)
    proposal = drafter.propose(after(drafter, features), tokens[0])
    known = np.zeros(config.vocab_size, dtype=bool)
    known[drafter.ids] = True
    assert known.sum() == config.draft_vocab_size
    for logits in (proposal.base_logits[:1], proposal.logits(0, tokens[:3, None])):
        assert_agree(np.isfinite(logits), np.broadcast_to(known, logits.shape), "exact")
    assert known[proposal.sample(np.random.default_rng(seed).random((20, drafter.gamma)))].all()


# Refusals


def test_what_does_not_fit_is_refused():
    drafter = random_drafter(config_of("rnn"))
    features, tokens = random_sequence(drafter, 5)
    context = after(drafter, features)
    proposal = drafter.propose(context, 0)
    cases = [
        (lambda: context.append(features[:, 1:]), r"features of the taps \(0, 2\) are \[s, 12\], got \(5, 11\)"),
        (lambda: context.append(features[0]), "got .12,."),
        (lambda: drafter.propose(context, 7), "outside the vocabulary of 7"),
        (lambda: drafter.propose(context, 0, lattice=-1), "lattice must be 0"),
        (lambda: drafter.forward_blocks(features[1:], tokens, [1]), "got 5 tokens and 4 features"),
        (lambda: drafter.forward_blocks(features, tokens, [5]), "anchors must be positions 0..4"),
        (lambda: drafter.forward_blocks(features, tokens, [-1]), "anchors must be positions 0..4"),
        (lambda: drafter.forward_blocks(features, tokens, 1), "anchors must be positions 0..4"),
        (lambda: drafter.forward_blocks(features, tokens, []), "anchors must be positions 0..4"),
        (
            lambda: drafter.forward_blocks(features, tokens, [1, 2], [[0] * 4]),
            "2 blocks need predecessors .A, 4., got .1, 4.",
        ),
        (lambda: proposal.logits(4, [[0] * 5]), "slot 4 asked, a block has slots 0..3"),
        (lambda: proposal.logits(2, [[0, 0]]), "slot 2 needs histories .* h >= 3, got .1, 2."),
        (lambda: proposal.probs(0, np.zeros((0, 1), int)), "n >= 1"),
        (lambda: proposal.probs(0, [[7]]), "outside the vocabulary of 7"),
        (lambda: proposal.sample(np.zeros((2, 5))), "h in 1..4, got .2, 5."),
        (lambda: proposal.sample(np.ones((2, 4))), "uniforms must lie in"),
    ]
    for refused, message in cases:
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"device": "cuda"}])
def test_a_dtype_or_device_that_cannot_be_had_is_refused(tmp_path, options):
    with pytest.raises(ValueError, match="the reference backend runs float32 or float64 on the CPU"):
        Drafter.load(tmp_path, None, **options)


def test_another_target_is_refused(golden):
    with pytest.raises(CheckpointError, match="was trained on another target"):
        Drafter.load(golden / "deepspec-dspark-vanilla", target_of(golden, "untied"))
