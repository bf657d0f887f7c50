"""Training a drafter as a program: the target's answers, the loop with its bar, what is stored, and resuming.

A script says where its drafter comes from and which trainer it gets: `begin(options, snapshot, target, text)` returns
the drafter's config.json, the drafter, what makes the trainer from a target, drafter, sequences and settings, and what
else must be equal for a run to be resumed.  Everything else is here, processes started by torchrun included.

Tests: `tests/test_training.py`, `tests/test_dreal.py`.
"""

import argparse
import json
import math
import os
import sys
import textwrap
import time
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import distributed
from tqdm import tqdm

from fast import posttraining, training
from fast.decoder import Decoder
from fast.devices import hardware, placement
from fast.paths import write_answers
from models.checkpoint import digest, locate
from models.text import Text, builtin_prompts, read_prompts
from reference.laws import SamplingLaw
from reference.program import at_least, commit, sha, versions
from reference.records import RecordFile, read
from reference.shared_records import ranks

ANSWERS_AT_ONCE, ANSWER_SEED = 16, 0
HELD_OUT_ANCHORS, HELD_OUT_SEED = 16, 0  # of a held-out answer: the same blocks in every training
COUNTS = (
    "limit", "sequences", "anchors", "at_once", "steps", "epochs", "save_every", "answer_tokens", "max_tokens",
    "layers", "block_size", "rank", "taps",
)  # fmt: skip


def launch(options, begin):
    """Run a training and print its report, or the one line."""
    try:
        report = run(options, begin)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command with --resume goes on from the last saved step, if there was one")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    if report:
        print(json.dumps(report))


