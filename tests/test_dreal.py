"""D-REAL through whole networks: slopes against enumeration, the target's online rows against plain forwards."""

import json
import shutil
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.config import DecoderConfig
from models.drafter_config import DrafterConfig
from tests.agreement import assert_agree
from tests.processes import train_in_two
from tests.strategies import seeds

torch = pytest.importorskip("torch")
tokenizers = pytest.importorskip("tokenizers")

from safetensors.torch import save_file  # noqa: E402

from examples import drafted_length, objective_slopes, train_drafter  # noqa: E402
from examples import dreal_posttrain as example  # noqa: E402
from fast import posttraining, training, training_program  # noqa: E402
from fast.decoder import Decoder  # noqa: E402
from fast.distance import overlap  # noqa: E402
from fast.drafters import Drafter  # noqa: E402
from fast.paths import write_answers  # noqa: E402
from reference.objectives import SMALLEST_BEHAVIOUR, until_stop  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
STOP, VOCAB, SLOTS = 2, 5, 3
TARGET = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 16,
    "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "rms_norm_eps": 1e-6, "rope_theta": 10_000.0, "max_position_embeddings": 256, "tie_word_embeddings": False,
    "attention_bias": False, "hidden_act": "silu", "eos_token_id": STOP,
}  # fmt: skip
FAMILIES = ("dflash", "vanilla", "gated", "rnn", "rnn_in_place", "attention", "dflash2")
DREAL = posttraining.OnlineRecipe(dreal=1.0)


def random_target(vocab_size=VOCAB, dtype=torch.float64, sharpness=0.5):
    rng, config = np.random.default_rng(3), DecoderConfig.from_dict(TARGET | {"vocab_size": vocab_size})
    scales = {"model.embed_tokens.weight": 1.0, "lm_head.weight": sharpness}
    tensors = {}
    for name, shape in config.tensor_shapes().items():
        scale = scales.get(name, shape[-1] ** -0.5)
        drawn = np.ones(shape) if "norm" in name else scale * rng.standard_normal(shape)
        tensors[name] = torch.from_numpy(drawn).to(dtype)
    return Decoder(config, tensors, (STOP,))


def raw_config(name, slots=SLOTS, vocab_size=VOCAB, candidates=3):
    """config.json of a drafter that proposes `slots` tokens; `name` is a family or a kind of Markov head."""
    in_place = name in ("dflash2", "rnn_in_place")
    arguments = {
        "target": "-", "out": "-", "preset": "tiny", "layers": 1, "taps": 1, "mask-id": 1,
        "family": name if name in train_drafter.RANKS else "dspark", "block-size": slots + in_place,
    }  # fmt: skip
    arguments |= {} if name == "dflash" else {"rank": 8}
    options = train_drafter.parse([text for flag, value in arguments.items() for text in (f"--{flag}", str(value))])
    raw = train_drafter.new_config(TARGET | {"vocab_size": vocab_size}, options, 1)
    if name == "dflash2":
        raw["dflash_config"]["selector_top_k"] = candidates
    if name == "attention":
        raw["nominate_topk"] = candidates
    if options.family == "dspark":
        raw |= {"markov_head_type": name.removesuffix("_in_place").replace("dspark", "vanilla")}
        raw |= {"sample_from_anchor": not in_place}
    return raw


def random_drafter(name, target, dtype=torch.float64, spread=0.3, **sizes):
    config = DrafterConfig.from_dict(raw_config(name, vocab_size=target.vocab_size, **sizes))
    drafter, generator = training.new_drafter(config, target, 1, dtype), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in drafter.parameters():
            p += spread * torch.randn(p.shape, dtype=torch.float64, generator=generator).to(dtype)
    return drafter


@pytest.fixture(scope="module")
def target():
    return random_target()


@pytest.fixture(params=FAMILIES)
def drafter(request, target):
    return random_drafter(request.param, target)


def flat_slopes(drafter):
    slopes = [torch.zeros_like(p) if p.grad is None else p.grad for p in drafter.parameters()]
    drafter.zero_grad()
    return torch.cat([slope.flatten() for slope in slopes])


TOKENS = np.array([3, 0, 1, 4, 0, 3, 1, 0])  # a sequence; its last position ends the text, not the blocks


# Enumeration


