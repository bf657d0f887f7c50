"""The walk: the law of M independent paths, kept as a tree; stops; agreement of the two backends."""

import itertools

import numpy as np
import pytest
from hypothesis import given

import reference
from models import toy
from reference.laws import SamplingLaw, draw, warp
from reference.paths import walk, write_answers
from tests.agreement import assert_agree
from tests.strategies import chains, laws, seeds

GAMMA = 4


def one_path_at_a_time(target, prefix, gamma, uniforms, law):
    """The definition: every path decoded alone.  Tokens [M, gamma] with -1 after a stop, and its rows."""
    tokens, rows = np.full(uniforms.shape, -1), {}
    for r, numbers in enumerate(uniforms):
        history = tuple(prefix)
        for k, u in enumerate(numbers):
            rows[r, k] = warp(target.logits(history)[None], law)[0]
            tokens[r, k] = draw(rows[r, k][None], [u])[0]
            if tokens[r, k] in target.stop_ids:
                break
            history += (int(tokens[r, k]),)
    return tokens, rows


@given(chains(), laws(), seeds)
def test_a_tree_is_its_paths(chain, law, seed):
    target, prefix = toy.markov_chain(*chain), [0, 1]
    uniforms = np.random.default_rng(seed).random((12, GAMMA))
    tokens, rows = one_path_at_a_time(target, prefix, GAMMA, uniforms, law)
    slots = list(walk(target, prefix, GAMMA, uniforms, law))
    for k in range(GAMMA):
        alive = (tokens[:, k] >= 0) if k == 0 else (tokens[:, k] >= 0) & (tokens[:, k - 1] >= 0)
        if k >= len(slots):
            assert not alive.any()
            continue
        slot = slots[k]
        assert_agree(slot.drawn, tokens[:, k], "exact")
        assert_agree(slot.path_node >= 0, alive, "exact")
        assert_agree(slot.alive, float(alive.mean()), "exact")
        for r in np.flatnonzero(alive):
            node = slot.path_node[r]
            assert_agree(slot.rows[node], rows[r, k], "float64")
            assert_agree(slot.history(k)[node], tokens[r, :k], "exact")
            assert slot.token[node] == (tokens[r, k - 1] if k else prefix[-1])
        assert_agree(slot.weight, np.bincount(slot.path_node[alive], minlength=len(slot.rows)) / 12, "float64")
        pasts = [tuple(p) for p in slot.history(k)]
        assert len(set(pasts)) == len(pasts)  # each prefix once
        assert (slot.weight > 0).all()
        if k:
            assert_agree(slot.history(k)[:, :-1], slots[k - 1].history(k - 1)[slot.parent], "exact")


def test_the_first_paths_and_slots_of_a_larger_walk():
    target = toy.random_table(4, 3, seed=1)
    uniforms = np.random.default_rng(0).random((64, 6))
    small, large = (list(walk(target, [0], g, uniforms[:m, :g])) for m, g in ((16, 3), (64, 6)))
    for a, b in zip(small, large, strict=False):
        assert_agree(a.drawn, b.drawn[:16], "exact")


def test_a_longer_block_begins_with_the_shorter_one():
    """Catalogue 49: the first 7 slots of 16, their rows and their floors, in both backends."""
    target = toy.random_table(4, 3, seed=1, stop_ids=(3,))
    uniforms = np.random.default_rng(0).random((48, 16))
    for backend in backends():
        short, long = (backend.walk(target, [0], g, uniforms[:, :g]) for g in (7, 16))
        slots = list(zip(short, long, strict=False))
        assert len(slots) == 7
        for a, b in slots:
            for name in ("parent", "token", "weight", "rows", "path_node", "drawn"):
                assert_agree(getattr(a, name), getattr(b, name), "exact")
            for order in (0, 1):
                assert backend.floor(a, order) == backend.floor(b, order)


def test_two_routes_to_a_floor():
    """Catalogue 51: sampled and enumerated T^(0) lie within a quarter of the step to the next slot, so none is shifted.

    The floors of the two-token chain are 0, .1, .19, .255.  Each estimate is a mean of 100,000 path risks in [0, 1]:
    six standard errors are at most .0095, false alarm below 1e-8 per slot.
    """
    uniforms = np.random.default_rng(3).random((100_000, 4))
    for backend in backends():
        sampled = [backend.floor(slot, 0).fit for slot in backend.walk(toy.two_token_chain(), [0, 0], 4, uniforms)]
        exact = backend.enumerate_paths(toy.two_token_chain(), [0, 0], 4, budget=99, cutoff=0.0)
        exact = [backend.floor(slot, 0).fit for slot in exact]
        steps = np.diff(exact)
        assert steps.min() > 0.06
        assert (np.abs(np.array(sampled) - exact)[1:] < steps / 4).all()
        assert (np.abs(np.array(sampled[1:]) - exact[:-1]) > steps / 4).all()  # what a shift would look like


