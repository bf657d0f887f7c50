"""K proposals: point masses, clusters, what must hold at any local optimum, agreement of the two backends."""

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given

from models import toy
from reference.clusters import improve, k_median
from reference.distance import barycentre, barycentre_risk, total_variation
from reference.laws import warp
from tests.agreement import TOLERANCES, assert_agree
from tests.strategies import chains, families, seeds
from tests.test_paths import backends

SLACK = TOLERANCES["float64"]


def found_by_both(rows, weights, k, **options):
    """The solution of both backends with NumPy centres, as far as they are installed."""
    yield k_median(rows, weights, k, **options)
    try:
        import torch

        from fast.clusters import k_median as theirs
    except ImportError:
        return
    found = theirs(torch.from_numpy(rows), weights, k, **options)
    yield type(found)(found.centres.numpy(), found.risk, found.spread)


@pytest.mark.parametrize(("k", "risk"), [(1, 5 / 6), (2, 4 / 6), (3, 3 / 6), (6, 0.0), (8, 0.0)])
def test_point_masses(k, risk):
    """Catalogue 36: (M - K) / M."""
    for found in found_by_both(np.eye(6), None, k, seed=0):
        assert_agree(found.risk, risk, "float64")
        assert found.centres.shape == (k, 6)


@given(families(), seeds)
def test_one_centre_is_the_barycentre(family, seed):
    """Catalogue 36: bit for bit, with spread 0."""
    rows, weights = family
    found, q = k_median(rows, weights, 1, seed=seed), barycentre(rows, weights)
    assert_agree(found.centres, q[None], "exact")
    assert_agree(found.risk, barycentre_risk(rows, q, weights), "exact")
    assert found.spread == 0.0


@given(chains(), seeds)
def test_one_proposal_is_the_order_0_floor(chain, seed):
    """Catalogue 36 and 49: on the rows of a walk, in both backends."""
    uniforms = np.random.default_rng(seed).random((20, 3))
    for backend in backends():
        for slot in backend.walk(toy.markov_chain(*chain), [0, 1], 3, uniforms):
            found = backend.k_median(slot.rows, slot.weight, 1, seed=seed)
            assert_agree(found.risk, backend.floor(slot, 0).fit, "float64")
            assert found.spread == 0.0


@given(families(), seeds)
def test_solutions_are_attained_and_fall_with_k(family, seed):
    """The risk is that of its centres, never rises with K, and is 0 once every distinct row can have its own."""
    rows, weights = family
    used = rows[weights > 0]
    distinct = len(np.unique(used.round(9), axis=0))
    risks = []
    for k in range(1, distinct + 2):
        found = k_median(rows, weights, k, seed=seed, restarts=2)
        nearest = np.min([total_variation(rows, q) for q in found.centres], axis=0)
        assert_agree(found.risk, float(weights @ nearest / weights.sum()), "float64")
        assert_agree(found.centres.sum(axis=1), np.ones(k), "float64")
        assert found.centres.min() >= 0
        assert found.spread >= 0
        risks.append(found.risk)
    assert all(a >= b - SLACK for a, b in pairwise(risks))
    assert_agree(risks[distinct - 1], 0.0, "solver")


def test_the_best_partition_of_a_few_rows():
    """Two centres over six rows against every way to part them in two: never better, and mostly as good."""
    optimal = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        rows, weights = warp(rng.normal(size=(6, 5)) * 2), rng.integers(1, 5, 6).astype(float)
        best = 1.0
        for size in (1, 2, 3):
            for part in combinations(range(6), size):
                inside = np.isin(np.arange(6), part)
                risk = sum(
                    weights[c].sum() * barycentre_risk(rows[c], barycentre(rows[c], weights[c]), weights[c])
                    for c in (inside, ~inside)
                )
                best = min(best, risk / weights.sum())
        found = k_median(rows, weights, 2, seed=seed, restarts=5)
        assert found.risk >= best - SLACK
        assert found.risk < k_median(rows, weights, 1, seed=seed).risk
        optimal += found.risk <= best + SLACK
    assert optimal >= 8  # the seeds are fixed; 9 of 10 were found


