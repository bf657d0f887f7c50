"""reference/anchor.py: every recorded number against plain loops over the paths, in both backends."""

import json
from dataclasses import asdict
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import reference
from models import toy
from models.toy_drafters import ToyDrafter
from reference import anchor, draft_meter
from reference.anchor import CENTRES, INFORMATION_ORDERS, KEPT, first_paths, measure_anchor
from reference.draft_meter import features_of
from reference.laws import SamplingLaw, warp
from reference.protocol import Design
from tests.agreement import assert_agree
from tests.strategies import chains, laws, seeds
from tests.test_paths import backends, one_path_at_a_time

PREFIX, GAMMA, PATHS = (1, 0), 4, 16
TABLE = toy.random_table(4, depth=5, seed=3, stop_ids=(3,))
TRUNCATING = SamplingLaw(temperature=0.7, top_k=3, top_p=0.9)
# no top-p that the rows of a chain, small whole numbers over their sum, meet exactly: rounding would decide there
CLEAR = st.builds(
    SamplingLaw,
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 100]),
    st.sampled_from([0.0, 0.37, 0.77, 1.0]),
)


def design_of(also=(), law=SamplingLaw(), gamma=GAMMA, paths=PATHS):
    return Design(anchors=1, paths=paths, gamma=gamma, law=law, also=also, seed=5)


def draws(seed, paths=PATHS, gamma=GAMMA):
    """Uniforms of the paths and of the drafted chains."""
    return np.random.default_rng(seed).random((2, paths, gamma))


def guess(vocab_size, seed=0):
    """A drafter's next-token function: an independent row for every slot and whatever it sees."""
    return lambda prefix, slot, seen: np.random.default_rng([seed, slot, *seen]).dirichlet(np.full(vocab_size, 0.7))


def measured(backend, target, design, seed=0, *, order=0, next_token=None, gamma=None, realised=()):
    """A row with one drafter "d"."""
    drafter = ToyDrafter(backend, gamma or design.gamma, order, next_token or guess(target.vocab_size))
    uniforms, drafted = draws(seed, design.paths, design.gamma)
    return measure_anchor(
        backend, target, PREFIX, uniforms, design, realised=realised, drafters={"d": drafter}, draft_uniforms=drafted
    )


def loops(target, design, seed, order, next_token):
    """What the drafter meets on every path, one path at a time: arrays [M, gamma], rows [M, gamma, V]."""
    law, shape = design.law, (design.paths, design.gamma)
    tokens, rows = one_path_at_a_time(target, PREFIX, design.gamma, draws(seed, *shape)[0], law)
    met = SimpleNamespace(
        token=tokens, rows=rows, alive=np.zeros(shape, bool), predecessor=np.full(shape, -1), target_p=np.zeros(shape),
        draft_p=np.zeros(shape), risk=np.zeros(shape), tempered=np.zeros(shape), reach=np.zeros(shape),
    )  # fmt: skip
    for r, k in product(*map(range, shape)):
        if (r, k) not in rows:
            continue
        block = (PREFIX[-1], *map(int, tokens[r, :k]))
        q = warp_row(next_token(PREFIX, k, seen(block, order)), law)
        loose = warp_row(next_token(PREFIX, k, seen(block, order)), SamplingLaw(law.temperature))
        p, z = rows[r, k], tokens[r, k]
        met.alive[r, k], met.predecessor[r, k] = True, block[-1]
        met.target_p[r, k], met.draft_p[r, k] = p[z], q[z]
        met.risk[r, k], met.tempered[r, k] = (abs(p - row).sum() / 2 for row in (q, loose))
        met.reach[r, k] = min(1, q[z] / p[z]) * (met.reach[r, k - 1] if k else 1)
    return met


def seen(block, order):
    return block if order is None else block[len(block) - order :]


def warp_row(probs, law):
    with np.errstate(divide="ignore"):
        return warp(np.log(np.asarray(probs, dtype=np.float64))[None], law)[0]


def assert_slots(actual, expected):
    """Two lists over slots, None at the same places."""
    assert [v is None for v in actual] == [v is None for v in expected]
    actual, expected = (
        np.array([v for v in values if v is not None], dtype=np.float64) for values in (actual, expected)
    )
    assert_agree(actual, expected, "float64")


