"""Information floors: the grouped estimator's catalogue, exact identities, properties, agreement."""

from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from models import toy
from reference.enumeration import enumerate_paths
from reference.floors import floor
from reference.laws import truncate
from reference.paths import Slot, walk
from tests.agreement import TOLERANCES, assert_agree
from tests.strategies import chains, laws, logits, seeds
from tests.test_paths import backends


def slot_of(ones, predecessors, index=2):
    """A slot of one path per row over two tokens: P(token 1) and realised predecessor of each."""
    n = len(ones)
    rows = np.stack([1 - np.array(ones), np.array(ones)], axis=1)
    past = np.stack([np.arange(n), np.array(predecessors)], axis=1)  # the token before tells the paths apart
    return Slot(
        index, np.arange(n), past[:, 1], np.full(n, 1 / n), rows, past, 1.0, 1.0, np.arange(n), np.zeros(n, int)
    )


def tensors(slot, dtype="float64"):
    torch = pytest.importorskip("torch")
    return Slot(**{**vars(slot), "rows": torch.from_numpy(slot.rows).to(getattr(torch, dtype))})


def every(slot, order):
    """The floor from both backends, as far as they are installed."""
    return [b.floor(tensors(slot) if b.__name__ == "fast" else slot, order) for b in backends()]


def test_grouped_estimator():
    """Catalogue 13 and 17: predecessors A B A C A B A."""
    slot = slot_of([0.1, 0.8, 0.3, 0.5, 0.5, 0.6, 0.9], [0, 1, 0, 2, 0, 1, 0])
    for found in every(slot, 1):
        assert_agree(found.fit, 0.1714286, "printed")
        assert_agree(found.split, 0.2666667, "printed")
        assert_agree(found.covered, 6 / 7, "float64")
        assert found.support == 7
        assert_agree(found.covered * found.split, 0.2285714, "printed")
        assert_agree(found.covered * found.split + 1 - found.covered, 0.3714286, "printed")
        # Both directions, every path scored once.  A: fit .1 .5 -> .3, score .3 .9; fit .3 .9 -> .6, score .1 .5.
        a, b = (0.0 + 0.6 + 0.5 + 0.1) / 4, 0.2
        assert_agree(found.held_out, (4 * a + 2 * b) / 6, "float64")
        assert_agree(found.lower, found.covered * found.held_out, "float64")
        assert_agree(found.upper, found.lower + 1 / 7, "float64")
    for found in every(slot, 0):
        assert_agree(found.fit, 0.2, "float64")
        assert found.covered == 1.0


def test_predecessors_all_different_or_all_equal():
    """Catalogue 14."""
    ones = [0.1, 0.8, 0.3, 0.5]
    for found in every(slot_of(ones, [0, 1, 2, 3]), 1):
        assert (found.fit, found.held_out, found.split, found.covered) == (0.0, None, None, 0.0)
        assert (found.lower, found.upper) == (0.0, 1.0)
    same = slot_of(ones, [5] * 4)
    for one, zero in zip(every(same, 1), every(same, 0), strict=True):
        assert one == zero
        assert one.covered == 1.0


def test_rows_that_depend_on_the_predecessor_only():
    """Catalogue 16."""
    for found in every(slot_of([0.1, 0.7, 0.1, 0.7, 0.1], [0, 1, 0, 1, 0]), 1):
        assert_agree(np.array([found.fit, found.held_out, found.split]), np.zeros(3), "float64")


def test_the_identity_needs_no_coverage():
    """From order k on T is 0 whatever was dropped; was once: an enumerated slot brackets it with [0, 1 - c]."""
    slot = slot_of([0.1, 0.5], [0, 0])
    slot = Slot(**{**vars(slot), "weight": np.array([0.6, 0.3]), "covered": 0.9, "path_node": None, "drawn": None})
    for order in (2, 3):
        for found in (*every(slot, order), *every_truncated(slot, 1, order)):
            assert list(vars(found).values()) == [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 2]


