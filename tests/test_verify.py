"""One round of verification: the exact output law, field cases A1, A2, B3, golden arrays, agreement."""

import importlib
from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import example, given

from models import toy
from reference.laws import SamplingLaw, draw, warp
from reference.verify import Verdict, residual, verify_block
from tests.agreement import assert_agree
from tests.strategies import logits, seeds

LAST = np.nextafter(1, 0)  # the largest uniform there is
each_wing = pytest.mark.parametrize("wing", ["reference", "fast"])


def called(wing, name, *arrays, dtype="float64"):
    """A function of the room on NumPy arrays, rows [.., V] first; tokens and uniforms stay on the host."""
    if wing == "reference":
        return {"verify_block": verify_block, "residual": residual}[name](*arrays)
    torch = pytest.importorskip("torch")
    rows = [torch.from_numpy(np.array(a, dtype=dtype)) for a in arrays[:2]]
    return getattr(importlib.import_module("fast.verify"), name)(*rows, *arrays[2:])


def verify(wing, target_probs, draft_probs, draft_tokens, uniforms, dtype="float64"):
    rows = np.array(target_probs, dtype=np.float64), np.array(draft_probs, dtype=np.float64)
    return called(wing, "verify_block", *rows, np.array(draft_tokens, dtype=np.int64), uniforms, dtype=dtype)


def outcomes(wing, target_probs, draft_probs, draft_tokens):
    """Every verdict on one block with its exact probability: {Verdict: probability}.

    A verdict changes only where a uniform passes an accept ratio or a step of a cumulative law.  The unit cube is
    cut at all of those, and within each piece both the lower and the upper end of every uniform are tried.
    """
    p, q = np.array(target_probs, dtype=np.float64), np.array(draft_probs, dtype=np.float64)
    cuts = [[min(1.0, p[k, x] / q[k, x])] for k, x in enumerate(draft_tokens)]
    laws = [residual(p[k], q[k]) for k in range(len(q))] + [p[-1]]
    cuts.append(np.unique(np.concatenate([np.cumsum(law) for law in laws])))
    pieces = [list(pairwise(ends)) for ends in map(edges, cuts)]
    found = {}
    for piece in product(*pieces):
        low, high = np.array(piece).T
        inside = np.minimum(1e-12, (high - low) / 4)
        for uniforms in (low + inside, high - inside):
            verdict = verify(wing, p, q, draft_tokens, uniforms)
            found[verdict] = found.get(verdict, 0.0) + np.prod(high - low) / 2
    return found


def edges(cuts):
    """0, the cuts strictly inside, 1; cuts that only rounding tells apart count once."""
    inside = [c for c in np.unique(np.round(cuts, 14)) if 0 < c < 1]
    return [0.0, *inside, 1.0]


def first_token(wing, target, draft, proposal=None):
    """Output law [V] of a block of one draft drawn from `proposal` and judged as drawn from `draft`; and acceptance."""
    target, draft = np.array(target), np.array(draft)
    law, kept = np.zeros(len(target)), 0.0
    for x, chance in enumerate(draft if proposal is None else np.array(proposal)):
        for verdict, weight in outcomes(wing, [target, target], [draft], [x]).items() if chance else ():
            law[x if verdict.accepted else verdict.token] += chance * weight
            kept += chance * weight * verdict.accepted
    return law, kept


