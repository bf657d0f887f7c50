"""The drafters of the embedded target as they are shipped: small, lossless, and accepted as long as measured."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from scipy.stats import binom

from models.checkpoint import Checkpoint, locate
from models.drafter_config import DrafterConfig
from models.text import Text, builtin_prompts, read_prompts
from reference.engine import uniforms as engine_uniforms
from reference.laws import SamplingLaw, draw, warp
from reference.protocol import Design
from tests.agreement import assert_agree

torch = pytest.importorskip("torch")

import fast  # noqa: E402
import reference  # noqa: E402
from fast.engine import Engine, Request  # noqa: E402
from reference.anchor import measure_anchor  # noqa: E402

DRAFTERS = ("attention", "dflash", "dflash2", "dflash2-dreal", "dspark", "dspark-dreal")
GAMMA, GREEDY, PLAIN = 7, SamplingLaw(0), SamplingLaw()


@cache
def target(dtype="float64"):
    return fast.Decoder.load(locate("tiny").folder, dtype=dtype, stop_ids=text().stop_ids)


@cache
def text():
    return Text.from_folder(locate("tiny").folder)


def drafter(name, dtype="float64", **changed):
    folder = locate(f"tiny/{name}").folder
    if not changed:
        return fast.Drafter.load(folder, target(dtype), dtype=dtype)
    config = replace(DrafterConfig.from_folder(folder), **changed)
    tensors = {key: tensor.to(target(dtype).dtype) for key, tensor in drafter(name, dtype).state_dict().items()}
    return fast.Drafter(config, tensors, target(dtype).embedding, target(dtype).head)


@cache
def prompts():
    some = read_prompts(builtin_prompts())[::4]
    return [tuple(text().chat([{"role": "user", "content": p.text}])) for p in some]


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_is_small_has_a_card_and_borrows_the_tables(name):
    folder = locate(f"tiny/{name}").folder
    assert sum(file.stat().st_size for file in folder.iterdir()) <= 3e6
    assert not {"embed_tokens.weight", "lm_head.weight"} & set(Checkpoint(folder).tensors)
    card = (folder / "README.md").read_text()
    for said in ("seed", "steps", "learning", "anchors"):
        assert said in card
    assert DrafterConfig.from_folder(folder).family == name.removesuffix("-dreal")


@pytest.mark.parametrize("name", DRAFTERS)
def test_both_backends_read_it_alike(name):
    tokens = np.array(prompts()[0])
    plain = reference.Decoder.load(locate("tiny").folder, dtype="float64")
    theirs = reference.Drafter.load(locate(f"tiny/{name}").folder, plain, dtype="float64")
    session = plain.open(tokens, theirs.taps)
    mine = drafter(name).forward_blocks(torch.from_numpy(session.features), tokens, [5, 9])
    assert_agree(mine.base_logits, theirs.forward_blocks(session.features, tokens, [5, 9]).base_logits, "golden")


@pytest.mark.parametrize(
    ("name", "block_size", "batch"),
    [("attention", 7, 8), ("dflash", 7, 3), ("dflash2", 8, 8), ("dspark", 7, 1), ("dspark", 2, 5), ("dflash2", 16, 7)],
)
def test_greedy_texts_are_those_of_plain_decoding(name, block_size, batch):
    """Some prompts of every domain, side by side, float64; blocks of other lengths than trained on are only worse."""
    mine = drafter(name) if block_size == drafter(name).config.block_size else drafter(name, block_size=block_size)
    engine = Engine(target(), mine, 512, batch=batch)
    requests = [Request(prompt, 16, GREEDY) for prompt in prompts()]
    found, plain = engine.generate(requests), plain_texts()
    assert [completion.tokens for completion in found] == plain
    assert sum(len(c.rounds) for c in found) < sum(len(tokens) - 1 for tokens in plain)


@cache
def plain_texts():
    engine = Engine(target(), None, 512, batch=8)
    return [c.tokens for c in engine.generate([Request(prompt, 16, GREEDY) for prompt in prompts()])]


@pytest.mark.parametrize("name", ("attention", "dflash2"))
def test_sampled_texts_have_the_law_of_the_target(name):
    """How often the likeliest texts of three tokens come up in N = 300, each against its binomial law.

    A count in a tail of probability 1e-9 / (2 texts) is a failure, so the chance of a false alarm is 1e-9 at most.
    """
    N, prompt, law = 300, prompts()[0], SamplingLaw(1.0, top_k=3)
    texts, session = {(): 1.0}, None
    for _ in range(3):
        grown = {}
        for done, mass in texts.items():
            session = target().open(np.array([*prompt, *done]))
            row = warp(session.root_logits.numpy()[None], law)[0]
            grown |= {(*done, int(token)): mass * row[token] for token in np.flatnonzero(row)}
        texts = grown
    requests = [Request(prompt, 3, law, (7, i)) for i in range(N)]
    found = [c.tokens for c in Engine(target(), drafter(name), 256, batch=100).generate(requests)]
    assert set(found) <= set(texts) and abs(sum(texts.values()) - 1) < 1e-9
    likely = sorted(texts, key=texts.get)[-8:]
    for tokens in likely:
        count, p = found.count(tokens), texts[tokens]
        assert min(binom.cdf(count, N, p), binom.sf(count - 1, N, p)) > 1e-9 / (2 * len(likely))


@pytest.mark.parametrize("name", DRAFTERS)
def test_rounds_are_as_long_as_the_recorded_reach_says(name):
    """Mean accepted drafts of rounds behind one anchor, against sum_k E[W_k] of its target paths; 5 standard errors.

    A request's first token is drawn without a round; its uniform is chosen so that it is the anchor.
    """
    rounds, paths, differences, variances = 40, 64, [], []
    mine = drafter(name, "float32")
    for i, prompt in enumerate(prompts()[::3]):
        tokens = np.array([*prompt, *plain_texts()[3 * i][:6]])
        row = warp(target("float32").open(tokens[:-1]).root_logits.numpy()[None], PLAIN)[0]
        aim = row[: tokens[-1]].sum() + row[tokens[-1]] / 2
        assert draw(row[None], [aim])[0] == tokens[-1]

        def forced(seed, position, slots, aim=aim):
            return np.array([aim]) if slots == 0 else engine_uniforms(seed, position, slots)

        engine = Engine(target("float32"), mine, 512, batch=40, lattice=None if mine.lattice else 0, uniforms=forced)
        requests = [Request(tuple(tokens[:-1]), GAMMA + 2, PLAIN, (i, j)) for j in range(rounds)]
        found = np.array([c.rounds[0].accepted for c in engine.generate(requests)])
        u, v = np.random.default_rng([1, i]).random((2, paths, GAMMA))
        measured = measure_anchor(
            fast,
            target("float32"),
            tokens,
            u,
            Design(paths=paths, gamma=GAMMA),
            drafters={name: mine},
            draft_uniforms=v,
        )["drafters"][name]
        survival = np.array(measured["arrival"]) - np.array(measured["rejected"])  # E[W_k] = E[W_{k-1} (1 - TV_k)]
        differences.append(found.mean() - survival.sum())
        variances.append(found.var() * (1 / rounds + 1 / paths))  # W_k is a mean over drafts: it varies less
    assert abs(np.mean(differences)) < 5 * np.sqrt(np.sum(variances)) / len(differences)
