"""Serving: the catalogue, every target block and verification itself by enumeration, properties, agreement."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models import toy
from reference import stats
from reference.floors import floor
from reference.laws import warp
from reference.paths import Slot, walk
from reference.serving import (
    Serving,
    accept_factors,
    accepted_length,
    accepted_length_product,
    dependence,
    largest_risk_from_length,
    length_from_largest_risk,
    path_factors,
    reach,
    serve,
    serving_risk,
    survival,
)
from tests.agreement import assert_agree
from tests.strategies import chains, laws, logits, seeds
from tests.test_risk import ORDER_0, exact_slot, owned, paths_slot, wings


def all_blocks(target, prefix, proposal, gamma):
    """Every block that a toy can write: its probability [M], and factors, TVs and life of its slots [M, gamma].

    `proposal` maps the realised tokens of the block to q_k [V].
    """
    weights, blocks = [], []

    def follow(past, weight, block, stopped):
        if len(block) == gamma:
            weights.append(weight)
            blocks.append(block)
        elif stopped:
            follow(past, weight, [*block, (0.0, 0.0, 0.0)], True)
        else:
            p, q = target.next_token((*prefix, *past)), proposal(past)
            for z in np.flatnonzero(p).tolist():
                here = min(1.0, q[z] / p[z]), abs(p - q).sum() / 2, 1.0
                follow((*past, z), weight * p[z], [*block, here], z in target.stop_ids)

    follow((), 1.0, [], False)
    factors, risks, alive = np.moveaxis(np.array(blocks), 2, 0)
    return np.array(weights), factors, np.minimum(risks, 1), alive > 0


def accepted_drafts(target, prefix, proposal, gamma, past=()):
    """Expected number of tokens that token-level verification accepts, over all drafts; a stop ends the round."""
    if len(past) == gamma:
        return 0.0
    p, q, total = target.next_token((*prefix, *past)), proposal(past), 0.0
    for d in np.flatnonzero(q).tolist():
        accept = min(1.0, p[d] / q[d])
        if accept:
            going = d not in target.stop_ids
            after = accepted_drafts(target, prefix, proposal, gamma, (*past, d)) if going else 0.0
            total += q[d] * accept * (1 + after)
    return total


def random_proposal(vocab, gamma, seed):
    """An order-1 proposal, with some tokens it never says."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.ones(vocab), size=(gamma, vocab)) * (rng.random((gamma, vocab, vocab)) < 0.8)
    table[table.sum(axis=-1) == 0] = 1
    table /= table.sum(axis=-1, keepdims=True)
    return lambda past: table[len(past), past[-1] if past else 0]


def fields(serving):
    """A `Serving` or a pooled result as NumPy arrays by name, NaN as -1."""
    names = [*vars(serving), *(("survival", "hazard") if isinstance(serving, Serving) else ())]
    return {name: np.nan_to_num(np.asarray(getattr(serving, name)), nan=-1.0) for name in names}


def test_the_chain_by_enumeration():
    """Catalogue 24: all eight blocks of the two-token chain."""
    weights, factors, risks, _ = all_blocks(toy.two_token_chain(), (0, 0), lambda past: ORDER_0[len(past)], 3)
    assert len(weights) == 8
    survived = np.array([0.9, 0.65, 0.454])
    for room, own in wings("serving"):
        one = room.serve(own(factors), own(risks), weights=weights)
        assert_agree(one.risk, np.array([0.1, 0.28, 0.326]), "float64")
        assert_agree(one.survival, survived, "float64")
        assert_agree(room.survival(own(factors), weights), survived, "float64")
        assert_agree(one.hazard, np.array([0.1, 0.2777778, 0.3015385]), "printed")
        assert_agree(room.serving_risk(one).risk, one.hazard, "float64")
        assert_agree(room.accepted_length(room.reach(own(factors)), weights), 3.004, "float64")
        assert_agree(room.accepted_length(one.survival), 3.004, "float64")
        assert_agree(room.accepted_length_product(one.risk), 2.984752, "float64")
        assert_agree(room.dependence(one).ratio, np.array([1, 1.0030864, 1.0394915]), "printed")


