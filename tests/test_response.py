"""Best responses and sweeps: closed forms, linear programmes, an enumerated toy, properties, agreement."""

import importlib
from dataclasses import asdict, replace
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from models import toy
from reference.response import BlockPaths, best_response, credit, fit_proposal, sweep, water_fill
from tests.agreement import assert_agree
from tests.strategies import seeds


@pytest.fixture(params=["reference", "fast"], scope="module")
def room(request):
    """The module under test."""
    if request.param == "fast":
        pytest.importorskip("torch")
    return importlib.import_module(f"{request.param}.response")


@st.composite
def items(draw, tokens=3, most=6, least=1e-7):
    """Tokens, target probabilities and credits [n] of a water fill: ties, zeros, tiny values."""
    count = draw(st.integers(0, most))
    probs = st.one_of(st.sampled_from([0.0, least, 0.1, 0.2, 0.25, 0.3, 0.5, 1.0]), st.floats(0.01, 1))
    credits = st.one_of(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]), st.floats(1e-3, 7))
    columns = [draw(st.lists(s, min_size=count, max_size=count)) for s in (st.integers(0, tokens - 1), probs, credits)]
    return np.array(columns[0], dtype=np.int64), np.array(columns[1], dtype=float), np.array(columns[2], dtype=float)


@st.composite
def blocks(draw):
    """(`BlockPaths` of 8 to 24 paths over a few tokens, the order of its proposal): ties, zero mass, stops."""
    rng = np.random.default_rng(draw(seeds))
    shape = paths, gamma = draw(st.integers(8, 24)), draw(st.integers(1, 4))
    vocab, order = draw(st.integers(1, 4)), draw(st.integers(0, 1))
    token = rng.integers(0, vocab, shape)
    predecessor = np.concatenate([np.zeros((paths, 1), dtype=np.int64), token[:, :-1]], axis=1)
    few = rng.choice([0.0, 1e-7, 0.1, 0.2, 0.3, 0.5, 1.0], shape, p=[0.05, 0.05, 0.2, 0.2, 0.2, 0.2, 0.1])
    target_p = few if draw(st.booleans()) else rng.random(shape)
    base = rng.dirichlet(np.full(vocab, 0.3), size=(gamma, vocab))  # a proposal for each slot and predecessor
    if order == 0:
        base[:] = base[:, :1]
    draft_p = base[np.arange(gamma), predecessor, token]
    alive = np.cumprod(rng.random(shape) > draw(st.sampled_from([0.0, 0.2])), axis=1).astype(bool)
    return BlockPaths(token, target_p, draft_p, predecessor, alive), order


def objective(q, tokens, probs, worth):
    """sum_r c_r min(1, q(token_r) / p_r) of a proposal given as {token: mass}."""
    mass = np.array([q.get(int(t), 0.0) for t in tokens])
    return float(sum(c * min(1.0, m / p) for m, p, c in zip(mass, probs, worth, strict=True) if p > 0))


def factors_of(paths):
    """Accept factors of the recorded proposal, from the definition."""
    p, q = paths.target_p, paths.draft_p
    ratio = np.divide(q, p, out=np.zeros_like(p), where=p > 0)
    return np.where(paths.alive, np.minimum(1, ratio), 0)


def accepted(factors):
    """Expected accepted drafts of each path, [M]."""
    return np.array([sum(np.prod(row[: k + 1]) for k in range(len(row))) for row in factors])


def test_filling_in_closed_form(room):
    """Catalogue 29 and 30."""
    tokens, probs = np.array([0, 0, 1, 2, 2]), np.array([0.5, 0.25, 0.4, 0.2, 0.8])
    worth = np.array([1, 0.5, 1.2, 0.1, 0.4])
    allocation, leftover = room.water_fill(tokens, probs, worth)
    assert list(allocation) == [0, 1, 2]
    assert_agree(list(allocation.values()), [0.5, 0.4, 0.1], "float64")
    assert leftover == 0
    assert_agree(objective(allocation, tokens, probs, worth), 2.8, "float64")

    allocation, leftover = room.water_fill(np.array([0, 1, 0]), np.array([0.3, 0.2, 0.1]), np.array([1.0, 1, 2]))
    assert allocation.keys() == {0, 1}
    assert_agree([allocation[0], allocation[1], leftover], [0.3, 0.2, 0.5], "float64")


