"""The toys' exact floors: the catalogue's chain, point masses, and a linear programme."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings

from models import toy
from reference.floors import floor
from reference.paths import walk
from tests.agreement import assert_agree
from tests.strategies import chains


def test_the_two_token_chain():
    """Catalogue 18: rows slot 1..3, columns order 0, 1, .."""
    chain = toy.two_token_chain()
    for slot, floors in {0: [0], 1: [0.1, 0], 2: [0.19, 0.04, 0], 3: [0.255, 0.0428, 0, 0]}.items():
        for order, expected in enumerate(floors):
            assert_agree(toy.exact_floor(chain, (0, 0), slot, order), float(expected), "float64")


def test_point_masses():
    """M continuations that differ everywhere: 1 - 1/M from slot 1 on without a predecessor, 0 with one."""
    target = toy.point_masses([[0, 5, 6], [1, 6, 7], [2, 7, 5], [3, 4, 4]], vocab_size=8)
    for slot in (1, 2):
        assert_agree(toy.exact_floor(target, (9,), slot, 0), 0.75, "float64")
        assert_agree(toy.exact_floor(target, (9,), slot, 1), 0.0, "float64")


@given(chains(max_vocab=3))
@settings(max_examples=15)
def test_floors_fall_with_the_order_and_solve_the_linear_programme(chain):
    optimize = pytest.importorskip("scipy.optimize")
    target = toy.markov_chain(*chain)
    for slot in (1, 2):
        pasts, weights, rows = toy.enumerate_rows(target, (0, 0), slot)
        if not pasts:
            continue
        floors = [toy.exact_floor(target, (0, 0), slot, order) for order in range(slot + 1)]
        assert floors[-1] == 0
        assert all(a >= b - 1e-12 for a, b in pairwise(floors))
        u, v = rows.shape
        q_part = np.tile(np.eye(v), (u, 1))
        best = optimize.linprog(
            np.concatenate([np.zeros(v), np.repeat(weights / weights.sum(), v) / 2]),
            A_ub=np.block([[q_part, -np.eye(u * v)], [-q_part, -np.eye(u * v)]]),
            b_ub=np.concatenate([rows.ravel(), -rows.ravel()]),
            A_eq=np.concatenate([np.ones(v), np.zeros(u * v)])[None], b_eq=[1.0],
        ).fun  # fmt: skip
        assert_agree(floors[0], float(best), "solver")


def test_estimated_floors_approach_the_exact_ones():
    """On the catalogue's chain, orders 0 to 2."""
    chain, paths = toy.two_token_chain(), 20_000
    uniforms = np.random.default_rng(0).random((paths, 4))
    # Each floor is a mean of path risks in [0, 1]: six standard errors, false alarm below 1e-8 per value.
    allowed = 6 * 0.5 / np.sqrt(paths)
    for slot in walk(chain, [0, 0], 4, uniforms):
        for order in range(3):
            estimate, truth = floor(slot, order), toy.exact_floor(chain, (0, 0), slot.index, order)
            assert abs(estimate.fit - truth) <= allowed
            assert abs(estimate.held_out - truth) <= allowed


@pytest.mark.parametrize(
    "table", [np.ones((2, 3)), np.array([[0.5, 0.4], [0.5, 0.5]]), np.array([[1.5, -0.5], [0.5, 0.5]])]
)
def test_a_table_that_is_no_chain_is_refused(table):
    with pytest.raises(ValueError, match="chain"):
        toy.markov_chain(table)


def test_random_tables_are_repeatable():
    one, two = (toy.random_table(5, 3, seed=7) for _ in range(2))
    assert_agree(one.next_token((1, 2, 3)), two.next_token((1, 2, 3)), "exact")
    assert_agree(
        one.next_token((4, 1, 2, 3)), two.next_token((0, 1, 2, 3)), "exact"
    )  # depth 3: older tokens are forgotten
    assert (one.next_token((1, 2, 3)) != one.next_token((1, 2, 4))).any()


@pytest.mark.parametrize("prefix", [(0,), (1,), (1, 0, 1, 1), (1, 1, 1, 1, 1)])
def test_parity_has_no_floor_and_blind_proposals_all_the_risk(prefix):
    """App. G.2: the floor is 0; over uniform prefixes the constant proposal has risk 1/2, and none is better."""
    target = toy.parity()
    assert toy.exact_floor(target, prefix, 0, 0) == 0
    assert toy.exact_floor(target, prefix, 3, 0) == 0
    prefixes = np.array(np.meshgrid(*[[0, 1]] * 4)).reshape(4, -1).T
    rows = np.array([target.next_token(tuple(x)) for x in prefixes])
    for q in ([0.5, 0.5], [0.9, 0.1], [0.0, 1.0]):
        assert_agree(np.abs(rows - q).sum(axis=1).mean() / 2, 0.5, "float64")


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.6, 0.3, 0.1], [0.25] * 4])
@pytest.mark.parametrize("sharpness", [0.0, 0.4, 1.0])
def test_mixtures(weights, sharpness):
    target = toy.mixture(weights, sharpness)
    for slot in (1, 2):
        assert_agree(toy.exact_floor(target, (0,), slot, 0), sharpness * (1 - max(weights)), "float64")
        assert_agree(toy.exact_floor(target, (0,), slot, slot), 0.0, "float64")
    if sharpness == 1:
        assert_agree(toy.exact_floor(target, (0,), 2, 1), 0.0, "float64")
