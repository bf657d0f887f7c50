"""Speculative decoding: the output law by enumeration, loops of the authors' own code, and plain decoding.

Field cases A1 (the array that was drawn from), B3 (greedy ties), C1 and C2 (stops and caps inside a block), D2 (rows of
one batch).  Fast and reference decode the same tokens.
"""

import gc
import importlib
from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import groupby, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

import reference
import reference.engine
from models.config import DecoderConfig
from models.toy import ToyTarget, drafted_length, random_table
from models.toy_drafters import ToyDrafter
from reference.engine import Engine, Request, RoundStats, Text, tokens_per_round, uniforms
from reference.laws import SamplingLaw, draw, warp
from reference.verify import Verdict, residual, verify_block
from tests.agreement import assert_agree
from tests.strategies import seeds
from tests.test_drafters import FAMILIES, TIED, config_of, random_tensors

LAST = np.nextafter(1, 0)
GREEDY = SamplingLaw(0)
each_wing = pytest.mark.parametrize("wing", ["reference", "fast"])


def backend(wing):
    if wing == "fast":
        pytest.importorskip("torch")
    return importlib.import_module(wing)


def engine_of(wing):
    backend(wing)
    return importlib.import_module(f"{wing}.engine")


# The output law, by enumeration


class Trusting(ToyDrafter):
    """A toy drafter that is confident after token 0 only."""

    def propose(self, context, token, law):
        proposal = super().propose(context, token, law)
        proposal.confidence = lambda slot, history: np.where(history[:, -1] == 0, 9.0, -9.0)
        return proposal


def outcomes(run):
    """{outcome: probability} of a program run(choose), where choose(law) draws an index; every way once."""
    waiting, found = [()], {}
    while waiting:
        script, taken, weight = waiting.pop(), [], 1.0

        def choose(law, script=script, taken=taken):
            nonlocal weight
            options = np.flatnonzero(law)
            if len(taken) >= len(script):
                waiting.extend((*taken, other) for other in options[1:])
            taken.append(script[len(taken)] if len(taken) < len(script) else options[0])
            weight *= law[taken[-1]]
            return taken[-1]

        outcome = run(choose)
        found[outcome] = found.get(outcome, 0.0) + weight
    return found


def decided(monkeypatch, choose):
    """Let `choose` decide whatever the engine's uniforms decide, through its own functions."""

    def inside(law):  # a uniform that draws the chosen token
        token = choose(law / law.sum())
        return (law[:token].sum() + law[token] / 2) / law.sum()

    def chosen_draw(rows, _):
        return draw(rows, [inside(rows[0])])

    def chosen_verdict(p, q, tokens, _):
        u, accepted = np.zeros(len(tokens) + 1), 0
        for k, x in enumerate(tokens):
            ratio = min(1.0, p[k, x] / q[k, x])
            u[k] = (LAST, 0.0)[choose(np.array([1 - ratio, ratio]))]
            if u[k]:
                break
            accepted += 1
        u[-1] = inside(residual(p[accepted], q[accepted]) if accepted < len(tokens) else p[-1])
        return verify_block(p, q, tokens, u)

    monkeypatch.setattr(reference.engine, "draw", chosen_draw)
    monkeypatch.setattr(reference.engine, "verify_block", chosen_verdict)


def text_law(target, prefix, length, law):
    """{tokens: probability} of the target's own texts of at most so many tokens."""
    if not length:
        return {(): 1.0}
    found = {}
    for token, p in enumerate(warp(target.logits(prefix), law)):
        rest = {(): 1.0} if token in target.stop_ids else text_law(target, (*prefix, token), length - 1, law)
        found |= {(token, *tail): p * weight for tail, weight in rest.items() if p}
    return found


def row_of(vocab, seed, keep=99):
    """A drafter's rows, a different one for everything it may see; `keep` candidates of it."""

    def next_token(prefix, slot, seen):
        row = np.random.default_rng([seed, *prefix, 99, slot, 98, *seen]).dirichlet(np.ones(vocab))
        row[np.argsort(-row)[keep:]] = 0
        return row / row.sum()

    return next_token


LAWS = {
    "temperature 1": {},
    "greedy drafts": {"draft_law": GREEDY},
    "hotter drafts": {"draft_law": SamplingLaw(3.0)},
    "confidence": {"threshold": 0.5},
    "greedy drafts, confidence": {"draft_law": GREEDY, "threshold": 0.5},
}


@pytest.mark.parametrize("settings", LAWS)
@pytest.mark.parametrize("order", [0, 1, None])
@pytest.mark.parametrize(("vocab", "slots", "length", "keep"), [(2, 2, 5, 2), (3, 2, 4, 2)])
def test_texts_have_the_law_of_the_target(monkeypatch, settings, order, vocab, slots, length, keep):
    """Chains of every kind, lattices of `keep` candidates, drafts with one-hot rows, blocks cut by confidence."""
    target = ToyTarget(vocab, random_table(vocab, 9, seed=3).next_token)
    drafter = Trusting(reference, slots, order, row_of(vocab, 7, keep))
    engine, request = Engine(target, drafter, 20, **LAWS[settings]), Request((1, 0), length)
    assert_law(monkeypatch, engine, request, text_law(target, (1, 0), length, SamplingLaw()))


