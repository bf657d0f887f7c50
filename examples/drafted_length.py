"""Which drafter gets more of its blocks accepted?  Expected tokens of a round at temperature 1, on the same blocks.

The target answers every prompt.  Behind anchors in its answers each drafter drafts a block, the target reads it, and

    1 + J,    J = sum_k a_k prod_{j<k} r_j    (`fast/posttraining.py`)

is the expected number of tokens of that round, bonus token counted, given the drafts.  Nothing of the verification is
drawn and all drafters stand behind the same anchors with the same uniforms, so small differences show in far fewer
tokens than serving takes (`serve_compare.py`).  Rounds in serving begin more often where text is hard, so there tau is
lower.

    python examples/drafted_length.py --target tiny --drafter tiny/dspark tiny/dflash2
    python examples/drafted_length.py --target tiny --drafter tiny/dspark dreal-1 dreal-2 dreal-3 --seeds    # one run

Each answer and each drafter's blocks behind it are a line of the record file (--out): the same command goes on after an
interruption.  Prints tau by drafter and task, and paired differences, with intervals over prompts; the last line is one
JSON document.
"""

import json
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from tqdm import tqdm

import fast
from fast.posttraining import drafted_length, read_sequence
from fast.training import anchor_places
from fast.training_program import answers_to, sequence_of
from models.checkpoint import locate
from models.config import DecoderConfig
from reference import program
from reference.records import RecordFile, read
from reference.serving_report import check_tasks, runs_of, tau_tables

TITLES = (
    "Expected tokens of a round behind an anchor, temperature 1, bonus token counted",
    "Difference on the same blocks",
)


def main(arguments=None):
    """Measure and report, or say in one line what is wrong."""
    program.in_one_line(run, parse(arguments))


def run(options):
    """Load, measure what is missing, report."""
    program.at_least(options, anchors=1, requests=1, answer_tokens=1, limit=1, seed=0)
    device, dtype = fast.placement(options.device, options.dtype)
    snapshot = locate(options.target, revision=options.revision)
    config = DecoderConfig.from_folder(snapshot.folder)
    plan = SimpleNamespace(
        anchors=min(options.requests, options.limit or options.requests), gamma=0,
        answer_tokens=options.answer_tokens or min(program.ANSWER_TOKENS, config.max_positions // 2),
    )  # fmt: skip
    target, prompts, _, about = program.load_model(options, plan, fast, device, dtype, snapshot, config, print)
    check_tasks({prompt.domain for prompt in prompts})
    drafters, origins = program.load_drafters(options, plan, fast, device, dtype, target, print)
    provenance = {
        "design": {"anchors": options.anchors, "answer_tokens": plan.answer_tokens, "seed": options.seed},
        "prompts": program.sha([(p.id, p.domain, p.tokens) for p in prompts]), "dtype": dtype, "device": device,
        "hardware": fast.hardware(device), "versions": program.versions("fast"), "commit": program.commit(),
        **about, "drafters": origins,
    }  # fmt: skip
    runs_of(list(drafters), options.seeds)
    out = options.out or Path("runs") / f"drafted-{'-'.join([snapshot.name.replace('/', '--'), *drafters])}.jsonl"
    with RecordFile(out, provenance) as records:
        for note in records.notes:
            print(f"note: {note}")
        print(f"records: {out} ({len(records.rows)} of {len(prompts) * (1 + len(drafters))} done)", flush=True)
        measure(target, drafters, prompts, options.anchors, plan.answer_tokens, options.seed, records)
    tables = report(read(out)[1], options.seeds)
    print("\n\n".join(table.render() for table in tables if table.rows))
    print(
        json.dumps(
            {"provenance": provenance, "tables": [asdict(table) for table in tables]},
            allow_nan=False,
        )
    )


def measure(target, drafters, prompts, anchors, answer_tokens, seed, records):
    """Every answer, and every drafter's blocks behind it, that the records do not hold yet."""
    answers = {row["prompt"]: row for row in records.rows if row["kind"] == "answer"}
    done = {(row["drafter"], row["prompt"]) for row in records.rows if row["kind"] == "blocks"}
    missing = [i for i, prompt in enumerate(prompts) if prompt.id not in answers]
    for i, answer in answers_to(target, [prompt.tokens for prompt in prompts], missing, answer_tokens, seed):
        row = {"kind": "answer", "prompt": prompts[i].id, "tokens": answer.tokens, "stopped": answer.stopped}
        records.append(row)
        answers[prompts[i].id] = row
    for i, prompt in enumerate(tqdm(prompts, unit="prompt", disable=None)):
        sequence = sequence_of(answers[prompt.id] | {"prompt": prompt.tokens}, target.stop_ids)
        readings = {}  # drafters with the same taps share what the target reads
        for name, drafter in drafters.items():
            if (name, prompt.id) in done:
                continue
            length = blocks = 0
            if len(anchor_places(sequence.supervised)):
                if drafter.taps not in readings:
                    readings[drafter.taps] = read_sequence(target, sequence.tokens, drafter.taps)
                length, blocks = drafted_length(
                    target, drafter, sequence, anchors, [seed, i], readings[drafter.taps]
                )  # fmt: skip
            about = {"kind": "blocks", "drafter": name, "domain": prompt.domain, "prompt": prompt.id}
            records.append(about | {"length": length, "blocks": blocks})


def report(rows, seeds):
    """The two tables, from the rows of a record file."""
    found, tasks = {}, {}
    for row in rows:
        if row["kind"] == "blocks":
            found.setdefault(row["drafter"], {})[row["prompt"]] = row["length"], row["blocks"]
            tasks[row["prompt"]] = row["domain"]
    length, blocks = np.array([[mine[prompt] for mine in found.values()] for prompt in tasks]).transpose(2, 0, 1)
    if not blocks.any():
        raise ValueError("no answer has two tokens, so nothing was drafted; raise --answer-tokens")
    prompts, tasks = np.array(list(tasks)), np.array(list(tasks.values()))
    return tau_tables(
        TITLES, list(found), prompts, tasks, length, blocks, seeds, replicates=10_000, counted=("answers", "blocks")
    )


def parse(arguments):
    """The command line."""
    title, _, about = __doc__.partition("\n\n")
    parser = ArgumentParser(description=title, epilog=about, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(anchors_from=None, slot_convention="auto", domains=None, prompt_tokens=None, stop_ids=None)
    add = parser.add_argument
    add("--target", required=True, metavar="ID_OR_FOLDER", help="hub id, folder or tiny")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--drafter", nargs="+", required=True, metavar="ID_OR_FOLDER", help="hub ids, folders, tiny/NAME")
    add("--seeds", action="store_true", help="report NAME-1, NAME-2 ... together, as seeds of one training")
    add("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files, a task each (default: the project's)")
    add("--requests", type=int, default=sys.maxsize, metavar="N", help="at most N prompts of a task (default: all)")
    add("--anchors", type=int, default=32, help="most anchors of an answer (default %(default)s)")
    add("--answer-tokens", type=int, metavar="N",
        help=f"cap on an answer's length (default {program.ANSWER_TOKENS}, at most half of the context)")  # fmt: skip
    add("--thinking", choices=("off", "on", "unset"), default="off", help="passed to the chat template")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default="auto",
        help="default: bfloat16 on cuda, float32 on a CPU",
    )
    add("--seed", type=int, default=20260818, help="of answers, anchors and drafts")
    add("--limit", type=int, metavar="N", help="smoke run: at most N prompts of a task")
    add("--out", type=Path, metavar="FILE", help="record file (default: in runs/, named after what is measured)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
