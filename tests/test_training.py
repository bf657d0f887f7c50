"""Training of drafters: losses against arrays of the authors' own code and closed forms, the loop against itself."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.config import DecoderConfig
from models.drafter_checkpoint import read_drafter
from models.drafter_config import DrafterConfig
from reference.drafters import TrainingBlocks
from tests.agreement import assert_agree
from tests.processes import train_in_two
from tests.strategies import seeds

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from safetensors.torch import load_file, save_file  # noqa: E402

from examples import train_drafter as example  # noqa: E402
from fast import draft_losses as losses  # noqa: E402
from fast import objectives, training  # noqa: E402
from fast import training_program as program  # noqa: E402
from fast.decoder import Decoder, to_tensor  # noqa: E402
from fast.draft_losses import RECIPES, Labels, Recipe, block_labels, block_losses  # noqa: E402
from fast.drafters import Drafter  # noqa: E402
from fast.paths import write_answers  # noqa: E402
from fast.training_program import sequence_of  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
DSPARK = RECIPES["dspark"]
FAMILIES = ("dflash", "dspark", "attention", "dflash2")


# Losses against the authors' values on synthetic logits


@pytest.fixture(scope="module")
def stored_losses(golden):
    def read(name):
        with np.load(golden / "losses" / f"{name}.npz") as arrays:
            return {key: torch.from_numpy(array) for key, array in arrays.items()}

    return read


def leaf(tensor):
    return tensor.clone().requires_grad_()


def reduced(recipe, logits, teacher, labels, counted, confidence=None, **options):
    """The loss of blocks that are given by their logits: (`BlockLosses`, its total)."""
    blocks = TrainingBlocks(logits[..., :0], logits, logits, confidence)
    found = block_losses(recipe, blocks, Labels(None, labels, counted), teacher, **options)
    return found, found.total(recipe)


def check_slope(loss, tensor, expected, kind="golden"):
    (slope,) = torch.autograd.grad(loss, tensor, retain_graph=True)
    assert_agree(slope, expected, kind)


def kept_blocks(stored, prefix=""):
    return [
        stored[prefix + name][0]
        for name in ("draft_logits", "teacher_logits", "target_ids", "eval_mask", "confidence_logits")
    ]


@pytest.mark.parametrize(
    ("name", "recipe"),
    {
        "ce": Recipe(cross_entropy=1.0),
        "l1": Recipe(total_variation=2.0),
        "confidence": Recipe(confidence=1.0),
        "dspark_total": DSPARK,
        "dflash_total": RECIPES["dflash"],
    }.items(),
)
def test_deepspec_losses(stored_losses, name, recipe):
    stored = stored_losses("deepspec")
    logits, teacher, labels, counted, trust = kept_blocks(stored)
    logits, trust = leaf(logits), leaf(trust)
    found, total = reduced(recipe, logits, teacher, labels, counted, trust)
    loss = total / (found.weight + 1e-6)  # their denominator
    assert_agree(loss, stored[f"loss_{name}"], "golden")
    if name != "confidence":
        check_slope(loss, logits, stored[f"grad_draft_logits_{name}"][0])
    if recipe.confidence:
        check_slope(loss, trust, stored[f"grad_confidence_logits_{name}"][0])
    assert_agree(found.length, stored["metric_num_tau_probabilistic"], "golden")
    assert_agree(found.blocks.double(), stored["metric_den_tau_probabilistic"], "exact")


def test_deepspec_loss_of_two_processes_shares_one_denominator(stored_losses):
    stored = stored_losses("deepspec_two_ranks")
    parts = []
    for rank in range(2):
        logits, teacher, labels, counted, trust = kept_blocks(stored, f"rank{rank}_")
        logits, trust = leaf(logits), leaf(trust)
        parts.append((*reduced(DSPARK, logits, teacher, labels, counted, trust), logits, trust))
    weight = sum(part[0].weight for part in parts) + 1e-6
    for rank, (_, total, logits, trust) in enumerate(parts):
        loss = 2 * total / weight  # their gradients are then averaged over the two
        assert_agree(loss, stored[f"rank{rank}_loss"], "golden")
        check_slope(loss, logits, stored[f"rank{rank}_grad_draft_logits"][0])
        check_slope(loss, trust, stored[f"rank{rank}_grad_confidence_logits"][0])


def test_nomination(stored_losses):
    stored = stored_losses("specfloor_nomination")
    logits, teacher, counted = leaf(stored["unary_logits"][0]), stored["teacher_logits"][0], stored["eval_mask"][0]
    recipe = Recipe(nomination=float(stored["nominate_alpha"]), candidates=int(stored["nominate_topk"]))
    found, total = reduced(recipe, logits, teacher, torch.zeros_like(counted, dtype=torch.int64), counted)
    loss = total / found.weight
    assert_agree(loss, stored["loss_alpha_times_nomination"], "printed")  # their slot weights are float32
    check_slope(loss, logits, stored["grad_unary_logits"][0], "printed")
    per_slot = losses.nominate(logits, teacher, recipe.candidates).masked_fill(~counted, 0).sum(dim=0)
    assert_agree(per_slot, stored["slot_num"], "golden")


def test_specforge_losses_in_place(stored_losses):
    stored = stored_losses("specforge")
    logits, labels = leaf(stored["draft_logits"].flatten(0, 1)), stored["target_ids"].flatten(0, 1)
    counted = stored["weight_mask"].flatten(0, 1) > 0
    counted[:, 0] = False
    sequences = 2
    for name, recipe in {
        "dflash": Recipe(cross_entropy=1.0),
        "dflash_flat": Recipe(cross_entropy=1.0, decay=np.inf),
        "dpace": RECIPES["dpace"],
        "dpace_alpha0": Recipe(cross_entropy=1.0, smoothing=0.0),
        "dpace_alpha02": Recipe(cross_entropy=1.0, smoothing=0.2),
    }.items():
        found, total = reduced(recipe, logits, logits.detach(), labels, counted, in_place=True)
        loss = total / (sequences if "dpace" in name else found.weight)
        assert_agree(loss, stored[f"loss_{name}"], "golden")
        check_slope(loss, logits, stored[f"grad_draft_logits_{name}"].flatten(0, 1), "golden")


def test_specforge_dspark_loss(stored_losses):
    stored = stored_losses("specforge")
    logits, trust = leaf(stored["draft_logits"].flatten(0, 1)), leaf(stored["dspark_confidence_logits"].flatten(0, 1))
    teacher, labels, counted = (
        stored[name].flatten(0, 1) for name in ("dspark_teacher_logits", "target_ids", "dspark_eval_mask")
    )
    found, total = reduced(DSPARK, logits, teacher, labels, counted, trust)
    loss = total / found.weight
    assert_agree(loss, stored["dspark_loss"], "golden")
    check_slope(loss, logits, stored["dspark_grad_draft_logits"].flatten(0, 1))
    check_slope(loss, trust, stored["dspark_grad_confidence_logits"].flatten(0, 1))
    assert_agree(found.length, stored["dspark_metric_num_tau_probabilistic"], "golden")


@pytest.mark.parametrize("in_place", [False, True], ids=["sample_from_anchor", "in_place"])
def test_speculators_losses(stored_losses, in_place):
    stored, convention = stored_losses("speculators"), "in_place" if in_place else "sample_from_anchor"
    shape = (-1, int(stored["block_size"]))
    logits = leaf(stored["draft_logits"].unflatten(0, shape))
    teacher, counted = (stored[name].unflatten(0, shape) for name in ("teacher_logits", f"loss_mask_{convention}"))
    counted = counted > 0
    assert_agree(losses.divergence(logits, teacher).flatten(), stored["value_kl_div"], "golden")
    check_slope(losses.divergence(logits, teacher).sum(), logits, stored["grad_kl_div"].unflatten(0, shape))
    for name, recipe in {
        "kl_fixed": Recipe(divergence=1.0, unweighted=True),
        "ce01_tv09_fixed": Recipe(cross_entropy=0.1, total_variation=0.9, teacher_labels=True, unweighted=True),
        "ce_fixed": Recipe(cross_entropy=1.0, teacher_labels=True, unweighted=True),
        "ce_dpace": Recipe(cross_entropy=1.0, teacher_labels=True, smoothing=0.5),
    }.items():
        _, total = reduced(
            recipe, logits, teacher, torch.zeros_like(counted, dtype=torch.int64), counted, in_place=in_place
        )
        loss = total / (counted.sum().double() + 1e-5)  # their denominator
        assert_agree(loss, stored[f"loss_{name}_{convention}"], "golden")
        if f"grad_loss_{name}_{convention}" in stored:
            check_slope(loss, logits, stored[f"grad_loss_{name}_{convention}"].unflatten(0, shape))


def test_candidates_with_the_label_put_in(stored_losses):
    stored = stored_losses("speculators")
    labels = stored["teacher_logits"].argmax(dim=-1)
    assert_agree(
        losses.with_label(stored["selector_unary_candidates"], labels), stored["selector_training_candidates"], "exact"
    )
    place = (losses.with_label(stored["selector_unary_candidates"], labels) == labels[:, None]).int().argmax(dim=-1)
    assert_agree(place, stored["selector_target_position"], "exact")


def test_selector_loss(stored_losses):
    stored = stored_losses("speculators")
    scores, weights, counted = (stored[name] for name in ("selector_logits", "weights_in_place", "loss_mask_in_place"))
    entropy = losses.cross_entropy(leaf(scores), stored["selector_target_position"])
    loss = (weights * counted * entropy).sum() / (counted.sum() + 1e-5)
    assert_agree(loss, stored["selector_loss"], "golden")


# Losses and slopes of the authors' whole drafters

TRAINED = (
    "deepspec-dflash",
    "deepspec-dspark-vanilla",
    "deepspec-dspark-fitted",
    "deepspec-dspark-gated",
    "deepspec-dspark-rnn",
    "deepspec-dspark-gemma4/separate-v",
    "deepspec-dspark-gemma4/shared-kv",
    "specfloor-attn/final",
    "specfloor-attn/head-anchor-gate",
    "specfloor-attn/vanilla-shortconv",
    "specfloor-attn/vanilla-slotembed",
    "specforge-dflash/full",
    "specforge-dflash/sliding",
    "specforge-dspark/vanilla",
    "specforge-dspark/rnn",
    "speculators-dflash/full-vocab",
    "speculators-dflash/draft-vocab-sliding",
    "speculators-dspark/draft-vocab",
    "speculators-dspark/in-place-gated",
    "speculators-dflash2/sliding",
)


def load_trained(golden, name):
    """A stored drafter in float64, ready to be differentiated, and the arrays beside it."""
    config = DrafterConfig.from_folder(golden / name)
    stored = read_drafter(golden / name, config)
    tensors = {key: to_tensor(raw, kind, torch.float64, "cpu") for key, kind, raw in stored.tensors()}
    if config.architecture == "gemma4":  # no target of its kind exists: its own copies of the tables
        tables = (stored.read(table) for table in ("embed_tokens.weight", "lm_head.weight"))
        embedding, head = (to_tensor(raw, kind, torch.float64, "cpu") for kind, raw in tables)
    else:
        target = target_of(golden, name)
        embedding, head = target.embedding, target.head
    if stored.d2t is not None:
        head = head[torch.from_numpy(np.arange(len(stored.d2t)) + stored.d2t)]
    with np.load(golden / name / "golden.npz") as arrays:
        return Drafter(config, tensors, embedding, head, stored.d2t), dict(arrays)


def target_of(golden, name):
    kind = "tied" if name.startswith(("deepspec", "specfloor")) else "untied"
    return Decoder.load(golden / "target" / kind, dtype="float64")


def training_rows(golden, name, drafter, arrays):
    """Per sequence: features, tokens, anchors, labels of their blocks, and the target's final states."""
    ids, features, mask, anchors = (
        arrays[key] for key in ("input_ids", "target_features", "train_loss_mask", "train_anchor_positions")
    )
    size, in_place = drafter.config.block_size, drafter.config.in_place
    if name.startswith("speculators"):  # two documents in one row; their mask runs on into the next one
        states = target_of(golden, name).model.norm(torch.from_numpy(arrays["train_target_last_hidden_raw"]).double())
        document = arrays["train_document_ids"]
        for start in np.unique(document, return_index=True)[1]:
            here = arrays["train_anchor_valid"] & (document[anchors] == document[start])
            tokens, some = ids[start:], anchors[here] - start
            labels = block_labels(tokens, mask[start:] > 0, some, size, in_place, chained=False)
            labels = labels._replace(counted=arrays["train_aligned_mask"][here] > 0)
            yield arrays["train_target_features"][start:], tokens, some, labels, states[start:]
        return
    states, keep = arrays["target_final_hidden"], arrays["train_block_keep"]
    if not name.startswith("specforge"):
        ids, features, mask, anchors, states, keep = (
            array[None] for array in (ids, features, mask, anchors, states, keep)
        )
    for i in range(len(ids)):
        some = anchors[i][keep[i]]  # the others fill their batch up
        labels = block_labels(
            ids[i], mask[i] > 0, some, size, in_place, chained=not name.startswith("specforge-dflash")
        )
        yield features[i], ids[i], some, labels, torch.from_numpy(states[i]).double()