@pytest.mark.parametrize("law", [SamplingLaw(0.7, top_k=2), SamplingLaw(top_p=0.8), GREEDY])
def test_texts_have_the_filtered_law_and_end_at_stops(monkeypatch, law):
    target = ToyTarget(3, random_table(3, 9, seed=4).next_token, stop_ids=(2,))
    drafter, request = Trusting(reference, 3, None, row_of(3, 8)), Request((0,), 4, law)
    expected = text_law(target, (0,), 4, law)
    assert_law(monkeypatch, Engine(target, drafter, 20), request, expected)
    assert_law(monkeypatch, Engine(target, drafter, 20, draft_law=SamplingLaw()), request, expected)


def assert_law(monkeypatch, engine, request, expected):
    def run(choose):
        decided(monkeypatch, choose)
        (completion,) = engine.generate([request])
        return completion.tokens

    with monkeypatch.context():
        found = outcomes(run)
    assert found.keys() == expected.keys()
    assert_agree(np.array([found[text] for text in expected]), np.array(list(expected.values())), "float64")


def test_the_enumeration_notices_another_law(monkeypatch):
    """Field case A1: drafts judged by rows they were not drawn from give the text another law."""
    target = ToyTarget(2, random_table(2, 9, seed=3).next_token)
    engine = Engine(target, ToyDrafter(reference, 2, 1, row_of(2, 7)), 20)
    drafted = engine._draft

    def careless(*arguments):
        drafts, _ = drafted(*arguments)
        return drafts, np.full((len(drafts), 2), 0.5)

    engine._draft = careless
    with pytest.raises(AssertionError, match="differs by"):
        assert_law(monkeypatch, engine, Request((1, 0), 4), text_law(target, (1, 0), 4, SamplingLaw()))


def test_expected_tokens_of_a_round(monkeypatch):
    """Committed tokens of the first round, weighted over all ways it can go, against the exact recursion of the toy."""
    target = ToyTarget(3, random_table(3, 9, seed=3).next_token)
    table = np.random.default_rng(1).normal(size=(2, 3, 3))  # [slot, predecessor, token]
    drafter = ToyDrafter(reference, 2, 1, lambda prefix, slot, seen: warp(table[slot, seen[-1]]))

    def run(choose):
        decided(monkeypatch, choose)
        return Engine(target, drafter, 20).generate([Request((1, 0), 4)])[0].rounds[0].committed

    with monkeypatch.context():
        found = outcomes(run)
    first = target.next_token((1, 0))
    expected = sum(p * drafted_length(target, (1, 0, token), table)[0] for token, p in enumerate(first))
    assert_agree(sum(committed * weight for committed, weight in found.items()), expected, "float64")


# Small models in both wings


