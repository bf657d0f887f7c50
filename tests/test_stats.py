"""Anchors, weights and intervals: catalogue section 25.H (40-43), designs by enumeration, coverage."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.stats import (
    Anchor,
    concentration,
    eligible,
    hajek,
    hajek_sums,
    prompt_bootstrap,
    sample_anchors,
    stratum,
    subsample,
    weighted_correlation,
    weighted_quantile,
)
from tests.agreement import assert_agree


def population(sizes):
    """One anchor per position: `sizes` maps a stratum to how many it has."""
    return [Anchor("d", f"p{i % 7}", i, 100, key) for key, size in sizes.items() for i in range(size)]


def test_hajek_mean():
    """Catalogue 40."""
    assert_agree(hajek([0.2, 0.4], [0.5, 0.1]), 0.3666667, "printed")
    assert_agree(hajek([[0.2, 1.0], [0.4, np.nan]], [0.5, 0.1]), np.array([22 / 60, 1.0]), "float64")
    assert np.isnan(hajek([np.nan], [0.5]))
    for bad in (0.0, -0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match="inclusion"):
            hajek([1.0], [bad])
    for values, inclusion in (([1.0, 2.0], [1.0]), ([1.0], [0.5, 0.5]), ([1.0], 0.5)):
        with pytest.raises(ValueError, match="as many inclusion probabilities"):
            hajek(values, inclusion)


def test_weighted_median():
    """Catalogue 40."""
    assert weighted_quantile([1, 2, 3], [1, 1, 2], 0.5) == 2
    assert weighted_quantile([3, 1, 2], [2, 1, 1], 0.5) == 2
    assert weighted_quantile([5], [1], 1.0) == 5
    assert weighted_quantile([1, 2], [1, 1], 0.0) == 1


def test_concentration():
    """By hand: three small values of weight 5 in 9 carry .012 of 1.812; the weighted .9 quantile is .8."""
    values, weights = [0.0, 0.6, 0.004, 0.2, 0.8, 0.002], [1.0, 1.0, 2.0, 2.0, 1.0, 2.0]
    found = concentration(values, weights)
    total = 0.6 + 0.008 + 0.4 + 0.8 + 0.004
    assert_agree(found.below, 5 / 9, "float64")
    assert_agree(found.carried, 0.012 / total, "float64")
    assert_agree(found.top, 0.8 / total, "float64")
    half = concentration(values, weights, threshold=0.6, quantile=0.5)
    assert_agree(
        np.array([half.below, half.carried, half.top]), np.array([7 / 9, 0.412 / total, 1.808 / total]), "float64"
    )
    absent = concentration([*values, np.nan, 9.0], [*weights, 5.0, 0.0])
    assert absent == found
    assert concentration([0.3] * 4, [1.0] * 4).top == 1.0  # ties at the quantile are all in
    nothing = concentration([0.0, 0.0], [1.0, 1.0])
    assert nothing.below == 1.0
    assert np.isnan([nothing.carried, nothing.top]).all()
    for bad in (
        [[0.1, -0.1], [1, 1]],
        [[0.1], [1, 1]],
        [[0.1], [-1]],
        [[np.nan], [1]],
        [[0.1], [0]],
        [[0.1], [np.nan]],
    ):
        with pytest.raises(ValueError, match=r"negative|as many weights|no value"):
            concentration(*bad)


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 4)), min_size=1, max_size=9))
def test_concentration_of_repeated_anchors(pairs):
    """An anchor of weight n is n anchors of weight one, and the order of anchors is nothing."""
    values, weights = map(np.array, zip(*pairs, strict=True))
    found, again = (
        concentration(values, weights),
        concentration(np.repeat(values, weights)[::-1], np.ones(weights.sum())),
    )
    for name in ("below", "carried", "top"):
        mine, theirs = getattr(found, name), getattr(again, name)
        assert np.isnan(mine) == np.isnan(theirs)
        if not np.isnan(mine):
            assert_agree(mine, theirs, "float64")
            assert 0 <= mine <= 1 + 1e-12


def test_weighted_correlation():
    """By hand: x 0, 0, 1 and y 0, 1, 1 with weights 1, 1, 2 have covariance 1/8 and variances 1/4 and 3/16."""
    found = weighted_correlation([0, 0, 1], [0, 1, 1], [1, 1, 2])
    assert_agree(found, (1 / 8) / np.sqrt(1 / 4 * 3 / 16), "float64")
    assert_agree(weighted_correlation([0, 0, 1, 1], [0, 1, 1, 1], np.ones(4)), found, "float64")
    assert_agree(weighted_correlation([0, 9, 0, 1, 7], [0, np.nan, 1, 1, 1], [1, 1, 1, 2, 0]), found, "float64")
    x = np.array([0.3, 0.1, 0.7])
    assert_agree(weighted_correlation(x, 5 - 2 * x, [0.2, 0.3, 0.4]), -1.0, "float64")
    assert np.isnan(weighted_correlation([0.3] * 3, x, [0.1, 0.2, 0.3]))
    with pytest.raises(ValueError, match="as many weights"):
        weighted_correlation(x, x, [1, 1])


@given(st.integers(2, 8), st.integers(0, 2**32 - 1))
def test_correlation_does_not_see_scales(n, seed):
    """Shifts and positive scales change nothing; equal weights are NumPy's correlation."""
    rng = np.random.default_rng(seed)
    x, y, w = rng.random(n), rng.random(n), rng.uniform(0.1, 1, n)
    assert_agree(weighted_correlation(3 * x - 1, 0.5 * y + 2, 7 * w), weighted_correlation(x, y, w), "golden")
    assert_agree(weighted_correlation(x, y, np.ones(n)), np.corrcoef(x, y)[0, 1], "golden")


