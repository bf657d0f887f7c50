"""The log-loss companion: the exact chain, entropies, the published realised-token forms, agreement."""

from importlib import import_module
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given

from models import toy
from reference.floors import floor
from reference.information import ce_realised, effective_support, jackknife, mutual_information, recovery
from reference.paths import Slot, walk
from tests.agreement import TOLERANCES, assert_agree
from tests.strategies import chains, families, laws, seeds
from tests.test_floors import tensors
from tests.test_paths import backends

SLACK = TOLERANCES["float64"]


def exact_slot(target, prefix, k):
    """Every prefix that reaches slot k with its exact probability."""
    pasts, weight, rows = toy.enumerate_rows(target, prefix, k)
    past = np.array([(*prefix, *p) for p in pasts])
    return Slot(k, np.arange(len(past)), past[:, -1], weight, rows, past, float(weight.sum()))


def slot_from(rows, weights):
    """An enumerated slot with one prefix per row."""
    past = np.arange(len(rows))[:, None]
    return Slot(1, np.zeros(len(rows), int), past[:, 0], weights, rows, past, 1.0)


def both_backends(slot, order=None):
    """The information from both backends, as far as they are installed."""
    yield mutual_information(slot, order)
    try:
        from fast.information import mutual_information as theirs
    except ImportError:
        return
    yield theirs(tensors(slot), order)


def entropy(p):
    return -sum(x * np.log(x) for x in p if x > 0)


def test_the_exact_chain():
    """Catalogue 21: I(Z_k; last m) in nats and the recovery of the binary chain."""
    expected = {
        (1, 1): 0.0883695,
        (2, 1): 0.1496086,
        (2, 2): 0.1648599,
        (3, 1): 0.1848001,
        (3, 2): 0.2029233,
        (3, 3): 0.2029233,
    }
    found = {}
    for (k, m), value in expected.items():
        slot = exact_slot(toy.two_token_chain(), (0, 0), k)
        for information in both_backends(slot, m):
            assert_agree(information, value, "printed")
        found[k, m] = mutual_information(slot, m)
        assert_agree(mutual_information(slot), mutual_information(slot, k), "exact")
        assert_agree(mutual_information(slot, 0), 0.0, "exact")
    for (k, m), value in {(2, 1): 0.907489, (3, 1): 0.910689, (3, 2): 1.0}.items():
        assert_agree(recovery([found[k, m]], [found[k, k]]), value, "printed")


@given(chains(), seeds)
def test_pinsker_bounds_the_floor(chain, seed):
    """Catalogue 22: T^(m) <= sqrt((I_kk - I_km) / 2) at every anchor, and information rises with the order."""
    slots = [exact_slot(toy.markov_chain(*chain), (0, 1), k) for k in (1, 2, 3) if not all_stop(chain, k)]
    slots += walk(toy.markov_chain(*chain), [0, 1], 4, np.random.default_rng(seed).random((25, 4)))
    for slot in slots:
        found = [mutual_information(slot, m) for m in range(slot.index + 1)]
        assert found[0] == 0.0
        assert all(a <= b + SLACK for a, b in pairwise(found))
        for m, information in enumerate(found):
            assert floor(slot, m).fit <= np.sqrt(max(found[-1] - information, 0.0) / 2) + np.sqrt(SLACK)


def all_stop(chain, k):
    return not toy.enumerate_rows(toy.markov_chain(*chain), (0, 1), k)[0]


@given(families())
@example((np.eye(3), np.ones(3)))
@example((np.array([[1.0]]), np.array([2.0])))
def test_entropies(family):
    """H(pbar) - sum w H(p_u), bounded by log U and log V; permutations, multiplicities and padding change nothing."""
    rows, weights = family
    w = weights / weights.sum()
    expected = entropy(w @ rows) - w @ [entropy(p) for p in rows]
    for found in both_backends(slot_from(rows, weights)):
        assert_agree(found, float(max(expected, 0.0)), "float64")
        assert 0 <= found <= np.log(min(rows.shape)) + SLACK
    found = mutual_information(slot_from(rows, weights))
    columns = np.random.default_rng(0).permutation(rows.shape[1])
    assert_agree(mutual_information(slot_from(rows[:, columns], weights)), found, "float64")
    assert_agree(mutual_information(slot_from(np.pad(rows, ((0, 0), (0, 2))), weights)), found, "float64")
    twice = slot_from(np.concatenate([rows, rows]), np.concatenate([weights, 3 * weights]))
    assert_agree(mutual_information(twice), found, "float64")
    assert_agree(mutual_information(slot_from(rows[:1], weights[:1] + 1)), 0.0, "exact")