@given(chains(max_vocab=3), seeds)
def test_reach_is_what_verification_accepts(chain, seed):
    """tau = 1 + sum S_k is the exact expectation over drafts and coins; realised and conditional forms agree."""
    table, stop_ids = chain
    target, proposal = toy.markov_chain(table, stop_ids), random_proposal(table.shape[-1], 3, seed)
    weights, factors, risks, alive = all_blocks(target, (0, 1), proposal, 3)
    expected = 1 + accepted_drafts(target, (0, 1), proposal, 3)
    for room, own in wings("serving"):
        one = room.serve(own(factors), own(risks), alive, weights)
        assert_agree(room.accepted_length(room.reach(own(factors)), weights), expected, "float64")
        assert_agree(room.accepted_length(one.survival), expected, "float64")
        assert_agree(one.survival, room.survival(own(factors), weights), "float64")
    # The last token's noise is gone: a smaller variance at every slot.
    before = np.concatenate([np.ones((len(weights), 1)), reach(factors)[:, :-1]], axis=1) * alive
    for realised, conditional in zip(reach(factors).T, (before * (1 - risks)).T, strict=True):
        assert weights @ conditional**2 <= weights @ realised**2 + 1e-12


@given(chains(max_vocab=3), seeds)
def test_identities(chain, seed):
    """Catalogue 25, exact over all blocks: E a_k = 1 - R_k, the hazard, the range of tau, the union bound."""
    target, proposal = toy.markov_chain(chain[0]), random_proposal(chain[0].shape[-1], 4, seed)
    weights, factors, risks, _ = all_blocks(target, (0, 1), proposal, 4)
    one = serve(factors, risks, weights=weights)
    assert_agree(weights @ factors, 1 - one.risk, "float64")
    assert_agree(one.arrival, np.append(1.0, one.survival[:-1]), "float64")
    steps = one.survival - (1 - np.nan_to_num(one.hazard)) * np.append(1.0, one.survival[:-1])
    assert_agree(steps, np.zeros(4), "float64")
    assert all(a >= b - 1e-12 for a, b in pairwise(one.survival))
    tau, largest = accepted_length(one.survival), min(1.0, one.risk.max())
    assert 1 - 1e-12 <= tau <= 5 + 1e-12
    assert length_from_largest_risk(largest, 4) <= tau + 1e-12
    assert largest_risk_from_length(min(5.0, max(1.0, tau)), 4) <= largest + 1e-12


def test_risk_that_is_never_met_while_serving():
    """Catalogue 26: T_1 = R_1 = 1/2 on all paths, 0 on those that are reached; all of it is path selection."""
    target = toy.markov_chain(np.array([[0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0, 0], [0.5, 0.5, 0, 0]]))
    weights, factors, risks, _ = all_blocks(target, (2,), lambda past: np.eye(4)[2 * len(past)], 2)
    assert_agree(floor(exact_slot(target, (2,), 1), 0).fit, 0.5, "float64")
    for room, own in wings("serving"):
        pooled = room.serving_risk(room.serve(own(factors), own(risks), weights=weights))
        assert_agree(pooled.risk, np.array([0.5, 0.0]), "float64")
        assert_agree(pooled.free, np.array([0.5, 0.5]), "float64")
        assert_agree(pooled.within, np.array([0.0, -0.5]), "float64")
        assert_agree(pooled.between, np.zeros(2), "float64")


