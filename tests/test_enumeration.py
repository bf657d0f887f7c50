"""Exact enumeration: certified brackets against brute force, bookkeeping of mass, agreement of the two backends."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models import toy
from reference.enumeration import enumerate_paths, heaviest
from reference.floors import floor
from reference.laws import SamplingLaw, warp
from tests.agreement import TOLERANCES, assert_agree
from tests.strategies import chains, laws
from tests.test_floors import tensors

GAMMA = 4
SLACK = TOLERANCES["golden"]  # of the brute-force floors, found by bisection
budgets = st.sampled_from([3, 5, 9, 20, 10_000])
cutoffs = st.sampled_from([0.0, 1e-3, 0.1, 0.5])


def warped(target, law):
    """The toy whose plain next-token law is the target's under `law`, so that it can be enumerated by brute force."""
    return toy.ToyTarget(target.vocab_size, lambda h: warp(target.logits(h), law), target.stop_ids)


def enumerations(*arguments, **options):
    """The enumeration by each backend, as far as they are installed."""
    yield enumerate_paths(*arguments, **options)
    try:
        from fast.enumeration import enumerate_paths as theirs
    except ImportError:
        return
    for_floors = theirs(*arguments, **options)
    yield (type(s)(**{**vars(s), "rows": s.rows.numpy()}) for s in for_floors)


@given(chains(max_vocab=3), laws(), budgets, cutoffs)
def test_brackets_contain_the_floor(chain, law, budget, cutoff):
    """Whatever was dropped, and whether or not it stopped since, for every slot and order."""
    target, exact = toy.markov_chain(*chain), {}
    for slots in enumerations(target, [0, 1], 3, law=law, budget=budget, cutoff=cutoff):
        for slot in slots:
            for order in range(slot.index + 1):
                here = slot.index, order
                if here not in exact:
                    exact[here] = toy.exact_floor(warped(target, law), (0, 1), *here)
                found = floor(slot, order)
                assert found.lower - SLACK <= exact[here] <= found.upper + SLACK
                assert_agree(found.upper - found.lower, 1 - slot.covered, "float64")


@pytest.mark.parametrize("stop_ids", [(), (3,)])
@pytest.mark.parametrize("budget", [3, 10, 40, 10_000])
def test_brackets_of_a_table_without_structure(stop_ids, budget):
    target = toy.random_table(4, 4, seed=7, stop_ids=stop_ids)
    widths = []
    for slot in enumerate_paths(target, [0], GAMMA, budget=budget, cutoff=0.0):
        for order in (0, 1, 2):
            exact, found = toy.exact_floor(target, (0,), slot.index, order), floor(slot, order)
            assert found.lower - SLACK <= exact <= found.upper + SLACK
            if budget == 10_000:
                assert_agree(found.fit, exact, "golden")
                assert found.lower == found.fit == found.upper
        widths.append(1 - slot.covered)
    assert widths[-1] > 0 if budget < 40 else widths[1] == 0
    assert all(a <= b + SLACK for a, b in itertools.pairwise(widths))


@given(chains(max_vocab=3), laws())
def test_everything_is_kept_when_it_fits(chain, law):
    """Every prefix with its exact probability, and nothing uncovered."""
    target = toy.markov_chain(*chain)
    for slots in enumerations(target, [0, 1], GAMMA, law=law, budget=10_000, cutoff=0.0):
        seen = 0
        for slot in slots:
            pasts, weights, rows = toy.enumerate_rows(warped(target, law), (0, 1), slot.index)
            assert [tuple(p) for p in slot.history(slot.index)] == pasts
            assert_agree(slot.weight, weights, "float64")
            assert_agree(slot.rows, rows, "float64")
            assert_agree(slot.alive, float(weights.sum()), "float64")
            assert slot.covered == 1.0
            seen += 1
        assert seen == GAMMA or not toy.enumerate_rows(warped(target, law), (0, 1), seen)[0]


@given(chains(), laws(), budgets, cutoffs)
def test_mass_is_accounted_for(chain, law, budget, cutoff):
    """Rows within the budget, weights that are probabilities, heaviest children first, mass dropped as allowed."""
    target = toy.markov_chain(*chain)
    for slots in enumerations(target, [0, 1], GAMMA, law=law, budget=budget, cutoff=cutoff):
        spent, before = 0, None
        for slot in slots:
            k = slot.index
            spent += len(slot.rows) if k else 0
            assert_agree(slot.weight.sum(), np.float64(slot.covered * slot.alive), "float64")
            assert 0 < slot.covered <= 1
            assert not np.isin(slot.token, target.stop_ids).any() or k == 0
            for past, weight in zip(slot.history(k), slot.weight, strict=True):
                history = [warp(target.logits((0, 1, *past[:i])), law)[past[i]] for i in range(k)]
                assert_agree(weight, np.float64(np.prod(history)), "float64")
            if before is not None:
                children = before.weight[:, None] * before.rows
                children[:, list(target.stop_ids)] = 0
                children[slot.parent, slot.token] = 0
                assert children.max() <= slot.weight.min() + TOLERANCES["float64"]
                share = (budget - spent + len(slot.rows)) // (GAMMA - k)
                assert len(slot.rows) <= share
                if len(slot.rows) < share:  # the cutoff decided: the mass not covered is within its part
                    dropped, earlier = slot.alive - slot.weight.sum(), before.alive - before.weight.sum()
                    assert dropped <= max(earlier, cutoff * k / (GAMMA - 1)) + SLACK
            before = slot
        assert spent <= budget