def expected_drafts(drafter, target, features, p):
    """J behind position p, differentiable: sum over all blocks, rows from plain teacher-forced forwards."""
    chains = np.array(list(product(range(VOCAB), repeat=SLOTS - 1)))
    before = np.concatenate([np.full((len(chains), drafter.first + 1), TOKENS[p]), chains], axis=1)
    logits = drafter.forward_blocks(features, TOKENS, np.full(len(chains), p), before).logits[:, drafter.first :]
    texts = np.concatenate([np.tile(TOKENS[: p + 1], (len(chains), 1)), chains], axis=1)
    rows = torch.stack([torch.softmax(target.logits(text)[p:], dim=-1) for text in texts])
    least, drafts = torch.minimum(rows, torch.softmax(logits, dim=-1)), 0.0
    for k in range(SLOTS):
        same = (chains[:, k:] == 0).all(axis=1) & (chains[:, :k] != STOP).all(axis=1)  # one of each beginning
        for i in np.flatnonzero(same):
            reach = [least[i, j, token] for j, token in enumerate(chains[i, :k])]
            drafts = drafts + torch.stack([*reach, least[i, k].sum()]).prod()
    return drafts


def every_block(drafter, features, p):
    """Uniforms that draw every block with mass behind position p, and its probability: ([n, K], [n]).

    One last token stands for all of them: no loss reads it, as `test_last_draft_is_not_read` says.
    """
    context = drafter.context()
    context.append(features[:p])
    proposal, cells = drafter.propose(context, TOKENS[p]), [((TOKENS[p],), (), 1.0)]
    for k in range(SLOTS - 1):
        rows = proposal.probs(k, np.array([past for past, _, _ in cells])).numpy()
        cells = [
            ((*past, token), (*uniforms, row[:token].sum() + row[token] / 2), weight * row[token])
            for (past, uniforms, weight), row in zip(cells, rows, strict=True)
            for token in np.flatnonzero(row)
        ]
    return np.array([(*uniforms, 0.5) for _, uniforms, _ in cells]), np.array([weight for *_, weight in cells])


def losses_of(recipe, target, drafter, reading, anchors, uniforms, tokens=TOKENS, **options):
    return posttraining.round_losses(
        recipe, target, drafter, tokens, np.asarray(anchors), np.asarray(uniforms), reading, **options
    )


def test_mean_slope_is_that_of_the_expected_accepted_drafts(drafter, target):
    """Every weight of the drafter, over all blocks with their probabilities; with states reused and without."""
    reading = posttraining.read_sequence(target, TOKENS, drafter.taps)
    for p in (2, 6):
        exact = expected_drafts(drafter, target, reading.features, p)
        (1 - exact / SLOTS).backward()
        slope, (uniforms, weights) = flat_slopes(drafter), every_block(drafter, reading.features, p)
        assert torch.linalg.vector_norm(slope) > 1e-2
        assert_agree(weights.sum(), 1.0, "float64")
        for reuse in (True, False):
            drafts = 0.0
            for u, weight in zip(uniforms, weights, strict=True):
                found = losses_of(DREAL, target, drafter, reading, [p], [u], reuse=reuse)
                (weight * found.total(DREAL)).backward()
                drafts += weight * (found.length - 1)
            assert_agree(flat_slopes(drafter), slope, "solver")
            assert_agree(drafts, exact, "solver")


def test_held_out_length_is_the_expected_one(drafter, target):
    """Mean over many seeds against enumeration, within 5 of its standard errors; same seed, same value."""
    text = training.Sequence(TOKENS, np.arange(len(TOKENS)) >= 2)
    features = posttraining.read_sequence(target, TOKENS, drafter.taps).features
    exact = 1 + np.mean([float(expected_drafts(drafter, target, features, p).detach()) for p in range(2, 7)])
    found = [posttraining.expected_length(target, drafter, [text] * 8, 5, seed) for seed in range(30)]
    assert abs(np.mean(found) - exact) < 5 * np.std(found) / len(found) ** 0.5 + 1e-9
    assert posttraining.expected_length(target, drafter, [text] * 8, 5, 0) == found[0] != found[1]


def test_last_draft_is_not_read(drafter, target):
    reading, found = posttraining.read_sequence(target, TOKENS, drafter.taps), []
    for last in (1e-9, 0.4, 0.8, 1 - 1e-9):
        recipe = posttraining.OnlineRecipe(dreal=1.0, tv_static=1.0)
        losses_of(recipe, target, drafter, reading, [2, 6], np.full((2, SLOTS), [0.3, 0.6, last])).total(
            recipe
        ).backward()
        found.append(flat_slopes(drafter))
    for slope in found[1:]:
        assert_agree(slope, found[0], "exact")


# What is drafted and what the target is asked


def test_chains_are_those_that_the_drafter_proposes(drafter, target):
    rng, reading = np.random.default_rng(0), posttraining.read_sequence(target, TOKENS, drafter.taps)
    anchors, uniforms = np.array([0, 2, 2, 5, 7]), rng.random((5, SLOTS))
    blocks = posttraining.Blocks(drafter, reading.features, TOKENS, anchors)
    drafts, behaviour = posttraining.roll_out(blocks, uniforms)
    for p, u, chain, b in zip(anchors, uniforms, drafts.numpy(), behaviour, strict=True):
        context = drafter.context()
        context.append(reading.features[:p])
        proposal = drafter.propose(context, TOKENS[p])
        assert_agree(chain, proposal.sample(u[None])[0], "exact")
        seen = np.concatenate([TOKENS[[p]], chain])
        rows = torch.stack([proposal.probs(k, seen[None, : k + 1])[0, chain[k]] for k in range(SLOTS)])
        assert_agree(b, rows, "float64")