def blocks_of(drafter, features, tokens, anchors, states, labels):
    """Training blocks over the drafter's own vocabulary, and the teacher's logits for them."""
    blocks, teacher = drafter.forward_blocks(features, tokens, anchors), states[labels.places - 1] @ drafter.head.T
    if drafter.config.softcap:
        teacher = drafter.config.softcap * torch.tanh(teacher / drafter.config.softcap)
    if drafter.ids is not None:
        own = (logits[..., drafter.ids] for logits in (blocks.base_logits, blocks.logits))
        blocks = TrainingBlocks(blocks.hidden, *own, blocks.confidence)
    return blocks, teacher


def trained_as(name, config):
    """The recipe of a stored training loss, its name, and what the authors add to its denominator."""
    if name.startswith("speculators"):
        extra = {"confidence": float(config.confidence), "selector": float(config.family == "dflash2")}
        recipe = Recipe(divergence=1.0, unweighted=True, teacher_labels=True, candidates=config.lattice or 16, **extra)
        return recipe, "train_loss_kl", {"confidence": 1e-8}, 1e-5
    if name == "specfloor-attn/final":
        return replace(RECIPES["attention"], candidates=config.lattice), "train_loss", {}, 1e-6
    if name.startswith("specforge"):
        key = "train_loss_dflash_g4" if config.family == "dflash" else "train_loss"
        return RECIPES[config.family], key, {}, 0.0
    return RECIPES["dflash" if config.family == "dflash" else "dspark"], "train_loss", {}, 1e-6


