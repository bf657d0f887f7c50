"""How much faster are the walk and the barycentre than what one would write without this project?

    python examples/benchmark.py --target ID_OR_FOLDER

Every ratio is taken in turn in this process, on this machine, and only after both sides were checked to agree.
A walk reads the full-vocabulary float32 probabilities at all gamma = 7 slots of M = 256 paths, and its ratio
depends on how many of their prefixes are distinct, so each prefix's ratio is given beside its mean number of
distinct rows.  Its peers are `transformers` with the prefix prefilled once and its cache repeated M times, and
`generate` with `num_return_sequences=M`.  The barycentre's peer sorts every column of all M rows.

Needs the `test` extra (transformers).  Takes about 15 minutes on two cores; nothing else should run meanwhile.
The last line is one JSON document.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import fast
from models import toy
from models.checkpoint import locate
from models.drafter_config import DrafterConfig
from models.text import Text
from reference.anchor import measure_anchor
from reference.laws import SamplingLaw
from reference.protocol import Design

M, GAMMA, VOCABULARY, DISTINCT = 256, 7, 151_936, 64
PROMPTS = (  # one of each kind; the prefix is the chat prompt and the model's own greedy answer, cut to length
    "Tom has 17 apples and buys 25 more. How many apples does he have? Explain step by step.",
    "Write a Python function that returns the factorial of n, with a docstring and tests.",
    "List the days of the week and describe each one.",
    "I want to learn to cook. Tell me how to start, step by step, in detail.",
)


def main():
    """Measure every row, print each when it is done, then all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", required=True, metavar="ID_OR_FOLDER")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = locate(options.target).folder
    rows = []

    def add(row):
        rows.append(row)
        print("   ".join(f"{key}: {value}" for key, value in row.items()), flush=True)

    add(barycentre_row(options.seed))
    add(memory_row())
    add(drafter_row(folder, options.seed))
    for dtype, length, peer in (
        ("float32", 55, repeat_cache),
        ("float32", 511, repeat_cache),
        ("float32", 55, generate),
        ("bfloat16", 511, repeat_cache),
    ):
        add(walk_row(folder, dtype, length, peer, options.seed))
    conditions = {"threads": torch.get_num_threads(), "torch": torch.__version__, "M": M, "gamma": GAMMA}
    print(json.dumps({"target": options.target, "seed": options.seed, **conditions, "rows": rows}))


def drafter_row(folder, seed):
    """What a drafter's risks, serving quantities and best responses add to an anchor's walk and floors."""
    target = fast.Decoder.load(folder)
    drafters = {"random": random_drafter(target, seed)}
    alone, both = Design(paths=M, gamma=GAMMA), Design(paths=M, gamma=GAMMA, also=("response",))
    bare, full = [], []
    for i, prefix in enumerate(prefixes(folder, 55)):
        paths, drafts = np.random.default_rng([seed, i]).random((2, M, GAMMA))

        def floors(prefix=prefix, paths=paths):
            return measure_anchor(fast, target, prefix, paths, alone)

        def gaps(prefix=prefix, paths=paths, drafts=drafts):
            return measure_anchor(fast, target, prefix, paths, both, drafters=drafters, draft_uniforms=drafts)

        if floors()["order1"] != gaps()["order1"]:
            sys.exit("error: the floors beside a drafter differ; nothing was timed")
        pairs = [(seconds(floors), seconds(gaps)) for _ in range(3)]
        bare.append(statistics.median(a for a, _ in pairs))
        full.append(statistics.median(b for _, b in pairs))
    return {
        "work": "one anchor with a random two-layer DSpark drafter: risks, serving, best responses and sweeps",
        "peer": "the same anchor's walk and floors alone",
        "ratio": round(sum(bare) / sum(full), 2),
        "cost": round(sum(full) / sum(bare), 2),
        "by_prefix": [round(b / a, 2) for a, b in zip(bare, full, strict=True)],
        "ours_s": round(statistics.mean(full), 2),
        "peer_s": round(statistics.mean(bare), 2),
    }


