"""Sampling laws and draws: closed forms, field cases B1 and B2, agreement of the two backends."""

import numpy as np
import pytest
from hypothesis import example, given

from reference.laws import SamplingLaw, draw, truncate, warp
from tests.agreement import assert_agree
from tests.strategies import laws, logits, seeds
from tests.twins import both

ROW = np.array([[0.5, 0.3, 0.15, 0.05]])


@both("warp")
@pytest.mark.parametrize(
    ("law", "expected"),
    [
        (SamplingLaw(), [0.5, 0.3, 0.15, 0.05]),
        (SamplingLaw(top_p=0.75), [0.625, 0.375, 0, 0]),  # catalogue 44
        (SamplingLaw(top_k=3, top_p=0.82), [10 / 19, 6 / 19, 3 / 19, 0]),  # catalogue 44: mass before any renormalising
        (SamplingLaw(top_p=0.0), [1, 0, 0, 0]),
        (SamplingLaw(top_p=1e-8), [1, 0, 0, 0]),
        (SamplingLaw(top_p=0.5), [1, 0, 0, 0]),
        (SamplingLaw(top_p=0.6), [0.625, 0.375, 0, 0]),
        (SamplingLaw(top_p=0.85), [10 / 19, 6 / 19, 3 / 19, 0]),
        (SamplingLaw(top_k=4), [0.5, 0.3, 0.15, 0.05]),
        (SamplingLaw(top_k=5), [0.5, 0.3, 0.15, 0.05]),
        (SamplingLaw(top_k=10**6), [0.5, 0.3, 0.15, 0.05]),
        (SamplingLaw(temperature=0.0), [1, 0, 0, 0]),
        (SamplingLaw(temperature=0.5), [0.25 / 0.365, 0.09 / 0.365, 0.0225 / 0.365, 0.0025 / 0.365]),
    ],
)
def test_warp_of_one_row(warp, law, expected):
    assert_agree(warp(np.log(ROW), law), np.array([expected], dtype=np.float64), "float64")


@both("warp")
def test_ties_are_kept_lowest_id_first(warp):
    assert_agree(warp(np.zeros((1, 4)), SamplingLaw(top_p=0.5)), np.array([[0.5, 0.5, 0, 0]]), "float64")
    tied = np.zeros((1, 512))
    tied[0, [5, 256]] = 9.0
    assert_agree(warp(tied, SamplingLaw(top_k=1)).argmax(-1), np.array([5]), "exact")
    assert_agree(warp(tied, SamplingLaw(temperature=0.0)).argmax(-1), np.array([5]), "exact")


@both("warp")
def test_tiny_top_p_keeps_the_largest_of_many(warp):
    row = np.random.default_rng(0).normal(size=(1, 4096))
    kept = warp(row, SamplingLaw(top_p=1e-8))
    assert_agree((kept > 0).nonzero()[-1].ravel(), np.array([row.argmax()]), "exact")


@both("warp")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_without_finite_maximum_is_named(warp, bad):
    rows = np.zeros((3, 4))
    rows[1] = bad
    with pytest.raises(ValueError, match=r"row \(1,\)"):
        warp(rows)


@both("warp")
def test_a_nan_row_spoils_no_other(warp):
    """Field case A2 (a): of three rows of 10,000 the middle one is NaN; it is named, and the others do not need it."""
    logits = np.random.default_rng(0).normal(size=(3, 10_000))
    logits[1] = np.nan
    with pytest.raises(ValueError, match=r"row \(1,\)"):
        warp(logits)
    alone = np.concatenate([warp(logits[[0]]), warp(logits[[2]])])
    assert_agree(warp(logits[[0, 2]]), alone, "float64")
    tokens = draw(np.asarray(alone), [0.3, 0.9])
    with pytest.raises(ValueError):
        draw(np.insert(alone, 1, np.nan, axis=0), [0.3, 0.5, 0.9])
    assert_agree(draw(alone[[0, 0, 1]], [0.3, 0.5, 0.9])[[0, 2]], tokens, "exact")


