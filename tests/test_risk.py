"""Drafter risk: exact values by enumeration, the identities around gap and exposure, agreement."""

from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, reject

from models import toy
from reference.distance import barycentre, total_variation
from reference.floors import floor
from reference.paths import Slot, walk
from reference.risk import CHUNK, Gap, exposure, gap, paired_self_risk, prefix_risks, propagate, risk, self_risk
from tests.agreement import assert_agree
from tests.strategies import chains, families, logits, seeds

ORDER_0 = np.array([[0.7, 0.3], [0.5, 0.5], [0.4, 0.6]])  # proposals for the two-token chain, slots 0 to 2


def wings(room, dtype="float64"):
    """One room in every wing that can be imported, each with what turns a NumPy array into the wing's own."""
    yield import_module(f"reference.{room}"), np.asarray
    try:
        torch, fast = import_module("torch"), import_module(f"fast.{room}")
    except ModuleNotFoundError:
        return
    yield fast, lambda a: torch.tensor(a, dtype=getattr(torch, dtype))


def owned(slot, own):
    """The slot with its rows as the wing's own arrays."""
    return Slot(**{**vars(slot), "rows": own(slot.rows)})


def exact_slot(target, prefix, k):
    """All prefixes of a toy at one slot with their exact probabilities."""
    pasts, weights, rows = toy.enumerate_rows(target, prefix, k)
    if not pasts:
        reject()  # every path stops before
    past = np.array([(*prefix, *p) for p in pasts])
    return Slot(k, np.full(len(past), -1), past[:, -1], weights, rows, past, float(weights.sum()))


def paths_slot(rows, node):
    """A sampled slot at index 1: the prefixes' rows, and which of them each path is on."""
    node, one = np.asarray(node), np.arange(len(rows))
    weight = np.bincount(node[node >= 0], minlength=len(rows)) / len(node)
    return Slot(1, one, one, weight, rows, one[:, None], float((node >= 0).mean()), 1.0, node, node)


def drafter(vocab, seed):
    """A random first proposal [V] and a random conditional table [V, V] with some zero entries."""
    rng = np.random.default_rng(seed)
    table = rng.dirichlet(np.full(vocab, 0.5), size=vocab + 1)
    table[:, 0] += table[:, 1]  # no drafter says token 1
    table[:, 1] = 0
    return table[0], table[1:]


def test_risks_of_the_chain():
    """Catalogue 24: R = (.1, .28, .326)."""
    for k, expected in enumerate((0.1, 0.28, 0.326)):
        slot = exact_slot(toy.two_token_chain(), (0, 0), k)
        for room, own in wings("risk"):
            assert_agree(room.risk(owned(slot, own), own(ORDER_0[k])), expected, "float64")


def test_gaps_of_the_chain():
    """Catalogue 18 and 24: G = R - T with T^(0) = (0, .1, .19)."""
    for k, expected in enumerate((0.1, 0.18, 0.136)):
        slot = exact_slot(toy.two_token_chain(), (0, 0), k)
        found = gap(risk(slot, ORDER_0[k]), floor(slot, 0))
        assert_agree(found.fit, expected, "float64")
        assert (found.held_out is None) == (k > 0)  # exact weights have no halves, and slot 0 needs none


@given(families(), seeds)
def test_no_proposal_beats_the_floor(family, seed):
    """Catalogue 50; the barycentre attains it, and a proposal that knows every row has no risk."""
    rows, weights = family
    node = np.repeat(np.arange(len(rows)), 1 + weights.astype(int))
    slot, q = paths_slot(rows, node), np.random.default_rng(seed).dirichlet(np.ones(rows.shape[1]))
    lowest = floor(slot, 0)
    for room, own in wings("risk"):
        there = owned(slot, own)
        found = room.risk(there, own(q))
        assert 0 <= found <= 1 + 1e-12
        assert gap(found, lowest).fit >= -1e-12
        counts = np.bincount(node).astype(float)
        assert_agree(room.risk(there, own(barycentre(rows, counts))), lowest.fit, "float64")
        assert_agree(room.risk(there, own(rows)), 0.0, "exact")
        assert_agree(room.risk(there, own(np.tile(q, (len(rows), 1)))), found, "float64")


def test_oracle_conditioning_path_by_path():
    """R^oracle of a walk is the mean over its paths, each read at the predecessor that it realised."""
    target = toy.random_table(4, 3, seed=7)
    _, after = drafter(4, seed=1)
    slots = list(walk(target, [0], 3, np.random.default_rng(2).random((30, 3))))
    drawn = np.stack([slot.drawn for slot in slots], axis=1)
    for k in (1, 2):
        each = [total_variation(target.next_token((0, *z[:k])), after[z[k - 1]]) for z in drawn]
        for room, own in wings("risk"):
            found = room.risk(owned(slots[k], own), own(after[slots[k].token]))
            assert_agree(found, float(np.mean(each)), "float64")


