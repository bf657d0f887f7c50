"""The cache of the fast decoder: masks, rows of uneven length, and the tree beside a prefix (field cases D1, D2)."""

import numpy as np
import pytest

from tests.agreement import assert_agree

torch = pytest.importorskip("torch")

import fast  # noqa: E402
import reference  # noqa: E402
from fast.decoder import attend_causal, attend_tree  # noqa: E402
from reference.decoder import attend  # noqa: E402
from tests.test_decoder import grow_all, random_decoder, random_tokens, uncached  # noqa: E402

PROMPTS = [random_tokens(length, seed=length) for length in (3, 7, 12)]
GARBAGE = 1e4  # finite, and large enough to ruin every logit it reaches
precisions = pytest.mark.parametrize(("dtype", "kind"), [("float32", "logits32"), ("float64", "float64")])


def last_logits(decoder, tokens):
    """The logits after a sequence, from one forward without a cache, [V]."""
    return decoder.logits(np.asarray(tokens))[-1]


# D1: fewer queries than keys


def test_three_queries_after_four_cached_keys_see_four_five_six_and_seven_keys():
    """D1 (a): zero queries average the values they see; a mask in the wrong corner gives 0, 0.5, 1."""
    expected = np.array([[2.0], [2.5], [3.0]])
    q, keys, values = np.zeros((3, 1, 1)), np.ones((7, 1, 1)), np.arange(7.0).reshape(7, 1, 1)
    assert_agree(attend(q, keys, values, np.tri(3, 7, k=4, dtype=bool)), expected, "float64")

    keys, values = torch.from_numpy(keys), torch.from_numpy(values)
    path = torch.tensor([[-1, -1, 4], [-1, 4, 5], [4, 5, 6]])
    prefix = keys[:4].transpose(0, 1), values[:4].transpose(0, 1)
    assert_agree(attend_tree(torch.from_numpy(q), *prefix, keys[path], values[path], path < 0), expected, "float64")
    assert_agree(attend_causal(0, torch.zeros_like(keys), keys, values)[-3:], expected, "float64")


@precisions
def test_a_block_after_a_cache_equals_one_uncached_forward(dtype, kind):
    """D1 (b): the block at once in the reference, token by token in both ways that the fast decoder continues."""
    tokens = random_tokens(7)
    plain, quick = random_decoder(reference, dtype=dtype), random_decoder(fast, dtype=dtype)
    expected = plain.logits(tokens)[4:]

    _, cache = plain.forward(tokens[:4], np.arange(4), plain.empty_cache(), np.tri(4, dtype=bool))
    hidden, cache = plain.forward(tokens[4:], np.arange(4, 7), cache, np.tri(3, 7, k=4, dtype=bool))
    assert_agree(hidden @ plain.head.T, expected, kind)
    assert len(cache[0][0]) == 7

    chain = [([i - 1], [token]) for i, token in enumerate(tokens[4:])]
    assert_agree(grow_all(quick.open(tokens[:4]), chain), expected, kind)
    batch = quick.open_batch([tokens[:4]], 3)
    assert_agree(torch.cat([batch.step([token]) for token in tokens[4:]]), expected, kind)


# D2: rows of one batch