def test_both_passes_see_the_same_chain(drafter, target):
    """On policy a ratio is an accept factor; and no token that may be drawn is so rare that the floor under b acts."""
    rng, reading = np.random.default_rng(1), posttraining.read_sequence(target, TOKENS, drafter.taps)
    anchors = np.tile(np.arange(8), 50)
    with torch.no_grad():
        blocks = posttraining.Blocks(drafter, reading.features, TOKENS, anchors)
        drafts, behaviour = posttraining.roll_out(blocks, rng.random((len(anchors), SLOTS)))
        q = torch.softmax(blocks.logits(drafts[:, :-1]), dim=-1)
    assert float(q[q > 0].min()) > SMALLEST_BEHAVIOUR
    counted = np.ones(drafts.shape, dtype=bool)
    p = posttraining.target_rows(target, reading, TOKENS, anchors, drafts.numpy(), counted).probs
    p, q = (rows.gather(-1, drafts[..., None])[..., 0] for rows in (p, q))
    assert_agree(torch.minimum(p, q) / behaviour, (p / q).clamp(max=1), "float64")


@st.composite
def chains(draw):
    """A text of a few tokens, anchors in it, and drafts that often repeat it."""
    rng = np.random.default_rng(draw(seeds))
    tokens = rng.integers(VOCAB, size=draw(st.integers(1, 12)))
    anchors = np.sort(rng.integers(len(tokens), size=draw(st.integers(1, 16))))
    slots = draw(st.integers(1, 5))
    drafts = rng.integers(VOCAB, size=(len(anchors), slots))
    text = np.concatenate([tokens, rng.integers(VOCAB, size=slots)])
    repeats = rng.random(drafts.shape) < draw(st.sampled_from([0.0, 0.7, 0.9, 1.0]))
    return tokens, anchors, np.where(repeats, text[anchors[:, None] + 1 + np.arange(slots)], drafts)


@settings(max_examples=30)
@given(chains(), st.booleans())
def test_target_rows_are_those_of_plain_forwards(found, reuse):
    """And they take one position for each different suffix, one row of logits for each different beginning."""
    (tokens, anchors, drafts), target = found, random_target()
    counted = until_stop(drafts, [STOP])
    rows = posttraining.target_rows(
        target, posttraining.read_sequence(target, tokens, (0,)), tokens, anchors, drafts, counted, reuse
    )
    known, anew = [], []
    for a, k in np.argwhere(counted):
        text = (*tokens[: anchors[a] + 1], *drafts[a, :k])
        assert_agree(rows.probs[a, k], torch.softmax(target.logits(np.array(text))[-1], dim=-1), "float64")
        repeats = k == 0 or (reuse and text == tuple(tokens[: len(text)]))
        (known if repeats else anew).append(text if reuse else (anchors[a], text))
    assert rows.reused == len(known)
    assert rows.grown == len(set(anew))
    assert rows.read_out == len(set(known)) + len(set(anew))
    assert rows.probs.shape == (*drafts.shape, VOCAB)


def test_reuse_changes_nothing(drafter, target):
    """Sums and slopes of many blocks, some of whose drafts repeat the text; and the target reads less."""
    rng, tokens = np.random.default_rng(4), np.tile(TOKENS, 4)
    reading, recipe = (
        posttraining.read_sequence(target, tokens, drafter.taps),
        posttraining.OnlineRecipe(dreal=1.0, tv_static=1.0),
    )
    anchors, found = np.arange(30), {}
    uniforms = rng.random((30, SLOTS))
    for reuse in (True, False):
        losses = losses_of(recipe, target, drafter, reading, anchors, uniforms, tokens, reuse=reuse)
        losses.total(recipe).backward()
        found[reuse] = losses, flat_slopes(drafter)
    (less, slope), (more, other) = found[True], found[False]
    assert_agree(slope, other, "float64")
    for name in ("length", "overlap", *recipe.terms):
        sums = [losses.terms.get(name, getattr(losses, name, None)) for losses in (less, more)]
        assert_agree(sums[0], sums[1], "float64")
    assert less.slots == more.slots
    assert more.reused == 30 < less.reused
    assert less.grown < more.grown <= more.slots - more.reused
    assert less.grown <= less.slots - less.reused