@given(chains(), laws(), seeds)
def test_what_is_known_costs_nothing(chain, law, seed):
    """Slot 0 order 0 and slot 1 order 1 are 0, not nearly 0; catalogue 15: plug-in floors fall with the order."""
    target = toy.markov_chain(*chain)
    uniforms = np.random.default_rng(seed).random((25, 4))
    for backend in backends():
        for slot in backend.walk(target, [0, 1], 4, uniforms, law):
            fits = []
            for order in range(4):
                found = backend.floor(slot, order)
                fits.append(found.fit)
                assert 0 <= found.fit <= 1
                assert 0 <= found.lower <= found.upper <= 1 + 1e-12
                if order >= slot.index:
                    assert (found.fit, found.held_out, found.split) == (0.0, 0.0, 0.0)
                    assert (found.lower, found.upper, found.covered) == (0.0, 0.0, 1.0)
                elif found.held_out is not None:
                    assert found.covered * found.held_out >= found.lower - 1e-12
            assert all(a >= b - 1e-12 for a, b in pairwise(fits))


@given(logits(max_rows=8), seeds)
def test_backends_agree_on_any_slot(table, seed):
    """Random rows, predecessors and path order; float64, and float32 rows of the same logits."""
    pytest.importorskip("torch")
    from reference.laws import warp

    rng = np.random.default_rng(seed)
    rows, n = warp(table), len(table)
    node = rng.integers(0, n, 3 * n)
    node = np.unique(node, return_inverse=True)[1].ravel()  # every prefix has a path
    rows = rows[: node.max() + 1]
    n, paths = len(rows), len(node)
    node[rng.random(paths) < 0.1] = -1
    if len(np.unique(node[node >= 0])) < n:
        node[:n] = np.arange(n)
    weight = np.bincount(node[node >= 0], minlength=n) / paths
    past = np.stack([np.arange(n), rng.integers(0, 2, n)], axis=1)
    slot = Slot(2, np.arange(n), past[:, 1], weight, rows, past, float((node >= 0).mean()), 1.0, node, node)
    import fast

    for order in (0, 1, 2):
        expected, found = asdict(floor(slot, order)), asdict(fast.floor(tensors(slot), order))
        single = asdict(fast.floor(tensors(slot, "float32"), order))
        for name, value in expected.items():
            if value is None or isinstance(value, int):
                assert found[name] == value == single[name]
            else:
                assert_agree(found[name], value, "float64")
                if name in ("fit", "covered"):  # a held-out score depends on which of two equal minimisers was met
                    assert_agree(single[name], value, "float32")


def test_exact_weights_have_no_halves():
    """An enumerated slot: nothing is held out, and the uncovered mass widens the interval."""
    slot = slot_of([0.1, 0.5], [0, 0])
    slot = Slot(**{**vars(slot), "weight": np.array([0.6, 0.3]), "covered": 0.9, "path_node": None, "drawn": None})
    for found in every(slot, 0):
        assert found.held_out is None
        assert_agree(found.fit, 0.3 / 0.9 * 0.4, "float64")
        assert_agree(found.lower, 0.3 * 0.4, "float64")
        assert_agree(found.upper, 0.3 * 0.4 + 0.1, "float64")


def test_a_row_with_a_nan_is_not_read():
    # was once: the reference's truncated read drops the NaN of this row and returns a floor of .444
    slot = slot_of([0.0, 0.0], [0, 0])
    slot = Slot(**{**vars(slot), "rows": np.array([[0.5, 0.3, 0.2], [0.5, np.nan, 0.5]])})
    for backend in backends():
        there = tensors(slot) if backend.__name__ == "fast" else slot
        with pytest.raises(ValueError, match="row 1 is no distribution"):
            backend.truncated_floor(there, 2)


def every_truncated(slot, k, order):
    """The truncated floor from both backends, as far as they are installed."""
    return [b.truncated_floor(tensors(slot) if b.__name__ == "fast" else slot, k, order) for b in backends()]