def test_tokens_without_mass_are_no_nan():
    """Field case I1 (b): with q = (.25, .75, 0) the mean of p = (.5, .5, 0) and (0, 1, 0), KL(p || q) = .143841."""
    slot = slot_from(np.array([[0.5, 0.5, 0.0], [0.0, 1.0, 0.0]]), np.array([0.5, 0.5]))
    for found in both_backends(slot):
        assert_agree(2 * found - float(np.log(4 / 3)), 0.1438410, "printed")


@given(chains(), laws(), seeds)
def test_backends_agree_on_walks(chain, law, seed):
    """Every slot and order; float64, and float32 rows."""
    fast = pytest.importorskip("fast.information")
    uniforms = np.random.default_rng(seed).random((20, 3))
    for slot in walk(toy.markov_chain(*chain), [0, 1], 3, uniforms, law):
        for order in (None, 0, 1, 2):
            found = fast.mutual_information(tensors(slot), order)
            assert_agree(found, mutual_information(slot, order), "float64")
            single = fast.mutual_information(tensors(slot, "float32"), order)
            assert_agree(single, mutual_information(slot, order), "float32")
        token = int(slot.drawn[slot.drawn >= 0][0])
        mine, theirs = fast.ce_realised(tensors(slot), token), ce_realised(slot, token)
        assert mine.blind.corrected == theirs.blind.corrected
        assert_agree(mine.blind.plugin, theirs.blind.plugin, "float64")
        assert_agree(mine.commit, theirs.commit, "float64")


def test_jackknife():
    """Catalogue 37."""
    found = jackknife([0.2, 0.4, 0.6])
    assert_agree(
        np.array([found.plugin, found.value, found.relative_se]), np.array([0.9162907, 0.8732651, 0.2886751]), "printed"
    )
    assert found.corrected
    scaled = jackknife([0.02, 0.04, 0.06])
    assert_agree(scaled.value - found.value, float(np.log(10)), "float64")
    assert_agree(scaled.relative_se, found.relative_se, "float64")
    found = jackknife([0.5, 0.1, 0.1, 0.1])
    assert_agree(np.array([found.plugin, found.value]), np.array([1.6094379, 1.4364166]), "printed")
    for n in (3, 4, 8):
        found = jackknife([0.25] * n)
        assert_agree(found.value, found.plugin, "float64")
        assert (found.relative_se, found.corrected) == (0.0, True)
    found = jackknife([0.9] + [1e-9] * 7)  # the raw correction would be -13.2
    assert_agree(found.value, 2.1848021, "printed")
    assert not found.corrected


def test_jackknife_of_few_and_of_nothing():
    empty = jackknife([])
    assert np.isnan(empty.value)
    assert np.isnan(empty.plugin)
    assert (empty.relative_se, empty.corrected) == (np.inf, False)
    two = jackknife([0.5, 0.5])
    assert (two.value, two.relative_se, two.corrected) == (two.plugin, np.inf, False)
    assert jackknife([0.0, 0.0, 0.0]).value == np.inf
    lone = jackknife([0.3, 0.0, 0.0])  # leaving it out leaves nothing
    assert (lone.value, lone.corrected) == (lone.plugin, False)
    for bad in ([-0.1, 0.2], [np.nan], [[0.1]]):
        with pytest.raises(ValueError, match="probabilities"):
            jackknife(bad)


@given(chains(), laws(), seeds)
def test_realised_losses_are_ordered(chain, law, seed):
    """Catalogue 38: CE_commit >= CE_B >= 0, all equal to CE_A at slot 0; and -log of the mean, path by path."""
    uniforms = np.random.default_rng(seed).random((20, 4))
    for slot in walk(toy.markov_chain(*chain), [0, 1], 4, uniforms, law):
        token = int(slot.drawn[slot.drawn >= 0][0])
        found = ce_realised(slot, token)
        assert found.commit >= found.blind.plugin - SLACK
        assert found.blind.plugin >= found.blind.value - SLACK
        assert found.blind.value >= -SLACK
        weight = slot.weight / slot.weight.sum()
        assert_agree(found.blind.plugin, float(-np.log(weight @ slot.rows[:, token])), "float64")
        exact = ce_realised(Slot(**{**vars(slot), "path_node": None}), token)
        assert_agree(exact.blind.plugin, found.blind.plugin, "float64")
        assert_agree(exact.commit, found.commit, "float64")
        if slot.index == 0:
            assert_agree(found.commit, found.blind.plugin, "float64")