@cache
def model_of(wing, family="vanilla", vocab=11, seed=0, dtype="float64", stop_ids=(), kinship=0.0, **fields):
    """(target, drafter) with random weights, the same in both wings.

    kinship: 0 = strangers; more = a target that mostly looks at the last token and a vanilla drafter that knows it.
    """
    pack, random = backend(wing), np.random.default_rng([seed, 5])
    config = DecoderConfig.from_dict(
        dict(
            model_type="qwen3",
            vocab_size=vocab,
            hidden_size=6,
            intermediate_size=5,
            num_hidden_layers=4,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=4,
            rms_norm_eps=1e-6,
            rope_theta=100.0,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )
    weights = {n: ("norm" in n) + 0.5 * random.standard_normal(s) for n, s in config.tensor_shapes().items()}
    drafting = config_of(family, vocab_size=vocab, draft_vocab_size=vocab, **fields)
    tensors = random_tensors(drafting, seed)
    if kinship:
        for name in weights:
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weights[name] /= 4 * kinship
        known = weights["model.embed_tokens.weight"]
        known = known / np.sqrt((known**2).mean(axis=1, keepdims=True)) * weights["model.norm.weight"]
        tensors["markov_head.markov_w1.weight"] = known
        tensors["markov_head.markov_w2.weight"] = kinship * weights["lm_head.weight"]

    def there(arrays):
        if wing == "fast":
            torch = pytest.importorskip("torch")
            return {name: torch.from_numpy(a).to(getattr(torch, dtype)) for name, a in arrays.items()}
        return {name: a.astype(dtype) for name, a in arrays.items()}

    target = pack.Decoder(config, there(weights), stop_ids)
    return target, pack.Drafter(drafting, there(tensors), target.embedding, target.head)


def prompts(count, vocab=11, seed=0):
    random = np.random.default_rng([seed, 6])
    return [tuple(random.integers(0, vocab, random.integers(1, 13)).tolist()) for _ in range(count)]


def greedy_text(target, prompt, length):
    """Plain greedy decoding without any cache, the reference's slowest way."""
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(int(np.argmax(target.logits(tokens)[-1])))
    return tuple(tokens[len(prompt) :])


@each_wing
@pytest.mark.parametrize("block_size", [2, 3, 8, 16])
def test_greedy_texts_are_those_of_plain_decoding(wing, block_size):
    """Field case B3 (b): float64, batches of 1 to 8, blocks of 2 to 16; some drafts accepted, some not."""
    options = {"kinship": 1.0, "block_size": block_size, "markov_rank": 6}
    plain, _ = model_of("reference", **options)
    requests = [Request(prompt, 24, GREEDY) for prompt in prompts(8)]
    expected = [greedy_text(plain, request.prompt, 24) for request in requests]
    target, drafter = model_of(wing, **options)
    for batch in (1, 3, 8) if wing == "fast" else (8,):
        engine = engine_of(wing).Engine(target, drafter, 40, batch=batch)
        found = engine.generate(requests)
        assert [completion.tokens for completion in found] == expected
        assert 1.2 < tokens_per_round(found) < block_size + 0.8
    plainly = engine.generate(requests, speculate=False)
    assert [completion.tokens for completion in plainly] == expected
    assert {r for completion in plainly for r in completion.rounds} == {RoundStats(0, 0, 1)}


def test_greedy_texts_of_200_tokens():
    pytest.importorskip("torch")
    target, drafter = model_of("fast", kinship=1.0, block_size=8, markov_rank=6)
    engine = engine_of("fast").Engine(target, drafter, 220, batch=4)
    requests = [Request(prompt, 200, GREEDY) for prompt in prompts(4, seed=1)]
    found, plain = engine.generate(requests), engine.generate(requests, speculate=False)
    assert [c.tokens for c in found] == [c.tokens for c in plain]


def test_greedy_texts_in_bfloat16_part_at_near_ties_only(capsys):
    """Field case B3 (c): where the two ways part, the plain forward's two largest logits lie within 4 bfloat16 ulps."""
    torch = pytest.importorskip("torch")
    target, drafter = model_of("fast", kinship=1.0, block_size=8, markov_rank=6, dtype="bfloat16")
    engine = engine_of("fast").Engine(target, drafter, 120, batch=4)
    requests = [Request(prompt, 100, GREEDY) for prompt in prompts(8, seed=2)]
    found, plain = engine.generate(requests), engine.generate(requests, speculate=False)
    for request, mine, theirs in zip(requests, found, plain, strict=True):
        for i, (a, b) in enumerate(zip(mine.tokens, theirs.tokens, strict=True)):
            if a != b:
                top = target.logits([*request.prompt, *theirs.tokens[:i]])[-1].topk(2).values
                ulp = 2.0 ** (torch.log2(top[0].abs()).floor().item() - 7)
                print(f"parted at token {i}, margin {(top[0] - top[1]).item() / ulp:.1f} ulps")
                assert top[0] - top[1] <= 4 * ulp
                break


def test_a_session_that_is_extended_and_cropped():
    """What it reads after a crop is what a new session reads; a prefix with a tree stays as it is."""
    target, tokens = model_of("reference")[0], np.arange(12) % 11
    session = target.open(tokens[:5], (0, 2))
    session.extend(tokens[[7, 1, 1]])
    session.crop(6)
    session.crop(5)
    logits, features = session.extend(tokens[5:9])
    assert_agree(logits, target.logits(tokens)[5:9], "float64")
    assert_agree(features, target.open(tokens, (0, 2)).features[5:9], "float64")
    assert_agree(session.grow([-1], tokens[9:10]), target.logits(tokens)[9:10], "float64")
    for refused in (lambda: session.extend([1]), lambda: session.crop(3)):
        with pytest.raises(ValueError, match="from which a tree has grown"):
            refused()
    for length in (0, 6):
        with pytest.raises(ValueError, match=f"a prefix of 5 tokens cannot be cropped to {length}"):
            target.open(tokens[:5]).crop(length)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "logits32"), ("float64", "float64")])
def test_rows_of_uneven_length_are_extended_together(dtype, kind):
    """Field case D1: every query sees its own row up to itself, however much of the cache is looked at."""
    torch = pytest.importorskip("torch")
    target, _ = model_of("fast", dtype=dtype)
    texts, lengths = [np.arange(i, i + 12) % 11 for i in range(3)], [3, 5, 8]
    cache = target.cache(4, 20)
    for row, (text, length) in enumerate(zip(texts, lengths, strict=True)):
        target.prefill(cache, row, text[:length])
    new = torch.from_numpy(np.stack([text[n : n + 4] for text, n in zip(texts, lengths, strict=True)]))
    for span in (12, 20):
        logits, features = target.extend(cache, new, torch.tensor(lengths), span, (-1, 1))
        for row, (text, n) in enumerate(zip(texts, lengths, strict=True)):
            assert_agree(logits[row], target.logits(text)[n : n + 4], kind)
            assert_agree(features[row], target.open(text, (-1, 1)).features[n : n + 4], kind)


# Both wings, and rows of one batch


@st.composite
def workloads(draw):
    """A family, engine settings and requests of uneven length and law, some of which stop."""
    family = draw(st.sampled_from(sorted(FAMILIES)))
    fields = {"block_size": draw(st.integers(2, 6)), "in_place": draw(st.booleans())}
    options = {
        "draft_law": draw(st.sampled_from([None, GREEDY, SamplingLaw(1.5)])),
        "lattice": draw(st.sampled_from([None, 0, 3])),
        "threshold": draw(st.sampled_from([0.0, 0.5])) if family not in ("dflash", "dflash2") else 0.0,
    }
    if family == "attention":
        fields |= {"head_gate": draw(st.sampled_from(["none", "state_output"])), "head_anchor": draw(st.booleans())}
    laws = [SamplingLaw(), SamplingLaw(0.5, top_k=4), SamplingLaw(1.5, top_p=0.9), GREEDY]
    requests = [
        Request(prompt, draw(st.integers(0, 14)), draw(st.sampled_from(laws)), (i, 3))
        for i, prompt in enumerate(prompts(draw(st.integers(1, 6)), seed=draw(st.integers(0, 9))))
    ]
    return family, fields, options, requests, draw(st.sampled_from([(), (3, 7)]))