def test_suffixes_take_one_forward_and_logits_only_where_a_slot_asks(target, monkeypatch):
    drafter, forwards, rows = random_drafter("vanilla", target), [], []
    forward, read_out = Decoder.forward, Decoder.read_out
    monkeypatch.setattr(Decoder, "forward", lambda *a: forwards.append(len(a[1])) or forward(*a))
    monkeypatch.setattr(Decoder, "read_out", lambda *a: rows.append(len(a[1])) or read_out(*a))
    reading = posttraining.read_sequence(target, TOKENS, drafter.taps)
    uniforms = np.random.default_rng(0).random((32, SLOTS))
    found = losses_of(DREAL, target, drafter, reading, np.arange(32) % 8, uniforms)
    assert forwards == [len(TOKENS), found.grown] and found.grown > 0
    assert rows == [found.read_out] and found.read_out < found.slots


def test_a_stop_ends_its_block(target):
    """Token 0 and the stop token are drawn: slot 2 adds nothing and the target is not asked about it."""
    drafter = random_drafter("dflash", target)
    reading = posttraining.read_sequence(target, TOKENS, drafter.taps)
    blocks = posttraining.Blocks(drafter, reading.features, TOKENS, np.array([2]))
    rows = torch.softmax(blocks.base[0].detach(), dim=-1)
    before = rows.cumsum(dim=-1) - rows
    uniforms = np.array([[float(rows[0, 0] / 2), float(before[1, STOP] + rows[1, STOP] / 2), 0.5]])
    found = losses_of(DREAL, target, drafter, reading, [2], uniforms)
    texts = [TOKENS[:3], np.append(TOKENS[:3], 0)]
    p = torch.stack([torch.softmax(target.logits(text)[-1], dim=-1) for text in texts])
    a = overlap(p, rows[:2])
    kept = torch.clamp(p[0, 0] / rows[0, 0], max=1)
    assert found.slots == 2
    assert_agree(found.length, 1 + a[0] + kept * a[1], "float64")
    assert_agree(found.overlap, a.sum(), "float64")
    assert_agree(found.terms["dreal"], 1 - (a[0] + kept * a[1]) / SLOTS, "float64")


# Numbers at the edge


@pytest.mark.parametrize("recipe", [DREAL, posttraining.OnlineRecipe(tv_static=1.0)], ids=["dreal", "tv_static"])
@pytest.mark.parametrize("name", ["vanilla", "dflash2"])
@pytest.mark.parametrize("kind", ["one_hot_target", "one_hot_draft", "both"])
def test_slopes_stay_finite_where_nothing_is_accepted(kind, name, recipe):
    """Rows whose other words underflow to 0 in float32, in the target, the drafter or both."""
    target = random_target(dtype=torch.float32, sharpness=1.0 if kind == "one_hot_draft" else 400.0)
    drafter = random_drafter(name, target, torch.float32)
    if kind != "one_hot_target":
        drafter.head = -400.0 * drafter.head
    reading = posttraining.read_sequence(target, TOKENS, drafter.taps)
    uniforms = np.random.default_rng(0).random((16, SLOTS))
    found = losses_of(recipe, target, drafter, reading, np.tile(np.arange(8), 2), uniforms)
    found.total(recipe).backward()
    assert torch.isfinite(flat_slopes(drafter)).all() and torch.isfinite(found.length)
    if kind == "both":
        assert float(found.length) < 16 + 8  # mostly nothing is accepted


# The confidence head, memory, precision


@pytest.mark.parametrize("name", ["vanilla", "rnn_in_place", "attention"])
def test_confidence_trains_its_own_head_only(name, target):
    """BCE against the overlap; every other weight has the slope that it has without the term, bit by bit."""
    drafter, found = random_drafter(name, target), []
    reading, uniforms = (
        posttraining.read_sequence(target, TOKENS, drafter.taps),
        np.random.default_rng(0).random((8, SLOTS)),
    )
    own = torch.cat([torch.full((p.numel(),), "confidence" in n) for n, p in drafter.named_parameters()])
    for weight in (0.0, 1.0):
        recipe = posttraining.OnlineRecipe(dreal=1.0, confidence=weight)
        losses = losses_of(recipe, target, drafter, reading, np.arange(8), uniforms)
        losses.total(recipe).backward()
        found.append(flat_slopes(drafter))
    assert_agree(found[1][~own], found[0][~own], "exact")
    assert not found[0][own].any()

    blocks = posttraining.Blocks(drafter, reading.features, TOKENS, np.arange(8))
    drafts, _ = posttraining.roll_out(blocks, uniforms)
    counted = until_stop(drafts.numpy(), [STOP])
    p = posttraining.target_rows(target, reading, TOKENS, np.arange(8), drafts.numpy(), counted).probs
    a = overlap(p, torch.softmax(blocks.logits(drafts[:, :-1]), dim=-1))
    seen = torch.cat([torch.from_numpy(TOKENS)[:, None], drafts[:, :-1]], dim=1)
    trust = drafter.confidence(blocks.hidden[:, drafter.first :], seen)
    chance, counted = torch.sigmoid(trust), torch.from_numpy(counted)
    entropy = -(a * chance.log() + (1 - a) * (1 - chance).log())
    assert_agree(losses.terms["confidence"], torch.where(counted, entropy, 0).sum() / SLOTS, "float64")
    bias = torch.where(counted, chance - a, 0).sum() / SLOTS
    assert_agree(found[1][own][-1], bias, "float64")