@given(logits(), seeds)
def test_a_perfect_drafter(table, seed):
    """Catalogue 27: q = p is accepted always, exactly; a path that has stopped is cut off."""
    rows = warp(table)
    node = np.random.default_rng(seed).integers(-1, len(rows), 9)
    slot = paths_slot(rows, node)
    drawn = np.where(node >= 0, rows.argmax(axis=1)[node], -1)
    slot = Slot(**{**vars(slot), "drawn": drawn})
    for room, own in wings("serving"):
        factors, risks = room.path_factors(owned(slot, own), own(rows))
        assert_agree(factors, (node >= 0).astype(float), "exact")
        assert_agree(risks, np.zeros(9), "exact")
        assert room.accepted_length(room.reach(own(np.ones((5, 3))))) == 4.0
        dead = room.reach(room.accept_factors(own(np.array([0.5, 0.0, 0.5])), own(np.array([0.5, 0.7, 0.5]))))
        assert_agree(dead, np.array([1.0, 0.0, 0.0]), "exact")


def test_contexts_that_differ_are_not_dependence():
    """Catalogue 28: factors 1 in one context and .2 in the other, constant in each."""
    factors = np.array([1, 0.2])[:, None, None] * np.ones((2, 4, 3))
    for room, own in wings("serving"):
        two = room.serve(own(factors), own(1 - factors))
        found = room.dependence(two)
        assert_agree(found.ratio, np.array([1, 0.52 / 0.36, 0.504 / 0.216]), "float64")
        assert_agree(found.within, np.ones(3), "float64")
        assert_agree(found.between, found.ratio, "exact")
        pooled = room.serving_risk(two)
        assert_agree(pooled.free, np.full(3, 0.4), "float64")
        assert_agree(pooled.within, np.zeros(3), "float64")
        assert_agree(pooled.between, np.array([0.4, 0.16 / 1.2, 0.032 / 1.04]) - 0.4, "float64")


def test_a_stop_that_is_accepted_rarely_shows():
    """p = (.05, .05, .9), the last a stop, and q = (.3, .3, .4) on every path: D_1 = .05 / .025, all paths alike.

    Accepted alike with the other tokens (q = p / 2 and the rest on a fourth token), the stop leaves no dependence.
    """
    for q, acceptance, ratio in (([0.3, 0.3, 0.4, 0.0], 0.5, 2.0), ([0.025, 0.025, 0.45, 0.5], 0.5, 1.0)):
        target = toy.markov_chain(np.array([0.05, 0.05, 0.9, 0.0]), stop_ids=(2,))
        weights, factors, risks, alive = all_blocks(target, (0,), lambda past, q=np.array(q): q, 2)
        for room, own in wings("serving"):
            one = room.serve(own(factors), own(risks), alive, weights)
            assert_agree(one.risk, np.full(2, 1 - acceptance), "float64")
            found = room.dependence(one)
            assert_agree(found.ratio, np.array([1.0, ratio]), "float64")
            assert_agree(found.within, np.array([1.0, ratio]), "float64")
            assert_agree(found.between, np.ones(2), "float64")
            expected = 1 + acceptance + 0.1 * acceptance**2
            assert_agree(room.accepted_length_product(one.risk, one.alive), expected, "float64")
            assert_agree(room.accepted_length(one.survival), expected + (ratio - 1) * 0.025, "float64")


def test_selection_and_composition_together():
    """Two anchors by hand, weights 3 and 1; a third is never reached and counts with its free risk."""
    serving = Serving(
        alive=np.ones((3, 2)),
        risk=np.array([[0.2, 0.5], [0.4, 0.9], [1.0, 0.3]]),
        arrival=np.array([[1.0, 0.8], [1.0, 0.2], [1.0, 0.0]]),
        rejected=np.array([[0.2, 0.24], [0.4, 0.1], [1.0, 0.0]]),
    )
    weights = [3.0, 1.0, 2.0]
    free, alone = (1.5 + 0.9 + 0.6) / 6, (0.9 + 0.5 + 0.6) / 6
    pooled = (0.72 + 0.1) / (2.4 + 0.2)
    for room, own in wings("serving"):
        found = room.serving_risk(Serving(**{k: own(v) for k, v in vars(serving).items()}), weights)
        assert_agree(found.risk[1], np.float64(pooled), "float64")
        assert_agree(found.free[1], np.float64(free), "float64")
        assert_agree(found.within[1], np.float64(alone - free), "float64")
        assert_agree(found.between[1], np.float64(pooled - alone), "float64")
    w = np.array(weights)[:, None]
    interval = stats.prompt_bootstrap(w * serving.rejected, w * serving.arrival, ["a", "b", "c"], replicates=10)
    assert_agree(interval.value, serving_risk(serving, weights).risk, "float64")


