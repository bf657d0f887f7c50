"""The engine's rows of `examples/benchmark.py`: plain decoding against `transformers.generate`, and what a round costs.

`plain_rows`: greedy float32 texts of one and of eight requests, prompts of one length and of several (`generate` pads
those on the left).  The texts must be the same, or part where the model nearly ties, before anything is timed.
`overhead_row`: the share of a speculative round, one request, that is spent outside the models: outside the drafter's
block, its head at each slot, and the target's forward with the writing of the drafter's context.
"""

import statistics
import sys
import time
import warnings
from collections import Counter
from functools import wraps

import numpy as np
import torch

import fast
from fast.drafters import Blocks
from fast.engine import Engine, Request
from models.drafter_config import DrafterConfig
from models.text import Text
from reference.laws import SamplingLaw

GREEDY, M, GAMMA = SamplingLaw(0), 256, 7  # M and gamma of every row of the benchmark
TIE = 5e-3  # difference of logits that float32 sums in another order may turn round
QUESTIONS = (
    "Tom has 17 apples and buys 25 more. How many apples does he have? Explain step by step.",
    "Write a Python function that returns the factorial of n, with a docstring and tests.",
    "List the days of the week and describe each one.",
    "I want to learn to cook. Tell me how to start, step by step, in detail.",
    "Who was Ada Lovelace?",
    "Why is the sky blue? Explain it to a child, and then to a student of physics.",
    "Write a short story about the sea.",
    "What should I see in a week in Rome?",
)


def plain_rows(folder, new_tokens=128, repeats=3):
    """Rows of plain decoding: 1 request, 8 with prompts of one length, 8 of several lengths."""
    from transformers import AutoModelForCausalLM

    target, text = fast.Decoder.load(folder, stop_ids=()), Text.from_folder(folder)
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = [tuple(text.chat([{"role": "user", "content": question}])) for question in QUESTIONS]
    shortest = min(map(len, prompts))
    for name, some in (
        ("1 request", prompts[:1]),
        ("8 requests, prompts of one length", [prompt[-shortest:] for prompt in prompts]),
        ("8 requests, prompts of several lengths", prompts),
    ):
        yield {"work": f"plain greedy decoding, {name}, float32", **plain_row(target, model, some, new_tokens, repeats)}


def plain_row(target, model, prompts, new_tokens, repeats):
    """Our time and the peer's in turn, whole and without the prompts' forward."""
    texts, parted = decode(target, prompts, new_tokens)[0], []
    for prompt, mine, other in zip(prompts, texts, generate(model, prompts, new_tokens), strict=True):
        at = next((i for i, (a, b) in enumerate(zip(mine, other, strict=True)) if a != b), None)
        if at is not None:
            logits = target.logits([*prompt, *mine[:at]])[-1]
            if (apart := float(abs(logits[mine[at]] - logits[other[at]]))) > TIE:
                sys.exit(f"error: texts differ at token {at}, where logits are {apart:.2g} apart; nothing was timed")
            parted.append(at)
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        _, prefill = decode(target, prompts, new_tokens)
        ours = time.perf_counter() - begun
        peer, peer_prefill = (seconds(generate, model, prompts, count) for count in (new_tokens, 1))
        times.append((ours, ours - prefill, peer, peer - peer_prefill))
    ours, steps, peer, peer_steps = (statistics.median(column) for column in zip(*times, strict=True))
    count = len(prompts) * new_tokens
    return {
        "peer": "transformers.generate(do_sample=False)",
        "new_tokens": new_tokens,
        "ratio": round(statistics.median(row[2] / row[0] for row in times), 2),
        "ratio_without_prefill": round(statistics.median(row[3] / row[1] for row in times), 2),
        "ours_tokens_s": round(count / ours, 1),
        "peer_tokens_s": round(count / peer, 1),
        "ours_step_ms": round(1e3 * steps / (new_tokens - 1), 1),
        "peer_step_ms": round(1e3 * peer_steps / (new_tokens - 1), 1),
        "texts_part_at_ties": parted,
    }


