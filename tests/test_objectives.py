"""Training objectives: closed forms, finite differences, enumeration on toys, golden arrays, agreement."""

import importlib
from itertools import product

import numpy as np
import pytest
from hypothesis import example, given

from models import toy
from reference import objectives
from reference.laws import warp
from tests.agreement import assert_agree
from tests.strategies import logits, seeds

each_wing = pytest.mark.parametrize("wing", ["reference", "fast"])
NAMES = ("static_decay", "dpace", "tv_static", "dreal")


def evaluate(wing, name, draft_logits, *arrays, dtype="float64", **options):
    """(loss, slope in the draft logits) of an objective, from either wing, as NumPy values."""
    if wing == "reference":
        found = getattr(objectives, name)(draft_logits, *arrays, **options)
        return found.loss, found.grad
    torch = pytest.importorskip("torch")

    def there(a):
        if not isinstance(a, np.ndarray):
            return a
        return torch.from_numpy(np.array(a, dtype=dtype if a.dtype.kind == "f" else a.dtype))

    draft_logits, options = there(draft_logits).requires_grad_(), {k: there(v) for k, v in options.items()}
    found = getattr(importlib.import_module("fast.objectives"), name)(draft_logits, *map(there, arrays), **options)
    assert found.grad is None
    found.loss.backward()
    return found.loss.item(), draft_logits.grad.numpy()


def block(seed, slots=3, vocab=4, blocks=()):
    """An ordinary block: draft logits, target rows, tokens drawn from the draft, and their probabilities."""
    rng = np.random.default_rng(seed)
    z, p = rng.normal(size=(*blocks, slots, vocab)) * 2, warp(rng.normal(size=(*blocks, slots, vocab)) * 2)
    tokens = (warp(z).cumsum(-1) > rng.random((*blocks, slots, 1))).argmax(-1)
    return z, p, tokens, np.take_along_axis(warp(z), tokens[..., None], -1)[..., 0]


def arguments(name, p, tokens, behaviour):
    """What an objective takes after the draft logits."""
    return {"tv_static": (p,), "dreal": (p, tokens, behaviour)}.get(name, (tokens,))


def differences(function, z, step=1e-5):
    """Central finite differences of a scalar function, in the shape of z."""
    slope = np.empty_like(z)
    for at in np.ndindex(z.shape):
        moved = np.zeros_like(z)
        moved[at] = step
        slope[at] = (function(z + moved) - function(z - moved)) / (2 * step)
    return slope


# Closed forms


@each_wing
def test_static_decay_in_closed_form(wing):
    z, w = np.log([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25]]), np.exp(-1 / 4)
    loss, grad = evaluate(wing, "static_decay", z, np.array([0, 1]))
    assert_agree(loss, (np.log(2) + w * np.log(4)) / (1 + w), "float64")
    assert_agree(grad, np.array([[-0.5, 0.25, 0.25], [0.5 * w, -0.75 * w, 0.25 * w]]) / (1 + w), "float64")
    loss, _ = evaluate(wing, "static_decay", z, np.array([0, 1]), decay=np.inf)
    assert_agree(loss, np.log(8) / 2, "float64")


@each_wing
def test_dpace_by_hand(wing):
    """Confidences .9, .5, .1, smoothed .95, .75, .55: weights 2.054375, 1.104375, .391875."""
    s, w = np.array([0.9, 0.5, 0.1]), np.array([2.054375, 1.104375, 0.391875])
    loss, grad = evaluate(wing, "dpace", np.log(np.stack([s, 1 - s], axis=1)), np.zeros(3, dtype=int))
    assert_agree(loss, -(w * np.log(s)).sum(), "float64")
    assert_agree(grad, np.stack([w * (s - 1), w * (1 - s)], axis=1), "float64")