def alike(family, fields, options, requests, stop_ids=(), seed=0, batch=3):
    """Both wings decode the requests to the same completions, with drafts and without."""
    found = []
    for wing in ("reference", "fast"):
        target, drafter = model_of(wing, family, seed=seed, stop_ids=stop_ids, **fields)
        engine = engine_of(wing).Engine(target, drafter, 24, batch=batch, **options)
        found.append([engine.generate(requests), engine.generate(requests, speculate=False)])
    assert found[0] == found[1]


@settings(max_examples=20)
@given(workloads(), st.integers(0, 3), st.integers(1, 4))
def test_wings_decode_the_same_tokens_in_the_same_rounds(workload, seed, batch):
    """float64; the reference runs requests one by one, the fast wing side by side, joining and leaving."""
    pytest.importorskip("torch")
    alike(*workload, seed, batch)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("in_place", [False, True])
def test_wings_agree_on_every_family(family, in_place):
    pytest.importorskip("torch")
    requests = [Request(prompt, 12, SamplingLaw(1.5), i) for i, prompt in enumerate(prompts(4))]
    alike(family, {"block_size": 5, "in_place": in_place}, {}, requests)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_a_request_alone_and_in_a_batch(family, dtype):
    pytest.importorskip("torch")
    target, drafter = model_of("fast", family, dtype=dtype, stop_ids=(3,), block_size=5)
    requests = [Request(prompt, 15, SamplingLaw(1.5), i) for i, prompt in enumerate(prompts(7))]
    engine = engine_of("fast").Engine(target, drafter, 40, batch=4)
    together = engine.generate(requests)
    assert len({len(completion.tokens) for completion in together}) > 2, "leave at different times"
    assert [engine.generate([request])[0] for request in requests] == together
    assert engine.generate(requests[::-1]) == together[::-1]


def scripted(turns):
    """Verdicts that accept 0, 2 and 5 drafts in turn whatever they are, for one block and for the rows of a batch."""

    def accepted(key, drafted):
        turns[key] = turns.get(key, -1) + 1
        return min((0, 2, 5)[(turns[key] + key) % 3], int(drafted))

    def block(p, q, tokens, u):
        a = accepted(int(u[-1] * 3), len(tokens))
        return Verdict(a, int(p[a].argmax()))

    def rows(p, q, tokens, drafted, u):
        taken = [accepted(int(own[-1] * 3), count) for own, count in zip(u, drafted, strict=True)]
        return [Verdict(a, int(row[a].argmax())) for row, a in zip(p, taken, strict=True)]

    return block, rows


def test_every_row_keeps_its_own_length(monkeypatch):
    """Field case D2 (a): prompts of 3, 7, 12 tokens, 0, 2 and 5 drafts accepted in turn over 6 rounds."""
    pytest.importorskip("torch")
    requests = [Request(tuple(t % 11 for t in range(length)), 21, seed=i) for i, length in enumerate((3, 7, 12))]

    def named(seed, position, slots):  # the last uniform says whose round it is
        return np.append(uniforms(seed, position, slots)[:-1], (seed + 0.5) / 3)

    found, lengths = [], {}
    for wing in ("reference", "fast"):
        module, (block, rows) = engine_of(wing), scripted({})
        monkeypatch.setattr(module, *(("verify_block", block) if wing == "reference" else ("verify_rows", rows)))
        target, drafter = model_of(wing, block_size=6, seed=2)
        engine = module.Engine(target, drafter, 40, batch=3, uniforms=named)
        if wing == "fast":
            step = engine._read_for_both

            def watched(tokens, anchors, span, step=step):
                for row, anchor in enumerate(anchors.tolist()):
                    lengths.setdefault(row, []).append(anchor)
                return step(tokens, anchors, span)

            engine._read_for_both = watched
        found.append(engine.generate(requests))
    assert found[0] == found[1]
    for row, (request, completion) in enumerate(zip(requests, found[1], strict=True)):
        committed = [(0, 2, 5)[(turn + row) % 3] + 1 for turn in range(6)]
        assert [r.committed for r in completion.rounds] == committed
        assert lengths[row] == (len(request.prompt) + np.cumsum([0, *committed[:-1]])).tolist()


def test_leftovers_in_the_caches_are_hidden():
    """Field case D2 (b): what lies behind a row's length, or in rows that nobody owns, changes nothing."""
    torch = pytest.importorskip("torch")
    for family in ("vanilla", "attention"):
        target, drafter = model_of("fast", family, block_size=5)
        requests = [Request(prompt, 15, SamplingLaw(), i) for i, prompt in enumerate(prompts(5))]
        texts = []
        for leftover in (0.0, 1e4, -1e4):
            engine = engine_of("fast").Engine(target, drafter, 40, batch=3)
            for tensor in caches(engine):
                tensor.fill_(leftover)
            texts.append(engine.generate(requests))
        assert texts[0] == texts[1] == texts[2]
        assert torch.isfinite(engine.cache.keys).all()


def caches(engine):
    return [engine.cache.keys, engine.cache.values, *(t for pair in engine.contexts.buffers for t in pair)]


def test_memory_is_allocated_once():
    """Caches stay where they are, and no tensor outlives the requests it served."""
    torch = pytest.importorskip("torch")
    target, drafter = model_of("fast", "attention", block_size=5)
    engine = engine_of("fast").Engine(target, drafter, 40, batch=3)

    def held():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if issubclass(type(t), torch.Tensor))

    counts, places = [], [t.data_ptr() for t in caches(engine)]
    for turn in range(4):
        engine.generate([Request(prompt, 8, seed=i) for i, prompt in enumerate(prompts(7, seed=turn))])
        counts.append(held())
    assert len(set(counts[1:])) == 1
    assert [t.data_ptr() for t in caches(engine)] == places