@each_wing
@pytest.mark.parametrize(("vocab", "slots", "seed"), [(2, 2, 0), (3, 2, 1), (3, 2, 2), (4, 1, 3), (2, 0, 4)])
def test_the_text_has_the_law_of_the_target(wing, vocab, slots, seed):
    """Committed tokens, then continued by the target: the target's law of K+1 tokens; all rows depend on history."""
    target, drafter = (toy.random_table(vocab, 3, s, 0.7).next_token for s in (seed, seed + 100))
    text = np.zeros((vocab,) * (slots + 1))
    expected = np.zeros_like(text)
    for tokens in np.ndindex(*text.shape):
        expected[tokens] = np.prod([target(tokens[:k])[x] for k, x in enumerate(tokens)])
    for block in product(range(vocab), repeat=slots):
        p = np.stack([target(block[:k]) for k in range(slots + 1)])
        q = np.array([drafter(block[:k]) for k in range(slots)]).reshape(slots, vocab)
        drawn = np.prod([q[k, x] for k, x in enumerate(block)])
        for verdict, weight in outcomes(wing, p, q, block).items():
            committed = (*block[: verdict.accepted], verdict.token)
            for rest in product(range(vocab), repeat=slots + 1 - len(committed)):
                tokens = committed + rest
                follow = np.prod([target(tokens[:k])[tokens[k]] for k in range(len(committed), slots + 1)])
                text[tokens] += drawn * weight * follow
    assert_agree(text, expected, "float64")


@each_wing
def test_the_array_that_was_sampled_from(wing):
    """Field case A1 (a) to (c): lossless with the array the draft was drawn from, wrong by these much with another."""
    p, raw, kept = [0.5, 0.2, 0.2, 0.1], [0.4, 0.3, 0.2, 0.1], [4 / 7, 3 / 7, 0, 0]
    law, acceptance = first_token(wing, p, kept)
    assert_agree(law, np.array(p), "float64")
    assert_agree(acceptance, 0.7, "float64")
    law, _ = first_token(wing, p, raw, proposal=kept)
    assert_agree(law, np.array([5 / 7, 2 / 7, 0, 0]), "float64")

    law, acceptance = first_token(wing, [0.5, 0.5], [1.0, 0.0])
    assert_agree(law, np.array([0.5, 0.5]), "float64")
    assert_agree(acceptance, 0.5, "float64")
    law, _ = first_token(wing, [0.5, 0.5], [0.9, 0.1], proposal=[1.0, 0.0])
    assert_agree(law, np.array([5 / 9, 4 / 9]), "float64")

    law, acceptance = first_token(wing, [0.2, 0.5, 0.3], [0.5, 0.3, 0.2])
    assert_agree(law, np.array([0.2, 0.5, 0.3]), "float64")
    assert_agree(acceptance, 0.7, "float64")


@each_wing
def test_the_residual(wing):
    """All of q is subtracted; where nothing is left over it falls back to p.

    Field case A1 (c): .3 of the drafts are replaced; had only the drafted token 0 been subtracted, its place would go
    to the others as p has them, and the text would have the law (.2, .4875, .3125).
    """
    row, draft = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.3, 0.2])
    law = called(wing, "residual", row, draft)
    assert_agree(law, np.array([0, 2 / 3, 1 / 3]), "float64")
    kept, careless = np.minimum(row, draft), np.array([0, 0.5, 0.3]) / 0.8
    assert_agree(kept + 0.3 * np.asarray(law), row, "float64")
    assert_agree(kept + 0.3 * careless, np.array([0.2, 0.4875, 0.3125]), "float64")
    assert_agree(called(wing, "residual", row, row), row, "float64")


@each_wing
@pytest.mark.parametrize("last", [0.0, 0.34, 0.67, LAST])
def test_a_rejection_by_rounding_alone(wing, last):
    """Field case A2 (c): p and q equal up to float32, rejected all the same; the residual is zero everywhere."""
    p, q = np.full(3, np.float32(0.33333325)), np.full(3, np.float32(0.33333334))
    for dtype in ("float32", "float64"):
        verdict = verify(wing, [p, p], [q], [0], np.array([0.9999999, last]), dtype)
        assert verdict == Verdict(0, int(3 * last))