@each_wing
def test_overlap_objectives_by_hand(wing):
    """Two slots, q = (.5, .5): overlaps .7 and .9, the first draft over-weighted, so that it survives with .2 / .5."""
    p, z = np.array([[0.2, 0.8], [0.6, 0.4]]), np.zeros((2, 2))
    loss, grad = evaluate(wing, "tv_static", z, p, decay=2.0)
    assert_agree(loss, 1 - (0.7 + np.exp(-0.5) * 0.9) / 2, "float64")
    assert_agree(grad, -np.array([[-0.25, 0.25], [0.25 * np.exp(-0.5), -0.25 * np.exp(-0.5)]]) / 2, "float64")
    loss, grad = evaluate(wing, "dreal", z, p, np.array([0, 0]), np.array([0.5, 0.5]))
    assert_agree(loss, 1 - (0.7 + 0.4 * 0.9) / 2, "float64")
    assert_agree(grad, -np.array([[-0.25, 0.25], [0.4 * 0.25, -0.4 * 0.25]]) / 2, "float64")
    # The first draft under-weighted: it survives surely, and more of it is worth the .9 behind it.
    loss, grad = evaluate(wing, "dreal", z, p, np.array([1, 0]), np.array([0.5, 0.5]))
    assert_agree(loss, 1 - (0.7 + 0.9) / 2, "float64")
    assert_agree(grad, -np.array([[-0.25 - 0.45, 0.25 + 0.45], [0.25, -0.25]]) / 2, "float64")


FACTORS = {  # field case I1 (a): factors, their running products summed, its gradient
    "one zero": ([0.9, 0.0, 0.8, 0.7], 0.9, [1, 2.124, 0, 0]),
    "two zeros": ([0.9, 0.0, 0.0, 0.7], 0.9, [1, 0.9, 0, 0]),
    "all kept": ([1.0, 1.0, 1.0, 1.0], 4.0, [4, 3, 2, 1]),
}


@each_wing
@pytest.mark.parametrize(("factors", "value", "slope"), FACTORS.values(), ids=FACTORS)
def test_running_products_through_zero(wing, factors, value, slope):
    if wing == "reference":
        factors = np.array(factors)
        found, by_overlap, by_ratio = objectives.accepted_drafts(factors, factors)
        assert_agree(found, np.float64(value), "float64")
        assert_agree(by_overlap + by_ratio, np.array(slope, dtype=np.float64), "float64")
        numeric = differences(lambda a: objectives.accepted_drafts(a, a)[0], factors)
        assert_agree(by_overlap + by_ratio, numeric, "solver")
        return
    torch, fast = pytest.importorskip("torch"), importlib.import_module("fast.objectives")
    for dtype, kind in ((torch.float64, "float64"), (torch.float32, "float32")):
        a = torch.tensor(factors, dtype=dtype, requires_grad=True)
        found = fast.accepted_drafts(a, a)
        found.backward()
        assert_agree(found, torch.tensor(value, dtype=dtype), kind)
        assert_agree(a.grad, torch.tensor(slope, dtype=dtype), kind)


# Slopes


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["static_decay", "tv_static", "dreal"])
def test_slopes_by_finite_differences(name, seed):
    z, *rest = block(seed)
    counted = np.arange(3) < (3 if seed % 2 else 2)
    found = getattr(objectives, name)

    def loss(z):
        return found(z, *arguments(name, *rest), counted=counted).loss

    grad = found(z, *arguments(name, *rest), counted=counted).grad
    assert_agree(grad, differences(loss, z), "solver")
    assert_agree(grad.sum(-1), np.zeros(3), "float64")  # a shift of the logits changes nothing


@pytest.mark.parametrize("seed", range(4))
def test_dpace_without_smoothing_climbs_the_confidence_products(seed):
    """D-REAL paper Eq. 14, by finite differences of sum_t prod_{i<=t} q_i(y_i)."""
    z, _, labels, _ = block(seed)

    def products(z):
        return np.cumprod(np.take_along_axis(warp(z), labels[:, None], -1)).sum()

    assert_agree(objectives.dpace(z, labels, smoothing=0.0).grad, -differences(products, z), "solver")


NASTY = {  # draft logits, target rows, tokens: nothing accepted, one-hot targets, p = q, saturated and forbidden
    "nothing accepted": ([[800.0, 0, 0], [0, 0, 0]], [[0, 0.5, 0.5], [0.2, 0.3, 0.5]], [0, 1]),
    "nothing accepted anywhere": ([[-np.inf, 0, 0]] * 2, [[1.0, 0, 0]] * 2, [1, 2]),
    "one-hot target": ([[1.0, 0, 0], [0, 1, 0]], [[0, 1.0, 0], [0, 1, 0]], [1, 0]),
    "one-hot both": ([[0, -np.inf, -np.inf]] * 2, [[1.0, 0, 0]] * 2, [0, 0]),
    "p = q": ([[0.0] * 4] * 2, [[0.25] * 4] * 2, [3, 0]),
    "saturated": ([[300.0, -300, 0], [-80, 60, 0]], [[0.2, 0.3, 0.5], [0.2, 0.3, 0.5]], [0, 1]),
    "one word": ([[3.0], [0.0]], [[1.0], [1.0]], [0, 0]),
}