@pytest.mark.parametrize("name", TRAINED)
def test_loss_and_slopes_of_stored_drafters(golden, name):
    drafter, arrays = load_trained(golden, name)
    recipe, key, special, usual = trained_as(name, drafter.config)
    loss, parts = 0.0, []
    for features, tokens, anchors, labels, states in training_rows(golden, name, drafter, arrays):
        blocks, teacher = blocks_of(drafter, features, tokens, anchors, states, labels)
        selector = None
        if recipe.selector:
            before = tokens[np.maximum(labels.places - 1, anchors[:, None])]
            selector = drafter.correction(blocks.hidden, torch.from_numpy(before), None), drafter.correction.readout
        parts.append(block_losses(recipe, blocks, labels, teacher, drafter.config.in_place, selector))
    weight = sum(part.weight for part in parts)
    for term in recipe.terms:
        total = sum(part.terms[term] for part in parts)
        loss = loss + getattr(recipe, term) * total / (weight + special.get(term, usual))
    kind = "golden" if recipe.nomination == 0 else "printed"  # the weights of theirs are float32
    assert_agree(loss, arrays[key], kind)
    loss.backward()
    with np.load(golden / name / "train_grads.npz") as slopes:
        slopes = dict(slopes)
    own = dict(drafter.named_parameters())
    assert own.keys() == slopes.keys()
    for tensor, expected in slopes.items():
        slope = own[tensor].grad.numpy()
        if expected.shape == (3,) and slope.shape != (3,):  # three numbers stand for the tensor
            slope = np.array([slope.sum(), np.linalg.norm(slope), slope.ravel() @ np.cos(np.arange(slope.size))])
        assert_agree(slope, expected, "golden" if expected.dtype == np.float64 else "printed")


@pytest.mark.parametrize("name", [name for name in TRAINED if name.startswith(("deepspec", "specfloor"))])
def test_labels_and_rows_that_count_are_the_authors(golden, name):
    drafter, arrays = load_trained(golden, name)
    keep = arrays["train_block_keep"]
    for *_, labels, _ in training_rows(golden, name, drafter, arrays):
        expected = arrays["train_eval_mask"][keep]
        assert_agree(labels.counted, expected, "exact")
        assert_agree(labels.tokens[expected], arrays["train_target_ids"][keep][expected], "exact")
    assert not arrays["train_eval_mask"][~keep].any()


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_dpace_of_stored_drafters(golden, kind):
    name = f"specforge-dflash/{kind}"
    drafter, arrays = load_trained(golden, name)
    for key, smoothing in {"dpace": 0.5, "dpace_a02": 0.2}.items():
        recipe, total = replace(RECIPES["dpace"], smoothing=smoothing), 0.0
        for features, tokens, anchors, labels, states in training_rows(golden, name, drafter, arrays):
            blocks, teacher = blocks_of(drafter, features, tokens, anchors, states, labels)
            total = total + block_losses(recipe, blocks, labels, teacher, True).total(recipe)
        assert_agree(total / len(arrays["input_ids"]), arrays[f"train_loss_{key}"], "golden")


def test_initial_values(golden):
    with np.load(golden / "specfloor-attn" / "initial_values.npz") as stored:
        stored = dict(stored)
    for name in ("final", "head-anchor-gate"):
        config, prefix = DrafterConfig.from_folder(golden / "specfloor-attn" / name), name.replace("-", "_") + "_"
        tensors = training.initial_tensors(config, torch.from_numpy(stored[f"{prefix}lm_head"]), seed=0)
        for key, expected in stored.items():
            tensor = key.removeprefix(prefix)
            if (
                key.startswith(prefix)
                and tensor in tensors
                and (name, tensor) != ("head-anchor-gate", "markov_head.out_norm.weight")
            ):
                assert_agree(tensors[tensor], expected, "printed")
        assert tensors.keys() == config.tensor_shapes().keys()


# Closed forms


