"""What every measuring program does around the protocol: flags, loading, provenance, an estimate, the report.

A program is its docstring, its own flags, the choice of a backend and a call of `main`: `examples/floor_qwen3_4b.py`.
Tests: `tests/test_examples.py`.
"""

import hashlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import time
import warnings
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path

import numpy as np

from models import toy
from models.checkpoint import digest, locate
from models.config import DecoderConfig
from models.text import Text, builtin_prompts, read_prompts
from models.toy_drafters import study_drafters
from reference import protocol, report
from reference.anchor import ALSO
from reference.draft_meter import check_drafters
from reference.laws import SamplingLaw
from reference.records import RecordError, read
from reference.shared_records import SharedRecords, ranks

ITEM_SIZE = {"bfloat16": 2, "float32": 4, "float64": 8}
ANCHORS, ANSWER_TOKENS = 96, 2048
ERRORS = (ValueError, OSError)  # every named error is one of the two


def main(options, backend, draw=report.plot):
    """Measure and report with a backend, the `reference` or `fast` package; or say in one line what is wrong."""
    in_one_line(run, options, backend, draw)


def in_one_line(run, *arguments):
    """Call `run`; what stops it ends the process with one line, which names the process where there are several."""
    where = f" in rank {os.environ['RANK']}" if os.environ.get("RANK") else ""
    try:
        run(*arguments)
    except ERRORS as error:
        sys.exit(f"error{where}: {error}")
    except KeyboardInterrupt:
        sys.exit(f"stopped{where}; the same command goes on where it was")


def at_least(options, **least):
    """ValueError for a flag's number below the least that makes sense; a flag that is not given is left alone."""
    for name, bound in least.items():
        value = getattr(options, name, None)
        if value is not None and value < bound:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {bound}, got {value}")