def test_tokens_are_judged_by_the_rows_they_were_drawn_from(monkeypatch):
    """Field case A1 (d): bit for bit, in bfloat16, float32 and float64, with and without a lattice."""
    pytest.importorskip("torch")
    module, drawn, compared = engine_of("fast"), [], []

    def watched_draw(rows, *rest):
        drawn.append(rows)
        return plain_draw(rows, *rest)

    def watched_verdicts(p, q, tokens, drafted, u):
        for slot, rows in enumerate(drawn[len(drawn) - drafted.max() :]):  # before them, first tokens of texts
            assert_agree(q[:, slot], rows, "exact")
            compared.append(slot)
        verdicts = plain_verdicts(p, q, tokens, drafted, u)
        drawn.clear()
        return verdicts

    plain_draw, plain_verdicts = module.draw, module.verify_rows
    monkeypatch.setattr(module, "draw", watched_draw)
    monkeypatch.setattr(module, "verify_rows", watched_verdicts)
    for dtype, lattice in product(("bfloat16", "float32", "float64"), (0, 4)):
        target, drafter = model_of("fast", dtype=dtype, block_size=5)
        engine = module.Engine(target, drafter, 40, batch=2, lattice=lattice)
        engine.generate([Request(prompt, 10, SamplingLaw(), i) for i, prompt in enumerate(prompts(3, seed=4))])
    assert len(compared) > 60 and max(compared) == 4


@settings(max_examples=40)
@given(st.integers(1, 4), st.integers(0, 4), seeds)
def test_rows_are_verified_as_blocks_are(n, slots, seed):
    """All rows at once and one block at a time: the same verdicts; float64 and float32."""
    torch, rng = pytest.importorskip("torch"), np.random.default_rng(seed)
    p = warp(2 * rng.normal(size=(n, slots + 1, 6)), SamplingLaw(1.0, top_k=4))
    q = warp(2 * rng.normal(size=(n, slots, 6)), SamplingLaw(1.0, top_k=4))
    tokens = draw(q.reshape(-1, 6), rng.random(n * slots)).reshape(n, slots)
    drafted, u = rng.integers(0, slots + 1, n), rng.random((n, slots + 1))
    for dtype in (torch.float64, torch.float32):
        rows = [torch.from_numpy(a).to(dtype) for a in (p, q)]
        found = engine_of("fast").verify_rows(rows[0], rows[1] if slots else None, tokens, drafted, u)
        for i, (count, verdict) in enumerate(zip(drafted, found, strict=True)):
            own = rows[0][i, : count + 1].numpy(), rows[1][i, :count].numpy()
            assert verify_block(*own, tokens[i, :count], [*u[i, :count], u[i, -1]]) == verdict


def test_sampled_texts_have_the_law_of_the_target():
    """How often each text of three tokens comes up in N = 1000, against its binomial law.

    A count in a tail of probability 1e-9 / (2 texts) is a failure, so all of them together raise a false alarm with
    probability 1e-9 at most.
    """
    pytest.importorskip("torch")
    N, prompt, law, options = 1000, (2, 0, 1), SamplingLaw(2.0), {"vocab": 3, "block_size": 3, "mask_id": 1}
    target, drafter = model_of("fast", **options)
    plain, _ = model_of("reference", **options)
    engine = engine_of("fast").Engine(target, drafter, 8, batch=100, lattice=2)
    found = engine.generate([Request(prompt, 3, law, (7, i)) for i in range(N)])
    counts = Counter(completion.tokens for completion in found)
    for text in product(range(3), repeat=3):
        p = np.prod([warp(plain.logits([*prompt, *text[:k]])[-1], law)[token] for k, token in enumerate(text)])
        tails = binom.cdf(counts[text], N, p), binom.sf(counts[text] - 1, N, p)
        assert min(tails) > 1e-9 / (2 * 27)


# Stops, caps and the end of the context


@cache
def chain_of(wing, target_next, drafter_next, slots, stop_ids):
    """Models that follow a script: {token: the one after it}, other tokens are followed by themselves."""
    vocab = 64
    pack = backend(wing)

    def follow(pairs):
        table = np.eye(vocab)
        for before, after in pairs:
            table[:, before] = np.eye(vocab)[after]
        return 50 * table  # [after, before]

    config = DecoderConfig.from_dict(
        dict(
            model_type="qwen3",
            vocab_size=vocab,
            hidden_size=vocab,
            intermediate_size=1,
            num_hidden_layers=4,
            num_attention_heads=1,
            head_dim=2,
            rms_norm_eps=1e-6,
            rope_theta=100.0,
            max_position_embeddings=512,
            tie_word_embeddings=False,
        )
    )
    weights = {name: np.ones(shape) * ("norm" in name) for name, shape in config.tensor_shapes().items()}
    weights["model.embed_tokens.weight"], weights["lm_head.weight"] = np.eye(vocab), follow(target_next)
    drafting = config_of(
        "vanilla",
        vocab_size=vocab,
        draft_vocab_size=vocab,
        hidden_size=vocab,
        markov_rank=vocab,
        block_size=slots,
        output_multiplier=0.0,
        num_kv_heads=1,
        num_heads=1,
    )
    tensors = random_tensors(drafting, 0)
    tensors["markov_head.markov_w1.weight"] = np.eye(vocab)
    tensors["markov_head.markov_w2.weight"] = follow(drafter_next)
    if wing == "fast":
        torch = pytest.importorskip("torch")
        weights, tensors = ({n: torch.from_numpy(np.array(a)) for n, a in t.items()} for t in (weights, tensors))
    target = pack.Decoder(config, weights, stop_ids)
    return target, pack.Drafter(drafting, tensors, target.embedding, target.head)