def random_drafter(target, seed, layers=2, rank=256):
    """An untrained DSpark drafter of the target's widths, block 7, five taps."""
    c = target.config
    config = DrafterConfig(
        family="dspark", dialect="deepspec", architecture="qwen3", in_place=False, block_size=GAMMA,
        taps=tuple(np.linspace(1, c.num_layers - 3, 5).round().astype(int).tolist()), mask_id=c.vocab_size - 1,
        target_layers=c.num_layers, vocab_size=c.vocab_size, draft_vocab_size=c.vocab_size, hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size, num_layers=layers, num_heads=c.num_heads, num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim, rms_norm_eps=c.rms_norm_eps, rope=c.rope, rotary_dims=c.head_dim // 2,
        causal=(False,) * layers, windows=(None,) * layers, window_rule="query",
        markov_rank=rank, markov_type="vanilla",
        confidence=True, confidence_with_markov=True,
    )  # fmt: skip
    draw = torch.Generator().manual_seed(seed)
    tensors = {name: 0.02 * torch.randn(shape, generator=draw) for name, shape in config.tensor_shapes().items()}
    return fast.Drafter(config, tensors, target.embedding, target.head)


def walk_row(folder, dtype, length, peer, seed):
    """Walks of the prefixes of one length, ours and the peer's in turn."""
    from transformers import AutoModelForCausalLM

    target = fast.Decoder.load(folder, dtype=dtype)
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ours, theirs, distinct = [], [], []
    for i, prefix in enumerate(prefixes(folder, length)):
        uniforms = np.random.default_rng([seed, i]).random((M, GAMMA))
        check(target, model, prefix, uniforms, dtype)
        distinct.append(statistics.mean(len(slot.rows) for slot in fast.walk(target, prefix, GAMMA, uniforms)))
        ours.append(seconds(fast.walk, target, prefix, GAMMA, uniforms, repeats=3))
        theirs.append(seconds(peer, model, prefix, uniforms))
    return {
        "work": f"walk, {length}-token prefix, {dtype}",
        "peer": f"transformers, {peer.__doc__.split(':')[0]}",
        "ratio": round(sum(theirs) / sum(ours), 1),
        "by_prefix": [round(b / a, 1) for a, b in zip(ours, theirs, strict=True)],
        "distinct_rows": [round(n, 1) for n in distinct],
        "ours_s": round(statistics.mean(ours), 2),
        "peer_s": round(statistics.mean(theirs), 2),
    }


def prefixes(folder, length):
    """The prompts with the beginning of their greedy answers, as far as those are long enough."""
    text, target = Text.from_folder(folder), fast.Decoder.load(folder)
    for prompt in PROMPTS:
        tokens = text.chat([{"role": "user", "content": prompt}])
        if len(tokens) >= length:
            continue
        (answer,) = fast.write_answers(target, [tokens], np.zeros((1, length - len(tokens))), SamplingLaw(0))
        if len(tokens) + len(answer.tokens) == length:
            yield np.array([*tokens, *answer.tokens])