def over_paths(values, alive):
    """Mean over the living paths of every slot, None where there are none."""
    return [float(v[a].mean()) if a.any() else None for v, a in zip(values.T, alive.T, strict=True)]


# --- drafters ---------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(chains(), CLEAR, seeds, st.sampled_from([0, 1, None]))
@example((np.array([[0.0, 1.0], [0.5, 0.5]]), (1,)), SamplingLaw(), 0, 1)
def test_risk_arrival_and_rejection_are_those_of_the_paths(chain, law, seed, order):
    target = toy.markov_chain(*chain)
    next_token, design = guess(target.vocab_size, seed), design_of(law=law)
    met = loops(target, design, seed, order, next_token)
    before = np.concatenate([np.ones((PATHS, 1)), met.reach[:, :-1]], axis=1) * met.alive
    for backend in backends():
        row = measured(backend, target, design, seed, order=order, next_token=next_token)
        found = row["drafters"]["d"]
        assert_agree(np.array(row["alive"]), met.alive.mean(axis=0), "float64")
        assert found["order"] == order
        assert_slots(found["risk"], over_paths(met.risk, met.alive))
        assert_slots(found["arrival"], before.mean(axis=0))
        assert_slots(found["rejected"], (before * met.risk).mean(axis=0))
        if law.top_k or law.top_p < 1:
            assert_slots(found["tempered"], over_paths(met.tempered, met.alive))
        else:
            assert "tempered" not in found


def chained_self_risk(design, met, next_token, vocab_size):
    """R^self of an order-1 drafter by enumeration of everything it may draft before each slot."""
    out = []
    for k in range(design.gamma):
        total = 0.0
        for chain in product(range(vocab_size), repeat=k):
            block, chance = (PREFIX[-1], *chain), 1.0
            for i, token in enumerate(chain):
                chance *= warp_row(next_token(PREFIX, i, block[i : i + 1]), design.law)[token]
            q = warp_row(next_token(PREFIX, k, block[k : k + 1]), design.law)
            total += chance * np.mean([abs(met.rows[r, k] - q).sum() / 2 for r in np.flatnonzero(met.alive[:, k])])
        out.append(float(total) if met.alive[:, k].any() else None)
    return out


def sampled_self_risk(design, met, next_token, seed, order):
    """R^self with one chain per path, drawn token by token."""
    drafted, out = draws(seed, design.paths, design.gamma)[1], []
    for k in range(design.gamma):
        risks = []
        for r in np.flatnonzero(met.alive[:, k]):
            block = (PREFIX[-1],)
            for i in range(k):
                mass = np.cumsum(warp_row(next_token(PREFIX, i, seen(block, order)), design.law))
                block += (int((mass <= drafted[r, i] * mass[-1]).sum()),)
            q = warp_row(next_token(PREFIX, k, seen(block, order)), design.law)
            risks.append(abs(met.rows[r, k] - q).sum() / 2)
        out.append(float(np.mean(risks)) if risks else None)
    return out


@pytest.mark.parametrize("law", [SamplingLaw(), TRUNCATING], ids=["plain", "truncating"])
def test_self_risk_sums_over_all_that_may_be_drafted(law):
    design, next_token = design_of(law=law), guess(4)
    met = loops(TABLE, design, 1, 1, next_token)
    expected = chained_self_risk(design, met, next_token, 4)
    for backend in backends():
        found = measured(backend, TABLE, design, 1, order=1)["drafters"]["d"]
        assert_slots(found["self_risk"], expected)
        assert found["self_risk"][0] == found["risk"][0]
        assert found["self_risk"][2] != found["risk"][2]


@pytest.mark.parametrize("order", [1, None])
def test_self_risk_from_one_chain_per_path(order, monkeypatch):
    monkeypatch.setattr(anchor, "EXACT_VOCABULARY", 3)
    for seed, law in ((1, SamplingLaw()), (2, TRUNCATING)):
        design, next_token = design_of(law=law), guess(4)
        met = loops(TABLE, design, seed, order, next_token)
        expected = sampled_self_risk(design, met, next_token, seed, order)
        for backend in backends():
            found = measured(backend, TABLE, design, seed, order=order)["drafters"]["d"]
            assert_slots(found["self_risk"], expected)