def decode(target, prompts, new_tokens):
    """Texts of the engine, and the seconds that the prompts took."""
    engine = Engine(target, None, max(map(len, prompts)) + new_tokens, batch=len(prompts))
    texts = engine.generate([Request(prompt, new_tokens, GREEDY) for prompt in prompts])
    return [text.tokens for text in texts], engine.seconds["prefill"]


@torch.inference_mode()
def generate(model, prompts, new_tokens):
    """Texts of `generate`, prompts padded on the left, without stopping."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts])
    seen = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with warnings.catch_warnings(action="ignore"):
        out = model.generate(
            ids, attention_mask=seen, do_sample=False, max_new_tokens=new_tokens, min_new_tokens=new_tokens,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    return out[:, longest:].tolist()


def overhead_row(target, seed, new_tokens=150, repeats=5):
    """Median over runs of the time of a round outside the models, and of the parts of what is left."""
    engine = Engine(target, random_drafter(target, seed), 64 + new_tokens, batch=1)
    prompt, spent = tuple(range(5, 45)), Counter()
    logits = Blocks.logits
    for part, name in (("block", "_block"), ("target", "_read_for_both"), ("round", "_round")):
        setattr(engine, name, clocked(getattr(engine, name), spent, part))
    Blocks.logits = clocked(logits, spent, "head")
    runs = []
    try:
        for run in range(repeats + 1):
            spent.clear()
            (text,) = engine.generate([Request(prompt, new_tokens, SamplingLaw(), (seed, run))])
            runs.append({part: 1e3 * spent[part] / len(text.rounds) for part in spent})
    finally:
        Blocks.logits = logits
    parts = {part: statistics.median(run[part] for run in runs[1:]) for part in ("round", "block", "head", "target")}
    outside = 1 - (parts["block"] + parts["head"] + parts["target"]) / parts["round"]
    return {
        "work": f"one round of {target.config.parameter_count() / 1e6:.1f}M parameters and a random DSpark drafter",
        "outside_the_models": round(outside, 3),
        **{f"{part}_ms": round(value, 2) for part, value in parts.items()},
    }


def clocked(work, spent, part):
    """The same function, its seconds added to a counter."""

    @wraps(work)
    def timed(*arguments):
        begun = time.perf_counter()
        result = work(*arguments)
        spent[part] += time.perf_counter() - begun
        return result

    return timed


def random_drafter(target, seed, layers=2, rank=256):
    """An untrained DSpark drafter of the target's widths, dtype and device, block 7, at most five taps."""
    c = target.config
    config = DrafterConfig(
        family="dspark", dialect="deepspec", architecture="qwen3", in_place=False, block_size=GAMMA,
        taps=tuple(np.unique(np.linspace(1, c.num_layers - 3, 5).round().astype(int)).tolist()),
        mask_id=c.vocab_size - 1, target_layers=c.num_layers, vocab_size=c.vocab_size, draft_vocab_size=c.vocab_size,
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_layers=layers, num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, rope=c.rope,
        rotary_dims=c.head_dim // 2, causal=(False,) * layers, windows=(None,) * layers, window_rule="query",
        markov_rank=rank, markov_type="vanilla", confidence=True, confidence_with_markov=True,
    )  # fmt: skip
    return fast.Drafter(config, random_tensors(config, target, seed), target.embedding, target.head)


def random_tensors(config, like, seed):
    """Normal tensors of deviation 0.02 of the config's shapes, made where and as precise as `like` is."""
    draw = torch.Generator(like.device).manual_seed(seed)
    where = {"device": like.device, "dtype": like.dtype}
    return {name: 0.02 * torch.randn(s, generator=draw, **where) for name, s in config.tensor_shapes().items()}


def seconds(work, *arguments, repeats=1):
    """Median seconds of a few runs, iterators read to their end and devices waited for."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = work(*arguments)
        if hasattr(result, "__next__"):
            for _item in result:
                pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return statistics.median(times)