def test_the_change_from_few_to_many_paths():
    """Paired over anchors: a change alike everywhere has no width, however much the anchors differ."""
    few, pi = np.array([0.1, 0.9, 0.4, np.nan]), np.array([0.5, 0.1, 0.2, 0.3])
    found = prompt_bootstrap(*hajek_sums(few + 0.002 - few, pi), ["a", "b", "b", "c"], replicates=200)
    assert_agree(np.array([found.value, found.low, found.high]), np.full(3, 0.002), "float64")
    many = few + np.array([0.01, 0.0, -0.02, 0.0])
    found = prompt_bootstrap(*hajek_sums(many - few, pi), ["a", "b", "b", "c"], replicates=200)
    assert_agree(found.value, (2 * 0.01 - 5 * 0.02) / 17, "float64")
    assert_agree(np.array([found.low, found.high]), np.array([-5 * 0.02 / 15, 0.01]), "float64")


def test_six_rich_cells_share_256_places():
    """Catalogue 43: 42 each, the rest is not given away."""
    drawn = sample_anchors(population({(0, i): 1000 for i in range(6)}), 256, seed=1)
    assert len(drawn) == 252
    assert {a.inclusion for a in drawn} == {42 / 1000}


def test_small_cells_keep_their_places():
    drawn = sample_anchors(population({(0, 0): 3, (0, 1): 500}), 20, seed=1)
    assert sorted(a.inclusion for a in drawn) == [10 / 500] * 10 + [1.0] * 3


@given(
    st.dictionaries(st.tuples(st.integers(0, 3), st.integers(0, 2)), st.integers(1, 30), min_size=1), st.integers(1, 40)
)
def test_weights_restore_the_population(sizes, budget):
    """Catalogue 42: sum of 1 / pi is the population's size, stratum by stratum unless a second stage was needed."""
    people = population(sizes)
    drawn = sample_anchors(people, budget, seed=3)
    assert 0 < len(drawn) <= max(budget, 1)
    assert len({(a.stratum, a.position) for a in drawn}) == len(drawn)
    if len(sizes) <= budget:
        for key, size in sizes.items():
            assert_agree(sum(1 / a.inclusion for a in drawn if a.stratum == key), float(size), "golden")
    else:
        assert len(drawn) == budget
        assert all(a.inclusion <= budget / len(sizes) for a in drawn)