def test_a_proposal_that_reads_no_token_has_no_self_risk():
    for backend in backends():
        assert measured(backend, TABLE, design_of())["drafters"]["d"]["self_risk"] == [None] * GAMMA


@pytest.mark.parametrize("order", [0, 1, None])
def test_best_responses_and_sweeps_are_those_of_the_paths(order):
    design, next_token = design_of(("response",)), guess(4)
    met = loops(TABLE, design, 4, order, next_token)
    paths = reference.BlockPaths(met.token, met.target_p, met.draft_p, met.predecessor, met.alive)
    kind = 0 if order == 0 else 1
    for backend in backends():
        found = measured(backend, TABLE, design, 4, order=order)["drafters"]["d"]
        for k in range(GAMMA):
            for name, value in asdict(reference.best_response(paths, k, kind)).items():
                assert_agree(found["responses"][name][k], value, "float64")
        for name, backward in (("forward", False), ("backward", True)):
            expected = asdict(reference.sweep(paths, kind, backward=backward))
            assert_agree(np.array(found[name]["train"]), np.array(expected["train"]), "float64")
            assert_agree(np.array(found[name]["held_out"]), np.array(expected["held_out"]), "float64")


@settings(max_examples=10)
@given(chains(), laws(), seeds)
def test_no_drafter_beats_the_floor_of_its_order(chain, law, seed):
    """Catalogue 50: R >= T0 as fitted, and R on the realised predecessor >= T1 as fitted."""
    target = toy.markov_chain(*chain)
    for backend in backends():
        for order in (0, 1):
            next_token = guess(target.vocab_size, seed)
            row = measured(backend, target, design_of(law=law), seed, order=order, next_token=next_token)
            for risk, floor in zip(row["drafters"]["d"]["risk"], row[f"order{order}"]["fit"], strict=True):
                assert floor is None or risk >= floor - 1e-9


@pytest.mark.parametrize("order", [0, 1])
def test_the_barycentre_as_a_drafter_has_no_gap(order):
    uniforms, design = draws(6)[0], design_of()
    best = {}
    for slot in reference.walk(TABLE, PREFIX, GAMMA, uniforms):
        last = slot.history(order)
        for cell in np.unique(last, axis=0):
            here = (last == cell).all(axis=1)
            best[slot.index, *map(int, cell)] = reference.barycentre(slot.rows[here], slot.weight[here])
    even = np.full(4, 0.25)  # after a token that no path has drawn
    for backend in backends():
        row = measured(backend, TABLE, design, 6, order=order, next_token=lambda _, k, last: best.get((k, *last), even))
        assert row["order0"]["fit"][2] > 0.1
        assert_slots(row["drafters"]["d"]["risk"], row[f"order{order}"]["fit"])


def test_the_target_as_a_drafter_is_always_accepted():
    target = toy.random_table(4, depth=5, seed=3)
    for backend in backends():
        row = measured(
            backend, target, design_of(), order=None, next_token=lambda x, k, seen: target.next_token(x + seen[1:])
        )
        found = row["drafters"]["d"]
        assert_agree(np.array(found["risk"]), np.zeros(GAMMA), "float64")
        assert_agree(np.array(found["arrival"]), np.ones(GAMMA), "float64")
        assert_agree(np.array(found["rejected"]), np.zeros(GAMMA), "float64")
        assert_agree(1 + float(np.subtract(found["arrival"], found["rejected"]).sum()), GAMMA + 1.0, "float64")
        assert found["self_risk"][2] > 0.1  # what it drafts is not what the target wrote


@pytest.mark.parametrize("order", [2, None])
def test_a_perfect_drafter_that_reads_the_block_has_nothing_to_gain(order):
    # was once: its best response was sought among proposals that read one token, and the gain was negative
    target = toy.random_table(4, depth=3 if order == 2 else 5, seed=3)
    seen_of = {2: lambda x, k, seen: target.next_token(x + seen[-min(k, 2) :] if k else x), None: None}[order]
    follow = seen_of or (lambda x, k, seen: target.next_token(x + seen[1:]))
    for backend in backends():
        row = measured(backend, target, design_of(("response",), gamma=3, paths=64), order=order, next_token=follow)
        found = row["drafters"]["d"]
        assert_agree(np.array(found["risk"]), np.zeros(3), "float64")
        assert_agree(np.array(found["responses"]["train"]), np.zeros(3), "float64")
        assert_agree(np.array(found["forward"]["train"]), np.zeros(8), "float64")