def test_recomputed_activations_give_the_same_slopes(drafter, target):
    reading, uniforms = (
        posttraining.read_sequence(target, TOKENS, drafter.taps),
        np.random.default_rng(0).random((8, SLOTS)),
    )
    found = []
    for recompute in (False, True):
        losses_of(DREAL, target, drafter, reading, np.arange(8), uniforms, recompute=recompute).total(DREAL).backward()
        found.append(flat_slopes(drafter))
    assert_agree(found[1], found[0], "exact")


def test_products_in_bfloat16_keep_every_slope():
    """Weights are cast for the pass without slopes too; those casts must not serve the one with slopes."""
    target = random_target(dtype=torch.float32)
    for name in FAMILIES:
        drafter = random_drafter(name, target, torch.float32, spread=0.1)
        reading, uniforms = (
            posttraining.read_sequence(target, TOKENS, drafter.taps),
            np.random.default_rng(0).random((8, SLOTS)),
        )
        found = []
        for autocast in (None, torch.bfloat16):
            losses = losses_of(DREAL, target, drafter, reading, np.arange(8), uniforms, autocast=autocast)
            losses.total(DREAL).backward()
            assert losses.terms["dreal"].dtype == torch.float32
            found.append([p.grad is not None and bool(p.grad.any()) for p in drafter.parameters()])
            drafter.zero_grad()
        assert found[0] == found[1] and any(found[0])


# The loop


@pytest.fixture(scope="module")
def wide_target():
    return random_target(vocab_size=48, dtype=torch.float32, sharpness=3.0)


@pytest.fixture(scope="module")
def sequences(wide_target):
    """Four answers of up to 24 tokens."""
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 48, size=rng.integers(3, 8)) for _ in range(4)]
    answers = write_answers(wide_target, prompts, rng.random((4, 24)))
    rows = [{"prompt": p, "tokens": a.tokens, "stopped": a.stopped} for p, a in zip(prompts, answers, strict=True)]
    return [training_program.sequence_of(row, wide_target.stop_ids, 64) for row in rows]


def small_trainer(target, texts, name="vanilla", objective="dreal", dtype=torch.float32, **options):
    drafter = random_drafter(name, target, dtype, spread=0.05, slots=4, candidates=16)
    chosen = {"steps": 6, "sequences": 2, "anchors": 8, "learning_rate": 3e-3, "seed": 5} | options
    return posttraining.trainer_of(objective, target, drafter, texts, training.Settings(**chosen))


def weights(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.parameters])


@pytest.mark.parametrize("name", ["rnn", "attention", "dflash2"])
def test_same_seed_same_weights_and_resuming_goes_on_bit_by_bit(wide_target, sequences, name, tmp_path):
    whole, first, other = (small_trainer(wide_target, sequences, name, seed=seed) for seed in (5, 5, 6))
    steps = [whole.update() for _ in range(4)]
    assert [first.update() for _ in range(2)] == steps[:2]
    training.save_checkpoint(tmp_path / "state", first, {})
    resumed = small_trainer(wide_target, sequences, name)
    training.load_checkpoint(tmp_path / "state", resumed, {})
    assert [resumed.update() for _ in range(2)] == steps[2:]
    assert_agree(weights(resumed), weights(whole), "exact")
    other.update()
    assert (weights(other) != weights(whole)).any()


def test_anchors_a_few_at_a_time_add_up_to_the_step(sequences):
    target, found = random_target(vocab_size=48, sharpness=3.0), []
    for at_once in (0, 3):
        trainer = small_trainer(target, sequences, dtype=torch.float64, at_once=at_once, clip=1e9)
        step = trainer.update()
        found.append((step, torch.cat([p.grad.flatten() for p in trainer.parameters])))
    (whole, slope), (parts, other) = found
    assert_agree(other, slope, "float64")
    assert_agree(parts.loss, whole.loss, "float64")
    assert_agree(parts.tau, whole.tau, "float64")
    assert parts.counts["slots"] == whole.counts["slots"] and parts.counts["reused"] == whole.counts["reused"]
    shown = trainer.summary(parts)
    assert_agree(shown["J"], parts.tau - 1, "float64")
    assert_agree(shown["a"], parts.counts["overlap"] / parts.counts["slots"], "float64")
    assert 0 < shown["reused"] < 1 and shown["norm"] == parts.norm


