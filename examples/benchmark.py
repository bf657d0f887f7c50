"""How fast is the walk, and how fast the barycentre, against what one would write without this project?

    python examples/benchmark.py --target FOLDER_OR_ID [--limit N]

Each row is a ratio of two times taken in turn in this process, on this machine, after both sides were checked
to agree.  Walks read full-vocabulary float32 probabilities at all gamma slots of M paths; their peers are
`transformers` with the prefix prefilled once and its cache repeated M times, and its `generate` with
`num_return_sequences=M`.  The barycentre's peer sorts every column of all M rows with `torch.sort`.  Needs the `test` extra.  Last line: one JSON document.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import torch

import fast
from models.checkpoint import locate
from models.text import Text, builtin_prompts, read_prompts

M, GAMMA, VOCABULARY, DISTINCT = 256, 7, 151_936, 64


def main():
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", required=True, metavar="ID_OR_FOLDER")
    parser.add_argument("--prefixes", type=int, default=3, help="prefixes per length (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = locate(options.target).folder
    rows = [barycentre_row(options.seed)]
    report(rows[-1])
    for dtype, length, peer in (
        ("float32", 55, repeat_cache),
        ("float32", 511, repeat_cache),
        ("float32", 55, generate),
        ("bfloat16", 511, repeat_cache),
    ):
        rows.append(walk_row(folder, dtype, length, peer, options))
        report(rows[-1])
    rows.append(memory_row())
    report(rows[-1])
    conditions = {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(
        json.dumps(
            {"target": str(options.target), "M": M, "gamma": GAMMA, "seed": options.seed, **conditions, "rows": rows}
        )
    )


def report(row):
    print("   ".join(f"{k}: {v}" for k, v in row.items()), flush=True)


def walk_row(folder, dtype, length, peer, options):
    """Time walks of a few prefixes of one length, ours and the peer's in turn."""
    from transformers import AutoModelForCausalLM

    target = fast.Decoder.load(folder, dtype=dtype)
    with warnings.catch_warnings(action="ignore"):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ours, theirs, distinct = [], [], []
    for i, prefix in enumerate(prefixes(folder, length, options)):
        uniforms = np.random.default_rng([options.seed, i]).random((M, GAMMA))
        check(target, model, prefix, uniforms, dtype)
        ours.append(
            clock(lambda: [distinct.append(len(slot.rows)) for slot in fast.walk(target, prefix, GAMMA, uniforms)])
        )
        theirs.append(clock(lambda: [rows.shape for rows in peer(model, prefix, uniforms)], repeats=1))
    return {
        "work": f"walk, {length}-token prefix, {dtype}",
        "peer": f"transformers, {peer.__doc__.split(':')[0]}",
        "ratio": round(sum(theirs) / sum(ours), 1),
        "ours_s": round(statistics.mean(ours), 2),
        "peer_s": round(statistics.mean(theirs), 2),
        "distinct_rows_per_slot": round(statistics.mean(distinct), 1),
    }


def prefixes(folder, length, options):
    """Prefixes as the protocol meets them: a chat prompt and the beginning of the model's own answer."""
    text = Text.from_folder(folder)
    target = fast.Decoder.load(folder, dtype="float32", stop_ids=())
    found = []
    for prompt in read_prompts(builtin_prompts()):
        tokens = text.chat([{"role": "user", "content": prompt.text}])
        if length / 4 < len(tokens) < length - 8 and len(found) < options.prefixes:
            uniforms = np.random.default_rng([options.seed, len(tokens)]).random((1, length - len(tokens)))
            (answer,) = fast.write_answers(target, [tokens], uniforms)
            found.append(np.array([*tokens, *answer.tokens]))
    return found


@torch.inference_mode()
def repeat_cache(model, prefix, uniforms, drawn=None):
    """prefill once, cache repeated M times: one probability array [M, V] per slot."""
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
    """Both sides read the same rows along the same paths, to the precision of the dtype; else stop."""
    few = uniforms[:16]
    slots = list(fast.walk(target, prefix, GAMMA, few))
    peer = repeat_cache(model, prefix, few, [slot.drawn for slot in slots])
    worst = max(
        float((slot.rows[slot.path_node] - rows).abs().sum(1).max()) / 2 for slot, rows in zip(slots, peer, strict=True)
    )
    if worst > (1e-3 if dtype == "float32" else 0.2):
        sys.exit(f"error: rows differ from transformers by TV {worst}; no timing without agreement")


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
        sys.exit(f"error: barycentre risks differ ({ours()} and {peer()}); no timing without agreement")
    pairs = [(clock(ours, 1), clock(peer, 1)) for _ in range(5)]
    return {
        "work": f"barycentre and risk, V = {VOCABULARY}, {DISTINCT} distinct rows of {M}",
        "peer": "torch.sort of every column of all rows",
        "ratio": round(statistics.median(b / a for a, b in pairs), 1),
        "ours_s": round(statistics.median(a for a, _ in pairs), 3),
        "peer_s": round(statistics.median(b for _, b in pairs), 3),
    }


def memory_row():
    """Peak memory of one anchor beside the weights, at the vocabulary of Qwen3, all paths distinct."""
    import subprocess

    program = Path(__file__).resolve().parent / "benchmark_memory.py"
    out = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True).stdout
    return json.loads(out)


def clock(work, repeats=3):
    """Median seconds of a few runs."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


if __name__ == "__main__":
    main()
