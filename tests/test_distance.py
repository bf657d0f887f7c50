"""Overlap, total variation and the TV barycentre: closed forms, linear programmes, properties, agreement."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from reference.distance import barycentre, barycentre_risk, overlap, total_variation
from reference.laws import truncate, warp
from tests.agreement import assert_agree
from tests.strategies import families, logits, seeds
from tests.twins import both


def least_risk(rows, weights=None):
    """The risk of the reference barycentre."""
    return barycentre_risk(rows, barycentre(rows, weights), weights)


def binary(*ones):
    """Rows over two tokens from their probabilities of token 1."""
    return np.stack([1 - np.array(ones), np.array(ones)], axis=1)


CASES = {  # catalogue section 25.A and field case H2: rows, weights, least risk
    "A1 point masses": (np.eye(5), None, 0.8),
    "A1 weighted": (np.eye(5), [0.5, 0.2, 0.15, 0.1, 0.05], 0.5),
    "A2 two rows": (binary(0.1, 0.6), [0.3, 0.7], 0.3 * 0.5),
    "A3 binary": (binary(0.1, 0.2, 0.6, 0.9), None, 0.3 * 1.0),
    "A3 weighted": (binary(0.1, 0.2, 0.6, 0.9), [1, 1, 3, 1], 0.2),
    "A4": (np.array([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.1, 0.8, 0.1]]), None, 0.8 / 3),
    "A4 weighted": (np.array([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.1, 0.8, 0.1]]), [0.5, 0.3, 0.2], 0.19),
    "A4 multiplicity": (np.array([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.1, 0.8, 0.1]]), [1, 2, 1], 0.25),
    "A5 cyclic": (np.array([[0.7, 0.2, 0.1], [0.1, 0.7, 0.2], [0.2, 0.1, 0.7]]), None, 1.1 / 3),
    "A6 bimodal": (np.array([[0.9, 0.1, 0, 0]] * 3 + [[0, 0, 0.9, 0.1]] * 2), None, 0.4),
    "H2 a": (np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]), [0.55, 0.25, 0.2], 0.25),
    "H2 b": (np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]), [0.2, 0.5, 0.3], 0.30),
    "H2 c": (np.array([[0.7, 0.2, 0.1], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]), None, 1.1 / 3),
    "H2 d": (np.eye(2), [0.6, 0.4], 0.4),
    "H2 d even": (np.eye(2), None, 0.5),
}


@both("barycentre")
@pytest.mark.parametrize(("rows", "weights", "risk"), CASES.values(), ids=CASES)
def test_least_risks_in_closed_form(barycentre, rows, weights, risk):
    weights = None if weights is None else np.array(weights, dtype=np.float64)
    q = barycentre(rows, weights)
    assert_agree(barycentre_risk(rows, q, weights), risk, "float64")
    assert_agree(q.sum(), np.float64(1.0), "float64")  # catalogue 7: a probability vector, also where the mass jumps
    assert q.min() >= 0


@both("barycentre")
def test_which_minimiser(barycentre):
    """Catalogue 4, 12 (proportional ties), H2 (a): the majority row exactly; (e) a single row is itself."""
    assert_agree(barycentre(binary(0.1, 0.5)), np.array([0.7, 0.3]), "float64")
    rows = CASES["A4"][0]
    assert_agree(barycentre_risk(rows, np.array([0.6, 0.3, 0.1])), 0.8 / 3, "float64")  # one of many
    twice = barycentre(np.repeat(rows, [1, 2, 1], axis=0))
    assert_agree(barycentre(rows, np.array([1.0, 2, 1])), twice, "float64")
    rows = CASES["H2 a"][0]
    assert_agree(barycentre(rows, np.array([0.55, 0.25, 0.2])), rows[0], "float64")
    assert_agree(barycentre(rows[:1]), rows[0], "float64")
    mixture = np.array([0.55, 0.25, 0.2]) @ rows
    assert_agree(barycentre_risk(rows, mixture, [0.55, 0.25, 0.2]), 0.33, "float64")


@both("barycentre_risk")
@pytest.mark.parametrize(
    ("name", "risk"), [("A4", 0.3), ("A4 weighted", 0.229), ("A5 cyclic", 1.1 / 3), ("A6 bimodal", 0.48)]
)
def test_the_mixture_is_not_the_barycentre(barycentre_risk, name, risk):
    """Catalogue 4 to 6: what the weighted mean of the rows scores; as good only in the cyclic case."""
    rows, weights, _ = CASES[name]
    weights = np.full(len(rows), 1 / len(rows)) if weights is None else np.array(weights)
    assert_agree(barycentre_risk(rows, weights @ rows, weights), risk, "float64")


@both("barycentre")
@given(table=logits(), share=st.floats(0, 1), seed=seeds)
def test_between_two_rows(barycentre, table, share, seed):
    """Catalogue 2: T = min(w, 1 - w) TV; weighted alike, any law between the two rows is as good."""
    rows = warp(table)[[0, -1]]
    p, d, weights = rows[0], rows[1] - rows[0], np.array([share, 1 - share])
    risk = barycentre_risk(rows, barycentre(rows, weights), weights)
    assert_agree(risk, float(min(weights) * total_variation(*rows)), "float64")
    part = np.random.default_rng(seed).random(len(d))
    up, down = (part * np.maximum(s * d, 0) for s in (1, -1))
    most = min(up.sum(), down.sum())
    between = p + sum(s * a * (most / a.sum() if most else 0) for s, a in ((1, up), (-1, down)))
    assert_agree(barycentre_risk(rows, between), float(total_variation(*rows) / 2), "float64")


@both("barycentre")
@given(ones=st.lists(st.floats(0, 1), min_size=1, max_size=6), seed=seeds)
def test_two_tokens_have_a_median(barycentre, ones, seed):
    """Catalogue 3: over two tokens the least risk is the mean distance to the weighted median."""
    ones, weights = np.array(ones), np.random.default_rng(seed).random(len(ones)) + 0.01
    rows = binary(*ones)
    least = min(weights @ np.abs(ones - one) for one in ones) / weights.sum()
    assert_agree(barycentre_risk(rows, barycentre(rows, weights), weights), float(least), "float64")


@both("barycentre_risk")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_identical_rows_cost_nothing(barycentre_risk, dtype):
    """Catalogue 11; five copies whose weights do not add up exactly."""
    row = warp(np.random.default_rng(1).normal(size=50) * 3).astype(dtype).astype(np.float64)
    rows, weights = np.tile(row, (5, 1)), np.array([0.1, 0.2, 0.3, 0.3, 0.1])
    for w in (weights, None):
        assert_agree(barycentre_risk(rows, barycentre(rows, w), w), 0.0, "float64")


@both("barycentre")
def test_several_weightings_at_once(barycentre):
    rows = warp(np.random.default_rng(0).normal(size=(6, 9)) * 2)
    weights = np.array([[1, 2, 3, 0, 1, 1], [1, 1, 1, 1, 1, 1], [9, 1, 1, 1, 1, 1]], dtype=np.float64)
    assert_agree(barycentre(rows, weights), np.stack([barycentre(rows, w) for w in weights]), "float64")


@both("barycentre")
def test_bad_rows_and_weights_are_named(barycentre):
    """Field case H1 (b)."""
    good = np.full((3, 4), 0.25)
    for row, message in (
        ([0.225] * 4, "sum 0.9"),
        ([0.3] * 4, "sum 1.2"),
        ([0.3, 0.3, 0.401, -0.001], "smallest entry -0.001"),
        ([np.nan, 0.5, 0.25, 0.25], "sum nan"),
        ([0.0] * 4, "sum 0"),
    ):
        rows = good.copy()
        rows[1] = row
        with pytest.raises(ValueError, match=f"row 1 is no distribution.*{message}"):
            barycentre(rows)
        with pytest.raises(ValueError, match="row 1 is no distribution"):
            barycentre_risk(rows, good[0])
    for weights in ([0.0, 0, 0], [1.0, -1, 1], [1.0, np.nan, 1], [1.0, 1], [[1.0, 1, 1], [0, 0, 0]]):
        with pytest.raises(ValueError, match="weights"):
            barycentre(good, np.array(weights))
    for empty in (np.empty((0, 4)), np.empty((3, 0)), np.ones(4)):
        with pytest.raises(ValueError, match="non-empty"):
            barycentre(empty)


@both("barycentre")
def test_rows_that_sum_to_one_only_in_float32(barycentre):
    """Field case H1 (a)."""
    rows = warp(np.random.default_rng(3).normal(size=(5, 1000)) * 2).astype(np.float32).astype(np.float64)
    weights = np.full(5, np.float32(0.2), dtype=np.float64)
    q = barycentre(rows, weights)
    assert_agree(q.sum(), np.float64(1.0), "golden")
    exact = rows / rows.sum(axis=1, keepdims=True)
    assert_agree(barycentre_risk(rows, q, weights), least_risk(exact), "float32")
    assert least_risk(exact) > 0.1


@given(families())
@example((np.eye(3), np.array([1.0, 1, 1])))
@example((np.array([[1.0]]), np.array([2.0])))
@example((np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([1.0, 1.0])))
def test_barycentre_solves_the_linear_programme(family):
    """Catalogue 8: min sum_r w_r 1/2 sum_v e_rv with e >= |p - q|, sum q = 1, q >= 0."""
    optimize = pytest.importorskip("scipy.optimize")
    rows, weights = family
    u, v = rows.shape
    cost = np.concatenate([np.zeros(v), np.repeat(weights / weights.sum(), v) / 2])
    q_part = np.tile(np.eye(v), (u, 1))
    bounds = np.block([[q_part, -np.eye(u * v)], [-q_part, -np.eye(u * v)]])
    limits = np.concatenate([rows.ravel(), -rows.ravel()])
    total = np.concatenate([np.ones(v), np.zeros(u * v)])[None]
    best = optimize.linprog(cost, A_ub=bounds, b_ub=limits, A_eq=total, b_eq=[1.0]).fun
    assert_agree(least_risk(rows, weights), float(best), "solver")


@given(families())
def test_bounds_and_invariances(family):
    """Catalogue 9 and 10."""
    rows, weights = family
    w = weights / weights.sum()
    risk, mean = least_risk(rows, weights), w @ rows
    pairs = np.array([[total_variation(p, q) for q in rows] for p in rows])
    assert 0 <= risk <= (pairs @ w).min() + 1e-12
    assert risk >= w @ pairs @ w / 2 - 1e-12
    assert risk <= 1 - mean.max() + 1e-12
    others = len(rows) - 1
    assert not others or least_risk(rows) >= pairs.sum() / (len(rows) * others) / 2 - 1e-12
    assert risk <= barycentre_risk(rows, mean, weights) + 1e-12
    with np.errstate(divide="ignore", invalid="ignore"):
        kl = np.where(w > 0, np.where(rows > 0, rows * (np.log(rows) - np.log(mean)), 0).sum(axis=1), 0)
    assert risk <= np.sqrt(max(0.0, w @ kl) / 2) + 1e-12  # Pinsker and Jensen

    rng = np.random.default_rng(0)
    order, columns = rng.permutation(len(rows)), rng.permutation(rows.shape[1])
    assert_agree(least_risk(rows[order], weights[order]), risk, "float64")
    assert_agree(least_risk(rows[:, columns], weights), risk, "float64")
    assert_agree(least_risk(np.pad(rows, ((0, 0), (0, 2))), weights), risk, "float64")
    doubled = np.concatenate([rows, rows]), np.concatenate([weights / 4, 3 * weights / 4])
    assert_agree(least_risk(*doubled), risk, "float64")
    assert_agree(least_risk(np.concatenate([rows, rows[:1]]), np.append(weights, 0.0)), risk, "float64")


@given(families())
def test_weights_are_multiplicities(family):
    rows, weights = family
    counts = np.ceil(weights).astype(int)
    repeated = np.repeat(rows, counts, axis=0)
    assert_agree(least_risk(repeated), least_risk(rows, counts.astype(float)), "float64")


@given(families())
@example((np.array([[0.5, 0.5], [0.5, 0.5]]), np.array([1.0, 1.0])))
def test_backends_agree(family):
    """Catalogue 11: also in float32, and with several weightings at once."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    rows, weights = family
    q = barycentre(rows, weights)
    mine = fast.barycentre(torch.from_numpy(rows), weights)
    assert_agree(mine, q, "float64")
    assert_agree(
        fast.barycentre_risk(torch.from_numpy(rows), mine, weights), barycentre_risk(rows, q, weights), "float64"
    )
    single = torch.from_numpy(rows).float()
    mine = fast.barycentre(single, weights)
    assert_agree(fast.barycentre_risk(single, mine, weights), barycentre_risk(rows, q, weights), "float32")
    assert_agree(mine.sum(), np.float32(1), "float32")
    assert_agree(fast.overlap(torch.from_numpy(rows), torch.from_numpy(q)), overlap(rows, q), "float64")
    assert_agree(fast.total_variation(torch.from_numpy(rows), torch.from_numpy(q)), total_variation(rows, q), "float64")


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("vocab", [3_300, 20_011])
def test_backends_agree_on_wide_rows(whole, vocab):
    """The fast search starts from a sample of the columns and works in slabs: both only show on wide rows."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    rng = np.random.default_rng(vocab)
    for scale in (0.5, 3.0, 8.0):
        rows = torch.softmax(torch.from_numpy(rng.normal(size=(23, vocab)) * scale).float(), dim=-1)
        weights = rng.integers(1, 9, 23).astype(float) if whole else rng.random(23)
        risk = fast.barycentre_risk(rows, fast.barycentre(rows, weights), weights)
        assert_agree(risk, least_risk(rows.numpy(), weights), "float32")


@given(logits())
def test_overlap_and_total_variation(rows):
    rows = warp(rows)
    p, q = rows[0], rows[-1]
    assert_agree(overlap(p, q) + total_variation(p, q), np.float64(1.0), "float64")
    assert_agree(total_variation(p, q), total_variation(q, p), "exact")
    assert_agree(total_variation(rows, rows), np.zeros(len(rows)), "exact")
    assert 0 <= total_variation(p, q) <= 1 + 1e-12


@given(families())
def test_a_truncated_read_moves_the_floor_by_at_most_the_residual(family):
    """Catalogue 46, and the example that the sign may be positive (section 9)."""
    rows, weights = family
    kept, residual = truncate(rows, 2)
    moved = least_risk(kept, weights) - least_risk(rows, weights)
    assert abs(moved) <= weights @ residual / weights.sum() + 1e-12
    pair = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    assert_agree(least_risk(pair), 0.15, "float64")
    assert_agree(least_risk(truncate(pair, 2)[0]), 0.3125, "float64")


@both("barycentre_risk")
def test_a_proposal_that_is_none_is_refused(barycentre_risk):
    """Catalogue 7: among them the zero vector, half a TV from everything."""
    rows = np.full((2, 4), 0.25)
    assert_agree(total_variation(rows, np.zeros(4)), np.full(2, 0.5), "exact")
    for q in ([0.25, 0.25, 0.25, np.nan], [1.0, 1, 1, 1], [0.5, 0.5], [1.0], [0.5, 0.6, -0.1, 0.0], [0.0] * 4):
        with pytest.raises(ValueError, match=r"proposal over|no distribution"):
            barycentre_risk(rows, np.array(q))