def test_refused_rounds(target, wide_target, sequences):
    drafter = random_drafter("dflash", target)
    reading = posttraining.read_sequence(target, TOKENS, drafter.taps)
    for anchors in ([], [-1], [8]):
        with pytest.raises(ValueError, match="positions of the sequence of 8 tokens"):
            losses_of(DREAL, target, drafter, reading, np.array(anchors, dtype=int), np.zeros((len(anchors), SLOTS)))
    with pytest.raises(ValueError, match=r"2 blocks of 3 drafts need as many uniforms, got \(2, 2\)"):
        losses_of(DREAL, target, drafter, reading, [0, 1], np.zeros((2, 2)))
    drafter, recipe = (
        random_drafter("dflash", wide_target, torch.float32),
        posttraining.OnlineRecipe(dreal=1.0, confidence=1.0),
    )
    with pytest.raises(ValueError, match="no confidence head to train"):
        posttraining.OnlineTrainer(wide_target, drafter, sequences, training.Settings(1, 1), recipe)


@pytest.mark.parametrize("name", ["dflash", "vanilla", "attention", "dflash2"])
def test_objectives_differ_in_nothing_but_the_loss(wide_target, sequences, name, monkeypatch):
    """Sequences, anchors, rates and, for the online ones, drafts; and each moves every part of the drafter."""
    seen, draw, rows = [], training.draw_anchors, posttraining.target_rows
    drafted = []
    monkeypatch.setattr(training, "draw_anchors", lambda *a: seen.append((a[0], draw(*a))) or seen[-1][1])
    monkeypatch.setattr(posttraining, "target_rows", lambda *a: drafted.append(a[4]) or rows(*a))
    found = {}
    for objective in posttraining.OBJECTIVES:
        seen.clear(), drafted.clear()
        trainer = small_trainer(wide_target, sequences, name, objective)
        start = {n: p.detach().clone() for n, p in trainer.drafter.named_parameters()}
        step = trainer.update()
        rate = {group["lr"] for group in trainer.optimizer.param_groups}
        found[objective] = [np.concatenate([a for _, a in seen]), [len(s) for s, _ in seen], rate, list(drafted)]
        moved = {n.split(".")[0] for n, p in trainer.drafter.named_parameters() if (p != start[n]).any()}
        assert moved == {n.split(".")[0] for n in start}
        assert np.isfinite(step.loss) and step.norm > 0
    for objective, (anchors, lengths, rate, _) in found.items():
        assert_agree(anchors, found["dreal"][0], "exact")
        assert (lengths, rate) == (found["dreal"][1], found["dreal"][2]), objective
    assert len(found["dreal"][3]) == 2 and not found["dpace"][3]
    for mine, other in zip(found["dreal"][3], found["tv_static"][3], strict=True):
        assert_agree(mine, other, "exact")


def test_confidence_under_dpace_trains_its_own_head_only(wide_target, sequences):
    """Without the head's term every other weight moves alike; the family's own loss reaches the backbone through it."""
    found = {}
    for objective in ("dpace", "baseline"):
        for weight in (0.0, 1.0):
            trainer = small_trainer(wide_target, sequences, objective=objective)
            trainer.recipe = replace(trainer.recipe, confidence=weight)
            trainer.accumulate(sequences[0], [0])
            named = trainer.drafter.named_parameters()
            found[objective, weight] = torch.cat([p.grad.flatten() for n, p in named if "confidence" not in n])
    assert_agree(found["dpace", 0.0], found["dpace", 1.0], "exact")
    assert (found["baseline", 0.0] != found["baseline", 1.0]).any()