def softmax(z):
    e = np.exp(z - z.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


@st.composite
def rows(draw):
    """Logits and teacher logits [R, V], labels [R]; some rows have p = q."""
    rng = np.random.default_rng(draw(seeds))
    rows, vocab = draw(st.integers(1, 5)), draw(st.integers(2, 9))
    logits, teacher = draw(st.sampled_from([0.1, 2.0, 20.0])) * rng.standard_normal((2, rows, vocab))
    same = rng.random(rows) < 0.2
    teacher[same] = logits[same]
    return logits, teacher, rng.integers(vocab, size=rows)


@given(rows())
def test_slopes_in_closed_form(found):
    logits, teacher, labels = found
    q, p = softmax(logits), softmax(teacher)
    k = min(3, logits.shape[1])
    largest = np.argsort(-teacher, axis=1, kind="stable")[:, :k]
    nominated = np.zeros_like(p)
    np.put_along_axis(nominated, largest, softmax(np.take_along_axis(teacher, largest, axis=1)), axis=1)
    sign = np.sign(q - p) / 2
    z, t, y = leaf(torch.from_numpy(logits)), torch.from_numpy(teacher), torch.from_numpy(labels)
    distance = losses.total_variation(torch.softmax(t, dim=-1), torch.softmax(z, dim=-1))
    check_slope(losses.cross_entropy(z, y).sum(), z, q - np.eye(logits.shape[1])[labels], "float64")
    check_slope(losses.divergence(z, t).sum(), z, q - p, "float64")
    check_slope(losses.nominate(z, t, k).sum(), z, q - nominated, "float64")
    clear = (np.abs(q - p) > 1e-9).all(axis=1)  # at a kink the sign is chance
    check = q * (sign - (sign * q).sum(axis=1, keepdims=True))
    (slope,) = torch.autograd.grad(distance.sum(), z)
    assert_agree(slope[clear], check[clear], "float64")
    trust = leaf(torch.from_numpy(logits[:, 0]))
    accepted = 1 - np.abs(p - q).sum(axis=1) / 2
    check_slope(losses.confidence(trust, distance).sum(), trust, 1 / (1 + np.exp(-logits[:, 0])) - accepted, "float64")


@given(seeds, st.integers(1, 4), st.integers(2, 6), st.sampled_from([0.0, 0.5, 1.0]))
def test_dpace_agrees_with_the_objective(seed, blocks, size, smoothing):
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(3 * rng.standard_normal((blocks, size, 5)))
    labels, counted = rng.integers(5, size=(blocks, size)), rng.random((blocks, size)) < 0.8
    counted[:, 0] = True  # the objective averages over all blocks, the loss over those with a row that counts
    found, total = reduced(replace(RECIPES["dpace"], smoothing=smoothing), logits, logits, labels, counted)
    expected = objectives.dpace(logits, torch.from_numpy(labels), smoothing, torch.from_numpy(counted)).loss
    assert_agree(total / found.weight, expected, "float64")


@given(rows(), st.integers(1, 3))
def test_selector_scores_a_word_by_its_codebook(found, rank):
    logits, _, labels = found
    rng = np.random.default_rng(0)
    readout, latents = rng.standard_normal((logits.shape[1], rank)), rng.standard_normal((len(logits), rank))
    z, c, h = (leaf(torch.from_numpy(a)) for a in (logits, readout, latents))
    loss = losses.select(z, h, c, torch.from_numpy(labels), 2)
    scores = logits + latents @ readout.T
    for i, label in enumerate(labels):
        best = np.argsort(-logits[i], kind="stable")[:2]
        best = best if label in best else np.array([best[0], label])
        q = softmax(scores[i, best])
        assert_agree(loss[i], -np.log(q[best == label][0]), "float64")
        slope, gap = torch.autograd.grad(loss[i], (z, h), retain_graph=True), q - (best == label)
        assert_agree(slope[0][i, best], gap, "float64")
        assert_agree(slope[1][i], gap @ readout[best], "float64")


def test_confidence_does_not_pull_the_proposals():
    risk, trust = leaf(torch.rand(5, dtype=torch.float64)), leaf(torch.randn(5, dtype=torch.float64))
    losses.confidence(trust, risk).sum().backward()
    assert risk.grad is None
    assert_agree(trust.grad, torch.sigmoid(trust.detach()) - (1 - risk.detach()), "float64")


def test_labels_of_both_conventions_by_hand():
    """Ten tokens 100.., answers at 3..6 and 8..9; blocks of 4 behind 3, 5 and 8."""
    tokens, supervised = np.arange(100, 110), np.isin(np.arange(10), [3, 4, 5, 6, 8, 9])
    anchors = np.array([3, 5, 8])
    ahead = block_labels(tokens, supervised, anchors, 4, in_place=False)
    assert_agree(ahead.tokens, [[104, 105, 106, 107], [106, 107, 108, 109], [109, 109, 109, 109]], "exact")
    assert_agree(ahead.counted, np.array([[1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]]) > 0, "exact")
    own = block_labels(tokens, supervised, anchors, 4, in_place=True)
    assert_agree(own.tokens, [[103, 104, 105, 106], [105, 106, 107, 108], [108, 109, 109, 109]], "exact")
    assert_agree(own.counted, np.array([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 0, 0]]) > 0, "exact")
    loose = block_labels(tokens, supervised, anchors, 4, in_place=False, chained=False)
    assert_agree(loose.counted, np.array([[1, 1, 1, 0], [1, 0, 1, 1], [1, 0, 0, 0]]) > 0, "exact")


def test_loss_and_length_by_hand():
    """Two words; the drafter is sure to no avail: TV 1/2 in slot 0, 1/4 in slot 1; slot 2 does not count."""
    teacher = torch.log(torch.tensor([[[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]]], dtype=torch.float64))
    logits = torch.tensor([[[0.0, -np.inf], [0.0, 0.0], [0.0, -np.inf]]], dtype=torch.float64).clamp(min=-800)
    labels, counted = torch.tensor([[0, 1, 1]]), torch.tensor([[True, True, False]])
    found, _ = reduced(Recipe(cross_entropy=1.0, total_variation=1.0), logits, teacher, labels, counted)
    second = np.exp(-1 / 4)
    assert_agree(found.weight, 1 + second, "float64")
    assert_agree(found.terms["total_variation"], 1 / 2 + second / 4, "float64")
    assert_agree(found.terms["cross_entropy"], second * np.log(2), "float64")
    assert_agree(found.length, 1 + 1 / 2 + 1 / 2 * 3 / 4, "float64")
    shifted = (torch.cat([t[:, :1], t], dim=1) for t in (logits, teacher, labels))
    counted = torch.cat([torch.tensor([[False]]), counted], dim=1)
    moved, _ = reduced(Recipe(total_variation=1.0), *shifted, counted, in_place=True)
    assert_agree(moved.length, found.length, "float64")  # in place, row 0 is no slot
    assert_agree(moved.terms["total_variation"], found.terms["total_variation"], "float64")
    assert_agree(moved.weight, found.weight, "float64")