def test_known_target_is_copied(room):
    """Catalogue 32: one row for all paths; the leftover is the mass of the tokens that no path drew."""
    tokens, row = np.array([0, 1, 0, 0, 1]), np.array([0.6, 0.3, 0.08, 0.02])
    allocation, leftover = room.water_fill(tokens, row[tokens], np.array([1.0, 0.2, 3, 1, 2]))
    assert_agree([allocation[0], allocation[1], leftover], [0.6, 0.3, 0.1], "float64")


def test_nothing_to_fill(room):
    nothing = np.array([], dtype=np.int64), np.array([]), np.array([])
    worthless = np.array([0, 1, 1]), np.array([0.5, 0.2, 0.0]), np.array([0.0, 0.0, 1.0])
    for arguments in (nothing, worthless):
        assert room.water_fill(*arguments) == ({}, 1.0)


@given(case=items(least=0.01))
@example(case=(np.array([0, 0, 0, 1]), np.array([0.3, 0.3, 0.3, 0.1]), np.array([1.0, 1, 1, 1])))  # slopes that tie
def test_water_fill_solves_the_linear_programme(room, case):
    """Catalogue 31: max sum_r c_r a_r with a_r <= q(z_r) / p_r, a_r <= 1, sum_v q(v) = 1; no grid point is better."""
    optimize = pytest.importorskip("scipy.optimize")
    tokens, probs, worth = case
    allocation, leftover = room.water_fill(*case)
    assert leftover >= 0
    assert all(mass > 0 for mass in allocation.values())
    assert_agree(sum(allocation.values()) + leftover, 1.0, "float64")
    found = objective(allocation, *case)

    n = len(tokens)
    gains, row = np.where(probs > 0, worth, 0), np.eye(3)[tokens]  # columns of the programme: q(0..2), a_1..a_n
    best = optimize.linprog(
        np.append(np.zeros(3), -gains),
        A_ub=np.hstack([-row, np.diag(probs)]) if n else None,
        b_ub=np.zeros(n) if n else None,
        A_eq=np.append(np.ones(3), np.zeros(n))[None],
        b_eq=[1.0],
        bounds=[(0, 1)] * (3 + n),
    ).fun
    assert_agree(found, float(-best), "solver")
    if leftover > 0:
        assert_agree(found, float(gains.sum()), "float64")
    for first, second in product(range(11), range(11)):
        if first + second <= 10:
            grid = {0: first / 10, 1: second / 10, 2: (10 - first - second) / 10}
            assert objective(grid, *case) <= found + 1e-12


@given(case=items(), seed=seeds)
def test_order_and_splitting_of_paths_do_not_matter(room, case, seed):
    tokens, probs, worth = case
    found = objective(room.water_fill(*case)[0], *case)
    order = np.random.default_rng(seed).permutation(len(tokens))
    shuffled = room.water_fill(tokens[order], probs[order], worth[order])[0]
    assert_agree(objective(shuffled, *case), found, "golden")
    halves = np.tile(tokens, 2), np.tile(probs, 2), np.append(worth / 4, 3 * worth / 4)
    assert_agree(objective(room.water_fill(*halves)[0], *case), found, "golden")


@given(case=blocks(), seed=seeds)
def test_credit_is_the_worth_of_an_accepted_draft(case, seed):
    """Catalogue 33: tau moves by the mean of W_{k-1} F_k (a'_k - a_k); F at the last slot is 1."""
    factors = factors_of(case[0])
    gamma = factors.shape[1]
    for slot in range(gamma):
        moved = factors.copy()
        moved[:, slot] = np.random.default_rng(seed).random(len(factors))
        worth = credit(factors, slot)
        assert_agree(credit(moved, slot), worth, "exact")
        change = accepted(moved).mean() - accepted(factors).mean()
        assert_agree((worth * (moved[:, slot] - factors[:, slot])).mean(), change, "float64")
    assert_agree(credit(factors, gamma - 1), factors[:, :-1].prod(axis=1), "float64")


DRAFTS = np.array([[0.7, 0.3], [0.5, 0.5], [0.4, 0.6]])


def chain_law():
    """The two-token chain's 8 blocks of 3 tokens: (tokens [8, 3], target probabilities [8, 3], block law [8])."""
    target = toy.two_token_chain()
    tokens = np.array(list(product([0, 1], repeat=3)))
    target_p = np.array([[target.next_token((0, 0, *z[:k]))[z[k]] for k in range(3)] for z in tokens])
    return tokens, target_p, target_p.prod(axis=1)