S, PROMPT = 9, (0,)
TEXT = ((0, 30), (30, 31), (31, 8), (8, S), (S, 40), (40, 41), (41, 42), (42, 43), (43, 44))


def follow(wing, drafter_next=TEXT, target_next=TEXT, slots=7, stop_ids=(S,), length=50, capacity=60, prompt=PROMPT):
    target, drafter = chain_of(wing, target_next, drafter_next, slots, stop_ids)
    engine = engine_of(wing).Engine(target, drafter, capacity)
    completions = engine.generate([Request(prompt, length, law) for law in (GREEDY, SamplingLaw())])
    assert completions[0] == completions[1], "a chain is certain"
    plain = engine.generate([Request(prompt, length, GREEDY)], speculate=False)[0]
    assert (plain.tokens, plain.finish) == (completions[0].tokens, completions[0].finish)
    return completions[0]


def changed(pairs, **after):
    return tuple((b, after.get(f"t{b}", a)) for b, a in pairs)


@each_wing
def test_a_stop_inside_a_block_ends_the_text(wing):
    """Field case C1: (a) among the accepted drafts, (b) as the first of them and as the first token of all."""
    found = follow(wing)
    assert (found.tokens, found.finish) == ((30, 31, 8, S), "stop")
    assert found.rounds == (RoundStats(7, 3, 3),)
    found = follow(wing, prompt=(0, 30, 31))
    assert (found.tokens, found.rounds) == ((8, S), (RoundStats(7, 1, 1),))
    found = follow(wing, prompt=(8,))
    assert (found.tokens, found.finish, found.rounds) == ((S,), "stop", ())


@each_wing
def test_a_stop_behind_the_drafts_ends_the_text(wing):
    """Field case C1 (c) as the bonus token; (e) as the token that replaces a rejected draft."""
    found = follow(wing, slots=2)
    assert (found.tokens, found.finish, found.rounds) == ((30, 31, 8, S), "stop", (RoundStats(2, 2, 3),))
    found = follow(wing, changed(TEXT, t8=50))
    assert (found.tokens, found.finish, found.rounds) == ((30, 31, 8, S), "stop", (RoundStats(7, 2, 3),))


@each_wing
def test_a_stop_that_is_rejected_ends_nothing(wing):
    """Field case C1 (d): drafted, rejected, replaced by 55."""
    target_next = (*changed(TEXT, t8=55), (55, 56), (56, 57))
    found = follow(wing, TEXT, target_next, length=6)
    assert (found.tokens, found.finish) == ((30, 31, 8, 55, 56, 57), "length")


def test_what_follows_a_stop_is_not_in_the_caches(monkeypatch):
    """Field case C1: neither the target's session nor the drafter's context holds a token after it."""
    target, drafter = chain_of("reference", TEXT, TEXT, 7, (S,))
    sessions, contexts = [], []
    for owner, name, kept in ((target, "open", sessions), (drafter, "context", contexts)):
        made = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *a, made=made, kept=kept: kept.append(made(*a)) or kept[-1])
    Engine(target, drafter, 60).generate([Request(PROMPT, 50, GREEDY)])
    assert (sessions[0].prefix_length, len(sessions[0].cache[0][0]), contexts[0].length) == (4, 4, 1)


@each_wing
@pytest.mark.parametrize(
    ("length", "tokens", "finish"),
    [
        (5, (31, 8, S), "stop"),
        (3, (31, 8, S), "stop"),
        (2, (31, 8), "length"),
        (1, (31,), "length"),
        (0, (), "length"),
    ],
)
def test_the_cap_counts_tokens_and_hides_no_stop(wing, monkeypatch, length, tokens, finish):
    """Field case C2 (a); nothing is run where nothing is asked."""
    found = follow(wing, prompt=(0, 30), length=length)
    assert (found.tokens, found.finish) == (tokens, finish)
    if not length:
        target, drafter = chain_of(wing, TEXT, TEXT, 7, (S,))
        engine = engine_of(wing).Engine(target, drafter, 60)
        monkeypatch.setattr(target, "forward", None)
        assert engine.generate([Request((0,), 0)])[0].tokens == ()


@each_wing
def test_the_end_of_the_context(wing):
    """Field case C2 (b), (c): prompt and answer fill the positions; near the end there are fewer drafts, not none."""
    target, drafter = model_of(wing, block_size=16, kinship=1.0, markov_rank=6)
    engine = engine_of(wing).Engine(target, drafter, 64)
    for length in (60, 63, 64):
        request = Request(tuple(i % 11 for i in range(length)), 100, GREEDY)
        (found,), (plain,) = engine.generate([request]), engine.generate([request], speculate=False)
        assert (found.tokens, found.finish) == (plain.tokens, "length")
        assert len(found.tokens) == 64 - length
        assert length != 60 or found.rounds[0].drafted == 2
    with pytest.raises(ValueError, match="prompt of 65 tokens does not fit a capacity of 64"):
        engine.generate([Request((1,) * 65, 1)])