def test_a_block_that_does_not_count_adds_nothing():
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((3, 4, 6)))
    labels, counted = torch.zeros(3, 4, dtype=torch.int64), torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]) > 0
    trust = logits[..., 0]
    alone, total = reduced(DSPARK, logits[[0, 2]], -logits[[0, 2]], labels[:2], counted[[0, 2]], trust[[0, 2]])
    found, same = reduced(DSPARK, logits, -logits, labels, counted, trust)
    assert_agree(same, total, "float64")
    for name in ("weight", "length", "blocks"):
        assert_agree(getattr(found, name), getattr(alone, name), "exact" if name == "blocks" else "float64")


# The loop

TARGET = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": 48, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "attention_bias": False, "hidden_act": "silu", "eos_token_id": 2,
}  # fmt: skip


def random_tensors():
    """A random target that is mostly sure of its next word."""
    rng = np.random.default_rng(3)
    drawn = {}
    for name, shape in DecoderConfig.from_dict(TARGET).tensor_shapes().items():
        scale = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 6.0}.get(name, shape[-1] ** -0.5)
        values = np.ones(shape) if "norm" in name else scale * rng.standard_normal(shape)
        drawn[name] = torch.from_numpy(values).float().bfloat16().float()
    return drawn


def random_target(dtype):
    tensors = {name: tensor.to(dtype) for name, tensor in random_tensors().items()}
    return Decoder(DecoderConfig.from_dict(TARGET), tensors, (2,))


@pytest.fixture(scope="module")
def target():
    return random_target(torch.float32)


@pytest.fixture(scope="module")
def sequences(target):
    """Four answers of up to 30 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 48, size=rng.integers(3, 8)) for _ in range(4)]
    answers = write_answers(target, prompts, rng.random((4, 30)))
    rows = [{"prompt": p, "tokens": a.tokens, "stopped": a.stopped} for p, a in zip(prompts, answers, strict=True)]
    return [sequence_of(row, target.stop_ids, 64) for row in rows]


def options_for(family, **flags):
    arguments = {"preset": "tiny", "block-size": 4 + (family == "dflash2"), "mask-id": 1, "target": "-",
                 "out": "-", "family": family} | ({} if family == "dflash" else {"rank": 16}) | flags  # fmt: skip
    return example.parse([text for name, value in arguments.items() for text in (f"--{name}", str(value))])


def small_config(family):
    raw = example.new_config(TARGET, options_for(family), 1)
    return raw, DrafterConfig.from_dict(raw)


def small_trainer(target, texts, family, dtype=torch.float32, **settings):
    drafter = training.new_drafter(small_config(family)[1], target, seed=1, dtype=dtype)
    chosen = {"steps": 6, "sequences": 2, "anchors": 8, "learning_rate": 3e-3, "seed": 5} | settings
    return training.Trainer(target, drafter, texts, training.Settings(**chosen))


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_overfitted_drafter_measures_as_it_trained(target, sequences, family):
    """Tau as if sure of the text, and the same once every block is proposed and scored on the target's rows."""
    tokens, supervised = one = training.Sequence(*(array[:20] for array in sequences[3]))
    trainer = small_trainer(target, [one], family, steps=80, sequences=1, anchors=64, learning_rate=1e-2)
    assert len(set(tokens)) > 10  # a text that repeats itself would hide a shift
    for _ in range(79):
        trainer.update()
    before = {name: tensor.clone() for name, tensor in trainer.drafter.state_dict().items()}
    last = trainer.update()
    trainer.drafter.load_state_dict(before)  # what that step's tau is about
    rows, gamma = torch.softmax(target.logits(tokens), dim=-1), trainer.drafter.gamma
    context, lengths, sure = trainer.drafter.context(), [], []
    features = target.open(tokens, trainer.drafter.taps).features
    for p in training.anchor_places(supervised):
        context.append(features[context.length : p])
        proposal, slots = trainer.drafter.propose(context, tokens[p]), min(gamma, len(tokens) - 1 - p)
        overlaps = [
            1 - float(losses.total_variation(rows[p + k], proposal.probs(k, tokens[None, p : p + k + 1])[0]))
            for k in range(slots)
        ]
        lengths.append(1 + np.cumprod(overlaps).sum())
        sure.append(1 + np.cumprod([float(rows[p + k, tokens[p + k + 1]]) for k in range(slots)]).sum())
    assert_agree(last.tau, np.mean(lengths), "walk32")
    assert last.tau > 0.98 * np.mean(sure)


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.parameters])


def slopes(trainer):
    return torch.cat([p.grad.flatten() for p in trainer.parameters])


def test_same_seed_same_weights_and_resuming_goes_on_bit_by_bit(target, sequences, family, tmp_path):
    trainers = [small_trainer(target, sequences, family) for _ in range(3)]
    steps = [[trainer.update() for _ in range(4)] for trainer in trainers[:2]]
    assert steps[0] == steps[1]
    assert_agree(weights(trainers[0]), weights(trainers[1]), "exact")
    for _ in range(2):
        trainers[2].update()
    path = tmp_path / "state"
    training.save_checkpoint(path, trainers[2], {"seed": 5})
    resumed = small_trainer(target, sequences, family)
    training.load_checkpoint(path, resumed, {"seed": 5})
    assert [resumed.update() for _ in range(2)] == steps[0][2:]
    assert_agree(weights(resumed), weights(trainers[0]), "exact")
    other = small_trainer(target, sequences, family, seed=6)
    other.update()
    assert (weights(other) != weights(trainers[0])).any()