def test_stops():
    """A path that draws a stop id is alive at that slot and gone afterwards; the walk ends with the last path."""
    target = toy.markov_chain(np.array([0.5, 0.5]), stop_ids=(1,))
    uniforms = np.array([[0.1, 0.1, 0.1], [0.1, 0.9, 0.1], [0.9, 0.1, 0.1], [0.9, 0.9, 0.9]])
    slots = list(walk(target, [0], 3, uniforms))
    assert [slot.alive for slot in slots] == [1.0, 0.5, 0.25]
    assert_agree(
        np.stack([slot.drawn for slot in slots]), np.array([[0, 0, 1, 1], [0, 1, -1, -1], [0, -1, -1, -1]]), "exact"
    )
    assert len(list(walk(target, [0], 3, uniforms[2:]))) == 1
    assert [slot.weight.sum() for slot in slots] == [1.0, 0.5, 0.25]


def test_history_reaches_into_the_prefix():
    target = toy.markov_chain(np.array([0.5, 0.5]))
    slot = list(walk(target, [7 % 2, 0, 1], 3, np.full((2, 3), 0.7)))[1]
    assert_agree(slot.history(0), np.empty((1, 0), dtype=int), "exact")
    assert_agree(slot.history(3), np.array([[0, 1, 1]]), "exact")
    with pytest.raises(ValueError, match="history of 9"):
        slot.history(9)


@pytest.mark.parametrize(
    ("prefix", "gamma", "shape", "message"),
    [
        ([], 2, (3, 2), "at least one token"),
        ([5], 2, (3, 2), "outside the vocabulary"),
        ([-1], 2, (3, 2), "outside the vocabulary"),
        ([0], 0, (3, 0), "at least 1"),
        ([0], 2, (3, 3), "uniforms must be"),
        ([0], 2, (0, 2), "uniforms must be"),
    ],
)
def test_bad_walks_are_refused(prefix, gamma, shape, message):
    for backend in backends():
        with pytest.raises(ValueError, match=message):
            next(backend.walk(toy.two_token_chain(), prefix, gamma, np.full(shape, 0.5)))


def test_answers():
    """An answer ends before its stop id or at its cap, and depends on its own uniforms only."""
    target = toy.markov_chain(np.array([0.6, 0.3, 0.1]), stop_ids=(2,))
    uniforms = np.array([[0.1, 0.7, 0.95, 0.1], [0.1, 0.1, 0.7, 0.7], [0.99, 0.1, 0.1, 0.1]])
    for backend in backends():
        answers = backend.write_answers(target, [[0], [1], [0]], uniforms)
        assert [a.tokens for a in answers] == [(0, 1), (0, 0, 1, 1), ()]
        assert [a.stopped for a in answers] == [True, False, True]


@given(chains(), laws(), seeds)
def test_backends_walk_the_same_tree(chain, law, seed):
    fast = pytest.importorskip("fast")
    target = toy.markov_chain(*chain)
    uniforms = np.random.default_rng(seed).random((20, GAMMA))
    for mine, theirs in itertools.zip_longest(
        fast.walk(target, [0, 1], GAMMA, uniforms, law), walk(target, [0, 1], GAMMA, uniforms, law)
    ):
        for name in ("parent", "token", "path_node", "drawn", "past"):
            assert_agree(getattr(mine, name), getattr(theirs, name), "exact")
        assert (mine.index, mine.alive, mine.covered) == (theirs.index, theirs.alive, theirs.covered)
        assert_agree(mine.weight, theirs.weight, "exact")
        assert_agree(mine.rows, theirs.rows, "float64")
    assert fast.write_answers(target, [[0]], uniforms[:1], law) == write_answers(target, [[0]], uniforms[:1], law)


def test_greedy_walk_is_one_path():
    slots = list(walk(toy.random_table(5, 2, seed=3), [0], 5, np.random.default_rng(0).random((9, 5)), SamplingLaw(0)))
    assert [len(slot.rows) for slot in slots] == [1] * 5


def backends():
    """Both packages; only the reference where torch is missing."""
    try:
        import fast
    except ImportError:
        return [reference]
    return [reference, fast]


@pytest.mark.parametrize(
    ("prompts", "shape", "message"),
    [
        ([[0]], (2, 3), "1 prompts need uniforms"),
        ([[0], [1]], (1, 3), "2 prompts need uniforms"),
        ([[0]], (1, 0), "L >= 1"),
        ([[]], (1, 3), "at least one token"),
        ([[-1]], (1, 3), "outside the vocabulary"),
        ([[2]], (1, 3), "outside the vocabulary"),
    ],
)
def test_bad_answers_are_refused(prompts, shape, message):
    for backend in backends():
        with pytest.raises(ValueError, match=message):
            backend.write_answers(toy.two_token_chain(), prompts, np.full(shape, 0.5))
        assert backend.write_answers(toy.two_token_chain(), [], np.empty((0, 3))) == []