def test_every_greedy_route_takes_the_lowest_of_equal_maxima():
    """Field case B3 (a): bfloat16 scores, equal at ids 5 and 256."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=512)).bfloat16()
    scores[[5, 256]] = scores.max() + 1
    routes = {"argmax": int(scores.argmax()), "NumPy": int(scores.float().numpy().argmax())}
    for law in (SamplingLaw(temperature=0.0), SamplingLaw(top_k=1), SamplingLaw(top_p=0.0)):
        for rows in (warp(scores.float().numpy()[None], law), fast.warp(scores.float()[None], law)):
            routes[type(rows).__name__, law] = int((rows[0] > 0).nonzero()[0].item())
            for u in (0.0, 0.5, 0.999):
                taken = draw(rows, [u]) if isinstance(rows, np.ndarray) else fast.draw(rows, [u])
                routes[type(rows).__name__, law, u] = int(taken[0])
    assert set(routes.values()) == {5}, routes


@pytest.mark.parametrize(
    "options",
    [{"temperature": -1}, {"temperature": np.nan}, {"top_k": -1}, {"top_k": 2.0}, {"top_k": np.inf}, {"top_p": 1.5}],
)
def test_a_law_out_of_range_is_refused(options):
    with pytest.raises(ValueError, match="must"):
        SamplingLaw(**options)


@given(logits(), laws())
@example(np.zeros((1, 1)), SamplingLaw())
def test_warp_is_a_law(rows, law):
    """Catalogue 45: sums to one, keeps what it may, keeps no forbidden token, ignores a shift of the logits."""
    probs = warp(rows, law)
    assert_agree(probs.sum(-1), np.ones(len(rows)), "float64")
    assert (probs >= 0).all()
    assert (probs[np.isneginf(rows)] == 0).all()
    if law.temperature:
        plain = warp(rows, SamplingLaw(law.temperature))
        kept = (plain * (probs > 0)).sum(-1)
        assert (kept >= min(law.top_p, 1) * (1 if law.top_k == 0 else 0) - 1e-12).all()
        if law.top_k:
            assert ((probs > 0).sum(-1) <= law.top_k).all()
    if law.top_p == 1:
        assert_agree(warp(rows + 4.0, law) > 0, probs > 0, "exact")


@given(logits(), laws())
def test_backends_warp_alike(rows, law):
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    assert_agree(fast.warp(torch.from_numpy(rows), law), warp(rows, law), "float64")
    single = fast.warp(torch.from_numpy(rows).float(), SamplingLaw(law.temperature))
    assert_agree(single.sum(-1), np.ones(len(rows), dtype=np.float32), "float32")
    assert_agree(single, warp(rows, SamplingLaw(law.temperature)), "float32")


@both("truncate")
def test_truncated_reads(truncate):
    rows = np.array([[0.5, 0.3, 0.2], [0.2, 0.3, 0.5]])
    kept, residual = truncate(rows, 2)
    assert_agree(kept, np.array([[0.625, 0.375, 0], [0, 0.375, 0.625]]), "float64")
    assert_agree(residual, np.array([0.2, 0.2]), "float64")
    kept, residual = truncate(rows, 7)
    assert_agree(kept, rows, "float64")
    for k in (0, 1.5):
        with pytest.raises(ValueError, match="at least 1"):
            truncate(rows, k)


@both("truncate")
@pytest.mark.parametrize("bad", [[0.0, 0.0, 0.0], [0.5, np.nan, 0.5], [0.5, np.inf, 0.5]])
def test_a_row_without_a_mass_to_share_out_is_named(truncate, bad):
    # was once: a row of zeros becomes NaN, and a NaN outside the k largest goes unseen
    with pytest.raises(ValueError, match="row 1 cannot be renormalised"):
        truncate(np.array([[0.5, 0.3, 0.2], bad]), 2)


@given(logits())
def test_truncation_moves_a_row_by_its_residual(rows):
    """Catalogue 46: TV(p, p~) = residual, in both backends."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    rows = warp(rows)
    for k in (1, 2, rows.shape[1]):
        kept, residual = truncate(rows, k)
        assert_agree(np.abs(rows - kept).sum(-1) / 2, residual, "float64")
        for mine, theirs in zip(fast.truncate(torch.from_numpy(rows), k), (kept, residual), strict=True):
            assert_agree(mine, theirs, "float64")