def test_stops():
    """A stop that is accepted counts, nothing after it does, and the path weighs nothing where it does not arrive."""
    factors = np.array([[0.8, 0.0, 0.0], [0.5, 0.6, 0.9], [1.0, 0.5, 0.0], [0.4, 1.0, 1.0]])
    risks = np.array([[0.3, 0.0, 0.0], [0.3, 0.2, 0.1], [0.3, 0.4, 0.0], [0.3, 0.2, 0.5]])
    alive = np.array([[1, 0, 0], [1, 1, 1], [1, 1, 0], [1, 1, 1]], dtype=bool)
    careless = np.where(alive, 0, np.nan)  # what stands in dead slots is not looked at
    for room, own in wings("serving"):
        one = room.serve(own(factors + careless), own(risks + careless), alive)
        assert_agree(one.alive, np.array([1, 0.75, 0.5]), "exact")
        assert_agree(one.risk, np.array([0.3, 0.8 / 3, 0.3]), "float64")
        assert_agree(one.arrival, np.array([4, 1.9, 0.7]) / 4, "float64")
        assert_agree(one.rejected, np.array([1.2, 0.1 + 0.4 + 0.08, 0.03 + 0.2]) / 4, "float64")
        assert_agree(one.hazard, 1 - np.asarray(one.survival) / np.asarray(one.arrival), "float64")
        assert_agree(room.serving_risk(one).risk, one.hazard, "float64")
        # Acceptance that does not depend on the path leaves no dependence, stops or not.
        flat = room.serve(own(np.full((4, 3), 0.7)), own(np.full((4, 3), 0.3)), alive)
        for part in vars(room.dependence(flat)).values():
            assert_agree(part, np.ones(3), "float64")
        share = own(np.array([1, 0.75, 0.5]))
        expected = room.accepted_length_product(own(np.full(3, 0.3)), share)
        assert_agree(room.accepted_length(flat.survival), expected, "float64")
        # With no path left there is nothing to say.
        gone = room.serve(own(factors[:1]), own(risks[:1]), alive[:1])
        for value in (gone.risk, gone.hazard, *(getattr(room.serving_risk(gone), n) for n in ("risk", "free"))):
            assert_agree(np.isnan(np.asarray(value)), np.array([False, True, True]), "exact")
        assert_agree(np.isnan(np.asarray(room.dependence(gone).ratio)), np.array([False, True, True]), "exact")


@given(chains(), laws(), seeds)
def test_paths_of_a_walk_one_by_one(chain, law, seed):
    target, rng = toy.markov_chain(*chain), np.random.default_rng(seed)
    vocab = target.vocab_size
    after = rng.dirichlet(np.ones(vocab), size=vocab)
    for slot in walk(target, [0, 1], 3, rng.random((12, 3)), law):
        factors, risks = np.zeros(12), np.zeros(12)
        for r in np.flatnonzero(slot.path_node >= 0):
            p, q = slot.rows[slot.path_node[r]], after[slot.token[slot.path_node[r]]]
            factors[r], risks[r] = min(1, q[slot.drawn[r]] / p[slot.drawn[r]]), abs(p - q).sum() / 2
        for room, own in wings("serving"):
            found = room.path_factors(owned(slot, own), own(after[slot.token]))
            assert_agree(found[0], factors, "float64")
            assert_agree(found[1], risks, "float64")
        same = path_factors(slot, after[0]), path_factors(slot, np.tile(after[0], (len(slot.rows), 1)))
        assert_agree(np.stack(same[0]), np.stack(same[1]), "exact")


