"""Recorded steps: every input is filled on every replay, padding writes into scratch rows only (field case D3).

Without CUDA a stand-in records: its graph runs the step again on the buffers it was recorded with.
"""

import numpy as np
import pytest

from reference.engine import Request
from reference.laws import SamplingLaw
from tests.agreement import assert_agree
from tests.test_engine import GREEDY, caches, model_of, prompts

torch = pytest.importorskip("torch")

from fast.cuda_graphs import BUCKETS, Graphs  # noqa: E402
from fast.engine import Engine  # noqa: E402

POISON = 77


class StandIn:
    """Records a step as its outputs and a graph that fills them anew; counts what it records and what is replayed."""

    def __init__(self):
        self.recorded, self.replays = 0, 0

    def __call__(self, step):
        self.recorded += 1
        recorder, outputs = self, step()

        class Graph:
            def replay(self):
                recorder.replays += 1
                for old, new in zip(outputs, step(), strict=True):
                    if old is not None:
                        old.copy_(new)

        return Graph(), outputs


def recording(engine):
    """An engine whose steps go through graphs of the stand-in."""
    engine.graphs = Graphs("cpu", engine.batch, engine.cache.capacity, StandIn())
    engine.graphs.enabled = True
    return engine


def graphs(rows, positions=1000):
    made = Graphs("cpu", rows, positions, StandIn())
    made.enabled = True
    return made


def test_every_input_is_filled_on_every_replay():
    """Field case D3 (a), (d): buffers are poisoned in between, and the padding rows come out clear."""
    made, seen = graphs(8), []

    def step(tokens, lengths, span):
        seen.append((tokens.clone(), lengths.clone(), span))
        return tokens + lengths[:, None], None

    for n, start in ((3, 0), (4, 10), (3, 20), (1, 30)):
        tokens, lengths = torch.arange(start, start + 2 * n).view(n, 2), torch.arange(n) + start
        found, none = made.run(step, (tokens, lengths), 5)
        assert none is None
        assert_agree(found, tokens + lengths[:, None], "exact")
        bucket = next(b for b in BUCKETS if b >= n)
        for buffer, given in zip(seen[-1], (tokens, lengths), strict=False):
            assert_agree(buffer[:n], given, "exact")
            assert_agree(buffer[n:], torch.zeros(bucket - n, *given.shape[1:], dtype=torch.int64), "exact")
        for recorded in made.recorded.values():
            for buffer in recorded.inputs:
                buffer.fill_(POISON)
    assert made.record.recorded == 2  # buckets of 4 and of 1


def test_another_shape_or_dtype_is_refused():
    made = graphs(4)

    def step(tokens, lengths, span):
        return (tokens + lengths,)

    ids = torch.arange(3)
    made.run(step, (ids, ids), 5)
    (recorded,) = made.recorded.values()
    for given in ((ids, ids.int()), (ids, ids[:, None]), (ids, torch.arange(5))):
        with pytest.raises(ValueError, match="input 1 was recorded as torch"):
            recorded.replay(given)


def test_sizes_are_few_and_large_batches_run_eagerly():
    made, spans = graphs(100, positions=3000), []

    def step(tokens, span):
        spans.append((len(tokens), span))
        return (tokens,)

    for n in range(1, 101):
        for span in (1, 256, 257, 1500, 2900):
            made.run(step, (torch.zeros(n),), span)
    assert len(made.recorded) == 4 * len(BUCKETS)
    assert {span for n, span in spans if n <= 64} == {256, 512, 2048, 3000}
    assert {span for n, span in spans if n > 64} == {1, 256, 257, 1500, 2900}
    assert Graphs("cpu", 5, 10).buckets == (1, 2, 4, 5)