@both("draw")
def test_no_token_without_mass_is_drawn(draw):
    """Field case B1 (a): every cumulative edge, and one unit in the last place to either side."""
    rows = np.array([[0.33, 0.34, 0.0, 0.33]])
    edges = np.concatenate([[0.0], np.cumsum(rows[0]) / rows.sum()])
    uniforms = np.concatenate([np.nextafter(edges, 0), edges, np.nextafter(edges, 1)])
    uniforms = np.clip(uniforms, 0, np.nextafter(1, 0))
    drawn = draw(rows, uniforms, np.zeros(len(uniforms), dtype=int))
    assert set(drawn.tolist()) == {0, 1, 3}
    assert_agree(draw(np.tile([[0.0, 1.0]], (1000, 1)), np.linspace(0, 0.999, 1000)), np.ones(1000, dtype=int), "exact")


@both("draw", dtype="float32")
def test_a_float32_row_never_ends_early(draw):
    """Field case B1 (b): float32 partial sums of a uniform row stop at 0.998, float64 ones do not."""
    vocab = 151_936
    row = np.full((1, vocab), 1 / vocab, dtype=np.float32)
    uniforms = np.array([0.0, 0.5, 0.999, np.nextafter(1, 0)])
    drawn = draw(row, uniforms, np.zeros(4, dtype=int))
    assert (drawn < vocab).all()
    assert (np.abs(drawn - uniforms * vocab) <= 1).all()


@both("draw")
def test_more_categories_than_float32_can_count(draw):
    """Field case B1 (c): weight 2 on the first half and 1 on the second of 2^24 + 8 categories."""
    half = 2**23 + 4
    row = np.concatenate([np.full(half, 2.0), np.ones(half)])[None]
    uniforms = (np.arange(3000) + 0.5) / 3000
    share = (draw(row, uniforms, np.zeros(3000, dtype=int)) >= half).mean()
    assert share == 1000 / 3000


@both("draw")
@pytest.mark.parametrize(
    ("row", "uniform"), [([0.5, 0.5], 1.0), ([0.5, 0.5], -0.1), ([0.0, 0.0], 0.5), ([np.nan, 1.0], 0.5)]
)
def test_draws_from_nothing_are_refused(draw, row, uniform):
    with pytest.raises(ValueError):
        draw(np.array([row]), np.array([uniform]))


@both("draw")
def test_a_draw_for_each_row_or_none(draw):
    rows = np.array([[0.5, 0.5], [0.0, 1.0]])
    with pytest.raises(ValueError, match="2 rows need as many uniforms"):
        draw(rows, np.array([0.1]))
    assert_agree(draw(rows, np.array([]), []), np.array([], dtype=np.int64), "exact")


@given(logits(), laws(), seeds)
def test_backends_draw_alike(rows, law, seed):
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    probs, rng = warp(rows, law), np.random.default_rng(seed)
    which, uniforms = rng.integers(0, len(rows), 50), rng.random(50)
    drawn = draw(probs, uniforms, which)
    assert (probs[which, drawn] > 0).all()
    assert_agree(fast.draw(torch.from_numpy(probs), uniforms, which), drawn, "exact")
    uniforms = np.append(rng.random(49), np.nextafter(1, 0))
    for kind in (np.float64, np.float32):  # one token of each row, by another route
        rows = torch.from_numpy(probs[which].astype(kind))
        drawn = fast.draw(rows, uniforms, np.arange(50))
        assert_agree(fast.draw(rows, uniforms), drawn, "exact")
        assert (probs[which, drawn] > 0).all()


def sampler_fails(sampler, seed, p=np.array([0.5, 0.3, 0.2]), n=20_000):
    """A six-sigma check of a sampler's frequencies; false alarms below 1e-8 per run."""
    uniforms = np.random.default_rng(seed).random(n)
    share = np.bincount(sampler(uniforms), minlength=3) / n
    return bool((np.abs(share - p) > 6 * np.sqrt(p * (1 - p) / n)).any())


def test_the_sampler_check_can_tell():
    """Field case K1: 200 seeds pass on the right sampler; one biased by TV 0.04 (11 sigma) is always caught."""
    which = np.zeros(20_000, dtype=int)
    right, biased = np.array([[0.5, 0.3, 0.2]]), np.array([[0.54, 0.28, 0.18]])
    assert not any(sampler_fails(lambda u: draw(right, u, which), seed) for seed in range(200))
    assert all(sampler_fails(lambda u: draw(biased, u, which), seed) for seed in range(200))