@each_wing
@pytest.mark.parametrize("name", ["target_probs", "draft_probs"])
@pytest.mark.parametrize(
    ("row", "message"),
    [
        ([np.nan] * 4, "sum nan"),
        ([0.25, np.nan, 0.25, 0.25], "sum nan"),
        ([0.0] * 4, "sum 0"),
        ([0.3] * 4, "sum 1.2"),
        ([0.6, 0.6, -0.2, 0.0], ".* smallest entry -0.2"),
        ([0.25, np.inf, 0.25, 0.25], "sum inf"),
    ],
)
def test_a_row_that_is_no_distribution_is_named(wing, name, row, message):
    """Field case A2 (a) and (b): the tensor and the row, whether or not the round would get that far."""
    rows = {"target_probs": np.full((4, 4), 0.25), "draft_probs": np.full((3, 4), 0.25)}
    rows[name][2] = row
    with pytest.raises(ValueError, match=f"{name} row 2 is no distribution: {message}"):
        verify(wing, *rows.values(), [0, 1, 2], np.full(4, 0.5))


@each_wing
@pytest.mark.parametrize("vocab", [8_193, 151_936])
def test_a_correction_comes_from_where_the_target_has_mass(wing, vocab):
    """Field case A2 (d): all target mass on the first 8192 ids, the draft rejected, the last uniform anywhere."""
    p, q = np.zeros(vocab), np.full(vocab, 1 / vocab)
    p[:8192] = 1 / 8192
    p[5] = 0
    p /= p.sum()
    p, q = p.astype(np.float32), q.astype(np.float32)
    for last in (0.0, 0.5, LAST):
        for token in (5, vocab - 1):
            verdict = verify(wing, [p, p], [q], [token], np.array([0.0, last]), "float32")
            assert verdict.accepted == 0
            assert p[verdict.token] > 0


@each_wing
def test_greedy_is_the_limit(wing):
    """Field case B3 (a) on one-hot rows: the lowest of two equal maxima, and drafts stay while they are the argmax."""
    scores = np.zeros((4, 512))
    scores[:, [5, 256]] = 9.0
    scores[2, 7] = 10.0
    greedy = warp(scores, SamplingLaw(temperature=0.0))
    for tokens, accepted, token in (
        ([5, 5, 7], 3, 5),
        ([5, 5, 5], 2, 7),
        ([5, 256, 7], 1, 5),
        ([256, 5, 7], 0, 5),
    ):
        for u in (0.0, 0.5, LAST):
            assert verify(wing, greedy, np.eye(512)[tokens], tokens, np.full(4, u)) == Verdict(accepted, token)


@each_wing
def test_a_perfect_draft_is_always_kept(wing):
    rows = warp(np.random.default_rng(0).normal(size=(6, 50)) * 3)
    for dtype in ("float32", "float64"):
        tokens = draw(rows, np.linspace(0, 0.99, 6))[:5]
        verdict = verify(wing, rows, rows[:5], tokens, np.full(6, LAST), dtype)
        assert verdict == Verdict(5, int(draw(rows[5:], [LAST])[0]))


@each_wing
def test_a_token_its_own_row_cannot_draw_is_refused(wing):
    """Also where the target likes it: the rows are not those it was drawn from."""
    with pytest.raises(ValueError, match="draft token 1 at slot 1 was not drawn"):
        verify(wing, np.full((3, 2), 0.5), [[0.5, 0.5], [1.0, 0.0]], [0, 1], np.full(3, 0.5))


@each_wing
def test_what_does_not_fit_is_refused(wing):
    p, q, tokens, uniforms = np.full((3, 4), 0.25), np.full((2, 4), 0.25), [0, 1], np.full(3, 0.5)
    for arguments, message in (
        ((p[:2], q, tokens, uniforms), "target_probs"),
        ((p, p, tokens, uniforms), "draft_probs"),
        ((p, np.full((2, 5), 0.2), tokens, uniforms), "draft_probs"),
        ((p[0], q, tokens, uniforms), "target_probs"),
        ((p, q, [tokens], uniforms), "draft_tokens"),
        ((p, q, [0, 4], uniforms), "vocabulary"),
        ((p, q, [0, -1], uniforms), "vocabulary"),
        ((p, q, tokens, uniforms[:2]), "uniforms"),
        ((p, q, tokens, np.array([0.5, 1.0, 0.5])), "uniforms"),
        ((p, q, tokens, np.array([np.nan, 0.5, 0.5])), "uniforms"),
    ):
        with pytest.raises(ValueError, match=message):
            verify(wing, *arguments)