@pytest.mark.parametrize("row", [[0.0] * 4, [2.0, 2.0, 2.0, 2.0], [np.nan] * 4, [0.5, 0.5]])
def test_a_proposal_that_is_none_is_refused(row):
    proposal = SimpleNamespace(gamma=GAMMA, order=0, probs=lambda k, h: np.array([row] * len(h)))
    drafter = SimpleNamespace(
        gamma=GAMMA,
        order=0,
        taps=(),
        context=lambda: SimpleNamespace(append=lambda _: None),
        propose=lambda *_: proposal,
    )
    uniforms, drafted = draws(0)
    with pytest.raises(ValueError, match="a proposal at slot 0 is no distribution over 4 tokens"):
        measure_anchor(reference, TABLE, PREFIX, uniforms, design_of(), drafters={"d": drafter}, draft_uniforms=drafted)


def test_realised_tokens_are_asked_for():
    with pytest.raises(ValueError, match="read the 4 realised tokens, 0 were given"):
        measured(reference, TABLE, design_of(("information",)))


def test_proposals_held_one_at_a_time_give_the_same_bits(monkeypatch):
    design, rows = design_of(("response",), law=TRUNCATING), {}
    for order in (0, 1, None):
        for backend in backends():
            rows[order, backend] = measured(backend, TABLE, design, 8, order=order)
    monkeypatch.setattr(draft_meter, "CHUNK", 1)
    for (order, backend), row in rows.items():
        assert measured(backend, TABLE, design, 8, order=order) == row


def test_a_drafter_longer_than_the_block_is_measured_on_its_first_slots(monkeypatch):
    # was once: its chains were drawn with as many uniforms as the block is long, and it needs more
    monkeypatch.setattr(anchor, "EXACT_VOCABULARY", 3)
    for backend in backends():
        for order in (0, 1, None):
            short, long = (measured(backend, TABLE, design_of(), 9, order=order, gamma=g) for g in (GAMMA, GAMMA + 3))
            assert short == long


def test_a_drafter_shorter_than_the_block_is_refused():
    for backend in backends():
        with pytest.raises(ValueError, match="drafter d proposes 3 tokens, gamma is 4; lower --gamma"):
            measured(backend, TABLE, design_of(), gamma=3)


def test_several_drafters_are_each_measured_as_if_alone():
    uniforms, drafted = draws(10)
    for backend in backends():
        drafters = {
            str(order): ToyDrafter(backend, GAMMA, order, guess(4, seed)) for seed, order in enumerate([0, 1, None])
        }
        row = measure_anchor(backend, TABLE, PREFIX, uniforms, design_of(), drafters=drafters, draft_uniforms=drafted)
        for name, drafter in drafters.items():
            alone = measure_anchor(
                backend, TABLE, PREFIX, uniforms, design_of(), drafters={name: drafter}, draft_uniforms=drafted
            )
            assert row["drafters"][name] == alone["drafters"][name]


def test_every_drafter_reads_the_features_of_its_own_taps():
    """A target whose layer l gives 10 l + (0, 1) at every position, 100 per position."""
    opened, read = [], {}

    class Layers:
        vocab_size, stop_ids = TABLE.vocab_size, ()

        def open(self, prefix, taps=()):
            session = TABLE.open(prefix)
            opened.append(taps)
            columns = [10 * tap + np.arange(2) for tap in taps]
            session.features = 100 * np.arange(len(prefix))[:, None] + np.concatenate(columns)
            return session

    class Reader(ToyDrafter):
        def __init__(self, taps):
            super().__init__(reference, GAMMA, 0, guess(4))
            self.taps = taps

        def context(self):
            return SimpleNamespace(tokens=(), append=lambda features: read.update({self.taps: features}))

    drafters = {"a": Reader((5, 7)), "b": Reader((2,)), "c": Reader((2, 5, 7)), "d": Reader((7, 5))}
    uniforms, drafted = draws(11)
    measure_anchor(reference, Layers(), (1, 0, 2), uniforms, design_of(), drafters=drafters, draft_uniforms=drafted)
    assert opened == [(2, 5, 7)]
    for taps, features in read.items():  # of all positions but the last, whose token has not been through the target
        expected = [[100 * position + 10 * tap + i for tap in taps for i in range(2)] for position in range(2)]
        assert_agree(features, np.array(expected), "exact")
    assert len(read) == 4
    torch = pytest.importorskip("torch")
    session = SimpleNamespace(features=torch.arange(12).reshape(2, 6))
    assert_agree(features_of(drafters["a"], drafters, session), np.array([[2, 3, 4, 5], [8, 9, 10, 11]]), "exact")