def test_second_stage_is_in_the_probabilities():
    """Inclusion frequencies over many designs are the stated probabilities, over both stages.

    Each anchor's count is binomial(4000, pi): six standard errors, false alarm below 1e-8 each.
    """
    people, runs = population({(0, 0): 2, (0, 1): 3, (1, 0): 5}), 4000
    counts, stated = {}, {}
    for seed in range(runs):
        for a in sample_anchors(people, 2, seed):
            counts[a.stratum, a.position] = counts.get((a.stratum, a.position), 0) + 1
            stated[a.stratum, a.position] = a.inclusion
    assert len(counts) == 10
    for key, pi in stated.items():
        assert abs(counts[key] / runs - pi) <= 6 * np.sqrt(pi * (1 - pi) / runs)


def test_hajek_mean_over_all_designs_is_the_population_mean():
    """Catalogue 42 without sampling error: one stratum of 4, two drawn, all pairs equally likely."""
    values = np.array([0.1, 0.7, 0.4, 0.9])
    means = [hajek(values[list(pair)], [0.5, 0.5]) for pair in itertools.combinations(range(4), 2)]
    assert_agree(np.mean(means), values.mean(), "float64")


def test_subsampling_is_a_stage():
    drawn = subsample([Anchor("d", "p", i, 1, (0, 0), 0.5) for i in range(8)], 2)
    assert [a.inclusion for a in drawn] == [0.125, 0.125]


def test_eligible_positions():
    """Whole blocks only; no special token in them; a cut answer loses its censored tail."""
    assert eligible(list(range(10)), 7, set()) == [0, 1, 2, 3]
    assert eligible(list(range(10)), 3, {4}) == [0, 1, 5, 6, 7]
    assert eligible(list(range(20)), 7, set(), stopped=False) == list(range(7))
    assert eligible(list(range(6)), 7, set()) == []
    assert eligible([], 7, set()) == []


def test_strata():
    assert stratum(511, 0, 90) == (0, 0)
    assert stratum(512, 30, 90) == (1, 1)
    assert stratum(20_000, 89, 90) == (5, 2)
    assert stratum(0, 0, 0) == (0, 0)


def test_identical_prompts_have_no_width():
    """Catalogue 41."""
    y, ones = np.tile([0.2, 0.6], 5), np.ones(10)
    found = prompt_bootstrap(y, ones, np.repeat(np.arange(5), 2), replicates=200)
    assert_agree(np.array([found.value, found.low, found.high]), np.full(3, 0.4), "float64")


def bootstrap_by_loop(numerator, denominator, prompts, replicates, seed):
    """One replicate at a time, anchor by anchor, from the same counts."""
    names = sorted(set(prompts))
    times = np.random.default_rng(seed).multinomial(len(names), np.full(len(names), 1 / len(names)), size=replicates)
    draws = []
    for row in times:
        resample = [
            i for name, count in zip(names, row, strict=True) for i in np.flatnonzero(prompts == name).repeat(count)
        ]
        draws.append(numerator[resample].sum(axis=0) / denominator[resample].sum(axis=0))
    return np.percentile(draws, [2.5, 97.5], axis=0)


def test_one_matrix_product_is_the_loop():
    """Catalogue 41: all anchors of a prompt move together; several columns at once."""
    rng = np.random.default_rng(2)
    prompts = rng.choice(list("abcdef"), 40)
    y, pi = rng.random((40, 3)), rng.uniform(0.1, 1, 40)
    found = prompt_bootstrap(*hajek_sums(y, pi), prompts, replicates=300, seed=9)
    assert_agree(np.stack([found.low, found.high]), bootstrap_by_loop(*hajek_sums(y, pi), prompts, 300, 9), "float64")
    assert_agree(found.value, hajek(y, pi), "float64")
    one = prompt_bootstrap(*hajek_sums(y[:, 0], pi), prompts, replicates=300, seed=9)
    assert_agree(one.low, found.low[0], "float64")


