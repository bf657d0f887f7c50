"""The rows of `examples/benchmark.py --random-weights SHAPE`: real shapes, random weights made on the device.

`anchor_row`: seconds of one anchor by phase, M = 256, gamma = 7: the prefix's forward, the walk, the floors, and what a
random five-layer DSpark drafter's numbers add.  Random models scatter, so all paths differ: this is the dear end.
`decode_rows`: tokens/s of plain decoding at several batches, CUDA graphs on and off, and the share of the memory's
bandwidth that is used: bytes of weights and caches that a step must read, over the measured bandwidth of a copy.
"""

from types import SimpleNamespace

import numpy as np
import torch
from benchmark_engine import GAMMA, M, random_drafter, random_tensors, seconds

import fast
from fast.engine import Engine, Request
from models.config import DecoderConfig
from reference.anchor import measure_anchor
from reference.protocol import Design

SHAPES = {
    "qwen3-4b": dict(
        vocab_size=151_936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, rope_theta=1e6, max_position_embeddings=40_960,
    ),
    "tiny": dict(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rope_theta=1e4, max_position_embeddings=4096,
    ),
}  # fmt: skip


def random_rows(shape, device, dtype, seed, batches=(1, 8, 32), new_tokens=128):
    """All rows of one shape."""
    target = random_target(shape, device, dtype, seed)
    yield anchor_row(target, seed)
    yield from decode_rows(target, seed, batches, new_tokens)


def config_of(shape):
    """The Qwen3 configuration of a shape."""
    common = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "attention_bias": False}
    return DecoderConfig.from_dict({**SHAPES[shape], **common, "eos_token_id": 0, "hidden_act": "silu"})


def random_target(shape, device, dtype, seed):
    """A Qwen3 decoder of a shape's widths that nothing stops, its weights random."""
    config, where = config_of(shape), SimpleNamespace(device=torch.device(device), dtype=getattr(torch, dtype))
    tensors = random_tensors(config, where, seed).items()
    target = fast.Decoder(config, {name: t.fill_(1) if name.endswith("norm.weight") else t for name, t in tensors})
    del tensors  # packing leaves no second copy of what nothing else holds
    return target.pack()


def anchor_row(target, seed, length=512, repeats=3):
    """Seconds of the phases of one anchor, each the difference of two medians."""
    prefix, drafters = np.arange(length) % target.vocab_size, {"random": random_drafter(target, seed, layers=5)}
    paths, drafts = np.random.default_rng(seed).random((2, M, GAMMA))
    alone, both = Design(paths=M, gamma=GAMMA), Design(paths=M, gamma=GAMMA, also=("response",))

    def floors():
        return measure_anchor(fast, target, prefix, paths, alone)

    def gaps():
        return measure_anchor(fast, target, prefix, paths, both, drafters=drafters, draft_uniforms=drafts)

    gaps()  # libraries choose and allocate
    prefill = seconds(target.open, prefix, repeats=repeats)
    walk = seconds(fast.walk, target, prefix, GAMMA, paths, repeats=repeats)
    floor, gap = seconds(floors, repeats=repeats), seconds(gaps, repeats=repeats)
    return {
        "work": f"one anchor, {length}-token prefix, M = {M}, gamma = {GAMMA}",
        "total_s": round(gap, 3),
        "prefill_s": round(prefill, 3),
        "walk_s": round(walk - prefill, 3),
        "floors_s": round(floor - walk, 3),
        "drafter_s": round(gap - floor, 3),
    }


def decode_rows(target, seed, batches, new_tokens, length=256):
    """Plain decoding, sampled at temperature 1, at several batches."""
    bandwidth, width = copy_bandwidth(target.device), target.dtype.itemsize
    prompts = np.random.default_rng(seed).integers(target.vocab_size, size=(max(batches), length))
    for batch in batches:
        engine = Engine(target, None, length + new_tokens, batch=batch)
        requests = [Request(tuple(prompt.tolist()), new_tokens, seed=i) for i, prompt in enumerate(prompts[:batch])]
        cached = batch * (length + new_tokens / 2) * target.config.kv_bytes_per_token(width)
        least = (target.config.parameter_count() * width + cached) / bandwidth  # seconds a step; the head is tied
        for graphs in (True, False) if engine.graphs.enabled else (False,):
            engine.graphs.enabled = graphs
            engine.generate(requests)  # graphs are recorded
            engine.seconds.clear()
            engine.generate(requests)
            step = (engine.seconds["verify"] + engine.seconds["commit"]) / (new_tokens - 1)
            yield {
                "work": f"plain decoding, batch {batch}, {length}-token prompts, {new_tokens} tokens",
                "graphs": graphs,
                "tokens_s": round(batch / step, 1),
                "step_ms": round(1e3 * step, 2),
                "limit_tokens_s": round(batch / least, 1),
                "share_of_limit": round(least / step, 3),
                "copy_gb_s": round(bandwidth / 1e9, 1),
            }


def copy_bandwidth(device):
    """Bytes a second, read and written, of copying a large array on a device."""
    count = 2**28 if torch.device(device).type == "cuda" else 2**26
    source, into = torch.ones(count, device=device), torch.empty(count, device=device)
    seconds(into.copy_, source)
    return 2 * source.nbytes / seconds(into.copy_, source, repeats=9)