@given(logits(max_rows=6), seeds)
@example(np.zeros((1, 1)), 0)
@example(np.array([[0.0, 60.0], [60.0, 0.0], [0.0, 0.0]]), 1)
def test_backends_agree(table, seed):
    """Same rows and uniforms, same verdict, float64 and float32; the accepted length is what the ratios say."""
    pytest.importorskip("torch")
    rng, slots = np.random.default_rng(seed), len(table) - 1
    target, draft = warp(table), warp(table[::-1] + rng.normal(size=table.shape))[:slots]
    uniforms = rng.random(slots + 1)
    for dtype in ("float64", "float32"):
        p, q = target.astype(dtype).astype(np.float64), draft.astype(dtype).astype(np.float64)
        tokens = draw(q, rng.random(slots))
        found = verify("reference", p, q, tokens, uniforms)
        assert verify("fast", p, q, tokens, uniforms, dtype) == found
        kept = uniforms[:-1] * q[np.arange(slots), tokens] < p[np.arange(slots), tokens]
        assert found.accepted == int(np.cumprod(kept).sum())
        assert p[found.accepted, found.token] > 0


def test_two_roads_to_one_row_are_not_one_row():
    """Field case A1 (d): rows from bfloat16 logits, softmax in float32; one softmax in bfloat16 is another law."""
    torch, fast = pytest.importorskip("torch"), pytest.importorskip("fast")
    scores = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 151_936)) * 3).bfloat16()
    rows, other = fast.warp(scores.float()), torch.softmax(scores, dim=-1).float()
    other /= other.sum(dim=-1, keepdim=True)
    fast_verify, uniforms, kept = importlib.import_module("fast.verify").verify_block, np.array([LAST, 0.5]), []
    for u in np.linspace(0, 0.99, 20):
        tokens = fast.draw(rows[:1], [u])
        assert fast_verify(rows, rows[:1], tokens, uniforms).accepted == 1
        kept.append(fast_verify(rows, other[:1], tokens, uniforms).accepted)
    assert 0 < sum(kept) < 20  # a perfect draft, thought to be too likely about as often as not


@each_wing
@pytest.mark.parametrize("project", ["deepspec", "zlab"])
def test_golden_rounds(wing, project, golden):
    """Rounds computed by two public projects; one divides by max(q, 1e-8), which no drawn token here comes near."""
    with np.load(golden / "verify" / f"{project}.npz") as file:
        cases, seen = dict(file), 0
    for i, name in enumerate(cases["name"]):
        tokens = cases["draft_tokens"][i]
        tokens = tokens[tokens >= 0]
        slots = len(tokens)
        p, q = cases["target_probs"][i][: slots + 1], cases[DRAFTS[project]][i][:slots]
        uniforms = np.append(cases["u_accept"][i][:slots], cases["u_next"][i])
        accepted = int(cases["accepted"][i])
        if project == "deepspec" and cases["terminated_by_stop"][i]:  # their round is cut behind the stop id
            assert verify(wing, p, q, tokens, uniforms).accepted >= accepted, name
            continue
        law = called(wing, "residual", p[accepted], q[accepted]) if accepted < slots else p[slots]
        assert_agree(law, cases["next_distribution"][i], "golden")
        if (q[np.arange(slots), tokens] == 0).any() or (np.abs(q.sum(-1) - 1) > 1e-4).any():
            with pytest.raises(ValueError, match="draft"):  # made up to reach a branch; no drafter draws from this
                verify(wing, p, q, tokens, uniforms)
            continue
        seen += 1
        assert verify(wing, p, q, tokens, uniforms) == Verdict(accepted, int(cases["next_token"][i])), name
    assert seen >= len(cases["name"]) - 4


DRAFTS = {"deepspec": "draft_probs", "zlab": "draft_probs_dense"}