def test_a_prefix_of_one_token_leaves_the_context_empty():
    contexts = []

    def next_token(prefix, slot, last):
        contexts.append(prefix)
        return np.full(4, 0.25)

    uniforms, drafted = draws(0)
    drafters = {"d": ToyDrafter(reference, GAMMA, 0, next_token)}
    measure_anchor(reference, TABLE, (2,), uniforms, design_of(), drafters=drafters, draft_uniforms=drafted)
    assert set(contexts) == {(2,)}


# --- companions -------------------------------------------------------------------------------------------------

REALISED = (0, 2, 1, 2)


def slots_of(backend, design, seed, target=TABLE):
    return list(backend.walk(target, PREFIX, design.gamma, draws(seed, design.paths, design.gamma)[0], design.law))


def companions(backend, also, law=SamplingLaw(), seed=12, target=TABLE, realised=REALISED):
    """(the row with one companion, the slots it was read from, the uniforms)."""
    design = design_of((also,), law)
    uniforms = draws(seed)[0]
    row = measure_anchor(backend, target, PREFIX, uniforms, design, realised=realised)
    return row, slots_of(backend, design, seed, target), uniforms


def test_floors_support_and_counts_are_read_from_the_walk():
    for backend in backends():
        row, slots, _ = companions(backend, "ladder", seed=13)
        for k, slot in enumerate(slots):
            counts = np.bincount(slot.path_node[slot.path_node >= 0]).astype(np.float64)
            collisions, living = (counts * (counts - 1)).sum(), counts.sum()
            assert_agree(
                row["support"][k], float(living * (living - 1) / collisions if collisions else living), "float64"
            )
            assert row["distinct"][k] == len(counts)
            for order in (0, 1):
                assert {name: values[k] for name, values in row[f"order{order}"].items()} == asdict(
                    backend.floor(slot, order)
                )


@pytest.mark.parametrize("law", [SamplingLaw(), TRUNCATING], ids=["plain", "truncating"])
def test_information_and_losses(law):
    losses, history = [], PREFIX
    for token in REALISED:
        p = warp_row(TABLE.next_token(history), law)[token]
        losses.append(float(-np.log(p)) if p else None)
        history += (token,)
    for backend in backends():
        row, slots, _ = companions(backend, "information", law)
        found = row["information"]
        assert_slots(found["realised"], losses)
        for k, slot in enumerate(slots):
            p = np.array([float(slot.rows[n, REALISED[k]]) for n in slot.path_node if n >= 0])
            with np.errstate(divide="ignore"):
                commit = float(-np.log(p).mean())
            assert_slots([found["commit"][k]], [commit if np.isfinite(commit) else None])
            blind = reference.jackknife(p).value
            assert_slots([found["blind"][k]], [blind if np.isfinite(blind) else None])
            for m in INFORMATION_ORDERS:
                assert_agree(found[f"order{m}"][k], backend.mutual_information(slot, m), "float64")
            assert_agree(found["whole"][k], backend.mutual_information(slot), "float64")
        assert_slots(found["blind"][:1], found["realised"][:1])  # nothing is missing at slot 0