# The program


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target's folder with words w0..w47, w1 for masks, w2 to stop; a DSpark drafter's folder; prompts."""
    folder = tmp_path_factory.mktemp("models")
    target = folder / "target"
    target.mkdir()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(48)}, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"eos_token": "w2", "mask_token": "w1", "chat_template": "{{ messages[0].content }}"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    (target / "config.json").write_text(json.dumps(TARGET | {"vocab_size": 48}))
    model = random_target(vocab_size=48, dtype=torch.float32, sharpness=3.0)
    tensors = {name: model.get_parameter(name) for name in model.config.tensor_shapes()}
    save_file(tensors, target / "model.safetensors")
    raw = raw_config("dspark", slots=4, vocab_size=48)
    training_program.write_drafter(
        folder / "drafter", raw, random_drafter("dspark", model, torch.float32, 0.05, slots=4)
    )
    rows = [json.dumps({"prompt": " ".join(f"w{3 + (7 * i + j) % 45}" for j in range(4))}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(rows) + "\n")
    return folder


@pytest.fixture
def command(folders, tmp_path, monkeypatch):
    """The arguments of a small run of three steps; keyword arguments replace or (None) drop a flag, True sets one."""
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": tmp_path / "hub", "OMP_NUM_THREADS": "1"}.items():
        monkeypatch.setenv(name, str(value))

    def make(**flags):
        flags = {
            "target": folders / "target", "drafter": folders / "drafter", "out": tmp_path / "new", "preset": "tiny",
            "prompts": folders / "prompts.jsonl", "answers": tmp_path / "answers.jsonl", "sequences": 2, "anchors": 6,
            "answer_tokens": 12, "device": "cpu",
        } | flags  # fmt: skip
        given = {name: value for name, value in flags.items() if value is not None}
        return [
            text
            for name, value in given.items()
            for text in [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
        ]

    return make


def stored(path):
    state = torch.load(path, weights_only=True)
    return torch.cat([tensor.flatten() for tensor in state["drafter"].values()])


def test_every_objective_ends_in_a_folder_that_goes_on_drafting(command, folders, tmp_path, capsys):
    target = Decoder.load(folders / "target")
    start = (folders / "drafter" / "model.safetensors").read_bytes()
    for objective in posttraining.OBJECTIVES:
        out = tmp_path / objective
        example.main(command(out=out, objective=objective))
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report["objective"] == objective and report["steps"] == 3 and report["family"] == "dspark"
        assert report["counts"]["blocks"] == report["counts"]["weight"] or objective == "baseline"
        assert json.loads((out / "config.json").read_text()) == json.loads(
            (folders / "drafter" / "config.json").read_text()
        )
        assert (out / "model.safetensors").read_bytes() != start
        assert Drafter.load(out, target).gamma == 4
        if objective in ("dreal", "tv_static"):
            counts = report["counts"]
            assert 0 < counts["grown"] <= counts["slots"] - counts["reused"]
            assert abs(report["tau"] - 1 - report["J"]) < 1e-3 and 0 < report["a"] < 1


def test_an_interrupted_run_ends_where_an_undisturbed_one_does(command, tmp_path, monkeypatch):
    example.main(command(out=tmp_path / "whole"))
    updates, update = [], training.Trainer.update

    def stop_after_two(trainer):
        if len(updates) == 2:
            raise KeyboardInterrupt
        updates.append(update(trainer))
        return updates[-1]

    with monkeypatch.context() as patch, pytest.raises(SystemExit, match="--resume"):
        patch.setattr(training.Trainer, "update", stop_after_two)
        example.main(command(save_every=1))
    with pytest.raises(SystemExit, match="another objective"):
        example.main(command(resume=True, objective="tv_static"))
    example.main(command(resume=True, recompute=True))
    assert_agree(stored(tmp_path / "new.checkpoint"), stored(tmp_path / "whole.checkpoint"), "exact")


def test_smoke_run_in_bfloat16(command, capsys):
    example.main(command(limit=2, dtype="bfloat16", at_once=2, epochs=3, profile=True))
    report, log = capsys.readouterr()
    report = json.loads(report.splitlines()[-1])
    assert report["answers"] == 2 and report["steps"] == 2 and report["J"] > 0
    assert "estimate" in log and "backward" in log


def test_bad_commands(command, folders, tmp_path):
    with pytest.raises(SystemExit, match="there is nothing to resume"):
        example.main(command(resume=True))
    with pytest.raises(SystemExit, match="error:"):
        example.main(command(drafter=folders / "target"))
    with pytest.raises(SystemExit):
        example.main(command(objective="ce"))


# Comparing drafters on the same blocks


def test_drafted_lengths_are_recorded_resumed_and_compared(folders, tmp_path, capsys):
    target, prompts, out = folders / "target", folders / "prompts.jsonl", tmp_path / "drafted.jsonl"
    for seed in (1, 2):  # a training of two seeds that changed nothing
        shutil.copytree(folders / "drafter", tmp_path / f"same-{seed}")
    raw, model = raw_config("dspark", slots=4, vocab_size=48), Decoder.load(target)
    other = random_drafter("dspark", model, torch.float32, 0.5, slots=4)
    training_program.write_drafter(tmp_path / "other", raw, other)
    drafters = [folders / "drafter", tmp_path / "same-1", tmp_path / "same-2", tmp_path / "other"]
    arguments = ["--target", target, "--prompts", prompts, "--answer-tokens", 12, "--anchors", 3, "--device", "cpu",
                 "--out", out, "--seeds", "--drafter", *drafters]  # fmt: skip

    def run():
        drafted_length.main([str(word) for word in arguments])
        return json.loads(capsys.readouterr().out.splitlines()[-1])["tables"]

    tables = run()
    means, differences = ({tuple(row[:n]): row[n:] for row in tables[n - 2]["rows"]} for n in (2, 3))
    text = out.read_bytes()
    rows = [json.loads(line) for line in text.splitlines()][1:]
    assert [row["kind"] for row in rows] == ["answer"] * 6 + ["blocks"] * 24
    mine = [row for row in rows if row["kind"] == "blocks" and row["drafter"] == "other"]
    assert max(row["blocks"] for row in mine) == 3
    total = sum(row["length"] for row in mine) / sum(row["blocks"] for row in mine)
    assert_agree(means["other", "pooled"][2], total, "float64")
    old = Drafter.load(tmp_path / "other", model)
    words = [f"w{3 + j}" for j in range(4)]
    tokens = np.array([*(int(w[1:]) for w in words), *rows[0]["tokens"]])
    sequence = training.Sequence(tokens, np.arange(len(tokens)) >= 4)
    length, blocks = posttraining.drafted_length(model, old, sequence, 3, [20260818, 0])
    assert (mine[0]["length"], mine[0]["blocks"]) == (pytest.approx(length, rel=1e-5), blocks)
    assert means["same", "pooled"][:3] == [12, 2 * means["drafter", "pooled"][1], means["drafter", "pooled"][2]]
    assert differences["same", "drafter", "pooled"] == [0, [0, 0], [0, 0]]
    assert differences["other", "drafter", "pooled"][0] != 0

    lines = text.splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:12]) + b'{"kind": "blo')
    run()
    assert out.read_bytes() == text
    out.write_bytes(b"".join([*lines[:12], *lines[13:]]))  # a row comes back at the end
    assert [table["rows"] for table in run()] == [table["rows"] for table in tables]
    with pytest.raises(SystemExit, match="name of a mean over tasks"):
        shutil.copy(prompts, tmp_path / "macro.jsonl")
        arguments[3] = tmp_path / "macro.jsonl"
        run()
    arguments[3] = prompts
    arguments[arguments.index("--anchors") + 1] = 4
    with pytest.raises(SystemExit, match="design"):
        run()
    arguments[arguments.index("--anchors") + 1] = 0
    with pytest.raises(SystemExit, match="--anchors must be at least 1"):
        run()


# Slopes of the objectives


def test_signal_and_direction_of_noisy_slopes():
    """Known means and noise in 400 dimensions: the ratios within the jackknife's errors."""
    rng, n, size = np.random.default_rng(0), 60, 400
    uphill, across = np.linalg.qr(rng.standard_normal((size, 2)))[0].T
    mine = 3 * uphill + 4 * across + 0.5 * rng.standard_normal((n, size))
    theirs = 2 * uphill + 0.3 * rng.standard_normal((n, size))
    (row,) = objective_slopes.report({"mine": objective_slopes.products(mine, theirs)}).rows
    single = 25 + 0.25 * size
    for value, error, exact in zip(row[1::2], row[2::2], (25 / single, 0.6, 3 / single**0.5), strict=True):
        assert abs(value - exact) < 4 * error < 0.2
    rows = objective_slopes.report({"none": objective_slopes.products(mine - mine.mean(axis=0), theirs)}).rows
    assert rows[0][3] is None  # a mean that is lost in its noise has no direction