def test_a_ratio_is_not_a_mean_of_ratios():
    """Catalogue 41."""
    a, b = np.array([1.0, 1.0]), np.array([1.0, 10.0])
    found = prompt_bootstrap(a, b, ["x", "y"], replicates=100)
    assert_agree(found.value, 2 / 11, "float64")
    assert abs(found.value - np.mean(a / b)) > 0.3


def test_strata_are_resampled_apart_and_weigh_alike():
    """Equal-domain means: each stratum's ratio by itself, whatever its size, then their mean, in every replicate."""
    y = np.array([1.0, 3.0, 10.0, 10.0, 10.0])
    pi = np.array([0.5, 0.5, 0.1, 0.1, 0.1])
    prompts, strata = ["a", "b", "c", "d", "e"], ["s", "s", "t", "t", "t"]
    found = prompt_bootstrap(*hajek_sums(y, pi), prompts, strata=strata, replicates=2000)
    assert_agree(np.array([found.value, found.low, found.high]), np.array([6.0, 5.5, 6.5]), "float64")


def test_absent_values_do_not_lighten_a_domain():
    y, domains = np.array([0.1, np.nan, np.nan, np.nan, 0.3, 0.3, 0.3, 0.3]), ["a"] * 4 + ["b"] * 4
    found = prompt_bootstrap(*hajek_sums(y, np.full(8, 0.5)), list("pqrstuvw"), strata=domains, replicates=50)
    assert_agree(found.value, 0.2, "float64")


def test_one_prompt_has_no_interval():
    for strata in (None, ["s", "t", "t"]):
        found = prompt_bootstrap(np.arange(3.0), np.ones(3), ["a", "b", "b"] if strata else ["a"] * 3, strata=strata)
        assert np.isnan([found.low, found.high]).all()
        assert not np.isnan(found.value)


def test_other_combinations_of_strata():
    """A ratio of equal-domain means is not the mean of the domains' ratios."""
    both = np.array([[1.0, 2.0], [3.0, 12.0]])
    found = prompt_bootstrap(
        *hajek_sums(both, [1.0, 1.0]), ["a", "b"], strata=["s", "t"],
        combine=lambda r: r.mean(axis=1)[:, 0] / r.mean(axis=1)[:, 1], replicates=10,
    )  # fmt: skip
    assert_agree(found.value, 4 / 14, "float64")


def test_an_absent_column_is_nan():
    found = prompt_bootstrap(
        *hajek_sums(np.array([[np.nan, 1.0], [np.nan, 1.0]]), [0.5, 0.5]), ["a", "b"], replicates=20
    )
    assert np.isnan([found.value[0], found.low[0], found.high[0]]).all()
    assert found.value[1] == 1.0


def test_interval_covers():
    """170 prompts, 384 anchors that share their prompt's level: the 95% interval covers in 92-97% of 400 studies.

    With true coverage 95% the count has standard deviation 1.1%; the seed is fixed.
    """
    rng = np.random.default_rng(0)
    covered = 0
    for study in range(400):
        prompts = np.concatenate([np.arange(170), rng.integers(0, 170, 214)])
        y = rng.beta(1, 3, 170)[prompts] * rng.uniform(0.5, 1.5, 384)
        pi = rng.uniform(0.05, 0.2, 384)
        found = prompt_bootstrap(*hajek_sums(y, pi), prompts, replicates=500, seed=study)
        covered += found.low <= 0.25 <= found.high
    assert 0.92 <= covered / 400 <= 0.97