def test_accept_factors_at_their_edges():
    target = np.array([0.5, 0.5, 0.5, 0.0, 0.0, 1e-300, 1.0, 5e-324])
    draft = np.array([0.5, 0.9, 0.0, 0.0, 0.7, 1.0, 1e-300, 5e-324])
    for room, own in wings("serving"):
        found = room.accept_factors(own(target), own(draft))
        assert_agree(found, np.array([1, 1, 0, 0, 0, 1, 1e-300, 1]), "exact")
        found = room.accept_factors(own(np.array([[0.8], [0.4]])), own(np.array([0.2, 0.4])))
        assert_agree(found, np.array([[0.25, 0.5], [0.5, 1.0]]), "float64")


@st.composite
def anchors(draw, most=0.9):
    """Factors, TVs (up to `most`) and life [N, M, gamma] of several anchors, path weights [M], anchor weights [N]."""
    n, m, gamma = (draw(st.integers(1, 4)) for _ in range(3))
    rng = np.random.default_rng(draw(seeds))
    factors, risks = rng.choice([0, 0.3, 1, rng.random()], size=(n, m, gamma)), most * rng.random((n, m, gamma))
    alive = np.cumprod(rng.random((n, m, gamma)) < draw(st.sampled_from([0.5, 0.9, 1.0])), axis=2) > 0
    return np.where(alive, factors, 0), risks, alive, rng.integers(1, 4, m).astype(float), rng.random(n) + 0.1


@given(anchors())
def test_pooling(case):
    """Parts add (and multiply) up; one anchor alone has no composition; weights are multiplicities."""
    factors, risks, alive, paths, weights = case
    each = serve(factors, risks, alive, paths)
    assert all(a >= b - 1e-12 for s in survival(factors, paths) for a, b in pairwise(s))
    found, joint = (fields(pool(each, weights)) for pool in (serving_risk, dependence))
    known = each.arrival.sum(axis=0) > 0
    assert_agree((found["free"] + found["within"] + found["between"])[known], found["risk"][known], "float64")
    known = joint["between"] >= 0
    assert_agree((joint["within"] * joint["between"])[known], joint["ratio"][known], "float64")

    repeated = np.repeat(np.arange(factors.shape[1]), paths.astype(int))
    again = serve(*(a[:, repeated] for a in (factors, risks, alive)))
    for name, value in fields(each).items():
        assert_agree(fields(again)[name], value, "float64")
    for i in range(len(factors)):
        one = serve(factors[i], risks[i], alive[i], paths)
        for name, value in fields(one).items():
            assert_agree(fields(each)[name][i], value, "float64")
        alone, joint = fields(serving_risk(one)), fields(dependence(one))
        known = one.arrival > 0
        assert_agree(alone["risk"][known], one.hazard[known], "float64")
        assert_agree(alone["between"][known], np.zeros(known.sum()), "float64")
        known = joint["between"] >= 0
        assert_agree(joint["between"][known], np.ones(known.sum()), "float64")