@pytest.mark.parametrize("family", ["dflash", "rnn", "dflash2", "attention"])
def test_recorded_steps_decode_what_eager_steps_do(family):
    """Batches that shrink through the buckets, with other laws, seeds and lengths on the same graphs (D3 (c))."""
    target, drafter = model_of("fast", family, block_size=5, stop_ids=(3,))
    requests = [
        Request(prompt, 12, law, i)
        for i, (prompt, law) in enumerate(zip(prompts(7), (SamplingLaw(), GREEDY, SamplingLaw(0.7)) * 3, strict=False))
    ]
    eager, engine = Engine(target, drafter, 40, batch=5), recording(Engine(target, drafter, 40, batch=5))
    for speculate in (True, False):
        for seeds in (0, 100):
            asked = [Request(r.prompt, r.max_new_tokens, r.law, seeds + r.seed) for r in requests]
            assert engine.generate(asked, speculate) == eager.generate(asked, speculate)
    assert engine.graphs.record.replays > 3 * engine.graphs.record.recorded
    assert {key[0] for key in engine.graphs.recorded} == {"_block", "_read", "_read_for_both"}


def test_padding_writes_into_scratch_rows_only():
    """Field case D3 (b): three rows in a bucket of four change their own new positions and row 3, which no one owns."""
    target, drafter = model_of("fast", "attention", block_size=5)
    engine = recording(Engine(target, drafter, 20, batch=6))
    for tensor in caches(engine):
        tensor.fill_(0.25)
    lengths = [3, 7, 12]
    before = [tensor.clone() for tensor in caches(engine)]
    tokens = torch.from_numpy(np.arange(18).reshape(3, 6) % 11)
    engine.graphs.run(engine._read_for_both, (tokens, torch.tensor(lengths)), 18)
    assert engine.graphs.record.replays == 1
    for old, new in zip(before, caches(engine), strict=True):
        changed = (old != new).any(dim=-1).any(dim=-2)  # [.., rows, positions]
        changed = changed.any(dim=0) if changed.ndim == 3 else changed
        expected = torch.zeros_like(changed)
        for row, start in enumerate([*lengths, 0]):
            expected[row, start : start + 6] = True
        assert_agree(changed, expected, "exact")


def test_the_switch():
    target, drafter = model_of("fast", block_size=5)
    engine = recording(Engine(target, drafter, 20))
    engine.graphs.enabled = False
    engine.generate([Request((1, 2), 5)])
    assert engine.graphs.record.recorded == 0
    assert not Engine(target, drafter, 20).graphs.enabled, "nothing to record on a CPU"


# On a device


@pytest.fixture
def cuda_models():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")

    def load(family):
        target, drafter = model_of("fast", family, block_size=5, stop_ids=(3,))
        weights = {name: target.state_dict()[name].cuda() for name in target.config.tensor_shapes()}
        target = type(target)(target.config, weights, target.stop_ids)
        tensors = {name: tensor.cuda() for name, tensor in drafter.state_dict().items()}
        return target, type(drafter)(drafter.config, tensors, target.embedding, target.head)

    return load


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["dflash", "vanilla", "rnn", "dflash2", "attention"])
def test_graphs_decode_what_eager_steps_do_on_the_device(cuda_models, family):
    """Field case D3 (a), (c), in float64: other seeds and laws on the same graphs, buffers poisoned in between."""
    target, drafter = cuda_models(family)
    engine, eager = (Engine(target, drafter, 40, batch=5) for _ in range(2))
    eager.graphs.enabled = False
    for turn, law in enumerate((SamplingLaw(), GREEDY, SamplingLaw(1.5, top_k=5))):
        requests = [Request(prompt, 12, law, (turn, i)) for i, prompt in enumerate(prompts(7, seed=turn))]
        for speculate in (True, False):
            assert engine.generate(requests, speculate) == eager.generate(requests, speculate)
            for recorded in engine.graphs.recorded.values():
                for buffer in recorded.inputs:
                    buffer.fill_(POISON % 11)
    assert {key[0] for key in engine.graphs.recorded} == {"_block", "_read", "_read_for_both"}
    assert not eager.graphs.recorded
