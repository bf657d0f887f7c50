"""What does a drafter buy in serving: how many tokens a round, how many a second, and where does the time go?

The same prompts are continued by plain decoding and with each drafter, all in one engine, at every temperature and with
so many requests side by side.  Accepted length by task with its definitions, Pr(N >= t), paired differences between
drafters, throughput, latency and speed-up over plain decoding in the same engine.

    python examples/serve_compare.py --target Qwen/Qwen3-4B --drafter deepseek-ai/dspark_qwen3_4b_block7 OTHER \\
        --temperature 0 1 --concurrency 1 4 8 16 32 --prompts gsm8k.jsonl humaneval.jsonl --plot survival.png
    python examples/serve_compare.py --target FOLDER --drafter FOLDER --limit 2      # a trial of every part
    python examples/serve_compare.py --target toy --drafter parallel chained --backend reference    # no model: seconds
    torchrun --nproc-per-node 8 examples/serve_compare.py --target Qwen/Qwen3-4B ...    # eight GPUs, an engine on each

Each finished request is a line of the record file (--out) at once: the same command goes on after an interruption, and
more temperatures or numbers of requests side by side may join the same file.  Prints the tables and one JSON document
as the last line; `python -m reference.serving_report RECORDS` prints them again.

Under `torchrun` the requests of every cell are dealt to the processes, each an engine of its own that holds the stated
number of requests side by side; tokens a second stay those of one engine (`reference/serving_report.py`).
"""

import json
import sys
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from importlib import import_module
from itertools import product
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

from models.checkpoint import locate
from models.config import DecoderConfig
from reference import program, report, serving_report
from reference.engine import Request, check_settings
from reference.laws import SamplingLaw
from reference.records import key_of, read
from reference.serving_report import PLAIN, request_row
from reference.shared_records import SharedRecords, ranks

WARM_UP = 8  # tokens of each request of a batch that is not timed


def main(arguments=None):
    """Serve and report, or say in one line what is wrong."""
    program.in_one_line(run, parse(arguments))