@given(anchors())
def test_backends_agree(case):
    pytest.importorskip("torch")
    factors, risks, alive, paths, weights = (a.astype(np.float32).astype(a.dtype) for a in case)
    each = serve(factors, risks, alive, paths)
    for dtype in ("float64", "float32"):
        *_, (room, own) = wings("serving", dtype)
        theirs = room.serve(own(factors), own(risks), alive, own(paths))
        results = [(theirs, each), (room.serving_risk(theirs, weights), serving_risk(each, weights))]
        results.append((room.dependence(theirs, own(weights)), dependence(each, weights)))
        for mine, expected in results:
            assert list(vars(mine)) == list(vars(expected))
            for name, value in fields(expected).items():
                assert_agree(fields(mine)[name], value, "float64")
        assert_agree(room.reach(own(factors)), reach(factors), "float64")
        assert_agree(room.survival(own(factors), paths), survival(factors, paths), "float64")
        found = room.accept_factors(own(risks), own(factors))
        assert_agree(found, accept_factors(risks, factors), dtype)
        found = room.accepted_length(room.reach(own(factors[0])), paths)
        assert_agree(found, accepted_length(reach(factors[0]), paths), "float64")
        assert_agree(room.accepted_length_product(own(risks[0, 0])), accepted_length_product(risks[0, 0]), "float64")


@pytest.mark.parametrize(
    ("risk", "gamma", "tau"),
    [(0.0, 7, 8.0), (0.11, 7, 4.92), (0.23, 7, 2.7), (0.11, 5, 4.35), (0.23, 5, 2.7), (1 / 7, 7, 4.0), (0.18, 1, 1.82)],
)
def test_bounds_from_accepted_length(risk, gamma, tau):
    """Catalogue 47 and the values behind the paper's 0.11 and 0.23."""
    assert_agree(length_from_largest_risk(risk, gamma), tau, "float64")
    assert_agree(largest_risk_from_length(tau, gamma), risk, "float64")


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 16))
@example(0.5, 1.0, 7)
@example(1 / 3, 0.25, 3)
def test_the_union_bound_and_its_inverse(risk, other, gamma):
    tau = length_from_largest_risk(risk, gamma)
    assert 1 <= tau <= gamma + 1
    assert_agree(largest_risk_from_length(tau, gamma), risk, "float64")
    assert (length_from_largest_risk(other, gamma) <= tau) or other <= risk


def test_what_cannot_be_is_refused():
    half = np.full((2, 3), 0.5)
    enumerated = Slot(**{**vars(paths_slot(np.eye(2), [0, 1])), "path_node": None, "drawn": None})
    for room, own in wings("serving"):
        for bad in (np.nan, -0.1, 1.01):
            wrong = half.copy()
            wrong[1, 1] = bad
            for call in (room.reach, room.survival, room.accepted_length, room.accepted_length_product):
                with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got"):
                    call(own(wrong))
            for pair in ((wrong, half), (half, wrong)):
                for call in (room.accept_factors, room.serve):
                    with pytest.raises(ValueError, match=r"must lie in \[0, 1\], got"):
                        call(*map(own, pair))
        with pytest.raises(ValueError, match="alive again"):
            room.serve(own(half), own(half), np.array([[1, 1, 1], [1, 0, 1]], dtype=bool))
        with pytest.raises(ValueError, match="shapes differ"):
            room.serve(own(half), own(half[:, :2]))
        for weights in ([1.0], [1.0, -1], [0.0, 0], [np.nan, 1]):
            for call in (room.survival, room.accepted_length):
                with pytest.raises(ValueError, match="weights"):
                    call(own(half), np.array(weights))
        for shape in ((0, 3), (2, 0), (3,)):
            with pytest.raises(ValueError, match=r"\[..., M, gamma\]"):
                room.survival(own(np.ones(shape)))
        with pytest.raises(ValueError, match="one anchor at a time"):
            room.accepted_length(own(half[None]))
        with pytest.raises(ValueError, match="no paths"):
            room.path_factors(owned(enumerated, own), own(np.eye(2)))
    for call, value in ((length_from_largest_risk, 1.1), (largest_risk_from_length, 0.9)):
        with pytest.raises(ValueError, match="must lie in"):
            call(value, 3)
        with pytest.raises(ValueError, match="gamma must be at least 1"):
            call(1.0, 0)
    with pytest.raises(ValueError, match=r"bonus token counted.*\[1, 4\], got 4.5"):
        largest_risk_from_length(4.5, 3)
