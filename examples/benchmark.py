"""How fast are the walk, the floors, the engine and training, beside what one would write without this project?

    python examples/benchmark.py --target ID_OR_FOLDER                       # all rows
    python examples/benchmark.py --target ID_OR_FOLDER --only engine --threads 1
    python examples/benchmark.py --device cuda --random-weights qwen3-4b     # no download; `tiny` is a trial on a CPU

Every ratio of times is taken in turn in this process, on this machine; walk, floors and engine are timed only after
both sides were checked to agree.

    walk      reads the full-vocabulary probabilities at all gamma = 7 slots of M = 256 paths.  Its ratio depends on how
              many of their prefixes are distinct, so each prefix's ratio is given beside its mean number of distinct
              rows.  Its peers are `transformers` with the prefix prefilled once and its cache repeated M times, and
              `generate` with `num_return_sequences=M`
    floors    the barycentre, against sorting every column of all M rows; the peak memory of one anchor
              (`benchmark_floors.py`); what a random drafter adds to an anchor
    engine    plain decoding against `generate`, and the share of a round outside the models (`benchmark_engine.py`)
    training  time and peak memory of a D-REAL step of the tiny drafters, against a step of their first objective on the
              same anchors (`benchmark_training.py`); on the tiny target whatever --target says

`--random-weights` gives times of an anchor by phase, and decoding against the memory's bandwidth
(`benchmark_random.py`).  Needs the `test` extra (transformers).  Takes about 25 minutes on two cores; nothing else
should run meanwhile.  The last line is one JSON document.
"""

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for the rows that are kept in files of their own

from benchmark_engine import GAMMA, QUESTIONS, M, overhead_row, plain_rows, random_drafter, seconds
from benchmark_floors import barycentre_row, memory_row
from benchmark_random import SHAPES, random_rows
from benchmark_training import training_rows

import fast
from models.checkpoint import locate
from models.text import Text
from reference import program
from reference.anchor import measure_anchor
from reference.laws import SamplingLaw
from reference.protocol import Design

PREFIXES = 4  # of the questions, one of each kind, with the beginnings of the model's own greedy answers


def main(arguments=None):
    """Measure every row, print each when it is done, then all as JSON; or say in one line what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--target", metavar="ID_OR_FOLDER")
    which.add_argument("--random-weights", choices=SHAPES, help="of this shape, made on the device")
    parser.add_argument("--only", choices=("walk", "floors", "engine", "training"), help="of the rows of a target")
    parser.add_argument("--device", default="auto", help="of the rows of random weights: cpu, cuda or cuda:N")
    parser.add_argument("--dtype", default="auto", help="of the rows of random weights")
    parser.add_argument("--threads", type=int, help="of both sides (PyTorch's choice)")
    parser.add_argument("--tokens", type=int, default=128, help="that the engine writes for each request (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    program.in_one_line(run, parser.parse_args(arguments))


def run(options):
    """Print the rows that are asked for, each as it comes, and the document."""
    program.at_least(options, tokens=2, threads=1)
    if options.random_weights and options.only:
        raise ValueError("--only goes with --target")
    if options.threads:
        torch.set_num_threads(options.threads)
    device, dtype = "cpu", "float32"
    if options.random_weights:
        device, dtype = fast.placement(options.device, options.dtype)
    elif options.device not in ("auto", "cpu") or options.dtype != "auto":
        raise ValueError("--device and --dtype go with --random-weights: a target's rows are timed on the CPU")
    conditions = {
        "target": options.target or f"random {options.random_weights}", "hardware": fast.hardware(device),
        "dtype": dtype, "threads": torch.get_num_threads(), "torch": torch.__version__, "commit": program.commit(),
        "seed": options.seed, "M": M, "gamma": GAMMA,
    }  # fmt: skip
    rows = []
    for row in rows_of(options, device, dtype):
        rows.append(row)
        print("   ".join(f"{key}: {value}" for key, value in row.items()), flush=True)
    print(json.dumps({**conditions, "rows": rows}))


def rows_of(options, device, dtype):
    """The rows that are asked for."""
    if options.random_weights:
        yield from random_rows(options.random_weights, device, dtype, options.seed, new_tokens=options.tokens)
        return
    folder = locate(options.target).folder
    if options.only in (None, "engine"):
        yield from plain_rows(folder, options.tokens)
        yield overhead_row(fast.Decoder.load(locate("tiny").folder, stop_ids=()), options.seed)
    if options.only in (None, "floors"):
        yield barycentre_row(options.seed)
        yield memory_row()
        yield drafter_row(folder, options.seed)
    if options.only in (None, "training"):
        yield from training_rows(options.seed)
    if options.only in (None, "walk"):
        for dtype, length, peer in (
            ("float32", 55, repeat_cache),
            ("float32", 511, repeat_cache),
            ("float32", 55, generate),
            ("bfloat16", 511, repeat_cache),
        ):
            yield walk_row(folder, dtype, length, peer, options.seed)


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
    for prompt in QUESTIONS[:PREFIXES]:
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


if __name__ == "__main__":
    main()