@each_wing
@pytest.mark.parametrize("case", NASTY)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_turns_into_nan(wing, name, case):
    """Field case I1 (a) and (c) at the level of logits; no zero is divided by or put into a log."""
    z, p, tokens = (np.array(a) for a in NASTY[case])
    behaviour = np.take_along_axis(warp(z), tokens[:, None], -1)[:, 0]
    expected = evaluate("reference", name, z, *arguments(name, p, tokens, behaviour))
    for dtype in ("float64", "float32"):
        loss, grad = evaluate(wing, name, z, *arguments(name, p, tokens, behaviour), dtype=dtype)
        assert np.isfinite(loss)
        assert np.isfinite(grad).all()
        if dtype == "float64":
            assert_agree(loss, expected[0], "float64")
            assert_agree(grad, expected[1], "float64")
        if case in ("p = q", "one-hot both", "one word") and name in ("tv_static", "dreal"):
            assert_agree(grad, np.zeros_like(grad), "exact")
            if name == "dreal":
                assert_agree(loss, 0.0, "exact")


@each_wing
def test_a_tiny_behaviour_is_floored(wing):
    """Off the drafter's law: b = 0 counts as 1e-8."""
    z, p, tokens, _ = block(0)
    zero, floored = (evaluate(wing, "dreal", z, p, tokens, np.full(3, b)) for b in (0.0, 1e-8))
    assert_agree(zero[0], floored[0], "exact")
    assert_agree(zero[1], floored[1], "exact")


# The expected accepted length


def expected_drafts(draft, target, slots, stop_ids=(), past=()):
    """E[accepted drafts] after `past`, by recursion over every token; the draft's rows may be complex."""
    q, p = draft(past), target(past)
    shared = np.where(q.real < p, q, p)
    length = shared.sum()
    if len(past) + 1 < slots:
        for token in set(range(len(p))) - set(stop_ids):
            length += shared[token] * expected_drafts(draft, target, slots, stop_ids, (*past, token))
    return length


def exact_slope(z, row_of, target, slots, stop_ids=()):
    """Gradient of E[accepted drafts] in the drafter's logits z [N, V], by complex steps: no rounding to speak of."""

    def softmax(row):
        return np.exp(row) / np.exp(row).sum()

    slope = np.empty_like(z)
    for at in np.ndindex(z.shape):
        moved = z.astype(complex)
        moved[at] += 1e-30j
        length = expected_drafts(lambda past, moved=moved: softmax(moved[row_of(past)]), target, slots, stop_ids)
        slope[at] = length.imag / 1e-30
    return slope


def mean_slope(z, row_of, target, slots, slope, drawn_from):
    """E[slope] over every block, drawn token by token from `drawn_from`, collected in the drafter's logits [N, V]."""
    mean = np.zeros_like(z)
    for tokens in product(range(z.shape[1]), repeat=slots):
        pasts = [tokens[:k] for k in range(slots)]
        rows = [row_of(past) for past in pasts]
        chances = np.array([drawn_from(past)[token] for past, token in zip(pasts, tokens, strict=True)])
        found = slope(z[rows], np.stack([target(past) for past in pasts]), np.array(tokens), chances)
        np.add.at(mean, rows, chances.prod() * found)
    return mean


def chain(vocab, slots, seed):
    """A drafter that reads its own tokens: a row of logits [N, V] for each history, and which row that is."""
    pasts = [past for k in range(slots) for past in product(range(vocab), repeat=k)]
    place = {past: i for i, past in enumerate(pasts)}
    return np.random.default_rng(seed).normal(size=(len(pasts), vocab)) * 1.5, place.__getitem__


def parallel(vocab, slots, seed):
    """A drafter that does not: one row of logits for each slot."""
    return np.random.default_rng(seed).normal(size=(slots, vocab)) * 1.5, len