@pytest.mark.parametrize("token", [-1, 2])
def test_a_token_outside_the_vocabulary_is_refused(token):
    # was once: -1, the mark of a stopped path, is read as the last token
    slot = exact_slot(toy.two_token_chain(), (0, 0), 1)
    for backend in backends():
        with pytest.raises(ValueError, match=f"token {token} lies outside"):
            backend.ce_realised(tensors(slot) if backend.__name__ == "fast" else slot, token)


def test_the_loss_given_everything():
    """Catalogue 38: with the whole history forced, C_{k,k} = CE_A = -log p of the realised token."""
    target, block = toy.random_table(4, 3, seed=2), (1, 3, 0)
    uniforms = np.random.default_rng(0).random((5, 4))
    for backend in backends():
        force = import_module(f"{backend.__name__}.reweighting").force_suffix
        for k in (1, 2, 3):
            found = backend.ce_realised(force(target, [0], block[:k], k, uniforms), 2)
            expected = float(-np.log(target.next_token((0, *block[:k]))[2]))
            assert_agree(np.array([found.blind.value, found.commit]), np.full(2, expected), "float64")


def test_both_forms_have_one_expectation():
    """Averaged over the realised block, the loss given nothing minus that given everything is the information."""
    target = toy.two_token_chain()
    slot = exact_slot(target, (0, 0), 3)
    difference = 0.0
    for weight, row in zip(slot.weight, slot.rows, strict=True):
        for token, p in enumerate(row):
            difference += weight * p * (ce_realised(slot, token).blind.value + np.log(p))
    assert_agree(float(difference), mutual_information(slot), "float64")


def test_effective_support():
    """Catalogue 39, from shares of paths; exact probabilities; stopped paths do not count."""
    for counts, expected in (((3, 2, 1), 3.75), ((1, 1, 1, 1), 4.0), ((4,), 1.0), ((2, 2), 3.0), ((1,), 1.0)):
        paths = sum(counts)
        assert_agree(effective_support(np.array(counts) / paths, paths), expected, "float64")
        assert_agree(effective_support(np.array(counts) / (2 * paths), 2 * paths), expected, "float64")
        assert_agree(effective_support(np.array(counts) / paths), paths**2 / sum(n * n for n in counts), "float64")
    for weights, paths, message in (
        ([3, 2, 1], 6, "shares of 6 paths"),
        ([0.3, 0.7], 4, "shares of 4 paths"),
        ([0.0, 0.0], 4, "positive sum"),
        ([-0.5, 1.5], 2, "negative"),
    ):
        with pytest.raises(ValueError, match=message):
            effective_support(weights, paths)


def test_the_collision_probability_is_unbiased():
    """Over all samples of three paths, with their probabilities: E[1 / effective support] where paths collide."""
    p, collision = np.array([0.5, 0.3, 0.2]), 0.0
    for sample in np.ndindex(3, 3, 3):
        counts = np.bincount(sample, minlength=3)
        if counts.max() > 1:
            collision += p[list(sample)].prod() / effective_support(counts / 3, 3)
    assert_agree(float(collision), float((p**2).sum()), "float64")


def test_recovery_is_a_ratio_of_sums():
    partial, whole, inclusion = np.array([[0.1, 0.2], [0.3, 0.0]]), np.array([[0.2, 0.2], [0.4, 0.1]]), [0.5, 0.25]
    assert_agree(recovery(partial, whole), 0.6 / 0.9, "float64")
    assert_agree(recovery(partial, whole, inclusion), (0.3 / 0.5 + 0.3 / 0.25) / (0.4 / 0.5 + 0.5 / 0.25), "float64")
    assert_agree(recovery(partial[:, 0], whole[:, 0]), 0.4 / 0.6, "float64")
    with pytest.raises(ValueError, match="nothing to recover"):
        recovery([0.0], [0.0])
    with pytest.raises(ValueError, match="shapes differ"):
        recovery([0.1, 0.2], [0.1])
    for inclusion in ([0.5, 0.5], [-1.0], [0.0], [np.nan]):
        with pytest.raises(ValueError, match="inclusion"):
            recovery([0.1], [0.1], inclusion)
    for pair in (([np.nan], [0.1]), ([0.1], [np.nan]), ([0.1], [np.inf])):
        with pytest.raises(ValueError, match="must be finite"):
            recovery(*pair)