def run(options):
    """Load, serve or resume, report."""
    rank, size = ranks()
    options.quiet = options.quiet or rank > 0
    say = (lambda *_: None) if options.quiet else (lambda *text: print(*text, flush=True))
    check(options)
    if options.plot:
        report.check_plot(options.plot)
    backend = import_module(options.backend)
    device, dtype = backend.placement(options.device, options.dtype)
    snapshot = None if options.target == "toy" else locate(options.target, revision=options.revision)
    config = snapshot and DecoderConfig.from_folder(snapshot.folder)
    plan = SimpleNamespace(  # the part of a measurement's design that loading asks for
        anchors=min(options.requests or sys.maxsize, options.limit or sys.maxsize), gamma=options.gamma,
        answer_tokens=options.answer_tokens
        or min(program.ANSWER_TOKENS, config.max_positions // 2 if config else program.ANSWER_TOKENS),
    )  # fmt: skip
    if snapshot is None:
        target, prompts, _, about = program.load_toy(options, plan)
    else:
        target, prompts, _, about = program.load_model(options, plan, backend, device, dtype, snapshot, config, say)
    drafters, origins = program.load_drafters(options, plan, backend, device, dtype, target, say)
    if PLAIN in drafters:
        raise ValueError(f"a drafter is called {PLAIN!r}, the name of decoding without one; rename its folder")
    for name, drafter in drafters.items() if options.threshold else ():
        if not drafter.config.confidence:
            raise ValueError(f"{name} has no confidence head: leave out --threshold")
    for task, count in Counter(prompt.domain for prompt in prompts).items():
        if count < size * max(options.concurrency):
            engines = f" in {size} engines" if size > 1 else ""
            say(f"note: {task} has {count} prompts, too few for {max(options.concurrency)} side by side{engines}")
    design = {name: getattr(options, name) for name in ("top_k", "top_p", "lattice", "threshold", "gamma", "seed")}
    provenance = {
        "target": options.target, "revision": None, "design": design | {"answer_tokens": plan.answer_tokens},
        "prompts": program.sha([(p.id, p.domain, p.tokens) for p in prompts]), "backend": options.backend,
        "dtype": dtype, "device": device, "hardware": backend.hardware(device),
        "versions": program.versions(options.backend), "commit": program.commit(), **about, "drafters": origins,
    }  # fmt: skip
    out = options.out or default_out(options, provenance)
    with SharedRecords(out, provenance, rank, size) as records:
        for note in records.notes:
            say(f"note: {note}")
        say(f"records: {out} ({len(records.rows)} requests done)")
        serve(backend.Engine, target, {PLAIN: None, **drafters}, prompts, plan.answer_tokens, options, records)
    if rank:
        return
    summary = serving_report.summarise(*read(out))
    say(serving_report.table(summary))
    try:
        if options.plot:
            serving_report.plot(summary, options.plot)
            say(f"figure: {options.plot}")
    finally:
        print(json.dumps(summary, allow_nan=False))


def serve(make, target, drafters, prompts, answer_tokens, options, records):
    """Serve every request that has no row yet, cell by cell; engines are made by `make` and live one at a time."""
    capacity = max(len(prompt.tokens) for prompt in prompts) + answer_tokens
    settings = {"threshold": options.threshold, "lattice": options.lattice}
    pieces = []  # cell by cell a piece for each process: {key: (cell, request, prompt)}
    for cell in product(drafters, options.concurrency, options.temperature):
        law = SamplingLaw(cell[2], options.top_k, options.top_p)
        for first in range(records.size):
            pieces.append({
                key_in(cell, prompt): (cell, Request(prompt.tokens, answer_tokens, law, (options.seed, i)), prompt)
                for i, prompt in list(enumerate(prompts))[first :: records.size]
            })  # fmt: skip
    engine = made_for = None
    total = sum(map(len, records.share(pieces)))
    with tqdm(total=total, unit="request", disable=options.quiet) as bar:
        for piece, missing in records.deal(pieces):
            bar.update(len(piece) - len(missing))
            tasks = {}
            for cell, request, prompt in map(piece.get, missing):
                tasks.setdefault((cell, prompt.domain), {})[request] = prompt
            for (cell, _), requests in tasks.items():
                name, concurrency, _ = cell
                if made_for != (name, concurrency):
                    engine = None  # the last one's caches are free before new ones are allocated
                    more = settings if drafters[name] else {}
                    engine = make(target, drafters[name], capacity, batch=concurrency, **more)
                    made_for = name, concurrency
                    first = list(requests)[:concurrency]
                    engine.generate([Request(r.prompt, min(WARM_UP, answer_tokens), r.law) for r in first])
                engine.generate(list(requests), finished=recorder(cell, requests, engine, records, bar))


def key_in(cell, prompt):
    """The key of the row of a prompt's request in a cell (drafter, concurrency, temperature)."""
    name, concurrency, temperature = cell
    return key_of({
        "kind": "request", "drafter": name, "temperature": temperature, "concurrency": concurrency, "prompt": prompt.id
    })  # fmt: skip


def recorder(cell, prompts, engine, records, bar):
    """What writes the row of each request that ends; writing is in its neighbours' latency, not on the wall clock."""
    (name, concurrency, temperature), clock, parts = cell, time.perf_counter(), Counter(engine.seconds)

    def finished(request, completion):
        nonlocal clock, parts
        wall, spent = time.perf_counter() - clock, engine.seconds - parts
        text = program.sha(completion.tokens)
        row = request_row(
            name, temperature, concurrency, prompts[request], completion, wall, spent, text, engines=records.size
        )
        records.append(row)
        bar.update()
        clock, parts = time.perf_counter(), Counter(engine.seconds)

    return finished


def check(options):
    """A ValueError for flags that make no sense together."""
    program.at_least(options, requests=1, limit=1, answer_tokens=1, prompt_tokens=1, gamma=1)
    check_settings(1, 1, options.threshold)
    for temperature in options.temperature:
        SamplingLaw(temperature, options.top_k, options.top_p)
    for name in ("temperature", "concurrency"):
        if len(set(getattr(options, name))) < len(getattr(options, name)):
            raise ValueError(f"--{name} names a value twice")
    if min(options.concurrency) < 1:
        raise ValueError(f"--concurrency must be at least 1, got {min(options.concurrency)}")
    if options.backend == "reference" and options.concurrency != [1]:
        raise ValueError("the reference backend serves one request at a time: leave out --concurrency")
    if options.target == "toy" and (options.backend != "reference" or options.lattice is not None or options.threshold):
        raise ValueError("the toy is served with --backend reference, and without --lattice and --threshold")
    if options.plot and options.out and options.plot.resolve() == options.out.resolve():
        raise ValueError(f"--plot {options.plot} is the record file of --out; give the figure a name of its own")


def default_out(options, provenance):
    """runs/serving-TARGET-DRAFTERS-BACKEND.jsonl."""
    names = [provenance["target"].replace("/", "--"), *provenance["drafters"], options.backend]
    return Path("runs") / f"serving-{'-'.join(names)}.jsonl"


def parse(arguments):
    """The command line."""
    title, _, about = __doc__.partition("\n\n")
    parser = ArgumentParser(description=title, epilog=about, formatter_class=RawDescriptionHelpFormatter)
    parser.set_defaults(anchors_from=None)
    add = parser.add_argument
    add("--target", required=True, metavar="ID_OR_FOLDER", help="hub id, folder, tiny or toy")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--drafter", nargs="+", required=True, metavar="ID_OR_FOLDER")
    add("--slot-convention", choices=("auto", "anchor", "in-place"), default="auto",
        help="which position an output predicts, if the file leaves it open")  # fmt: skip
    add("--temperature", nargs="+", type=float, default=[0.0, 1.0], metavar="T", help="default: 0 1")
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0 = off")
    add("--concurrency", nargs="+", type=int, default=[1], metavar="N", help="requests side by side (default: 1)")
    add("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files, a task each (default: the project's)")
    add("--domains", nargs="+", metavar="NAME", help="serve only these tasks")
    add("--requests", type=int, metavar="N", help="at most N prompts of a task (default: all)")
    add("--prompt-tokens", type=int, metavar="N", help="leave out prompts longer than this")
    add("--answer-tokens", type=int, metavar="N",
        help=f"most new tokens (default {program.ANSWER_TOKENS}, at most half of the context)")  # fmt: skip
    add("--thinking", choices=("off", "on", "unset"), default="off", help="passed to the chat template")
    add("--stop-ids", nargs="+", type=int, metavar="ID", help="end texts at these ids (default: the model's own)")
    add("--lattice", type=int, metavar="N", help="candidates of a slot, 0 = all tokens (default: the family's own)")
    add("--threshold", type=float, default=0.0, help="cut a block before the first slot trusted less; 0 = never")
    add("--gamma", type=int, default=7, help="block length of the toy's drafters (default %(default)s)")
    add("--backend", choices=("fast", "reference"), default="fast")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", choices=("auto", *program.ITEM_SIZE), default="auto",
        help="default: bfloat16 on cuda, float32 on a CPU")  # fmt: skip
    add("--seed", type=int, default=980406)
    add("--limit", type=int, metavar="N", help="smoke run: at most N prompts of a task")
    add("--out", type=Path, metavar="FILE", help="record file (default: in runs/, named after what is served)")
    add("--plot", type=Path, metavar="FILE", help="write the survival curves to this image file (needs matplotlib)")
    add("--quiet", action="store_true", help="print the JSON document only")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