def chain_paths():
    """2,000 paths whose two halves both hold every block exactly as often as its probability says."""
    tokens, target_p, law = chain_law()
    block = np.tile(np.repeat(np.arange(8), np.rint(1000 * law).astype(int)), 2)
    assert len(block) == 2000
    predecessor = np.concatenate([np.zeros((8, 1), dtype=np.int64), tokens[:, :-1]], axis=1)
    draft_p = DRAFTS[np.arange(3), tokens]
    alive = np.ones((2000, 3), dtype=bool)
    return BlockPaths(tokens[block], target_p[block], draft_p[block], predecessor[block], alive)


def best_gain(factors, slot, order):
    """The population's best gain at one slot by a linear programme over the enumerated blocks."""
    optimize = pytest.importorskip("scipy.optimize")
    tokens, target_p, law = chain_law()
    cell = tokens[:, slot - 1] if order and slot else np.zeros(8, dtype=int)
    on, off = factors.copy(), factors.copy()
    on[:, slot], off[:, slot] = 1, 0
    worth = law * (accepted(on) - accepted(off))  # tau is linear in one slot's factors
    place = np.eye(4)[2 * cell + tokens[:, slot]]  # columns: q of the two cells, then a of the eight blocks
    totals = np.hstack([np.kron(np.eye(2), np.ones(2)), np.zeros((2, 8))])
    best = optimize.linprog(
        np.append(np.zeros(4), -worth),
        A_ub=np.hstack([-place, np.diag(target_p[:, slot])]),
        b_ub=np.zeros(8),
        A_eq=totals,
        b_eq=[1.0, 1.0],
        bounds=[(0, 1)] * 12,
    ).fun
    return float(-best - worth @ factors[:, slot])


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_response_to_an_enumerated_law(room, slot, order):
    """Every block as often as its probability says: the linear programme's gain, where fitted and held out alike."""
    tokens, target_p, law = chain_law()
    factors = np.minimum(1, DRAFTS[np.arange(3), tokens] / target_p)
    assert_agree(1 + law @ accepted(factors), 3.004, "float64")  # catalogue 24
    best = best_gain(factors, slot, order)
    assert best > 0.01
    found = room.best_response(chain_paths(), slot, order)
    assert_agree(found.train, best, "solver")
    assert_agree(found.held_out, found.train, "float64")
    worth = np.repeat(credit(factors, slot), np.rint(1000 * law).astype(int))
    assert_agree(found.effective_paths, worth.sum() ** 2 / (worth**2).sum(), "golden")


def test_slot_zero_of_an_enumerated_law(room):
    """The best proposal at slot 0 of a chain is its target row: the slot's risk is gone, and nothing is left over."""
    found = room.best_response(chain_paths(), 0)
    tokens, target_p, law = chain_law()
    factors = np.minimum(1, DRAFTS[np.arange(3), tokens] / target_p)
    factors[:, 0] = 1
    assert_agree(1 + law @ accepted(factors), 3.004 + found.train, "float64")
    assert_agree(found.leftover, 0.0, "float64")


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("backward", [False, True])
def test_sweep_of_an_enumerated_law(room, order, backward):
    """Catalogue 34: never falls, begins at least as well as the first slot alone, and ends where no slot gains."""
    paths = chain_paths()
    found = room.sweep(paths, order, 12, backward)
    assert len(found.train) == 12
    assert all(later >= earlier - 1e-12 for earlier, later in pairwise((0.0, *found.train)))
    assert found.train[0] >= room.best_response(paths, 2 if backward else 0, order).train - 1e-12
    assert_agree(found.held_out, found.train, "float64")

    first, draft_p = np.arange(2000) < 1000, paths.draft_p.copy()
    for _ in range(12):
        for slot in range(3)[:: -1 if backward else 1]:
            worth = credit(factors_of(replace(paths, draft_p=draft_p)), slot)
            draft_p[:, slot] = np.asarray(room.fit_proposal(paths, worth, slot, order, first)[0])
    fixed = replace(paths, draft_p=draft_p)
    assert_agree(accepted(factors_of(fixed)).mean() - accepted(factors_of(paths)).mean(), found.train[-1], "golden")
    for slot in range(3):
        assert_agree(room.best_response(fixed, slot, order).train, 0.0, "float64")
    assert_agree(room.sweep(fixed, order, 2, backward).train, np.zeros(2), "float64")