@given(chains(), seeds)
def test_self_risk_by_enumerating_all_chains(chain, seed):
    """Every chain (a_0, a_1) of the drafter against every target path, weighted by their probabilities."""
    table, stop_ids = chain
    first, after = drafter(table.shape[-1], seed)
    slot = exact_slot(toy.markov_chain(table, stop_ids), (0, 1), 2)
    expected, law = 0.0, np.zeros(len(first))
    for a, b in np.ndindex(after.shape):
        law[b] += first[a] * after[a, b]
        expected += first[a] * after[a, b] * sum(slot.weight * total_variation(slot.rows, after[b]))
    expected = float(expected / slot.weight.sum())
    for room, own in wings("risk"):
        marginal = room.propagate(own(first), own(after))
        assert_agree(marginal, law, "float64")
        assert_agree(room.self_risk(owned(slot, own), own(after), marginal), expected, "float64")
        assert room.risk(owned(slot, own), own(law @ after)) <= expected + 1e-12  # TV is convex in the proposal


@given(chains(), seeds)
def test_the_decomposition(chain, seed):
    """R^self = T^(1) + G^(1) + E; a predecessor that is known, as at slot 0, leaves no exposure."""
    table, stop_ids = chain
    first, after = drafter(table.shape[-1], seed)
    slot = exact_slot(toy.markov_chain(table, stop_ids), (0, 1), 2)
    oracle, own, lowest = risk(slot, after[slot.token]), self_risk(slot, after, first), floor(slot, 1)
    assert gap(oracle, lowest).fit >= -1e-12
    assert_agree(lowest.fit + gap(oracle, lowest).fit + exposure(own, oracle), own, "float64")
    start = exact_slot(toy.markov_chain(table, stop_ids), (0, 1), 0)
    known = np.eye(len(first))[1]  # the last token of X
    assert_agree(exposure(self_risk(start, after, known), risk(start, after[start.token])), 0.0, "float64")


@given(chains(), seeds)
def test_no_proposal_beats_the_floors_of_its_own_paths(chain, seed):
    """Catalogue 50: at every slot of a walk, R - T^(0) and R^oracle - T^(1), plug-in, are not negative."""
    table, stop_ids = chain
    first, after = drafter(table.shape[-1], seed)
    uniforms = np.random.default_rng(seed).random((15, 4))
    for slot in walk(toy.markov_chain(table, stop_ids), [0, 1], 4, uniforms):
        for room, own in wings("risk"):
            floors, there = import_module(room.__name__.replace("risk", "floors")), owned(slot, own)
            assert gap(room.risk(there, own(first)), floors.floor(there, 0)).fit >= -1e-12
            assert gap(room.risk(there, own(after[slot.token])), floors.floor(there, 1)).fit >= -1e-12


def test_both_sides_of_a_gap():
    slot = paths_slot(np.array([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8]]), [0, 0, 1, 2, 2])
    lowest = floor(slot, 0)
    assert gap(0.5, lowest) == Gap(0.5 - lowest.fit, 0.5 - lowest.held_out)
    assert gap(0.5, lowest).fit > gap(0.5, lowest).held_out


@given(logits(), seeds)
def test_sampled_predecessors(table, seed):
    """Paired: the mean over the paths alive, one by one.  Where all pairs occur, it is the exact mean by counts."""
    from reference.laws import warp

    rows, rng = warp(table), np.random.default_rng(seed)
    vocab = rows.shape[1]
    after = rng.dirichlet(np.ones(vocab), size=vocab)
    node = np.concatenate([np.arange(len(rows)), rng.integers(-1, len(rows), 9)])
    drawn = rng.integers(0, vocab, len(node))
    slot = paths_slot(rows, node)
    each = [total_variation(rows[u], after[a]) for u, a in zip(node, drawn, strict=True) if u >= 0]
    times = rng.integers(0, 3, vocab)
    times[0] += 1
    pairs = np.array([(u, a) for u in range(len(rows)) for a in np.repeat(np.arange(vocab), times)])
    crossed = paths_slot(rows, pairs[:, 0])
    for room, own in wings("risk"):
        found = room.paired_self_risk(owned(slot, own), own(after), drawn)
        assert_agree(found, float(np.mean(each)), "float64")
        found = room.paired_self_risk(owned(crossed, own), own(after), pairs[:, 1])
        assert_agree(found, room.self_risk(owned(crossed, own), own(after), own(times.astype(float))), "float64")