def test_a_realised_token_without_mass_is_absent_not_infinite():
    target = toy.markov_chain(np.array([[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]))
    for backend in backends():
        row, _, _ = companions(backend, "information", target=target, realised=(0, 2, 2, 2))
        assert (
            row["information"]["realised"][1]
            is row["information"]["blind"][1]
            is row["information"]["commit"][1]
            is None
        )
        assert_agree(row["information"]["realised"][2], 0.0, "exact")
        json.dumps(row, allow_nan=False)
        row, _, _ = companions(backend, "suffix", target=target, realised=(0, 2, 2, 2))
        assert row["suffix1"] == {name: [None] * GAMMA for name in ("fit", "held_out", "ess", "loss")}


def test_soft_floors():
    for backend in backends():
        row, slots, uniforms = companions(backend, "soft")
        for slot in slots:
            expected = asdict(backend.soft_floor(TABLE, PREFIX, slot.index, uniforms, budget=PATHS))
            assert {name: values[slot.index] for name, values in row["soft"].items()} == expected


@pytest.mark.parametrize("law", [SamplingLaw(), TRUNCATING], ids=["plain", "truncating"])
def test_suffixes(law):
    for backend in backends():
        row, slots, uniforms = companions(backend, "suffix", law)
        assert [name for name in row if name.startswith("suffix")] == ["suffix1", "suffix2"]
        assert len(slots) == GAMMA
        for m, k in ((1, 2), (1, 3), (2, 3)):
            found = {name: values[k] for name, values in row[f"suffix{m}"].items()}
            suffix = REALISED[k - m : k]
            try:
                floor = reference.floor_by_reweighting(TABLE, PREFIX, suffix, k, uniforms, law)
            except ValueError:
                assert set(found.values()) == {None}
                continue
            assert_slots([found["fit"], found["held_out"], found["ess"]], [floor.fit, floor.held_out, floor.ess])
            tokens, rows = one_path_at_a_time(TABLE, PREFIX, GAMMA, uniforms, law)
            top = bottom = 0.0
            for r in range(PATHS):  # C_{k,m}: every path forced to follow the suffix
                if (r, k - m) in rows:
                    history, weight = PREFIX + tuple(map(int, tokens[r, : k - m])), 1.0
                    for token in suffix:
                        weight *= warp_row(TABLE.next_token(history), law)[token]
                        history += (token,)
                    top += weight * warp_row(TABLE.next_token(history), law)[REALISED[k]]
                    bottom += weight
            assert_slots([found["loss"]], [float(-np.log(top / bottom)) if top else None])
        for m in (1, 2):
            assert all(row[f"suffix{m}"]["fit"][k] is None for k in range(m + 1))


def test_truncated_reads():
    for backend in backends():
        if not hasattr(backend, "truncated_floor"):
            pytest.skip("truncated_floor is not there yet")
        row, slots, _ = companions(backend, "truncated")
        for slot, kept, order in product(slots, KEPT, (0, 1)):
            found = backend.truncated_floor(slot, kept, order)
            for field in ("fit", "lower", "upper"):
                assert row[f"top{kept}"][f"order{order}_{field}"][slot.index] == getattr(found, field)


def test_k_medians():
    for backend in backends():
        row, slots, _ = companions(backend, "k_median")
        for slot, n in product(slots, CENTRES):
            found = reference.k_median(np.asarray(slot.rows), slot.weight, n, seed=5)
            assert_agree(row["k_median"][f"risk{n}"][slot.index], found.risk, "float64")
            assert_agree(row["k_median"][f"spread{n}"][slot.index], found.spread, "float64")
            assert found.risk <= row["order0"]["fit"][slot.index] + 1e-12


def test_the_ladder_is_a_run_with_a_quarter_of_the_paths():
    for backend in backends():
        for seed in range(3):
            row, _, uniforms = companions(backend, "ladder", seed=seed)
            part = measure_anchor(backend, TABLE, PREFIX, uniforms[: PATHS // 4], design_of(paths=PATHS // 4))
            for order in (0, 1):
                for name, values in part[f"order{order}"].items():
                    assert row[f"quarter{order}"][name] == values


@settings(max_examples=15)
@given(chains(), laws(), seeds, st.integers(1, 20))
def test_the_first_paths_of_a_slot_are_a_smaller_walk(chain, law, seed, paths):
    target, uniforms = toy.markov_chain(*chain), np.random.default_rng(seed).random((20, GAMMA))
    for backend in backends():
        small = {slot.index: slot for slot in backend.walk(target, PREFIX, GAMMA, uniforms[:paths], law)}
        for slot in backend.walk(target, PREFIX, GAMMA, uniforms, law):
            part, alone = first_paths(slot, paths), small.get(slot.index)
            if alone is None or (alone.path_node >= 0).sum() < 2:
                assert part is None
                continue
            for name in ("token", "past", "path_node", "drawn"):
                assert_agree(getattr(part, name), getattr(alone, name), "exact")
            for name in ("weight", "rows", "alive", "covered"):
                assert_agree(getattr(part, name), getattr(alone, name), "float64")


# --- a whole row ------------------------------------------------------------------------------------------------

EVERYTHING = ("information", "soft", "suffix", "k_median", "ladder", "response")


def leaves(value, path=()):
    if isinstance(value, dict | list | tuple):
        for name, part in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(part, (*path, name))
    else:
        yield path, value


@pytest.mark.parametrize("law", [SamplingLaw(), TRUNCATING], ids=["plain", "truncating"])
@pytest.mark.parametrize("order", [0, 1, None])
def test_backends_agree_on_everything(law, order):
    fast = pytest.importorskip("fast")
    for seed in range(2):
        mine, theirs = (
            dict(leaves(measured(b, TABLE, design_of(EVERYTHING, law), seed, order=order, realised=REALISED)))
            for b in (reference, fast)
        )
        assert list(mine) == list(theirs)
        for path, value in mine.items():
            if isinstance(value, float):
                assert_agree(theirs[path], value, "golden")
            else:
                assert theirs[path] == value


def test_networks_are_measured_alike_in_both_backends(golden):
    """A decoder and drafters of every order that read its layers; a block shorter than theirs, a truncating law."""
    fast = pytest.importorskip("fast")
    from fast.drafters import Drafter as FastDrafter
    from reference.drafters import Drafter

    names, design, rows = (
        ("deepspec-dflash", "deepspec-dspark-vanilla", "deepspec-dspark-rnn"),
        design_of(law=TRUNCATING),
        [],
    )
    uniforms, drafted = draws(14)
    for backend, load in ((reference, Drafter.load), (fast, FastDrafter.load)):
        target = backend.Decoder.load(golden / "target" / "tied", dtype="float64")
        drafters = {name: load(golden / name, target, dtype="float64") for name in names}
        assert [drafter.order for drafter in drafters.values()] == [0, 1, None]
        rows.append(
            measure_anchor(backend, target, (1, 5, 9, 3), uniforms, design, drafters=drafters, draft_uniforms=drafted)
        )
    mine, theirs = (dict(leaves(row)) for row in rows)
    assert list(mine) == list(theirs)
    for path, value in mine.items():
        if isinstance(value, float):
            assert_agree(theirs[path], value, "golden")
        else:
            assert theirs[path] == value
    for name, order in zip(names, ("order0", "order1"), strict=False):
        for risk, floor in zip(rows[0]["drafters"][name]["risk"], rows[0][order]["fit"], strict=True):
            assert 1 >= risk >= floor


def test_slots_with_fewer_than_two_paths_are_absent():
    """Most paths end at every slot: after a few no two are left."""
    target = toy.markov_chain(np.array([0.25, 0.15, 0.6]), stop_ids=(2,))
    ends = set()
    for backend in backends():
        for seed in range(4):
            row = measured(backend, target, design_of(EVERYTHING), seed, order=1, realised=(0, 1, 0, 1))
            counts = np.round(np.array(row["alive"]) * PATHS)
            ends.add(int((counts < 2).argmax()))
            json.dumps(row, allow_nan=False)
            for path, value in leaves({n: v for n, v in row.items() if n not in ("drafters", "alive", "distinct")}):
                if path[:2] == ("information", "realised") or path[0].startswith(("suffix", "quarter")):
                    continue  # a single path of its own; from slot m + 1 on; a quarter of the paths
                split = path[1] in ("held_out", "split") and value is None  # no cell can be split
                assert split or (value is None) == (counts[path[-1]] < 2), path
            for k, value in enumerate(row["drafters"]["d"]["risk"]):
                assert (value is None) == (counts[k] == 0)
            assert row["drafters"]["d"]["arrival"][int(counts.argmin())] is not None
    assert len(ends) > 1