def answers(decoder, prompts, uniforms):
    return [answer.tokens for answer in fast.write_answers(decoder, prompts, uniforms)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_answer_depends_on_its_own_prompt_alone(dtype):
    """D2 (a): prompts of 3, 7 and 12 tokens, some answers finished early, written together, alone, and in any order."""
    decoder = random_decoder(fast, dtype=dtype, stop_ids=range(0, 101, 9))
    prompts = [*PROMPTS, *PROMPTS[::-1]]
    uniforms = np.random.default_rng(3).random((6, 24))
    together = answers(decoder, prompts, uniforms)
    lengths = [len(tokens) for tokens in together]
    assert len(set(lengths)) > 3 and max(lengths) > 12, "finish at different times"

    plain = random_decoder(reference, dtype=dtype, stop_ids=decoder.stop_ids)
    one_by_one = [answer.tokens for answer in reference.write_answers(plain, prompts, uniforms)]
    alone = [answers(decoder, [prompt], row[None])[0] for prompt, row in zip(prompts, uniforms, strict=True)]
    order = [4, 0, 5, 3, 1, 2]
    permuted = answers(decoder, [prompts[i] for i in order], uniforms[order])
    for place, tokens in enumerate(together):
        assert_agree(alone[place], tokens, "exact")
        assert_agree(one_by_one[place], tokens, "exact")
        assert_agree(permuted[order.index(place)], tokens, "exact")


@precisions
def test_each_row_keeps_its_own_length_when_others_leave(dtype, kind):
    decoder = random_decoder(fast, dtype=dtype)
    batch, rows = decoder.open_batch(PROMPTS, 6), [list(prompt) for prompt in PROMPTS]
    assert_agree(batch.root_logits, torch.stack([last_logits(decoder, row) for row in rows]), kind)
    for kept in ([0, 1, 2], [2, 0, 1], [0, 2], [1], [0]):
        batch.keep(kept)
        rows = [[*rows[place], place + 50] for place in kept]
        logits = batch.step([row[-1] for row in rows])
        assert_agree(batch.cache.lengths, [len(row) for row in rows], "exact")
        assert_agree(logits, torch.stack([last_logits(decoder, row) for row in rows]), kind)


@precisions
def test_rejected_tokens_are_forgotten(dtype, kind):
    """D2 (a) as speculative decoding does it: every row proposes five tokens, and commits 0, 2 or 5 of them in turn."""
    decoder = random_decoder(fast, dtype=dtype)
    batch, rows = decoder.open_batch(PROMPTS, 32), [list(prompt) for prompt in PROMPTS]
    for turn in range(6):
        proposed = random_tokens((3, 5), seed=turn)
        for column in proposed.T:
            batch.step(column)
        accepted = [(0, 2, 5)[(turn + row) % 3] for row in range(3)]
        rows = [[*row, *new[:count]] for row, new, count in zip(rows, proposed, accepted, strict=True)]
        batch.cache.lengths = torch.tensor([len(row) for row in rows])
    assert_agree(batch.cache.lengths, [3 + 14, 7 + 14, 12 + 14], "exact")
    logits = batch.step([1, 2, 3])
    expected = [last_logits(decoder, [*row, token]) for row, token in zip(rows, [1, 2, 3], strict=True)]
    assert_agree(logits, torch.stack(expected), kind)


def test_leftover_keys_are_hidden_not_zeroed():
    """D2 (b): what lies in a row beyond its length changes not one bit of a step, whatever it is."""
    decoder, logits = random_decoder(fast), []
    for leftover in (0.0, GARBAGE, -GARBAGE):
        batch = decoder.open_batch(PROMPTS, 2)
        for row, prompt in enumerate(PROMPTS):
            batch.cache.keys[:, row, :, len(prompt) :] = leftover
            batch.cache.values[:, row, :, len(prompt) :] = leftover
        logits.append(torch.cat([batch.step([4, 5, 6]), batch.step([7, 8, 9])]))
    assert_agree(logits[1], logits[0], "exact")
    assert_agree(logits[2], logits[0], "exact")
    assert_agree(logits[0][2], last_logits(decoder, [*PROMPTS[2], 6]), "float64")


# The tree beside a prefix


def random_tree(sizes, seed=0):
    """One `grow` call per size; parents anywhere in the tree so far, the prefix included."""
    random, nodes, tree = np.random.default_rng(seed), 0, []
    for size in sizes:
        tree.append((random.integers(-1, nodes, size), random.integers(0, 101, size)))
        nodes += size
    return tree


@pytest.mark.parametrize("buckets", [(), (8, 16)])
def test_nodes_of_different_depths_grow_in_one_call(buckets):
    decoder, prefix = random_decoder(fast), random_tokens(5)
    decoder.buckets, session = buckets, decoder.open(prefix)
    tree = [([-1], [1]), ([0], [2]), ([1, -1], [3, 4]), ([2, 3, 1, -1, 0], [5, 5, 5, 5, 5]), ([4, 7], [6, 6])]
    assert_agree(grow_all(session, tree), uncached(decoder.logits, prefix, tree), "float64")
    lineage = [[node for node in path if node >= 0] for path in session.cache.ancestors.tolist()]
    assert lineage == [
        [0],
        [0, 1],
        [0, 1, 2],
        [3],
        [0, 1, 2, 4],
        [3, 5],
        [0, 1, 6],
        [7],
        [0, 8],
        [0, 1, 2, 4, 9],
        [7, 10],
    ]


@pytest.mark.parametrize("sizes", [(255, 1, 1), (254, 1, 1, 3), (100, 300, 7), (600, 2)], ids=str)
def test_a_tree_outgrows_its_room(sizes):
    """Room is made for 256 nodes at a time, and the scratch place moves with it."""
    plain, quick = (random_decoder(wing, num_hidden_layers=1) for wing in (reference, fast))
    prefix, tree = random_tokens(4), random_tree(sizes)
    session = quick.open(prefix)
    assert_agree(grow_all(session, tree), grow_all(plain.open(prefix), tree), "float64")
    assert session.cache.nodes == sum(sizes) < session.cache.node_keys.shape[1]


def test_scratch_and_free_places_are_never_read():
    decoder, prefix, tree, logits = random_decoder(fast), random_tokens(5), random_tree((3, 6, 250, 9)), []
    decoder.buckets = (8, 16)
    for poison in (0.0, GARBAGE, -GARBAGE):
        session, grown = decoder.open(prefix), []
        for call in tree:
            session.cache.node_keys[:, session.cache.nodes :] = poison
            session.cache.node_values[:, session.cache.nodes :] = poison
            grown.append(grow_all(session, [call]))
        logits.append(np.concatenate(grown))
    assert_agree(logits[1], logits[0], "exact")
    assert_agree(logits[2], logits[0], "exact")


def test_padded_rows_write_to_no_live_place():
    """D3 (b) without graphs: three nodes in a bucket of eight change their own three places and the scratch."""
    decoder = random_decoder(fast)
    decoder.buckets, session = (8, 16), decoder.open(random_tokens(5))
    grow_all(session, random_tree((2, 9)))
    cache = session.cache
    before = [t.clone() for t in (cache.keys, cache.values, cache.node_keys, cache.node_values)]
    session.grow([0, 4, -1], [7, 8, 9])
    assert_agree(cache.keys, before[0], "exact")
    assert_agree(cache.values, before[1], "exact")
    for now, then in [(cache.node_keys, before[2]), (cache.node_values, before[3])]:
        changed = (now != then).flatten(2).any(dim=2).any(dim=0)
        assert_agree(changed[:-1].nonzero()[:, 0], [11, 12, 13], "exact")


def test_a_position_beyond_the_cache_is_refused():
    """It would be the first position of the next head or row."""
    decoder = random_decoder(fast)
    cache = decoder.cache(2, 8)
    tokens, lengths = torch.tensor([[1, 2], [1, 2]]), torch.tensor([3, 7])
    with pytest.raises(ValueError, match="position 8 is beyond the cache's 8 positions"):
        decoder.extend(cache, tokens, lengths, 8)
    assert not cache.keys.any()
