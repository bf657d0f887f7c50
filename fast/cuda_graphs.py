"""Steps of a batch recorded as CUDA graphs, so that a replay costs one launch instead of some hundreds.

A recorded step reads and writes fixed addresses.  So its inputs live in buffers of its own, which every replay fills
anew, all of them and to the last row; what it returns lies where the next replay of any step may write.  Sizes are few:
rows are padded to a bucket, and the span of the caches that is looked at to a power of two.  Live sequences own the
first rows of the caches, so padding rows write behind them, where no sequence is: their scratch.  Nothing random is
recorded; uniforms stay with the caller.

All graphs share one memory pool.  Tests: `tests/test_cuda_graphs.py`.
"""

import torch

BUCKETS = (1, 2, 4, 8, 16, 32, 64)  # rows; a larger batch runs eagerly
SHORTEST = 256  # positions


class Graphs:
    """Runs steps through graphs that are recorded when a size is first met, or eagerly.

    Args: device; rows and positions there are in the caches; record, see `record`.
    Attributes: enabled, false = every step runs eagerly (so it does on a CPU).
    """

    def __init__(self, device, rows, positions, record=None):
        self.enabled = torch.device(device).type == "cuda"
        self.buckets = tuple(b for b in BUCKETS if b < rows) + ((rows,) if rows <= BUCKETS[-1] else ())
        self.positions, self.record = positions, record or Recorder()
        self.recorded = {}

    def run(self, step, inputs, span):
        """step(*inputs, span) -> tuple of tensors [n, ...] or None, of which the graph's hold until the next `run`.

        Args: step, a method whose name says what it does, which waits for nothing and writes at places its inputs name
            only; inputs, tensors [n, ...] on the device; span, the least number of positions it may look at.
        """
        n = len(inputs[0])
        bucket = next((b for b in self.buckets if b >= n), None)
        if not self.enabled or bucket is None:
            return step(*inputs, span)
        span = min(self.positions, max(SHORTEST, 1 << (span - 1).bit_length()))
        key = step.__name__, bucket, span, *(t.shape[1:] for t in inputs)
        if key not in self.recorded:
            self.recorded[key] = Recorded(step, inputs, bucket, span, self.record)
        return self.recorded[key].replay(inputs)


class Recorded:
    """One step at one size: its input buffers, its graph and its outputs."""

    def __init__(self, step, inputs, bucket, span, record):
        self.inputs = tuple(t.new_zeros(bucket, *t.shape[1:]) for t in inputs)
        self.fill(inputs)  # recording runs the step: with the real inputs it writes what the replay will write again
        self.graph, self.outputs = record(lambda: step(*self.inputs, span))

    def fill(self, inputs):
        """Copy every input into its buffer and clear the padding rows."""
        for i, (buffer, given) in enumerate(zip(self.inputs, inputs, strict=True)):
            if given.dtype != buffer.dtype or given.shape[1:] != buffer.shape[1:] or len(given) > len(buffer):
                raise ValueError(
                    f"input {i} was recorded as {buffer.dtype} {tuple(buffer.shape)}, at most so many rows, "
                    f"and came as {given.dtype} {tuple(given.shape)}"
                )
            buffer[: len(given)].copy_(given)
            buffer[len(given) :].zero_()

    def replay(self, inputs):
        """The step's outputs, [n, ...] each."""
        self.fill(inputs)
        self.graph.replay()
        return tuple(None if t is None else t[: len(inputs[0])] for t in self.outputs)


class Recorder:
    """Records a step as a CUDA graph: step() -> outputs becomes (graph, outputs).

    The first call outside the graph lets libraries choose and allocate what they will.
    """

    def __init__(self):
        self.pool = None

    def __call__(self, step):
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            outputs = step()
        return graph, outputs