def run(options, backend, draw):
    """Load, estimate, measure or resume, report; `draw` makes the figure of --plot from the summary."""
    rank, size = ranks()
    quiet = options.quiet or rank > 0
    say = (lambda *_: None) if quiet else (lambda *text: print(*text, flush=True))
    at_least(options, limit=1, prompt_tokens=1)
    law = SamplingLaw(options.temperature, options.top_k, options.top_p)
    anchors = ANCHORS if options.anchors is None else options.anchors
    anchors = min(anchors, options.limit or anchors)
    snapshot = None if options.target == "toy" else locate(options.target, revision=options.revision)
    config = snapshot and DecoderConfig.from_folder(snapshot.folder)
    answer_tokens = options.answer_tokens
    if answer_tokens is None:
        answer_tokens = min(ANSWER_TOKENS, config.max_positions // 2) if config else ANSWER_TOKENS
    design = protocol.Design(
        anchors, options.paths, options.gamma, answer_tokens, law, options.seed, tuple(options.also)
    )
    if "response" in design.also and not options.drafter:
        raise ValueError("--also response is about a drafter: give one")
    device, dtype = backend.placement(options.device, options.dtype)
    if options.anchors_from:
        for name in ("limit", "anchors", "domains", "prompts", "prompt_tokens"):
            if getattr(options, name):
                raise ValueError(
                    f"--{name.replace('_', '-')} means nothing with --anchors-from: all its anchors are measured"
                )
    if options.plot:
        if options.out and options.plot.resolve() == options.out.resolve():
            raise ValueError(f"--plot {options.plot} is the record file of --out; give the figure a name of its own")
        report.check_plot(options.plot)
    origin, source = read(options.anchors_from) if options.anchors_from else ({}, None)
    if snapshot is None:
        target, prompts, special_ids, about = load_toy(options, design)
    else:
        target, prompts, special_ids, about = load_model(options, design, backend, device, dtype, snapshot, config, say)
    drafters, origins = load_drafters(options, design, backend, device, dtype, target, say)
    check_drafters(drafters, design.gamma)
    provenance = {
        "target": options.target, "revision": None, "design": design.provenance(),
        "prompts": sha([(p.id, p.domain, p.tokens) for p in prompts]), "backend": options.backend, "dtype": dtype,
        "device": device, "hardware": backend.hardware(device), "versions": versions(options.backend),
        "commit": commit(), **about, **({"drafters": origins} if origins else {}),
    }  # fmt: skip
    if source is not None:
        for name in ("target", "revision"):
            if origin.get(name) != provenance[name]:
                raise RecordError(
                    f"{options.anchors_from} holds answers of {name} {origin.get(name)}, not {provenance[name]}: "
                    "anchors lie in the target's own text"
                )
        provenance["prompts"] = sha([row for row in source if row["kind"] != "anchor"])
    out = options.out or default_out(options, provenance)
    with SharedRecords(out, provenance, rank, size) as records:
        for note in records.notes:
            say(f"note: {note}")
        done = sum(row["kind"] == "anchor" for row in records.rows)
        say(f"records: {out} ({done} anchors done{f', {size} processes' if size > 1 else ''})")
        if not done and prompts and not quiet:
            say(estimate(target, prompts, design, provenance["dtype"], size))
        protocol.measure(
            backend, target, prompts, design, records,
            special_ids=special_ids, drafters=drafters, source=source, quiet=quiet,
        )  # fmt: skip
    if rank:
        return
    summary = report.summarise(*read(out))
    say(report.table(summary))
    try:
        if options.plot:
            draw(summary, options.plot)
            say(f"figure: {options.plot}")
    finally:
        print(report.last_line(summary))


def default_out(options, provenance):
    """runs/floors-TARGET-BACKEND.jsonl, with the drafters' names for gaps."""
    names = [provenance["target"].replace("/", "--"), *provenance.get("drafters", {}), options.backend]
    return Path("runs") / f"{'gaps' if options.drafter else 'floors'}-{'-'.join(names)}.jsonl"


def load_model(options, design, backend, device, dtype, snapshot, config, say):
    """A language model: (target, encoded prompts, special ids, what identifies it in the provenance)."""
    for note in config.notes:
        say(f"note: {note}")
    text = Text.from_folder(snapshot.folder, stop_ids=options.stop_ids)
    if not text.stop_ids:
        say("note: no stop id anywhere; answers run to --answer-tokens")
    prompts = [] if options.anchors_from else encode(options, design, config, text, say)
    target = backend.Decoder.load(snapshot.folder, dtype=dtype, device=device, stop_ids=text.stop_ids)
    about = {
        "target": snapshot.name, "revision": snapshot.revision or f"files {digest(snapshot.folder)}",
        "config": sha(config), "thinking": options.thinking,
        "template": text.template_hash, "template_source": text.template_source,
        "stop_ids": list(text.stop_ids), "stop_source": text.stop_source, "special_ids": sha(sorted(text.special_ids)),
    }  # fmt: skip
    return target, prompts, text.special_ids, about


def load_drafters(options, design, backend, device, dtype, target, say):
    """The drafters of --drafter: ({name: drafter}, {name: what identifies it}), both empty without the flag."""
    drafters, origins = {}, {}
    for name in options.drafter:
        if options.drafter.count(name) > 1:
            raise ValueError(f"drafter {name} is given twice")
        if options.target == "toy":
            known = study_drafters(backend, design.gamma)
            if name not in known:
                raise ValueError(f"the toy has no drafter {name!r}; it has {', '.join(known)}")
            drafters[name], origins[name] = known[name], {"order": known[name].order}
            continue
        snapshot = locate(name)
        short = snapshot.name.rsplit("/", 1)[-1]
        if short in drafters:
            raise ValueError(f"two drafters are called {short!r}; rename a folder")
        in_place = {"auto": None, "anchor": False, "in-place": True}[options.slot_convention]
        drafter = backend.Drafter.load(snapshot.folder, target, dtype=dtype, device=device, in_place=in_place)
        for note in drafter.config.notes:
            say(f"note: {short}: {note}")
        if drafter.config.lattice and drafter.config.family == "attention":
            say(f"note: {short}: proposes from all tokens here; it is served from {drafter.config.lattice} candidates")
        say(f"drafter {short}: {drafter.config.family}, {drafter.config.parameter_count():,} parameters of its own")
        drafters[short] = drafter
        origins[short] = {
            "id": snapshot.name, "revision": snapshot.revision or f"files {digest(snapshot.folder)}",
            "config": sha(drafter.config), "family": drafter.config.family, "order": drafter.order,
        }  # fmt: skip
    return drafters, origins


def load_toy(options, design):
    """A toy of two domains whose floors can be enumerated, for trying everything without a language model."""
    if getattr(options, "slot_convention", "auto") != "auto":
        raise ValueError("--slot-convention means nothing to the toy's drafters")
    for name in ("prompts", "revision", "stop_ids", "prompt_tokens"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} means nothing to the toy target")
    if options.device not in ("auto", "cpu") or options.dtype not in ("auto", "float64"):
        raise ValueError("the toy target is float64 on the CPU; leave out --device and --dtype")
    target, domains = toy.study(design.anchors)
    if options.anchors_from:
        return target, [], (), {"device": "cpu", "dtype": "float64"}
    if unknown := set(options.domains or domains) - set(domains):
        raise ValueError(f"no domain {', '.join(sorted(unknown))}; the toy has {', '.join(domains)}")
    prompts = [
        protocol.EncodedPrompt(f"{name}:{i}", name, tokens)
        for name, all_tokens in domains.items()
        if name in (options.domains or domains)
        for i, tokens in enumerate(all_tokens)
    ]
    return target, prompts, (), {"device": "cpu", "dtype": "float64"}


def parser(doc):
    """The flags of a measuring program, from its docstring; every default is the paper's."""
    title, _, about = doc.partition("\n\n")
    parser = ArgumentParser(description=title, epilog=about, formatter_class=RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--target",
        default="Qwen/Qwen3-4B",
        metavar="ID_OR_FOLDER",
        help="hub id, folder, tiny or toy (default %(default)s)",
    )
    add("--revision", help="branch, tag or commit of a hub id")
    add(
        "--prompts",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="JSONL files, a domain each (default: the project's four)",
    )
    add("--domains", nargs="+", metavar="NAME", help="measure only these domains")
    add(
        "--prompt-tokens",
        type=int,
        metavar="N",
        help="leave out prompts longer than this (default: what the model holds)",
    )
    add("--anchors", type=int, help=f"anchors, and prompts, per domain (default {ANCHORS})")
    add("--paths", type=int, default=256, metavar="M", help="continuations per anchor (default %(default)s)")
    add("--gamma", type=int, default=7, help="block length (default %(default)s)")
    add("--answer-tokens", type=int, metavar="N",
        help=f"cap on an answer's length (default {ANSWER_TOKENS}, at most half of the context)")  # fmt: skip
    add("--temperature", type=float, default=1.0)
    add("--top-p", type=float, default=1.0)
    add("--top-k", type=int, default=0, help="0 = off")
    add(
        "--thinking",
        choices=("off", "on", "unset"),
        default="off",
        help="passed to the chat template (default %(default)s)",
    )
    add("--stop-ids", nargs="+", type=int, metavar="ID", help="end answers at these ids (default: the model's own)")
    add("--backend", choices=("fast", "reference"), default="fast")
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", choices=("auto", *ITEM_SIZE), default="auto", help="default: bfloat16 on cuda, float32 on a CPU")
    add("--seed", type=int, default=20260818)
    add("--limit", type=int, metavar="N", help="smoke run: at most N anchors and prompts per domain")
    add("--also", nargs="+", default=[], choices=ALSO, metavar="WHAT", help=f"measure as well: {', '.join(ALSO)}")
    add("--anchors-from", type=Path, metavar="RECORDS", help="measure the answers and anchors of another record file")
    add("--out", type=Path, metavar="FILE", help="record file (default: in runs/, named after what is measured)")
    add("--plot", type=Path, metavar="FILE", help="write the floor curves to this image file (needs matplotlib)")
    add("--quiet", action="store_true", help="print the JSON document only")
    return parser


def encode(options, design, config, text, say):
    """The first `anchors` prompts of each domain that fit, as token ids after the chat template."""
    room = config.max_positions - design.answer_tokens - design.gamma
    longest = min(room, options.prompt_tokens or room)
    if longest < 1:
        raise ValueError(
            f"--answer-tokens {design.answer_tokens} leaves no room in a context of {config.max_positions}"
        )
    thinking = {"off": False, "on": True, "unset": None}[options.thinking]
    taken, dropped, prompts = Counter(), Counter(), []
    with warnings.catch_warnings(record=True) as caught:
        found = read_prompts(options.prompts or builtin_prompts(), domains=options.domains)
    for warning in caught:
        say(f"note: {warning.message}")
    for prompt in found:
        if taken[prompt.domain] == design.anchors:
            continue
        tokens = tuple(text.chat([{"role": "user", "content": prompt.text}], thinking=thinking))
        if len(tokens) > longest:
            dropped[prompt.domain] += 1
            continue
        taken[prompt.domain] += 1
        prompts.append(protocol.EncodedPrompt(prompt.id, prompt.domain, tokens))
    for domain, count in dropped.items():
        say(f"note: {domain}: left out {count} prompts longer than {longest} tokens")
    if not prompts:
        raise ValueError(f"no prompt has at most {longest} tokens; give shorter ones or raise --prompt-tokens")
    return prompts


def estimate(target, prompts, design, dtype, processes=1):
    """Upper bounds on memory (of each process) and time, from the sizes and from one timed prefill and tree step."""
    rows, item_size = min(64, design.paths), ITEM_SIZE[dtype]
    started = time.perf_counter()
    session = target.open(np.array(max((p.tokens for p in prompts), key=len)))
    prefill = time.perf_counter() - started
    step = []
    for n in (min(protocol.ANSWERS_AT_ONCE, rows), rows):
        started = time.perf_counter()
        session.grow(np.full(n, -1), np.zeros(n, dtype=np.int64))
        step.append(time.perf_counter() - started)
    anchors = design.anchors * len({p.domain for p in prompts})
    answers = -(-len(prompts) // (processes * protocol.ANSWERS_AT_ONCE)) * design.answer_tokens * step[0]
    walks = -(-anchors // processes) * (prefill + (design.gamma - 1) * step[1] * design.paths / rows)
    gigabytes = 4 * design.paths * target.vocab_size * max(4, item_size) / 1e9  # rows and their sorted copies
    if hasattr(target, "config"):
        length = max(len(p.tokens) for p in prompts) + design.answer_tokens
        gigabytes += target.config.parameter_count() * item_size / 1e9
        gigabytes += target.config.kv_bytes_per_token(item_size) * length * protocol.ANSWERS_AT_ONCE / 1e9
    each = " a process" if processes > 1 else ""
    return (
        f"estimate: {len(prompts)} answers, {anchors} anchors x {design.paths} paths x {design.gamma} slots; "
        f"at most {gigabytes:.1f} GB{each} and {(answers + walks) / 60:.0f} min (if no answer stops early and no two "
        "paths agree), plus the floors"
    )


def versions(backend):
    """Versions of what computes the numbers."""
    names = ("blockfloor", "numpy", "tokenizers") + (("torch",) if backend == "fast" else ())
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in names}


def commit():
    """The project's commit, None outside a checkout."""
    where = Path(__file__).resolve().parent
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=where, capture_output=True, text=True,
                              check=True).stdout.strip()  # fmt: skip
    except (OSError, subprocess.CalledProcessError):
        return None


def sha(value):
    """First 16 hex digits of the SHA-256 of a value's text."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]