@given(case=blocks())
def test_gains_by_their_definition(room, case):
    """Both folds one path at a time: fit on one half, read the other's lengths anew; catalogue 34, train >= 0."""
    paths, order = case
    base, half = factors_of(paths), len(paths.token) // 2
    for slot in range(base.shape[1]):
        worth, gains = credit(base, slot), np.zeros(2)
        for fit, other in ((range(half), range(half, len(base))), (range(half, len(base)), range(half))):
            moved = base.copy()
            for r in range(len(base)):
                cell = [s for s in fit if not order or paths.predecessor[s, slot] == paths.predecessor[r, slot]]
                cell = [s for s in cell if paths.alive[s, slot]]
                mine = water_fill(paths.token[cell, slot], paths.target_p[cell, slot], worth[cell])
                q = mine[0].get(int(paths.token[r, slot]), 0.0) + mine[1] * paths.draft_p[r, slot]
                p = paths.target_p[r, slot] * paths.alive[r, slot]
                moved[r, slot] = min(1, q / p) if p > 0 else 0
            gain = accepted(moved) - accepted(base)
            gains += [gain[list(fit)].mean() / 2, gain[list(other)].mean() / 2]
        found = room.best_response(paths, slot, order)
        assert_agree([found.train, found.held_out], gains, "golden")
        assert found.train >= -1e-12
        assert 0 <= found.leftover <= 1
        assert 0 <= found.effective_paths <= half + 1 + 1e-9


@given(case=blocks())
def test_sweeps_climb(room, case):
    """Catalogue 34: the fitted half's accepted length never falls, in either direction."""
    paths, order = case
    for backward in (False, True):
        found = room.sweep(paths, order, 4, backward)
        assert all(later >= earlier - 1e-12 for earlier, later in pairwise((0.0, *found.train)))
        assert np.abs(found.held_out).max() <= paths.token.shape[1]
    if paths.token.shape[1] == 1:  # one slot: its best response, at once and for good
        alone = room.best_response(paths, 0, order)
        assert_agree(found.train, np.full(4, alone.train), "float64")
        assert_agree(found.held_out, np.full(4, alone.held_out), "float64")


@given(case=blocks())
def test_sweeps_by_their_definition(room, case):
    """Two rounds one slot at a time: each is refitted under the credit that the latest proposals elsewhere give it."""
    paths, order = case
    base, first = factors_of(paths), np.arange(len(paths.token)) < len(paths.token) // 2
    for backward in (False, True):
        gains = np.zeros((2, 2))
        for fit in (first, ~first):
            latest = paths.draft_p.copy()
            for n in range(2):
                for slot in range(base.shape[1])[:: -1 if backward else 1]:
                    worth = credit(factors_of(replace(paths, draft_p=latest)), slot)
                    latest[:, slot] = fit_proposal(paths, worth, slot, order, fit)[0]
                gain = accepted(factors_of(replace(paths, draft_p=latest))) - accepted(base)
                gains[n] += [gain[fit].mean() / 2, gain[~fit].mean() / 2]
        found = room.sweep(paths, order, 2, backward)
        assert_agree(np.stack([found.train, found.held_out], axis=1), gains, "golden")


@given(case=blocks())
def test_smoothing_leads_back_to_the_recorded_proposal(room, case):
    """Catalogue 35: eps = 1 changes nothing at all; the objective is concave on the way."""
    paths, order = case
    for slot in range(paths.token.shape[1]):
        found = room.best_response(paths, slot, order, 1.0)
        assert (found.train, found.held_out) == (0.0, 0.0)
        whole = room.best_response(paths, slot, order).train
        for eps in (0.1, 0.25):
            assert (1 - eps) * whole - 1e-12 <= room.best_response(paths, slot, order, eps).train <= whole + 1e-12


def test_a_cell_nobody_fitted_keeps_the_recorded_proposal(room):
    """Catalogue 35.  Predecessor 7 is met in the second half only."""
    predecessor = np.repeat([[5], [7]], 4, axis=0)
    token, p, q = np.array([[0], [1]] * 4), np.full((8, 1), 0.4), np.array([[0.3], [0.1]] * 4)
    paths = BlockPaths(token, p, q, predecessor, np.ones((8, 1), dtype=bool))
    found, leftover = room.fit_proposal(paths, np.ones(8), 0, 1, np.arange(8) < 4)
    assert_agree(found[4:], q[4:, 0], "exact")
    assert_agree(found[:4], (0.4 + 0.2 * q[:4, 0]), "float64")
    assert_agree(leftover, 0.2, "float64")
    found, leftover = room.fit_proposal(paths, np.ones(8), 0, 1, np.zeros(8, dtype=bool))
    assert_agree(found, q[:, 0], "exact")
    assert leftover == 1.0