TOYS = {  # drafter, vocabulary, slots, stop ids
    "chain of 2": (chain, 2, 3, ()),
    "chain of 3": (chain, 3, 3, ()),
    "chain of 4": (chain, 4, 2, ()),
    "parallel": (parallel, 3, 3, ()),
    "parallel of 4": (parallel, 4, 3, ()),
    "chain that stops": (chain, 3, 3, (2,)),
    "parallel that stops": (parallel, 3, 3, (0, 2)),
}


@pytest.mark.parametrize(("drafter", "vocab", "slots", "stop_ids"), TOYS.values(), ids=TOYS)
def test_dreal_is_unbiased(drafter, vocab, slots, stop_ids):
    """Every drawn block, weighted by its probability: the mean slope is that of the exact expected length."""
    z, row_of = drafter(vocab, slots, seed=vocab)
    target = toy.random_table(vocab, slots, seed=7, concentration=2.0).next_token
    losses = []

    def slope(z, p, tokens, behaviour):
        found = objectives.dreal(z, p, tokens, behaviour, objectives.until_stop(tokens, stop_ids))
        losses.append(behaviour.prod() * found.loss)
        return found.grad

    mean = mean_slope(z, row_of, target, slots, slope, lambda past: warp(z[row_of(past)]))
    exact = exact_slope(z, row_of, target, slots, stop_ids)
    assert np.abs(exact).max() > 0.05  # there is something to agree on
    assert_agree(-slots * mean, exact, "float64")
    length = expected_drafts(lambda past: warp(z[row_of(past)]), target, slots, stop_ids)
    assert_agree(slots * (1 - sum(losses)), float(length), "float64")


def test_dreal_is_unbiased_for_any_behaviour():
    """Blocks drawn by another law than the drafter's: the ratio makes up for it."""
    z, row_of = chain(3, 2, seed=0)
    target, other = (toy.random_table(3, 2, seed=s, concentration=2.0).next_token for s in (7, 8))
    mean = mean_slope(z, row_of, target, 2, lambda *block: objectives.dreal(*block).grad, other)
    assert_agree(-2 * mean, exact_slope(z, row_of, target, 2), "float64")


def test_a_detached_prefix_is_biased():
    """With the prefix ratios held fixed the slope misses what earlier slots do to the chance of being reached."""
    z, row_of = chain(3, 3, seed=3)
    target = toy.random_table(3, 3, seed=7).next_token

    def detached(z, p, tokens, behaviour):
        q, at = warp(z), (np.arange(3), tokens)
        reached = np.cumprod(np.append(1, np.minimum(p, q)[at] / behaviour))[:-1]
        overlaps = [objectives.tv_static(z[[k]], p[[k]]).grad[0] for k in range(3)]
        return np.stack(overlaps) * reached[:, None] / 3

    def draft(past):
        return warp(z[row_of(past)])

    exact = exact_slope(z, row_of, target, 3)
    mean = mean_slope(z, row_of, target, 3, detached, draft)
    deepest = [row_of(past) for past in product(range(3), repeat=2)]
    assert_agree(-3 * mean[deepest], exact[deepest], "float64")  # nothing comes after the last slot
    assert np.abs(-3 * mean - exact).max() > 0.05


def test_dpace_leaves_a_perfect_drafter():
    """On the two-token chain, with q = p and continuations written by the target.

    The expected accepted length is at its maximum K and D-REAL stays there; D-PACE's mean slope does not vanish: it
    sharpens the drafter towards the likelier tokens, and a step along it shortens what is accepted.
    """
    _, row_of = chain(2, 3, seed=0)
    source = toy.two_token_chain()

    def target(past):
        return source.next_token((0, 0, *past))

    pasts = [past for k in range(3) for past in product(range(2), repeat=k)]
    z = np.log(np.stack([target(past) for past in pasts]))
    stay = mean_slope(z, row_of, target, 3, lambda z, p, *drawn: objectives.dreal(z, warp(z), *drawn).grad, target)
    assert_agree(stay, np.zeros_like(z), "exact")
    for smoothing in (0.0, 0.5):
        move = mean_slope(z, row_of, target, 3, lambda z, p, y, _, s=smoothing: objectives.dpace(z, y, s).grad, target)
        assert move[0, 0] < -0.05  # the likelier first token, .8, is to grow
        assert_agree(move.sum(-1), np.zeros(len(z)), "float64")
        moved = z - move
        assert expected_drafts(lambda past, moved=moved: warp(moved[row_of(past)]), target, 3) < 3 - 0.05