def test_stops_of_what_was_dropped():
    """A dropped prefix may have stopped since: `alive` counts it as alive, `covered` as lost."""
    target = toy.markov_chain(np.array([[0.6, 0.3, 0.1], [0.0, 0.0, 1.0], [0.2, 0.4, 0.4]]), stop_ids=(2,))
    slots = list(enumerate_paths(target, [0], 3, budget=2, cutoff=0.0))
    assert_agree(slots[1].weight, np.array([0.6]), "float64")
    assert_agree(slots[1].alive, 0.9, "float64")
    assert_agree(slots[1].covered, 2 / 3, "float64")
    assert_agree(slots[2].weight, np.array([0.36]), "float64")
    assert_agree(slots[2].alive, 0.36 + 0.3 + 0.18, "float64")  # in truth .54: token 1 always stops
    assert len(list(enumerate_paths(target, [1], 3, budget=9))) == 1


def test_the_heaviest():
    mass = np.array([0.2, 0.0, 0.3, 0.1, 0.3 + 1e-16, 0.1])
    assert_agree(heaviest(mass, 3, 0.0), np.array([0, 2, 4]), "exact")
    assert_agree(heaviest(mass, 1, 0.0), np.array([2]), "exact")  # equal but for rounding: the lower place
    assert_agree(heaviest(mass, 9, 0.1), np.array([0, 2, 3, 4]), "exact")
    assert_agree(heaviest(mass, 9, 5.0), np.array([2]), "exact")
    assert_agree(heaviest(mass, 9, -1.0), np.array([0, 2, 3, 4, 5]), "exact")
    assert len(heaviest(np.zeros(3), 2, 0.0)) == 0


@given(
    st.lists(st.sampled_from([0.0, 1e-20, 0.1, 0.1 + 1e-16, 0.25, 0.5]), min_size=1, max_size=9),
    st.integers(1, 10),
    st.sampled_from([-0.1, 0.0, 0.1, 0.2, 0.35, 2.0]),
)
def test_backends_agree_on_the_heaviest(mass, most, spare):
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast.enumeration")
    mass = np.array(mass)
    assert_agree(fast.heaviest(torch.from_numpy(mass), most, spare), heaviest(mass, most, spare), "exact")


@given(chains(), laws(), budgets, cutoffs)
def test_backends_enumerate_the_same_tree(chain, law, budget, cutoff):
    fast = pytest.importorskip("fast.enumeration")
    arguments = toy.markov_chain(*chain), [0, 1], GAMMA
    options = {"law": law, "budget": budget, "cutoff": cutoff}
    for mine, theirs in itertools.zip_longest(
        fast.enumerate_paths(*arguments, **options), enumerate_paths(*arguments, **options)
    ):
        for name in ("parent", "token", "past"):
            assert_agree(getattr(mine, name), getattr(theirs, name), "exact")
        for name in ("weight", "rows", "alive", "covered"):
            assert_agree(getattr(mine, name), getattr(theirs, name), "float64")


def test_fast_floors_read_enumerated_slots():
    fast = pytest.importorskip("fast")
    for slot in enumerate_paths(toy.random_table(5, 3, seed=2), [0], GAMMA, budget=30):
        for order in (0, 1):
            mine, theirs = fast.floor(tensors(slot), order), floor(slot, order)
            assert_agree(np.array([mine.lower, mine.upper]), np.array([theirs.lower, theirs.upper]), "float64")


def test_greedy_enumeration_is_one_path():
    slots = list(enumerate_paths(toy.random_table(5, 2, seed=3), [0], 5, law=SamplingLaw(0)))
    assert [len(slot.rows) for slot in slots] == [1] * 5
    assert [slot.covered for slot in slots] == [1.0] * 5


@pytest.mark.parametrize(
    ("prefix", "gamma", "options", "message"),
    [
        ([], 2, {}, "at least one token"),
        ([5], 2, {}, "outside the vocabulary"),
        ([0], 0, {}, "at least 1"),
        ([0], 4, {"budget": 2}, "at least 3 rows"),
        ([0], 4, {"budget": 3.5}, "at least 3 rows"),
        ([0], 4, {"cutoff": 1.0}, "cutoff"),
        ([0], 4, {"cutoff": -0.1}, "cutoff"),
    ],
)
def test_bad_enumerations_are_refused(prefix, gamma, options, message):
    with pytest.raises(ValueError, match=message):
        next(enumerate_paths(toy.two_token_chain(), prefix, gamma, **options))