@torch.inference_mode()
def repeat_cache(model, prefix, uniforms, drawn=None):
    """prefill once, cache repeated M times: one probability array [M, V] per slot."""
    with warnings.catch_warnings(action="ignore"):
        out = model(torch.as_tensor(prefix)[None], use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
        cache.batch_repeat_interleave(len(uniforms))
        logits = out.logits[:, -1].expand(len(uniforms), -1)
        for k in range(uniforms.shape[1]):
            probs = torch.softmax(logits.float(), dim=-1)
            yield probs
            if k < uniforms.shape[1] - 1:
                tokens = torch.multinomial(probs, 1) if drawn is None else torch.as_tensor(drawn[k])[:, None]
                logits = model(tokens, past_key_values=cache, use_cache=True).logits[:, -1]


@torch.inference_mode()
def generate(model, prefix, uniforms):
    """generate(num_return_sequences=M): one probability array [M, V] per slot."""
    with warnings.catch_warnings(action="ignore"):
        out = model.generate(
            torch.as_tensor(prefix)[None], attention_mask=torch.ones(1, len(prefix), dtype=torch.int64), do_sample=True,
            top_k=0, top_p=1.0, temperature=1.0, num_return_sequences=len(uniforms), max_new_tokens=uniforms.shape[1],
            min_new_tokens=uniforms.shape[1], return_dict_in_generate=True, output_logits=True, pad_token_id=0,
        )  # fmt: skip
    return [torch.softmax(logits.float(), dim=-1) for logits in out.logits]


def check(target, model, prefix, uniforms, dtype):
    """Both sides read the same rows along the same paths, to the precision of the dtype; else no timing."""
    few = uniforms[:16]
    slots = list(fast.walk(target, prefix, GAMMA, few))
    peer = repeat_cache(model, prefix, few, [slot.drawn.clip(min=0) for slot in slots])
    for slot, rows in zip(slots, peer, strict=False):
        alive = slot.path_node >= 0
        apart = fast.total_variation(slot.rows[slot.path_node[alive]], rows[torch.as_tensor(alive)]).max()
        if apart > (1e-3 if dtype == "float32" else 0.2):
            sys.exit(f"error: rows differ from transformers' by TV {apart:.2g} at slot {slot.index}; nothing was timed")


def barycentre_row(seed):
    """The barycentre and its risk from distinct rows, against sorting every column of all rows."""
    torch.manual_seed(seed)
    rows = torch.softmax(torch.randn(DISTINCT, VOCABULARY) * 2 + torch.randn(VOCABULARY) * 2, dim=-1)
    counts = 1 + np.random.default_rng(seed).multinomial(M - DISTINCT, np.full(DISTINCT, 1 / DISTINCT))
    repeated = rows[np.repeat(np.arange(DISTINCT), counts)]

    def ours():
        return fast.barycentre_risk(rows, fast.barycentre(rows, counts), counts)

    def peer():
        ranked = repeated.sort(dim=0).values
        mass = ranked.sum(dim=1)
        j = int(torch.searchsorted(mass, 1.0))
        share = (1 - mass[j - 1]) / (mass[j] - mass[j - 1])
        q = ranked[j - 1] + share * (ranked[j] - ranked[j - 1])
        return float((repeated - q).abs().sum(dim=1).mean() / 2)

    if abs(ours() - peer()) > 5e-6:
        sys.exit(f"error: barycentre risks differ ({ours()} and {peer()}); nothing was timed")
    pairs = [(seconds(ours), seconds(peer)) for _ in range(7)]
    return {
        "work": f"barycentre and risk, V = {VOCABULARY}, {DISTINCT} distinct rows of {M}",
        "peer": "torch.sort of every column of all rows, mass search, scoring",
        "ratio": round(statistics.median(b / a for a, b in pairs), 1),
        "ours_s": round(statistics.median(a for a, _ in pairs), 3),
        "peer_s": round(statistics.median(b for _, b in pairs), 3),
    }


def memory_row():
    """Peak memory of one anchor at Qwen3's vocabulary with all paths distinct, in a process of its own."""
    program = "from benchmark import measure_wide_anchor; measure_wide_anchor()"
    out = subprocess.run([sys.executable, "-c", program], cwd=sys.path[0], capture_output=True, text=True, check=True)
    return {
        "work": f"one anchor, V = {VOCABULARY}, M = {M}, gamma = {GAMMA}, all paths distinct",
        **json.loads(out.stdout),
    }


def measure_wide_anchor():
    """Print how far one anchor's walk and floors raise the peak memory of this process."""

    class Wide:  # a target whose rows cost nothing to compute
        vocab_size, stop_ids = VOCABULARY, ()

        def open(self, prefix):
            self.root_logits = torch.zeros(VOCABULARY)
            return self

        def grow(self, parents, tokens):
            return torch.randn(len(tokens), VOCABULARY) * 2

    fast.floor(next(fast.walk(toy.two_token_chain(), [0], 1, np.full((2, 1), 0.5))))
    before = peak_memory()
    uniforms = np.random.default_rng(0).random((M, GAMMA))
    measure_anchor(fast, Wide(), [0], uniforms, Design(paths=M, gamma=GAMMA))
    print(json.dumps({"peak_gb": round(peak_memory() - before, 2)}))


def peak_memory():
    """Largest resident size of this process so far, in GB (Linux)."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e6


def seconds(work, *arguments, repeats=1):
    """Median seconds of a few runs, iterators read to their end."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        result = work(*arguments)
        if hasattr(result, "__next__"):
            for _item in result:
                pass
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