@each_wing
def test_what_makes_no_sense_is_refused(wing):
    target, drafter = model_of(wing, "dflash")
    make = engine_of(wing).Engine
    for options, message in (
        ({"capacity": 0}, "capacity must be at least 1"),
        ({"capacity": 9, "batch": 0}, "batch must be at least 1"),
        ({"capacity": 9, "threshold": 1.0}, "threshold must be a probability"),
    ):
        with pytest.raises(ValueError, match=message):
            make(target, drafter, **options)
    engine = make(target, drafter, 20)
    for request, message in (
        (Request((), 1), "at least one token"),
        (Request((11,), 1), "outside the vocabulary"),
        (Request((1,), -1), "max_new_tokens must be 0 or more"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.generate([request])
    with pytest.raises(ValueError, match="has no confidence head: set threshold to 0"):
        make(target, drafter, 20, threshold=0.5).generate([Request((1,), 5)])


@each_wing
def test_without_a_drafter_decoding_is_plain(wing):
    target, drafter = model_of(wing)
    request, make = Request((1, 2), 9, SamplingLaw(), 4), engine_of(wing).Engine
    assert make(target, None, 20).generate([request]) == make(target, drafter, 20).generate([request], speculate=False)


# Statistics and uniforms


def test_tokens_per_round():
    """Pooled over rounds; the bonus token counts."""
    stats = [RoundStats(7, 7, 8), RoundStats(7, 0, 1), RoundStats(7, 3, 3)]
    made = [reference.engine.Completion((), "stop", tuple(r)) for r in (stats[:2], stats[2:], [])]
    assert_agree(tokens_per_round(made), 4.0, "exact")
    assert np.isnan(tokens_per_round([]))


def test_uniforms_are_a_function_of_request_and_position():
    keys = [(0, 0), (0, 1), (1, 0), ((0, 1), 0), ((1, 0), 0), ((0, 0), 1), ((0, 0), 0)]
    rows = [uniforms(*key, 3) for key in keys]
    assert_agree(np.array([len(row) for row in rows]), np.full(7, 7), "exact")
    assert len({row.tobytes() for row in rows}) == len(keys)
    assert_agree(uniforms(5, 6, 2), uniforms(5, 6, 2), "exact")
    assert all(((row >= 0) & (row < 1)).all() for row in rows)


# Rounds and loops of the authors' own code


@pytest.mark.parametrize(("project", "drafts"), [("deepspec", "draft_probs"), ("zlab", "draft_probs_dense")])
def test_golden_rounds_side_by_side(golden, project, drafts):
    """All stored rounds as the rows of one batch; theirs end behind a stop id among the kept drafts, as texts do.

    Left out are rounds made up to reach a branch, whose drafts could not have been drawn from their rows.
    """
    torch = pytest.importorskip("torch")
    with np.load(golden / "verify" / f"{project}.npz") as file:
        a = dict(file)
    tokens, drafted = a["draft_tokens"].clip(0), (a["draft_tokens"] >= 0).sum(axis=1)
    slots, q = np.arange(tokens.shape[1]), a[drafts]
    taken = np.take_along_axis(q, tokens[..., None], axis=2)[..., 0]
    honest = ((taken > 0) & (abs(q.sum(axis=2) - 1) < 1e-4) | (slots >= drafted[:, None])).all(axis=1)
    p, q = torch.from_numpy(a["target_probs"]), torch.from_numpy(q)
    u = np.concatenate([a["u_accept"], a["u_next"][:, None]], axis=1)
    verdicts = engine_of("fast").verify_rows(p[honest], q[honest], tokens[honest], drafted[honest], u[honest])
    for i, verdict in zip(np.flatnonzero(honest), verdicts, strict=True):
        stopped = project == "deepspec" and bool(a["terminated_by_stop"][i])
        target = ToyTarget(p.shape[2], None, [a["stop_id"][i]] if stopped else [])
        text = Text(Request((0,), 99), target, 100)
        text.end_round(tokens[i, : drafted[i]], verdict)
        kept = a["accepted"][i]
        expected = [*tokens[i, :kept], *([] if stopped else [a["next_token"][i]])]
        assert_agree(np.array(text.tokens), np.array(expected), "exact")
        assert text.rounds == [RoundStats(drafted[i], kept, len(expected))]
        assert text.done == stopped
    assert len(verdicts) >= len(honest) - 4


def runs_of(golden):
    for path in sorted(golden.rglob("golden.npz")):
        with np.load(path) as arrays:
            runs = sorted(name.removesuffix("_prompt") for name in arrays if name.endswith("_prompt"))
            for run in runs:
                picked = {n.removeprefix(f"{run}_"): arrays[n] for n in arrays if n.startswith(f"{run}_")}
                yield path.parent.relative_to(golden).as_posix(), run, picked


@each_wing
def test_generation_loops(wing, golden, monkeypatch):
    """Every stored run, with its uniforms: drafts made, drafts kept and tokens, round by round.

    z-lab shortens the drafter's input near the end, which changes its states; such rounds are requests of their own.
    """
    seen = 0
    for name, run, arrays in runs_of(golden):
        loop = Loop(arrays)
        if "filtered" in run:
            for module in (engine_of(wing), importlib.import_module(f"{wing}.drafters")):
                monkeypatch.setattr(module, "warp", renormalising(backend(wing).warp))
        for _, group in groupby(range(len(loop.starts)), key=lambda r: loop.block_len[r]):
            seen += replay(wing, golden, name, loop, list(group))
        monkeypatch.undo()
    assert seen > 200


def renormalising(warp):
    """These authors renormalise what top-k keeps before top-p counts it, which `SamplingLaw` does not."""

    def warped(logits, law=SamplingLaw()):
        kept = warp(logits, replace(law, top_p=1.0))
        with np.errstate(divide="ignore"):
            return warp(np.log(kept) if isinstance(kept, np.ndarray) else kept.log(), SamplingLaw(top_p=law.top_p))

    return warped


class Loop:
    """A stored run under one set of names, whichever project made it."""

    def __init__(self, a):
        self.arrays, self.prompt = a, a["prompt"]
        self.law = SamplingLaw(float(a["temperature"]), int(a.get("top_k", 0)), float(a.get("top_p", 1.0)))
        self.zlab = "block_tokens" in a
        self.starts = a["context_start"] + a["pending"] if self.zlab else a["start"]
        self.blocks = a["block_tokens"] if self.zlab else np.column_stack([a["verify_ids"][:, 0], a["chain_tokens"]])
        self.block_len = a["block_len"].tolist() if self.zlab else [None] * len(self.starts)
        self.committed = a["acceptance_lengths"].copy()
        if self.zlab and self.law.temperature:  # cut at the cap in the last round; none of these runs stops
            self.committed[-1] = a["accepted"][-1] + 1
        self.tokens = list(a["output_ids"][: len(self.prompt)])
        for r, block in enumerate(self.blocks):  # `output_ids` may have been cut at the cap
            kept = int(a["accepted"][r]) if "accepted" in a else int(self.committed[r]) - 1
            self.tokens[self.starts[r] :] = [*block[: 1 + kept], *([a["next_token"][r]] if "next_token" in a else [])]
        self.tokens[: len(a["output_ids"])] = a["output_ids"]
        self.stop_ids = tuple(int(s) for s in a.get("stop_ids", ()))

    def uniforms(self, r, slots):
        if not self.law.temperature:
            return np.zeros(2 * slots + 1)
        u = [self.arrays["u_draft"][r, :slots], self.arrays["u_accept"][r, :slots], self.arrays["u_next"][r : r + 1]]
        if "draft_candidates" in self.arrays:  # they draw in the stored order of the candidates, we by token id
            u[0] = [self._by_id(r, slot) for slot in range(slots)]
        return np.nan_to_num(np.concatenate(u))

    def _by_id(self, r, slot):
        candidates, q = self.arrays["draft_candidates"][r, slot], self.arrays["draft_probs"][r, slot].astype(float)
        if np.isnan(q).any():
            return 0.0
        order = np.argsort(candidates)
        place = int(np.flatnonzero(candidates[order] == self.blocks[r, slot + 1])[0])
        return (q[order].cumsum()[place] - q[order][place] / 2) / q.sum()


@cache
def golden_models(wing, golden, name, block_size, stop_ids):
    pack, kind = backend(wing), "tied" if name in TIED else "untied"
    target = pack.Decoder.load(golden / "target" / kind, dtype="float64", stop_ids=stop_ids)
    drafter = pack.Drafter.load(golden / name, target, dtype="float64")
    if block_size is not None and block_size != drafter.config.block_size:
        config = replace(drafter.config, block_size=block_size)
        tensors = drafter.tensors if wing == "reference" else drafter.state_dict()
        drafter = pack.Drafter(config, tensors, target.embedding, target.head)
    return target, drafter


def replay(wing, golden, name, loop, group):
    """Run the rounds of a group as one request and compare; how many there were."""
    target, drafter = golden_models(wing, golden, name, loop.block_len[group[0]], loop.stop_ids)
    first, prompt, gamma = group[0], loop.tokens[: loop.starts[group[0]]], drafter.gamma
    rounds = {int(loop.starts[r]): r for r in group}
    anchor = loop.blocks[first, 0]
    plain, _ = golden_models("reference", golden, name, None, loop.stop_ids)
    row = (renormalising(warp) if loop.law.top_k else warp)(plain.logits(prompt)[-1], loop.law)
    into = loop.arrays["u_first"] if first == 0 and "u_first" in loop.arrays else row[:anchor].sum() + row[anchor] / 2

    def stored(seed, position, slots):
        if not slots:
            return np.array([float(into)])
        return loop.uniforms(rounds[position], slots) if position in rounds else np.zeros(2 * slots + 1)

    wanted = 1 + sum(int(loop.committed[r]) for r in group)
    options = {"threshold": float(loop.arrays.get("confidence_threshold", 0))}
    if "draft_candidates" in loop.arrays:
        options["draft_law"] = SamplingLaw(loop.law.temperature)
    engine = engine_of(wing).Engine(target, drafter, 200, uniforms=stored, **options)
    request = Request(tuple(map(int, prompt)), wanted + gamma + 1, loop.law)  # no block is cut before they are done
    (found,) = engine.generate([request])
    expected = loop.tokens[len(prompt) : len(prompt) + wanted]
    assert found.tokens[: len(expected)] == tuple(map(int, expected)), (name, group)
    for r, stats in zip(group, found.rounds, strict=False):
        assert stats.committed == loop.committed[r]
        if "proposal_lengths" in loop.arrays:
            cut = stats.accepted == stats.committed  # their proposal ends at the stop id
            assert loop.arrays["proposal_lengths"][r] == (stats.accepted if cut else stats.drafted)
            assert loop.arrays["accepted"][r] == stats.accepted
    assert len(found.rounds) >= len(group)
    return len(group)