def test_a_checkpoint_is_whole_or_refused(target, sequences, tmp_path, monkeypatch):
    trainer, path = small_trainer(target, sequences, "dflash"), tmp_path / "state"
    with pytest.raises(ValueError, match="does not exist"):
        training.load_checkpoint(path, trainer, {})
    training.save_checkpoint(path, trainer, {"seed": 5, "answers": "a"})
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="another answers, steps"):
        training.load_checkpoint(path, trainer, {"seed": 5, "answers": "b", "steps": 3})

    def stops_halfway(state, to):
        Path(to).write_bytes(whole[:1000])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(torch, "save", stops_halfway)
        training.save_checkpoint(path, trainer, {})
    assert path.read_bytes() == whole
    for data in (whole[: len(whole) // 2], b"", b"not one"):
        path.write_bytes(data)
        with pytest.raises(ValueError, match="no whole checkpoint"):
            training.load_checkpoint(path, trainer, {"seed": 5, "answers": "a"})
    assert trainer.step == 0


def test_micro_batches_add_up_to_the_step(sequences, family):
    """All anchors at once, three at a time, one by one: the same slopes; and the loss is one quotient of sums."""
    target = random_target(torch.float64)
    found = []
    for at_once in (0, 3, 1):
        trainer = small_trainer(target, sequences, family, torch.float64, at_once=at_once, sequences=3, clip=1e9)
        found.append((trainer.update().loss, slopes(trainer)))
    for loss, slope in found[1:]:
        assert_agree(loss, found[0][0], "float64")
        assert_agree(slope, found[0][1], "float64")
    trainer = small_trainer(target, sequences, family, torch.float64, sequences=3)
    order = training.sequences_of(0, len(sequences), 3, 5)
    sums = [trainer.accumulate(sequences[n], [5, 0, i]) for i, n in enumerate(order)]
    total = sum(getattr(trainer.recipe, name) * s[name] for s in sums for name in trainer.recipe.terms)
    weight = sum(s["weight"] for s in sums)
    assert_agree(found[0][0], total / weight, "float64")
    assert_agree(found[0][1], slopes(trainer) / weight, "float64")


def test_blocks_do_not_see_past_their_anchor(target, family):
    """Blocks of overlapping anchors 10 and 12: neither sees features from its anchor on, nor the other block."""
    rng = np.random.default_rng(1)
    drafter = training.new_drafter(small_config(family)[1], target, seed=1, dtype=torch.float64)
    with torch.no_grad():
        for p in drafter.parameters():
            p += 0.3 * torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(1))
    tokens, features = rng.integers(3, 48, size=30), torch.from_numpy(rng.standard_normal((30, 3 * 32)))
    before = drafter.forward_blocks(features, tokens, [10, 12]).logits
    for anchor, row in ((10, 0), (12, 1)):
        changed = features.clone()
        changed[anchor:] += 1
        assert_agree(drafter.forward_blocks(changed, tokens, [10, 12]).logits[row], before[row], "exact")
    assert (drafter.forward_blocks(changed - 1, tokens, [10, 12]).logits != before).any()
    assert_agree(drafter.forward_blocks(features, tokens, [10, 15]).logits[0], before[0], "float64")


def test_a_loss_that_is_not_finite_stops_before_the_weights_change(target, sequences):
    trainer = small_trainer(target, sequences, "dspark")
    with torch.no_grad():
        trainer.drafter.norm.weight[0] = torch.inf
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"loss is nan at step 0.*smaller learning rate"):
        trainer.update()
    assert_agree(weights(trainer)[torch.isfinite(before)], before[torch.isfinite(before)], "exact")


def test_a_gradient_that_is_not_finite_stops_before_the_weights_change(target, sequences, monkeypatch):
    trainer = small_trainer(target, sequences, "dspark")
    trainer.drafter.fc.weight.register_hook(lambda slope: slope * torch.inf)
    before = weights(trainer)
    with pytest.raises(ValueError, match=r"gradient's norm is (nan|inf) at step 0.*smaller learning rate"):
        trainer.update()
    assert_agree(weights(trainer), before, "exact")


def test_refused_trainings(target, sequences):
    with pytest.raises(ValueError, match="4 answers of two tokens or more cannot fill a step of 5"):
        small_trainer(target, sequences, "dflash", sequences=5)
    drafter = training.new_drafter(small_config("dflash")[1], target, 0)
    for recipe, message in {
        "dspark": "confidence head, which this dflash",
        "dflash2": "needs its own objective",
    }.items():
        with pytest.raises(ValueError, match=message):
            training.Trainer(target, drafter, sequences, training.Settings(1, 1), RECIPES[recipe])
    with pytest.raises(ValueError, match=r"trained in float32 or float64, not torch.bfloat16"):
        training.Trainer(target, drafter.bfloat16(), sequences, training.Settings(1, 1))


def test_schedule_and_order():
    settings = training.Settings(steps=50, learning_rate=2.0, warm_up=0.08)
    rates = [training.learning_rate(step, settings) for step in range(50)]
    assert_agree(rates[:5], [0.5, 1.0, 1.5, 2.0, 2.0], "float64")
    assert_agree(rates[27], 1.0, "float64")  # half-way down the cosine of 46 steps
    assert 0 < rates[-1] < 0.01
    taken = [training.sequences_of(step, 10, 3, 7) for step in range(6)]
    for epoch in (taken[:3], taken[3:]):
        assert len(set(np.concatenate(epoch))) == 9
    assert (np.concatenate(taken[:3]) != np.concatenate(taken[3:])).any()


def test_a_step_clips_its_slopes_and_follows_the_schedule(target, sequences):
    trainer = small_trainer(target, sequences, "dflash", clip=0.1, steps=100)
    for step in range(3):
        assert trainer.update().norm > 0.1
        assert_agree(torch.linalg.vector_norm(slopes(trainer)), 0.1, "float32")
        assert {group["lr"] for group in trainer.optimizer.param_groups} == {3e-3 * (step + 1) / 4}


def test_selector_is_trained_on_what_it_is_served(target, sequences):
    """With every word a candidate, its term is the cross-entropy of the served logits at the teacher's choice."""
    raw = small_config("dflash2")[0]
    raw["dflash_config"] |= {"selector_top_k": 48}
    drafter = training.new_drafter(DrafterConfig.from_dict(raw), target, seed=1)
    with torch.no_grad():
        drafter.correction.predecessor_codebook *= 50
        drafter.correction.successor_codebook *= 50
    trainer = training.Trainer(target, drafter, sequences, training.Settings(1, 1))
    tokens, supervised = sequences[3]
    anchors = training.anchor_places(supervised)
    read = training.read_target(target, tokens, drafter.taps)
    found = trainer.losses(sequences[3], anchors, *read)
    labels = block_labels(tokens, supervised, anchors, 5, True)
    chosen = target.logits(tokens).argmax(dim=-1)[labels.places - 1]
    served = drafter.forward_blocks(read[1], tokens, anchors).logits
    entropy = losses.cross_entropy(served, chosen)
    weights = losses.row_weights(5, 4.0, True) * torch.from_numpy(labels.counted)
    assert_agree(found.terms["selector"].double() / weights.sum(), (weights * entropy).sum() / weights.sum(), "float32")
    assert entropy[:, 1:].std() > 1  # predecessors matter