def test_truncation_can_raise_a_floor():
    """Catalogue 46: .15 on full rows, .3125 on two entries of three, .2 left out; and down to 0 on one entry alike."""
    for rows, k, fit, truncated in (
        ([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]], 2, 0.15, 0.3125),
        ([[0.6, 0.4, 0.0], [0.6, 0.0, 0.4]], 1, 0.2, 0.0),
    ):
        slot = slot_of([0.0, 0.0], [0, 0])
        slot = Slot(**{**vars(slot), "rows": np.array(rows)})
        residual = truncate(slot.rows, k)[1].mean()
        for found, whole in zip(every_truncated(slot, k, 0), every(slot, 0), strict=True):
            assert_agree(whole.fit, fit, "float64")
            assert_agree(found.fit, truncated, "float64")
            band = [max(0.0, truncated - residual), min(1.0, truncated + residual)]
            assert_agree(np.array([found.lower, found.upper]), np.array(band), "float64")
            assert found.lower <= whole.fit <= found.upper
            assert found.covered == 1.0


@given(chains(), laws(), seeds)
def test_the_full_read_is_inside_the_band(chain, law, seed):
    """Walked slots, and enumerated ones whose brackets it widens; all entries read, it is the floor itself."""
    target, slack = toy.markov_chain(*chain), TOLERANCES["float64"]
    uniforms = np.random.default_rng(seed).random((15, 3))
    walked = list(walk(target, [0, 1], 3, uniforms, law))
    kept = list(enumerate_paths(target, [0, 1], 3, law=law, budget=4, cutoff=0.1))
    for slot in walked + kept:
        for order in range(slot.index + 1):
            whole, unread = floor(slot, order), 1 - slot.covered if order < slot.index else 0.0
            for k in range(1, target.vocab_size + 1):
                for found in every_truncated(slot, k, order):
                    assert 0 <= found.lower <= found.upper <= 1 + slack
                    assert found.lower - slack <= slot.covered * whole.fit
                    assert slot.covered * whole.fit + unread <= found.upper + slack
                    if k == target.vocab_size or order == slot.index:
                        assert_agree(found.fit, whole.fit, "float64")
                        assert_agree(found.upper - found.lower, unread, "float64")


@given(logits(), seeds)
def test_backends_agree_on_truncated_reads(table, seed):
    pytest.importorskip("torch")
    from reference.laws import warp

    rows = warp(table)
    n, rng = len(rows), np.random.default_rng(seed)
    past = np.stack([np.arange(n), rng.integers(0, 2, n)], axis=1)
    slot = Slot(2, np.arange(n), past[:, 1], np.full(n, 1 / n), rows, past, 1.0, 1.0, np.arange(n), np.arange(n))
    for order in (0, 1):
        mine, theirs = every_truncated(slot, 2, order)
        for name in ("fit", "lower", "upper", "covered"):
            assert_agree(getattr(mine, name), getattr(theirs, name), "float64")


@pytest.mark.parametrize("order", [-1, 1.5])
def test_a_bad_order_is_refused(order):
    with pytest.raises(ValueError, match="order"):
        floor(slot_of([0.1], [0]), order)


def test_floors_of_a_walk_by_brute_force():
    """Regroup the M paths one by one, without the tree, and solve each cell anew."""
    from reference.distance import barycentre, barycentre_risk

    target = toy.random_table(5, 4, seed=11)
    uniforms = np.random.default_rng(5).random((40, 4))
    slots = list(walk(target, [0], 4, uniforms))
    drawn = np.stack([slot.drawn for slot in slots], axis=1)
    for k in (2, 3):
        rows = np.array([target.next_token((0, *path[:k])) for path in drawn])
        plug, held, covered = 0.0, 0.0, 0
        for z in np.unique(drawn[:, k - 1]):
            cell = rows[drawn[:, k - 1] == z]
            plug += len(cell) / 40 * barycentre_risk(cell, barycentre(cell))
            if len(cell) > 1:
                covered += len(cell)
                for fit, score in ((cell[::2], cell[1::2]), (cell[1::2], cell[::2])):
                    held += len(score) * barycentre_risk(score, barycentre(fit))
        found = floor(slots[k], 1)
        assert_agree(found.fit, plug, "float64")
        assert_agree(found.held_out, held / covered, "float64")
        assert_agree(found.covered, covered / 40, "float64")