@given(case=blocks(), seed=seeds)
def test_what_a_stopped_path_would_have_met_is_ignored(room, case, seed):
    paths, order = case
    rng = np.random.default_rng(seed)
    junk = replace(
        paths,
        token=np.where(paths.alive, paths.token, rng.integers(-1, 3, paths.token.shape)),
        target_p=np.where(paths.alive, paths.target_p, np.nan),
        draft_p=np.where(paths.alive, paths.draft_p, -1),
        predecessor=np.where(paths.alive, paths.predecessor, -1),
    )
    for slot in range(paths.token.shape[1]):
        mine, theirs = (asdict(room.best_response(p, slot, order)) for p in (junk, paths))
        assert_agree(list(mine.values()), list(theirs.values()), "float64")
    mine, theirs = room.sweep(junk, order, 2), room.sweep(paths, order, 2)
    assert_agree([mine.train, mine.held_out], [theirs.train, theirs.held_out], "float64")


def test_bad_arguments_are_named(room):
    good = chain_paths()
    dead = good.alive.copy()
    dead[3, 1] = False
    few = BlockPaths(*(a[:7] for a in vars(good).values()))
    for paths, slot, order, message in (
        (few, 0, 0, "at least 8 paths, got 7"),
        (replace(good, alive=dead), 0, 0, "stay stopped"),
        (replace(good, token=good.token[:, :2]), 0, 0, r"\[M, gamma\]"),
        (replace(good, target_p=good.target_p * np.nan), 0, 0, "target_p"),
        (replace(good, draft_p=good.draft_p - 1), 0, 0, "draft_p"),
        (good, 3, 0, "slot 3"),
        (good, -1, 0, "slot -1"),
        (good, 0, 2, "order 0 or 1"),
    ):
        with pytest.raises(ValueError, match=message):
            room.best_response(paths, slot, order)
        if slot == 0:
            with pytest.raises(ValueError, match=message):
                room.sweep(paths, order)
    factors = np.full((8, 3), 0.5)
    if room.__name__.startswith("fast"):
        factors = importlib.import_module("torch").from_numpy(factors)
    for slot in (-1, 3):
        with pytest.raises(ValueError, match=f"slot {slot} lies outside a block of 3"):
            room.credit(factors, slot)
    with pytest.raises(ValueError, match="smoothing"):
        room.best_response(good, 0, 0, 1.5)
    for probs, worth, message in (([-0.1], [1.0], "probs"), ([0.1], [np.nan], "credit"), ([0.1, 0.1], [1.0], "all")):
        with pytest.raises(ValueError, match=message):
            room.water_fill(np.array([0]), np.array(probs), np.array(worth))


@given(case=items())
def test_backends_agree_on_a_fill(case):
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast.response")
    (mine, left), (theirs, remains) = fast.water_fill(*map(torch.from_numpy, case)), water_fill(*case)
    assert mine.keys() == theirs.keys()
    assert_agree([mine[t] for t in theirs], list(theirs.values()), "float64")
    assert_agree(left, remains, "float64")


@given(case=blocks(), seed=seeds)
def test_backends_agree_on_a_block(case, seed):
    """Arrays or tensors; also when slopes tie, which decides what is held out."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast.response")
    paths, order = case
    tensors = BlockPaths(*map(torch.from_numpy, vars(paths).values()))
    fit = np.random.default_rng(seed).random(len(paths.token)) < 0.5
    factors = factors_of(paths)
    for slot in range(paths.token.shape[1]):
        worth = credit(factors, slot)
        assert_agree(fast.credit(torch.from_numpy(factors), slot), worth, "float64")
        mine = fast.fit_proposal(tensors, torch.from_numpy(worth), slot, order, torch.from_numpy(fit))
        theirs = fit_proposal(paths, worth, slot, order, fit)
        assert_agree(mine[0], theirs[0], "float64")
        assert_agree(mine[1], theirs[1], "float64")
        expected = asdict(best_response(paths, slot, order, 0.1))
        for name, value in asdict(fast.best_response(tensors, slot, order, 0.1)).items():
            assert_agree(value, expected[name], "float64")
    for backward in (False, True):
        mine, theirs = fast.sweep(tensors, order, 3, backward), sweep(paths, order, 3, backward)
        assert_agree(mine.train, theirs.train, "float64")
        assert_agree(mine.held_out, theirs.held_out, "float64")