def test_dpace_points_elsewhere():
    """A drafter short of the target: no multiple of D-PACE's mean slope is the slope of the expected length."""
    z, row_of = chain(3, 3, seed=3)
    target = toy.random_table(3, 3, seed=7).next_token
    exact = -exact_slope(z, row_of, target, 3)
    for smoothing in (0.0, 0.5):
        mean = mean_slope(z, row_of, target, 3, lambda z, p, y, _, s=smoothing: objectives.dpace(z, y, s).grad, target)
        cosine = (mean * exact).sum() / np.sqrt((mean**2).sum() * (exact**2).sum())
        assert cosine < 0.95


# Blocks


@each_wing
def test_until_stop(wing):
    tokens, expected = np.array([[4, 1, 2], [1, 1, 0], [3, 4, 5]]), [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    if wing == "reference":
        assert_agree(objectives.until_stop(tokens, (1, 2)), np.array(expected, dtype=bool), "exact")
        assert objectives.until_stop(tokens, ()).all()
        return
    torch, fast = pytest.importorskip("torch"), importlib.import_module("fast.objectives")
    tokens = torch.from_numpy(tokens)
    assert_agree(fast.until_stop(tokens, (1, 2)), np.array(expected, dtype=bool), "exact")
    assert fast.until_stop(tokens, ()).all()


@each_wing
@pytest.mark.parametrize("name", NAMES)
def test_a_block_ends_at_its_stop(wing, name):
    """What stands behind the stop changes nothing, and the slots up to it are those of a shorter block."""
    z, *rest = block(5, slots=5)
    counted = np.arange(5) < 3
    expected = evaluate(wing, name, z, *arguments(name, *rest), counted=counted)
    p, tokens, behaviour = (a.copy() for a in rest)
    p[3:], tokens[3:], behaviour[3:], z[3:] = np.nan, -100, np.nan, 7.0
    loss, grad = evaluate(wing, name, z, *arguments(name, p, tokens, behaviour), counted=counted)
    assert_agree(loss, expected[0], "exact")
    assert_agree(grad, expected[1], "exact")
    assert_agree(grad[3:], np.zeros((2, 4)), "exact")
    loss, grad = evaluate(wing, name, z[:3], *arguments(name, *(a[:3] for a in rest)))
    scale = 3 / 5 if name in ("tv_static", "dreal") else 1.0
    assert_agree(expected[1][:3], scale * grad, "float64")
    assert_agree(expected[0], 1 - scale * (1 - loss) if scale < 1 else loss, "float64")


@each_wing
def test_a_gap_ends_a_drawn_block(wing):
    z, *rest = block(5, slots=5)
    ended, gap = np.array([1, 1, 0, 0, 0], dtype=bool), np.array([1, 1, 0, 1, 1], dtype=bool)
    (loss, grad), expected = (evaluate(wing, "dreal", z, *rest, counted=counted) for counted in (gap, ended))
    assert_agree(loss, expected[0], "exact")
    assert_agree(grad, expected[1], "exact")


@each_wing
@pytest.mark.parametrize("name", NAMES)
def test_blocks_side_by_side(wing, name):
    """Many blocks at once are the mean of the blocks; static decay shares its denominator."""
    z, *rest = block(8, blocks=(2, 3))
    counted = np.random.default_rng(0).random((2, 3, 3)) < 0.7
    loss, grad = evaluate(wing, name, z, *arguments(name, *rest), counted=counted)
    mean, shares = 0.0, counted @ objectives.slot_weights(3, 4.0)
    for at in np.ndindex(2, 3):
        share = shares[at] / shares.sum() if name == "static_decay" else 1 / 6
        one = evaluate(wing, name, z[at], *arguments(name, *(a[at] for a in rest)), counted=counted[at])
        mean += share * one[0]
        assert_agree(grad[at], share * one[1], "float64")
    assert_agree(loss, mean, "float64")


@each_wing
def test_nothing_counted(wing):
    z, p, *_ = block(0)
    for name in NAMES:
        rest = arguments(name, np.full_like(p, np.nan), np.full(3, -100), np.full(3, np.nan))
        loss, grad = evaluate(wing, name, z, *rest, counted=np.zeros(3, dtype=bool))
        assert_agree(loss, float(name in ("tv_static", "dreal")), "exact")
        assert_agree(grad, np.zeros((3, 4)), "exact")


@each_wing
def test_what_does_not_fit_is_refused(wing):
    z, p, tokens, b = block(0)
    broken, beyond, high, low = z.copy(), tokens.copy(), p.copy(), p.copy()
    broken[1, 2], beyond[2], high[1, 0], low[1, 0] = np.nan, 4, 2.0, -0.5
    forbidden = z.copy()
    forbidden[1, tokens[1]] = -np.inf
    cases = [
        ("static_decay", (forbidden, tokens), {}, r"no mass, at slot \(1,\)"),
        ("static_decay", (z, tokens), {"decay": 0.0}, "decay"),
        ("tv_static", (z, p), {"decay": -1.0}, "decay"),
        ("dpace", (z, tokens), {"smoothing": 1.5}, "smoothing"),
        ("static_decay", (z, tokens[:2]), {}, "labels"),
        ("static_decay", (z[0], tokens), {}, "draft_logits"),
        ("tv_static", (z, p[:, :3]), {}, "target_probs"),
        ("dreal", (z, p, tokens, b[:2]), {}, "behaviour"),
        ("dreal", (z, p, tokens[:2], b), {}, "tokens"),
        ("dreal", (z, p, tokens, np.log(b)), {}, "behaviour"),
        ("dreal", (z, p, tokens, np.full(3, np.nan)), {}, "behaviour"),
    ]
    for name in NAMES:
        cases.append((name, (broken, *arguments(name, p, tokens, b)), {}, "finite maximum"))
        cases.append((name, (z, *arguments(name, p, tokens, b)), {"counted": np.ones(2, dtype=bool)}, "counted"))
        if name != "tv_static":
            cases.append((name, (z, *arguments(name, p, beyond, b)), {}, r"vocabulary of 4, at slot \(2,\)"))
        if name in ("tv_static", "dreal"):
            for bad in (np.log(p), high, low, np.full_like(p, np.nan)):
                cases.append((name, (z, *arguments(name, bad, tokens, b)), {}, "target_probs is no law"))
    for name, given_arguments, options, message in cases:
        with pytest.raises(ValueError, match=message):
            evaluate(wing, name, *given_arguments, **options)


# Agreement


@given(logits(max_rows=8), seeds)
@example(np.zeros((1, 1)), 0)
def test_backends_agree(table, seed):
    """Losses and slopes in float64 on any rows; what is built from probabilities also in float32, its loss."""
    pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    p = warp(table[::-1] + rng.normal(size=table.shape) * 0.1)  # two softmaxes of one row differ in the last digit
    tokens = np.array([rng.choice(np.flatnonzero(np.isfinite(row))) for row in table])
    behaviour = np.where(rng.random(len(table)) < 0.2, rng.random(len(table)), warp(table)[range(len(table)), tokens])
    counted = rng.random(len(table)) < 0.9
    for name in NAMES:
        rest = arguments(name, p, tokens, behaviour)
        expected = evaluate("reference", name, table, *rest, counted=counted)
        found = evaluate("fast", name, table, *rest, counted=counted)
        scale = max(1.0, np.abs(expected[1]).max(), abs(expected[0]))  # a small behaviour makes a large ratio
        assert_agree(found[0] / scale, expected[0] / scale, "float64")
        assert_agree(found[1] / scale, expected[1] / scale, "float64")
        if name in ("tv_static", "dreal"):
            single = evaluate("fast", name, table, *rest, counted=counted, dtype="float32")
            assert_agree(single[0] / scale, expected[0] / scale, "float32")


@pytest.mark.parametrize("name", NAMES)
def test_sixteen_bit_logits_are_read_as_float32(name):
    """The same logits in bfloat16 and in float32 give the same loss; the slope comes back in bfloat16."""
    torch, fast = pytest.importorskip("torch"), importlib.import_module("fast.objectives")
    z, *rest = block(2, slots=4, vocab=300)
    half = torch.from_numpy(z).bfloat16().requires_grad_()
    rest = [torch.from_numpy(a) for a in arguments(name, *rest)]
    loss = getattr(fast, name)(half, *rest).loss
    loss.backward()
    assert_agree(loss, getattr(fast, name)(half.detach().float(), *rest).loss, "exact")
    assert half.grad.dtype == torch.bfloat16
    assert loss.dtype == torch.float32


# Other projects' arrays


def arrays(path):
    """What an npz file holds, by name."""
    with np.load(path) as file:
        return dict(file)


@each_wing
def test_golden_static_decay(wing, golden):
    """DeepSpec: cross-entropy and, as twice the total variation, its L1 term.  Its denominators carry an extra 1e-6."""
    cases = arrays(golden / "losses" / "deepspec.npz")
    z, counted, decay = cases["draft_logits"][0], cases["eval_mask"][0], float(cases["loss_decay_gamma"])
    total = (counted * objectives.slot_weights(7, decay)).sum()
    assert_agree(objectives.slot_weights(7, decay), cases["slot_weights"], "golden")
    loss, grad = evaluate(wing, "static_decay", z, cases["target_ids"][0], decay=decay, counted=counted)
    scale = total / (total + 1e-6)
    assert_agree(scale * loss, float(cases["loss_ce"]), "golden")
    assert_agree(scale * grad, cases["grad_draft_logits_ce"][0], "golden")
    p = warp(cases["teacher_logits"][0])
    loss, grad = evaluate(wing, "tv_static", z, p, decay=decay, counted=counted)
    scale = 2 * counted.size / (total + 1e-6)
    assert_agree(scale * (loss - 1 + total / counted.size), float(cases["loss_l1"]), "golden")
    assert_agree(scale * grad, cases["grad_draft_logits_l1"][0], "golden")


@each_wing
def test_golden_dpace_of_specforge(wing, golden):
    """Slot 0 stands for the anchor and is left out; the sum over blocks is divided by the two sequences."""
    cases = arrays(golden / "losses" / "specforge.npz")
    z, labels, counted = (cases[name][:, :, 1:] for name in ("draft_logits", "target_ids", "weight_mask"))
    for smoothing, ending in ((0.5, ""), (0.0, "_alpha0"), (0.2, "_alpha02")):
        loss, grad = evaluate(wing, "dpace", z, labels, smoothing=smoothing, counted=counted.astype(bool))
        assert_agree(10 / 2 * loss, float(cases[f"loss_dpace{ending}"]), "golden")
        assert_agree(10 / 2 * grad, cases[f"grad_draft_logits_dpace{ending}"][:, :, 1:], "golden")
    loss, grad = evaluate(wing, "static_decay", z, labels, counted=counted.astype(bool))
    assert_agree(loss, float(cases["loss_dflash"]), "golden")
    assert_agree(grad, cases["grad_draft_logits_dflash"][:, :, 1:], "golden")


@each_wing
def test_golden_losses_of_speculators(wing, golden):
    """D-PACE towards the teacher's argmax over the plain number of slots, and the total variation slot by slot."""
    cases = arrays(golden / "losses" / "speculators.npz")
    z, teacher = (cases[name].reshape(5, 7, -1) for name in ("draft_logits", "teacher_logits"))
    for convention, first in (("sample_from_anchor", 0), ("in_place", 1)):
        counted = cases[f"loss_mask_{convention}"].reshape(5, 7)[:, first:].astype(bool)
        loss, grad = evaluate(wing, "dpace", z[:, first:], teacher.argmax(-1)[:, first:], counted=counted)
        scale = 5 / (counted.sum() + 1e-5)
        assert_agree(scale * loss, float(cases[f"loss_ce_dpace_{convention}"]), "golden")
        expected = cases[f"grad_loss_ce_dpace_{convention}"].reshape(5, 7, -1)[:, first:]
        assert_agree(scale * grad, expected, "golden")
    for i in range(5):
        p = warp(teacher[i])
        assert_agree(evaluate(wing, "tv_static", z[i, :1], p[:1])[0], float(cases["value_tv"][7 * i]), "golden")
    _, grad = evaluate(wing, "tv_static", z.reshape(35, 1, -1), warp(teacher).reshape(35, 1, -1))
    assert_agree(35 * grad[:, 0], cases["grad_tv"], "golden")
