"""models/toy_drafters.py: what a toy drafter is shown, what it proposes and how it drafts."""

from itertools import chain, product

import numpy as np
import pytest

from models.toy import study
from models.toy_drafters import ToyDrafter, study_drafters
from reference.laws import SamplingLaw, warp
from tests.agreement import assert_agree
from tests.test_paths import backends

V, GAMMA = 5, 3


def next_token(prefix, slot, seen):
    """A row of its own for every argument; the last token never comes."""
    row = np.random.default_rng([*prefix, 99, slot, *seen]).dirichlet(np.ones(V))
    row[-1] = 0
    return row / row.sum()


def propose(backend, order, law=SamplingLaw(), prefix=(2, 0, 1)):
    drafter = ToyDrafter(backend, GAMMA, order, next_token)
    context = drafter.context()
    for token in prefix[:-1]:
        context.append(np.array([[token]]))
    return drafter.propose(context, prefix[-1], law)


@pytest.mark.parametrize("law", [SamplingLaw(), SamplingLaw(0.7, top_k=3, top_p=0.9), SamplingLaw(0)])
@pytest.mark.parametrize("order", [0, 1, None])
def test_a_proposal_is_its_function_under_the_law(order, law):
    for backend in backends():
        proposal = propose(backend, order, law)
        assert (proposal.gamma, proposal.order) == (GAMMA, order)
        for slot in range(GAMMA):
            blocks = np.array([(1, *block) for block in product(range(2), repeat=slot)])
            expected = [
                next_token((2, 0, 1), slot, () if order == 0 else b[-1:] if order else b) for b in blocks.tolist()
            ]
            with np.errstate(divide="ignore"):
                assert_agree(proposal.probs(slot, blocks), warp(np.log(expected), law), "float64")


@pytest.mark.parametrize("order", [0, 1, None])
def test_chains_are_drawn_from_the_proposal_token_by_token(order):
    uniforms = np.random.default_rng(1).random((20, GAMMA))
    for backend in backends():
        proposal, expected = propose(backend, order), []
        for numbers in uniforms:
            block = [1]
            for slot, u in enumerate(numbers):
                mass = np.cumsum(np.asarray(proposal.probs(slot, np.array([block]))[0]))
                block.append(int((mass <= u * mass[-1]).sum()))
            expected.append(block[1:])
        chains = proposal.sample(uniforms)
        assert_agree(chains, np.array(expected), "exact")
        assert chains.max() < V - 1


def test_drafters_of_the_study_follow_its_rule():
    """Mostly 5 t mod 63 follows t: `chained` applies it to the token it is given, `parallel` to the prefix."""
    target, prompts = study(2)
    for backend in backends():
        drafters = study_drafters(backend, 4)
        assert {name: (d.order, d.gamma, d.taps) for name, d in drafters.items()} == {
            "parallel": (0, 4, ()), "chained": (1, 4, ())
        }  # fmt: skip
        for name, prefix in product(drafters, chain.from_iterable(prompts.values())):
            context = drafters[name].context()
            context.append(target.open(prefix).features[:-1])
            proposal, token = drafters[name].propose(context, prefix[-1], SamplingLaw()), prefix[-1]
            for slot in range(4):
                q = np.asarray(proposal.probs(slot, np.array([[token]])))[0]
                token, sure = 5 * token % 63, 0.75 ** (slot + 1 if name == "parallel" else 1)
                assert q.argmax() == token
                assert_agree(float(q[token]), sure + (1 - sure) / 64, "float64")
                assert_agree(float(q.sum()), 1.0, "float64")