@given(st.lists(st.booleans(), min_size=1, max_size=30), st.integers(1, 8), seeds)
def test_anchors(supervised, count, seed):
    supervised = np.array(supervised)
    possible = [t for t in range(len(supervised) - 1) if supervised[t] and supervised[t + 1]]
    drawn = training.draw_anchors(supervised, count, np.random.default_rng(seed))
    assert len(drawn) == min(count, len(possible)) and set(drawn) <= set(possible)
    assert (np.diff(drawn) > 0).all()


# The program


def test_an_objective_without_a_confidence_term_leaves_the_head_out():
    for family in FAMILIES:
        for objective in ("dflash", "dspark", "dpace"):
            config = DrafterConfig.from_dict(example.new_config(TARGET, options_for(family, objective=objective), 1))
            assert config.confidence == (objective == "dspark" and family in ("dspark", "attention"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The target as a folder: words w0..w47, w1 for masks, w2 to stop; a template that is the text itself."""
    folder = tmp_path_factory.mktemp("target") / "target"
    folder.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(48)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "w2", "mask_token": "w1", "chat_template": "{{ messages[0].content }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps(TARGET))
    save_file(random_tensors(), folder / "model.safetensors")
    rows = [json.dumps({"prompt": " ".join(f"w{3 + (7 * i + j) % 45}" for j in range(4))}) for i in range(5)]
    (folder.parent / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def command(folder, tmp_path, monkeypatch):
    """The arguments of a small run; keyword arguments replace or (None) drop a flag, True sets one."""
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": tmp_path / "hub", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, str(value))

    def make(family="dspark", **flags):
        flags = {
            "target": folder, "family": family, "out": tmp_path / "drafter", "prompts": folder.parent / "prompts.jsonl",
            "preset": "tiny", "rank": None if family == "dflash" else 16, "block_size": 4 + (family == "dflash2"),
            "sequences": 2, "anchors": 6, "answer_tokens": 12, "steps": 4, "device": "cpu",
        } | flags  # fmt: skip
        given = {name: value for name, value in flags.items() if value is not None}
        return [
            text
            for name, value in given.items()
            for text in [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        ]

    return make


def test_the_folder_is_released_format_that_both_wings_load(command, folder, family, tmp_path, capsys):
    reference = pytest.importorskip("reference.drafters")
    decoder = pytest.importorskip("reference.decoder")
    example.main(command(family, profile=True))
    report, log = capsys.readouterr()
    report = json.loads(report.splitlines()[-1])
    assert report["steps"] == 4 and report["family"] == family and report["answers"] == 5
    assert "estimate" in log and "backward" in log
    raw = json.loads((tmp_path / "drafter" / "config.json").read_text())
    assert raw["architectures"] == ["DFlash2DraftModel" if family == "dflash2" else "Qwen3DSparkModel"]
    assert raw["rope_theta"] == raw["rope_parameters"]["rope_theta"] == TARGET["rope_theta"]
    fast_target, target = Decoder.load(folder), decoder.Decoder.load(folder)
    mine, theirs = Drafter.load(tmp_path / "drafter", fast_target), reference.Drafter.load(tmp_path / "drafter", target)
    dialects = {"dflash": "deepspec", "dspark": "deepspec", "attention": "specfloor", "dflash2": "zlab"}
    assert mine.config.dialect == dialects[family] and mine.config.in_place == (family == "dflash2")
    assert mine.config.parameter_count() == report["parameters"]
    tokens = np.arange(3, 20)
    features = fast_target.open(tokens, mine.taps).features
    found = mine.forward_blocks(features, tokens, [5, 9]).logits.detach()
    assert_agree(found.double(), theirs.forward_blocks(features.numpy(), tokens, [5, 9]).logits, "walk32")
    answers = (tmp_path / "drafter.answers.jsonl").read_bytes()
    with pytest.raises(SystemExit, match="add --resume"):
        example.main(command(family))
    assert (tmp_path / "drafter.answers.jsonl").read_bytes() == answers


def stored_weights(path):
    state = torch.load(path, weights_only=True)
    return torch.cat([tensor.flatten() for tensor in state["drafter"].values()])


def test_an_interrupted_run_ends_where_an_undisturbed_one_does(command, tmp_path, monkeypatch):
    example.main(command(out=tmp_path / "whole", held_out=1))
    updates, update = [], training.Trainer.update

    def stop_after_three(trainer):
        if len(updates) == 3:
            raise KeyboardInterrupt
        updates.append(update(trainer))
        return updates[-1]

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="--resume"):
        patch.setattr(training.Trainer, "update", stop_after_three)
        example.main(command(save_every=2, held_out=1))
    answers = tmp_path / "drafter.answers.jsonl"
    answers.write_bytes(answers.read_bytes() + b'{"kind":"answer","pro')  # and killed while writing
    with pytest.raises(SystemExit, match="another learning_rate"):
        example.main(command(resume=True, held_out=1, learning_rate=0.5))
    with pytest.raises(SystemExit, match="another answers"):
        example.main(command(resume=True))
    example.main(command(resume=True, held_out=1))
    assert_agree(
        stored_weights(tmp_path / "drafter.checkpoint"), stored_weights(tmp_path / "whole.checkpoint"), "exact"
    )
    whole = (tmp_path / "whole" / "model.safetensors").read_bytes()
    assert (tmp_path / "drafter" / "model.safetensors").read_bytes() == whole
    paths = [tmp_path / f"{name}.steps.jsonl" for name in ("drafter", "whole")]
    mine, theirs = ([json.loads(line) for line in path.read_text().splitlines()] for path in paths)
    assert mine.pop(2).pop("held_out") > 1  # the interrupted run saved there
    assert [row["step"] for row in theirs] == [0, 1, 2, 3, 4] and theirs.pop(2) and mine == theirs
    assert [("held_out" in row) for row in theirs] == [True, False, False, True]


def test_a_finished_run_that_is_resumed_reports_what_it_did(command, tmp_path, capsys):
    example.main(command(held_out=1))
    whole = json.loads(capsys.readouterr().out.splitlines()[-1])
    card = (tmp_path / "drafter" / "README.md").read_text()
    example.main(command(held_out=1, resume=True))
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == whole
    assert (tmp_path / "drafter" / "README.md").read_text() == card
    log = tmp_path / "drafter.steps.jsonl"
    kept = log.read_bytes()
    for damaged in (b"", kept[40:], b"[1]\n", b'{"tokens": 3}\n', kept.replace(b'"step": 2', b'"step": "2"')):
        log.write_bytes(damaged)
        with pytest.raises(SystemExit, match="no whole log of 4 steps"):
            example.main(command(held_out=1, resume=True))
        assert log.read_bytes() == damaged


def test_an_out_that_is_in_use_is_refused_and_left_alone(command, folder, tmp_path, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    monkeypatch.chdir(folder)
    for out, complaint in ((folder, "is not empty"), (".", "is not empty"), ("", "--out is empty")):
        with pytest.raises(SystemExit, match=complaint):
            example.main(command(out=out))
    example.main(command(out=f"{tmp_path}/a"))
    with pytest.raises(SystemExit, match="add --resume"):
        example.main(command(out=f"{tmp_path}/a/"))
    with pytest.raises(SystemExit, match="nothing to resume"):
        example.main(command(out=tmp_path / "b", resume=True))
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_too_many_held_out_are_refused_before_anything_is_written(command, tmp_path):
    for flags, complaint in (
        ({"held_out": 3}, "too few to hold 3 out"),
        ({"held_out": 2, "sequences": 4}, "3 prompts"),
    ):
        with pytest.raises(SystemExit, match=complaint):
            example.main(command(**flags))
    assert not (tmp_path / "drafter.answers.jsonl").exists()


def test_parts_are_added_to_the_same_backbone_and_tables_left_out(command, tmp_path):
    stored = {}
    for family, parts in (("dspark", None), ("dspark", "short_conv"), ("dspark", "slot_embed"), ("attention", "")):
        out = tmp_path / f"{family}-{parts}"
        flags = [*command(family, out=out, limit=1, learning_rate=1e-9, steps=None, without_tables=True)]
        example.main([*flags, *(["--parts", *parts.split()] if parts is not None else [])])
        stored[family, parts] = dict(load_file(out / "model.safetensors"))
        assert out.name in (out / "README.md").read_text().splitlines()[0]
    plain = stored["dspark", None]
    assert not {"embed_tokens.weight", "lm_head.weight"} & plain.keys()
    for (family, parts), tensors in stored.items():
        assert any("conv" in name for name in tensors) == (parts == "short_conv")
        assert ("slot_embed" in tensors) == (parts == "slot_embed")
        for name in (name for name in plain if family == "dspark" or name.startswith(("layers", "fc"))):
            assert_agree(tensors[name].float(), plain[name].float(), "walk32")
    with pytest.raises(SystemExit):
        example.main([*command("dflash2"), "--parts", "short_conv"])


def test_two_processes_make_the_same_steps_as_one(command, tmp_path):
    """Sequences 3 a step, so that the two processes get two and one."""
    example.main(command(out=tmp_path / "one", sequences=3))
    train_in_two("train_drafter.py", command(out=tmp_path / "two", sequences=3))
    one, two = (torch.load(tmp_path / f"{name}.checkpoint", weights_only=True) for name in ("one", "two"))
    assert one["step"] == two["step"] == 4
    for name, tensor in one["drafter"].items():
        assert_agree(two["drafter"][name], tensor, "walk32")


def test_smoke_run(command, tmp_path, capsys):
    example.main(command(limit=2, sequences=None, steps=None, epochs=3, dtype="bfloat16"))
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["answers"] == 2 and report["steps"] == 2


@pytest.mark.parametrize("name", [*program.COUNTS, "learning_rate"])
def test_a_number_that_trains_nothing_is_refused_at_once(command, tmp_path, name):
    for value in (0, -1):
        with pytest.raises(SystemExit, match=f"--{name.replace('_', '-')} must be .*, got {value}"):
            example.main(command(out=tmp_path / "new" / "drafter", **{name: value}))
    assert not (tmp_path / "new").exists()


def test_where_the_drafter_goes(command, tmp_path):
    """A folder is made for --out even if the answers lie elsewhere; a file is refused before they are written."""
    example.main(command(out=tmp_path / "a" / "b" / "drafter", answers=tmp_path / "answers.jsonl", steps=1))
    assert (tmp_path / "a" / "b" / "drafter" / "model.safetensors").is_file()
    with pytest.raises(SystemExit, match=r"answers\.jsonl is a file; --out names the drafter's folder"):
        example.main(command(out=tmp_path / "answers.jsonl"))
    assert not (tmp_path / "answers.jsonl.answers.jsonl").exists()


def test_flags_that_mean_nothing_or_do_not_fit(command, capsys):
    with pytest.raises(SystemExit):
        example.main(command("dflash", rank=16))
    assert "--rank is the width of a head, and a dflash drafter has none" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="10 taps do not fit into a target of 6 layers: take at most 3"):
        example.main(command(taps=10))
    with pytest.raises(SystemExit, match="--seed must be at least 0, got -1"):
        example.main(command(seed=-1))
    with pytest.raises(SystemExit, match="--learning-rate must be a positive number, got nan"):
        example.main(command(learning_rate="nan"))


def test_bad_commands(command, folder, tmp_path):
    with pytest.raises(SystemExit, match="there is nothing to resume"):
        example.main(command(resume=True))
    example.main(command(out=tmp_path / "first"))
    with pytest.raises(SystemExit, match="another answer_tokens"):
        example.main(command(answer_tokens=3, answers=tmp_path / "first.answers.jsonl"))
    with pytest.raises(SystemExit, match="5 prompts cannot fill a step of 6"):
        example.main(command(sequences=6))
    with pytest.raises(SystemExit, match="room for 252 tokens"):
        example.main(command(answer_tokens=300))
    with pytest.raises(SystemExit, match="mask_token_id 48 is outside"):
        example.main(command(mask_id=48, out=tmp_path / "other"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "w2", "chat_template": "{{ messages[0].content }}"})
    )
    with pytest.raises(SystemExit, match="say which one to use with --mask-id"):
        example.main(command(out=tmp_path / "third"))