def run(options, begin):
    """Answers, drafter, training, the drafter's folder; returns the report, None but in the first process."""
    check(options)
    rank, processes = join(options)
    say = (lambda *text: print(*text, file=sys.stderr, flush=True)) if rank == 0 else (lambda *_: None)
    out, checkpoint = Path(options.out), Path(f"{options.out}.checkpoint")
    snapshot = locate(options.target, revision=options.revision)
    text = Text.from_folder(snapshot.folder)
    target = Decoder.load(snapshot.folder, dtype=options.dtype, device=options.device, stop_ids=text.stop_ids)
    about = {"target": snapshot.name, "revision": snapshot.revision or f"files {digest(snapshot.folder)}"}
    raw, drafter, make, origin = begin(options, snapshot, target, text)
    answers, sequences = read_sequences(options, target, text, about, say)
    sequences = [sequence for sequence in sequences if len(training.anchor_places(sequence.supervised))]
    kept = held_out(len(sequences), options.held_out)
    unseen, sequences = ([s for i, s in enumerate(sequences) if (i in kept) == held] for held in (True, False))

    steps = options.steps or options.epochs * (len(sequences) // options.sequences)
    settings = training.Settings(
        min(steps, options.limit or steps), options.sequences, options.anchors, options.at_once or 0,
        options.learning_rate, seed=options.seed,
    )  # fmt: skip
    autocast = torch.bfloat16 if options.dtype == "bfloat16" else None
    trainer = make(target, drafter, sequences, settings, autocast=autocast)
    about |= origin
    identity = about | {
        "config": sha(raw), "answers": sha((answers, len(sequences), options.max_tokens, sorted(kept))),
        "objective": options.objective, "dtype": options.dtype, **asdict(settings),
    }  # fmt: skip
    if options.resume:
        training.load_checkpoint(checkpoint, trainer, identity)
    say(estimate(trainer, processes))

    def store():
        training.save_checkpoint(checkpoint, trainer, identity)
        write_drafter(out, raw, drafter, tables=not options.without_tables)

    trainer.seconds.clear()
    start = time.perf_counter()
    shown = train(trainer, options, unseen, store, rank)
    if options.profile:
        say(profile(trainer.seconds, time.perf_counter() - start))
    if rank:
        return None
    config, counts = drafter.config, dict(trainer.totals)
    tokens, seconds = counts.pop("tokens"), counts.pop("seconds")
    report = about | {
        "family": config.family, "parameters": config.parameter_count(), "objective": options.objective,
        "answers": len(trainer.sequences), "settings": asdict(settings), "steps": trainer.step, "dtype": options.dtype,
        "hardware": hardware(options.device), "versions": versions("fast"), "commit": commit(),
        "processes": processes, "seconds": round(seconds, 2), "tokens_per_second": round(tokens / seconds),
        **shown, "counts": counts,
    }  # fmt: skip
    write_card(out, report)
    return report


def train(trainer, options, unseen, store, rank):
    """All steps that are left; returns the numbers of the last one.  Process 0 logs and saves."""
    first, steps, shown, path = trainer.step, trainer.settings.steps, {}, Path(f"{options.out}.steps.jsonl")
    done = read_steps(path, first) if first and rank == 0 else []
    if done and first == steps:
        shown = {name: number for name, number in done[-1].items() if name not in ("step", "tokens")}
    with (
        step_log(path, done) if rank == 0 else nullcontext() as log,
        tqdm(total=steps, initial=first, unit="step", disable=None if rank == 0 else True) as bar,
    ):
        if rank == first == 0:
            log.write(json.dumps({"step": 0, "tokens": 0} | evaluate(trainer, unseen)) + "\n")
        while trainer.step < steps:
            step = trainer.update()
            shown = {name: round(number, 4) for name, number in trainer.summary(step).items()}
            bar.update()
            bar.set_postfix(shown, refresh=False)
            saving = trainer.step % options.save_every == 0 or trainer.step == steps
            if rank == 0:
                shown |= evaluate(trainer, unseen) if saving else {}
                log.write(json.dumps({"step": trainer.step, "tokens": step.tokens} | shown) + "\n")
                if saving:
                    store()
    return shown


def check(options):
    """ValueError for numbers that train nothing and for an --out that is in use; makes the folder around it."""
    at_least(options, **dict.fromkeys(COUNTS, 1), seed=0, held_out=0)
    if not 0 < options.learning_rate < math.inf:
        raise ValueError(f"--learning-rate must be a positive number, got {options.learning_rate}")
    if not options.out.strip():
        raise ValueError("--out is empty; it names the drafter's folder")
    out, checkpoint = Path(options.out), Path(f"{options.out}.checkpoint")
    if out.is_file():
        raise ValueError(f"{out} is a file; --out names the drafter's folder")
    if checkpoint.exists() and not options.resume:
        raise ValueError(f"{checkpoint} exists; add --resume to go on, or choose another --out")
    if not checkpoint.exists() and out.is_dir() and any(out.iterdir()):
        raise ValueError(f"{out} is not empty and no training of ours; choose another --out")
    if not checkpoint.exists() and options.resume:
        raise ValueError(f"{checkpoint} does not exist: there is nothing to resume")
    out.parent.mkdir(parents=True, exist_ok=True)


def join(options):
    """Join the processes that torchrun started, if it did, and fill in where to run: (rank, number of processes)."""
    options.device, options.dtype = placement(options.device, options.dtype)
    if ranks()[1] > 1 and not distributed.is_initialized():
        backend = "gloo" if options.device == "cpu" else "nccl"
        distributed.init_process_group(backend, timeout=timedelta(days=30))  # the others wait for the answers
    return training.place()


def held_out(count, wanted):
    """Which of `count` answers are kept out of a training: `wanted` places as far apart as can be."""
    if count < 2 * wanted:
        raise ValueError(f"{count} answers are too few to hold {wanted} out; give more prompts or a smaller --held-out")
    return {int(i) for i in (np.arange(wanted) + 0.5) * count / max(wanted, 1)}


def evaluate(trainer, sequences):
    """{"held_out": expected accepted length on sequences that are not trained on}, empty without any."""
    if not sequences:
        return {}
    with trainer.timed("held-out answers"):
        length = posttraining.expected_length(
            trainer.target, trainer.drafter, sequences, HELD_OUT_ANCHORS, HELD_OUT_SEED
        )
    return {"held_out": round(length, 4)}


def read_steps(path, first):
    """The lines of a log up to step `first`, in order; ValueError where it is damaged."""
    try:
        whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
        done = [row for row in map(json.loads, whole.splitlines()) if row["step"] <= first]
    except (OSError, ValueError, KeyError, TypeError):
        done = []
    if [row["step"] for row in done] not in ([*range(first + 1)], [*range(1, first + 1)]):
        raise ValueError(f"{path} is no whole log of {first} steps; restore it or start anew")
    return done


def step_log(path, done):
    """A text file with a JSON line for each step done, open for those of the coming ones."""
    text = "".join(f"{json.dumps(row)}\n" for row in done)
    training.write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    return path.open("a", buffering=1, encoding="utf-8")


def write_drafter(folder, raw, drafter, tables=True):
    """The drafter's folder: config.json and bfloat16 weights, with copies of the target's tables where it is custom."""
    weights = dict(drafter.state_dict())
    if tables and drafter.config.family != "dflash2":
        weights |= {"embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    weights = {name: tensor.to("cpu", torch.bfloat16, copy=True).contiguous() for name, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    data = f"{json.dumps(raw, indent=2)}\n".encode()
    training.write_atomically(folder / "config.json", lambda path: path.write_bytes(data))
    training.write_atomically(
        folder / "model.safetensors", lambda path: path.write_bytes(save(weights, {"format": "pt"}))
    )


def write_card(folder, report):
    """README.md of the drafter's folder: what it was trained from, on and with."""
    r, s, versions = report, report["settings"], ", ".join(f"{k} {v}" for k, v in report["versions"].items())
    start = f", from {r['drafter']} ({r['drafter_revision']})" if "drafter" in r else ""
    paragraphs = (
        f"# {folder.name}",
        f"A {r['family']} drafter for {r['target']} ({r['revision']}): {r['parameters']:,} parameters "
        "of its own; the target's embedding and head are borrowed.",
        f"Objective `{r['objective']}`{start}. {r['answers']:,} answers that the target wrote at temperature 1, "
        f"up to {s['anchors']} anchors in each; {r['steps']:,} steps of {s['sequences']} answers. "
        f"AdamW, learning rate {s['learning_rate']:g} after a warm-up over {s['warm_up']:.0%} of the steps, "
        f"cosine to 0, gradients clipped to norm {s['clip']:g}, seed {s['seed']}. Products in "
        f"{r['dtype']}, weights in float32, stored in bfloat16. {r['hardware']}, {r['processes']} "
        f"process(es), {r['seconds'] / 60:.0f} minutes; {versions}; commit {r['commit']}.",
    )
    fill = partial(textwrap.fill, width=120, break_long_words=False, break_on_hyphens=False)
    text = "\n\n".join(map(fill, paragraphs)) + "\n"
    training.write_atomically(folder / "README.md", lambda path: path.write_text(text, encoding="utf-8"))


def read_sequences(options, target, text, about, say):
    """Every prompt with the target's answer, written now where it is missing: (what decided them, the sequences)."""
    path = Path(options.answers or f"{options.out}.answers.jsonl")
    thinking = {"off": False, "on": True, "unset": None}[options.thinking]
    prompts = read_prompts(options.prompts or builtin_prompts())[: options.limit]
    encoded = [text.chat([{"role": "user", "content": p.text}], thinking=thinking) for p in prompts]
    left = len(encoded) - len(held_out(len(encoded), options.held_out))
    if left < options.sequences:
        raise ValueError(
            f"{left} prompts cannot fill a step of {options.sequences}; give more, or lower --sequences or --held-out"
        )
    room = target.config.max_positions - max(map(len, encoded))
    if room < options.answer_tokens:
        raise ValueError(f"the longest prompt leaves the target room for {room} tokens; set --answer-tokens to that")
    if training.place()[0] == 0:
        provenance = about | {
            "prompts": sha(encoded), "answer_tokens": options.answer_tokens, "seed": ANSWER_SEED,
            "dtype": options.dtype, "stop_ids": list(target.stop_ids),
        }  # fmt: skip
        with RecordFile(path, provenance) as records:
            say(f"answers: {path} ({len(records.rows)} of {len(encoded)} done)")
            write_missing(options.answer_tokens, target, encoded, records)
    if distributed.is_initialized():
        distributed.barrier()
    origin, rows = read(path)
    return origin, [sequence_of(row, target.stop_ids, options.max_tokens) for row in rows]


def write_missing(answer_tokens, target, prompts, records):
    """Let the target answer the prompts that have no record yet."""
    done = len(records.rows)
    for place, answer in answers_to(target, prompts, range(done, len(prompts)), answer_tokens, ANSWER_SEED):
        row = {"kind": "answer", "prompt": prompts[place], "tokens": answer.tokens, "stopped": answer.stopped}
        records.append(row)


def answers_to(target, prompts, places, answer_tokens, seed):
    """Yield (place, the target's answer at temperature 1) for some of the prompts, in order, with a bar.

    An answer depends on the seed, its prompt and its place only, not on its neighbours in the batch.
    """
    law, done = SamplingLaw(), len(prompts) - len(places)
    with tqdm(total=len(prompts), initial=done, unit="answer", disable=None) as bar:
        for start in range(0, len(places), ANSWERS_AT_ONCE):
            some = places[start:][:ANSWERS_AT_ONCE]
            uniforms = [np.random.default_rng([seed, place]).random(answer_tokens) for place in some]
            yield from zip(some, write_answers(target, [prompts[place] for place in some], uniforms, law), strict=True)
            bar.update(len(some))


def sequence_of(row, stop_ids, longest=None):
    """A record's tokens and which are the answer's, its stop token (the first of the target's) among them."""
    tokens = np.array([*row["prompt"], *row["tokens"], *stop_ids[:1] * row["stopped"]], dtype=np.int64)[:longest]
    return training.Sequence(tokens, np.arange(len(tokens)) >= len(row["prompt"]))


def estimate(trainer, processes):
    """One line: parameters, memory, and time from one sequence."""
    begin = time.perf_counter()
    trainer.accumulate(trainer.sequences[0], [0])
    seconds = time.perf_counter() - begin
    trainer.optimizer.zero_grad(set_to_none=True)
    config, settings = trainer.drafter.config, trainer.settings
    rows = (settings.at_once or settings.anchors) * config.block_size * config.vocab_size
    gigabytes = (16 * config.parameter_count() + 6 * 4 * rows) / 1e9  # weights, slopes, two moments; logits and slopes
    hours = seconds * settings.sequences / processes * (settings.steps - trainer.step) / 3600
    return (
        f"estimate: {config.parameter_count():,} parameters, {settings.steps} steps of {settings.sequences} sequences; "
        f"about {gigabytes:.2g} GB beside the target, {hours:.2g} h"
    )


def profile(seconds, total):
    """Where the time of the steps went."""
    lines = [f"{part:20} {s:9.2f} s {s / total:7.1%}" for part, s in seconds.most_common()]
    return "\n".join([*lines, f"{'all':20} {total:9.2f} s"])


def new_parser(doc, sizes):
    """A parser, described by a script's docstring, with the flags of every training; sizes, {preset: {flag: value}}."""
    parser = argparse.ArgumentParser(
        description=doc.split("\n\n")[0], epilog=doc.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--target", required=True, metavar="ID_OR_FOLDER")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--out", required=True, metavar="FOLDER", help="the drafter's folder")
    add("--preset", choices=tuple(sizes), default="released", help="sizes for a large model or for a tiny one")
    add("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files (default: the project's, for a trial)")
    add("--answers", type=Path, metavar="FILE", help="the target's answers (default: OUT.answers.jsonl)")
    add("--answer-tokens", type=int, metavar="N", help="cap on an answer's length")
    add("--max-tokens", type=int, default=4096, metavar="N", help="longer sequences are cut")
    add("--thinking", choices=("off", "on", "unset"), default="off", help="passed to the chat template")
    add("--sequences", type=int, help="sequences of a step, over all processes")
    add("--anchors", type=int, help="most anchors of a sequence")
    add("--at-once", type=int, metavar="N", help="anchors held in memory at a time (default: all)")
    add("--steps", type=int, help="length in steps instead of epochs")
    add("--learning-rate", type=float)
    add("--seed", type=int, default=42)
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of products; weights are float32")
    add("--save-every", type=int, default=100, metavar="STEPS")
    add("--held-out", type=int, default=0, metavar="N",
        help=f"answers kept out; OUT.steps.jsonl has tokens a round on {HELD_OUT_ANCHORS} blocks of each")  # fmt: skip
    add("--resume", action="store_true", help="go on from OUT.checkpoint")
    add("--limit", type=int, metavar="N", help="smoke run: at most N prompts and steps")
    add("--without-tables", action="store_true", help="store no copies of the target's embedding and head")
    add("--profile", action="store_true", help="print where the time of a step goes")
    return parser


def settle(options, sizes):
    """Fill in what the preset decides."""
    for name, value in sizes[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.out = os.path.normpath(options.out) if options.out.strip() else ""  # without a slash at its end
    if options.limit:
        options.sequences = min(options.sequences, options.limit)
    return options