def test_centres_that_serve_nobody_move():
    """Three equal centres: two of them serve nobody and go to different rows, so that each row ends with its own."""
    centres, risk = improve(np.eye(3), np.full(3, 1 / 3), np.eye(3)[[0, 0, 0]], 12)
    assert_agree(risk, 0.0, "exact")
    assert_agree(centres, np.eye(3), "exact")


@pytest.mark.parametrize(("seed", "iterations"), [(9, 12), (12, 0), (13, 0)])
def test_one_more_centre_never_hurts(seed, iterations):
    """Families on which a single start from scratch does worse with one centre more."""
    rows = warp(np.random.default_rng(seed).normal(size=(40, 12)) * 3)
    risks = [k_median(rows, None, k, seed=seed, restarts=1, iterations=iterations).risk for k in range(1, 7)]
    assert all(a >= b - SLACK for a, b in pairwise(risks))


def test_two_far_clusters():
    """Catalogue 36: two modes halve the risk and more, and the seeding does not matter."""
    rng = np.random.default_rng(0)
    logits = np.full((16, 6), -9.0)
    logits[:8, :3], logits[8:, 3:] = rng.normal(size=(2, 8, 3)) * 0.3
    rows = warp(logits)
    for one, two in zip(found_by_both(rows, None, 1, seed=1), found_by_both(rows, None, 2, seed=1), strict=True):
        assert two.risk < one.risk / 2
        assert two.spread <= SLACK


def test_weights_are_multiplicities():
    """Catalogue 36; a row without weight is not there."""
    rng = np.random.default_rng(3)
    rows, counts = warp(rng.normal(size=(7, 6)) * 2), np.array([1, 3, 0, 2, 1, 1, 4])
    merged = k_median(rows, counts.astype(float), 3, seed=2)
    repeated = k_median(np.repeat(rows, counts, axis=0), None, 3, seed=2)
    assert_agree(merged.risk, repeated.risk, "float64")
    assert_agree(merged.spread, repeated.spread, "float64")


def test_same_seed_same_answer():
    rows = warp(np.random.default_rng(4).normal(size=(30, 9)) * 3)
    first, again = (k_median(rows, None, 4, seed=7) for _ in range(2))
    assert_agree(first.centres, again.centres, "exact")
    one = k_median(rows, None, 4, seed=7, restarts=1)
    assert one.spread == 0.0
    assert one.risk <= k_median(rows, None, 3, seed=7, restarts=1).risk


@given(families(), seeds)
def test_backends_agree(family, seed):
    """float64 follows the same search; in float32 K = 1 is the same number and more centres still only help."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast.clusters")
    rows, weights = family
    for k in (1, 2, 3):
        expected = k_median(rows, weights, k, seed=seed)
        found = fast.k_median(torch.from_numpy(rows), weights, k, seed=seed)
        assert_agree(found.risk, expected.risk, "float64")
        assert_agree(found.spread, expected.spread, "float64")
        assert_agree(found.centres, expected.centres, "float64")
    single = [fast.k_median(torch.from_numpy(rows).float(), weights, k, seed=seed).risk for k in (1, 2, 3)]
    assert_agree(single[0], k_median(rows, weights, 1, seed=seed).risk, "float32")
    assert all(a >= b - TOLERANCES["float32"] for a, b in pairwise(single))


@pytest.mark.parametrize(
    ("rows", "weights", "k", "restarts", "message"),
    [
        (np.eye(2), None, 0, 3, "at least 1"),
        (np.eye(2), None, 2, 0, "at least 1"),
        (np.eye(2), np.array([1.0, -1]), 2, 3, "weights"),
        (2 * np.eye(2), None, 2, 3, "row 0"),
    ],
)
def test_bad_calls_are_refused(rows, weights, k, restarts, message):
    with pytest.raises(ValueError, match=message):
        k_median(rows, weights, k, seed=0, restarts=restarts)