def test_predecessors_without_mass_are_never_evaluated():
    """Neither asked of a function nor looked at in an array; and what is asked for comes in small batches."""
    rows = np.random.default_rng(0).dirichlet(np.ones(3 * CHUNK), size=2)
    table = np.random.default_rng(1).dirichlet(np.ones(3 * CHUNK), size=3 * CHUNK)
    marginal = np.random.default_rng(2).random(3 * CHUNK)
    marginal[5::3] = 0
    slot, broken = paths_slot(rows, [0, 1, 1]), np.where(marginal[:, None] > 0, table, np.nan)
    shares = marginal / marginal.sum()
    each = np.array([total_variation(rows, q) @ [1 / 3, 2 / 3] for q in table])
    for room, own in wings("risk"):
        asked, theirs = [], own(table)

        def after(predecessors, asked=asked, theirs=theirs):
            asked.append(predecessors)
            return theirs[predecessors]

        for conditionals in (own(broken), after):
            assert_agree(room.self_risk(owned(slot, own), conditionals, own(marginal)), float(shares @ each), "float64")
            assert_agree(room.propagate(own(marginal), conditionals), shares @ table, "float64")
        assert max(map(len, asked)) <= CHUNK
        assert_agree(np.concatenate(asked), np.tile(marginal.nonzero()[0], 2), "exact")


@given(logits(), seeds)
def test_backends_agree_in_float32(table, seed):
    from reference.laws import warp

    rows, rng = warp(table).astype(np.float32).astype(np.float64), np.random.default_rng(seed)
    vocab = rows.shape[1]
    after = rng.dirichlet(np.ones(vocab), size=vocab).astype(np.float32).astype(np.float64)
    node = np.concatenate([np.arange(len(rows)), rng.integers(-1, len(rows), 9)])
    drawn, slot = rng.integers(0, vocab, len(node)), paths_slot(rows, node)
    for room, own in wings("risk", "float32"):
        there, theirs, law = owned(slot, own), own(after), own(after[0])
        assert_agree(room.risk(there, law), risk(slot, after[0]), "float32")
        assert_agree(room.prefix_risks(there, law), prefix_risks(slot, after[0]), "float32")
        assert_agree(room.self_risk(there, theirs, law), self_risk(slot, after, after[0]), "float32")
        after_next = room.propagate(law, theirs)
        assert_agree(after_next, propagate(after[0], after), "float32")
        assert after_next.dtype == law.dtype
        found = room.paired_self_risk(there, theirs, drawn)
        assert_agree(found, paired_self_risk(slot, after, drawn), "float32")


def test_what_is_no_proposal_is_named():
    good = np.full((3, 4), 0.25)
    bad = good.copy()
    bad[1, 0] = np.nan
    slot, broken = paths_slot(good, [0, 1, 2]), paths_slot(bad, [0, 1, 2])
    enumerated = Slot(**{**vars(slot), "path_node": None, "drawn": None})
    even = np.full(4, 0.25)
    for room, own in wings("risk"):
        there, table = owned(slot, own), own(np.full((4, 4), 0.25))
        with pytest.raises(ValueError, match="row 1 is no distribution"):
            room.risk(there, own(bad))
        with pytest.raises(ValueError, match=r"row 0 is no distribution: sum 0\.8"):
            room.risk(there, own(np.full(4, 0.2)))
        with pytest.raises(ValueError, match="row 1 is no distribution"):
            room.risk(owned(broken, own), own(even))
        for shape in ((5,), (2, 4), (4, 3), (1, 3, 4), ()):
            with pytest.raises(ValueError, match="draft_probs must be"):
                room.risk(there, own(np.full(shape, 0.25)))
        for marginal in ([0.0] * 4, [1.0, -1, 1, 1], [np.nan, 1, 1, 1], [1.0] * 3, [[1.0] * 4]):
            with pytest.raises(ValueError, match="marginal must be"):
                room.self_risk(there, table, own(np.array(marginal)))
            with pytest.raises(ValueError, match="marginal must be"):
                room.propagate(own(np.array(marginal)), table)
        with pytest.raises(ValueError, match=r"after tokens \[1, 3\], row 1 is no distribution"):
            room.self_risk(there, own(np.tile([[0.25], [0.25], [0.25], [0.3]], 4)), own(np.array([0.0, 1, 0, 1])))
        with pytest.raises(ValueError, match="over 3 tokens"):
            room.self_risk(there, own(np.full((4, 3), 1 / 3)), own(even))
        with pytest.raises(ValueError, match="as many rows"):
            room.self_risk(there, lambda a, table=table: table[:2], own(even))
        with pytest.raises(ValueError, match="one predecessor"):
            room.paired_self_risk(there, table, np.zeros(2, int))
        for conditionals, wrong in ((table, -1), (table, 4), (lambda a, table=table: table[a], -1)):
            with pytest.raises(ValueError, match=f"predecessor {wrong} is no token"):
                room.paired_self_risk(there, conditionals, np.array([0, 1, wrong]))
        stopped = Slot(**{**vars(there), "path_node": np.array([0, 1, -1])})
        assert_agree(room.paired_self_risk(stopped, table, np.array([0, 1, -1])), 0.0, "exact")
        with pytest.raises(ValueError, match="one predecessor"):
            room.paired_self_risk(owned(enumerated, own), table, np.zeros(3, int))