def test_the_slopes_are_those_of_training(sequences, wide_target):
    settings = training.Settings(3, 2, 6, 0, 1e-3, clip=1e9, seed=5)
    for objective in posttraining.OBJECTIVES:
        first, second = (
            posttraining.trainer_of(objective, wide_target, random_drafter("vanilla", wide_target), sequences, settings)
            for _ in range(2)
        )
        for trainer in (first, second):
            trainer.recipe = replace(trainer.recipe, confidence=0.0)
        slope = objective_slopes.slopes_of(first, objective)[0]
        assert_agree(float(np.linalg.norm(slope)), second.update().norm, "walk32")


def test_slopes_of_a_folder(folders, tmp_path, capsys):
    arguments = ["--target", folders / "target", "--drafter", folders / "drafter", "--prompts",
                 folders / "prompts.jsonl", "--answers", tmp_path / "answers.jsonl", "--answer-tokens", 12, "--steps",
                 4, "--sequences", 2, "--anchors", 4, "--device", "cpu"]  # fmt: skip
    objective_slopes.main([str(word) for word in arguments])
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["table"]["rows"]
    assert [row[0] for row in rows] == list(posttraining.OBJECTIVES)
    assert rows[-1][3] in (pytest.approx(1.0), None) and all(row[1] <= 1 for row in rows)
    with pytest.raises(SystemExit, match="--steps must be at least 3"):
        objective_slopes.main([str(word) for word in [*arguments, "--steps", 2]])


def test_two_processes_make_the_same_steps_as_one(command, tmp_path):
    """Sequences 3 a step, so that the two processes get two and one."""
    example.main(command(out=tmp_path / "one", sequences=3))
    train_in_two("dreal_posttrain.py", command(out=tmp_path / "two", sequences=3))
    assert_agree(stored(tmp_path / "two.checkpoint"), stored(tmp_path / "one.checkpoint"), "walk32")
