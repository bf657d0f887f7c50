"""Which loss climbs the accepted length?  The slopes of all objectives at one drafter, before any training.

At step i = 1..n each objective has a slope g_i, over the same anchors of the same answers.  With h the slope of
1 - J/K, whose mean D-REAL estimates without bias (`fast/posttraining.py`), and E over steps:

    signal    |E g|^2 / E |g|^2                how much of a single step's slope is its mean; the rest is noise
    cosine    <E g, E h> / |E g| |E h|         whether the mean points where the accepted length rises
    uphill    <E g, E h> / |E h| sqrt(E |g|^2)     how far a step of length 1 goes that way, noise included

Products of means are those of different steps, so noise adds nothing to them; behind +- is the jackknife's standard
error over steps.  Slopes are plain ones in all weights but a confidence head's; AdamW scales them weight by weight.

    python examples/objective_slopes.py --target tiny --drafter tiny/dspark
    python examples/objective_slopes.py --target tiny --drafter tiny/dspark --prompts FILES --answers FILE --steps 48

Answers are written and read as in training.  All slopes are kept: 16 bytes for each weight and step.  The last line is
one JSON document.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

import fast
from fast.posttraining import OBJECTIVES, trainer_of
from fast.training import Settings, anchor_places, sequences_of
from fast.training_program import read_sequences
from models.checkpoint import digest, locate
from models.text import Text
from reference import program
from reference.sample import Table, cell


def main(arguments=None):
    """Measure and report, or say in one line what is wrong."""
    program.in_one_line(run, parse(arguments))


def run(options):
    """Slopes of every objective, their products, the table."""
    program.at_least(options, anchors=1, sequences=1, steps=3, answer_tokens=1, seed=0)
    options.device, options.dtype = fast.placement(options.device, "float32")
    snapshot, drafter = locate(options.target, revision=options.revision), locate(options.drafter)
    text = Text.from_folder(snapshot.folder)
    target = fast.Decoder.load(snapshot.folder, device=options.device, stop_ids=text.stop_ids)
    about = {"target": snapshot.name, "revision": snapshot.revision or f"files {digest(snapshot.folder)}"}
    options.out = f"runs/slopes-{snapshot.name.replace('/', '--')}"  # where answers go that are given no --answers
    _, sequences = read_sequences(options, target, text, about, lambda *words: print(*words, file=sys.stderr))
    sequences = [sequence for sequence in sequences if len(anchor_places(sequence.supervised))]
    settings = Settings(options.steps, options.sequences, options.anchors, 0, 1.0, seed=options.seed)
    slopes = {}
    for objective in OBJECTIVES:
        fresh = fast.Drafter.load(drafter.folder, target, device=options.device)
        slopes[objective] = slopes_of(trainer_of(objective, target, fresh, sequences, settings), objective)
    table = report({name: products(mine, slopes["dreal"]) for name, mine in slopes.items()})
    print(table.render())
    document = about | {
        "drafter": drafter.name, "drafter_revision": drafter.revision or f"files {digest(drafter.folder)}",
        "answers": len(sequences), "settings": asdict(settings), "hardware": fast.hardware(options.device),
        "versions": program.versions("fast"), "commit": program.commit(), "table": asdict(table),
    }  # fmt: skip
    print(json.dumps(document, allow_nan=False))


def slopes_of(trainer, name):
    """An objective's slope at each step, float32 [n, weights]; the drafter does not change."""
    named = trainer.drafter.named_parameters()
    weights = [p for key, p in named if p.requires_grad and not key.startswith("confidence_head")]
    rows, settings = [], trainer.settings
    for step in tqdm(range(settings.steps), desc=name, unit="step", disable=None):
        trainer.optimizer.zero_grad(set_to_none=True)
        order = sequences_of(step, len(trainer.sequences), settings.sequences, settings.seed)
        sums = [trainer.accumulate(trainer.sequences[i], [settings.seed, step, at]) for at, i in enumerate(order)]
        weight = sum(found["weight"] for found in sums)
        parts = [torch.zeros_like(p) if p.grad is None else p.grad / weight for p in weights]
        rows.append(torch.cat([part.flatten() for part in parts]).cpu().numpy())
    return np.stack(rows)


def products(mine, uphill):
    """Inner products of steps' slopes, float64 [n, n] each: of an objective's own, with those of J, and J's own."""
    return mine @ mine.T, mine @ uphill.T, uphill @ uphill.T


def report(found):
    """The table, from the products of every objective."""
    rows = []
    for name, grams in found.items():
        whole, n = numbers(*grams), len(grams[0])
        kept = [np.delete(np.arange(n), i) for i in range(n)]
        without = np.array([numbers(*(gram[np.ix_(some, some)] for gram in grams)) for some in kept])
        errors = np.sqrt((n - 1) * without.var(axis=0))
        rows.append([name, *(cell(x) for pair in zip(whole, errors, strict=True) for x in pair)])
    return Table(
        "slopes of the objectives and that of the expected accepted length",
        ["objective", "signal", "+-", "cosine", "+-", "uphill", "+-"],
        rows,
    )


def numbers(own, cross, uphill):
    """(signal, cosine, uphill) from the three matrices of products; NaN where a mean is lost in its noise."""
    square, product, rise = (between(gram) for gram in (own, cross, uphill))
    single = np.trace(own) / len(own)
    with np.errstate(invalid="ignore", divide="ignore"):
        return square / single, product / np.sqrt(square) / np.sqrt(rise), product / np.sqrt(single) / np.sqrt(rise)


def between(gram):
    """Mean product of two different steps' slopes."""
    n = len(gram)
    return (gram.sum() - np.trace(gram)) / (n * (n - 1))


def parse(arguments):
    """The command line."""
    title, _, about = __doc__.partition("\n\n")
    parser = ArgumentParser(description=title, epilog=about, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(limit=None, held_out=0, max_tokens=4096, thinking="off")
    add = parser.add_argument
    add("--target", required=True, metavar="ID_OR_FOLDER", help="hub id, folder or tiny")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--drafter", required=True, metavar="ID_OR_FOLDER", help="hub id, folder or tiny/NAME")
    add("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files (default: the project's)")
    add("--answers", type=Path, metavar="FILE", help="the target's answers (default: in runs/)")
    add("--answer-tokens", type=int, default=512, metavar="N", help="cap on an answer's length (default %(default)s)")
    add("--steps", type=int, default=24, metavar="N", help="how many slopes of each objective (default %(default)s)")
    add("--sequences", type=int, default=8, help="answers of a step (default %(default)s)")
    add("--anchors", type=int, default=64, help="most anchors of an answer (default %(default)s)")
    add("--seed", type=int, default=0, help="of anchors and drafts")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
