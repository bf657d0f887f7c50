"""How much rejection is forced on a block drafter by what it may look at?

The target writes answers to prompts; at anchors inside them M continuations are walked, and the information
floors of order 0 (a proposal that sees the prefix only) and order 1 (one realised token more) are estimated
slot by slot.  Every anchor is a line of the record file; the same command resumes a stopped run.

    python examples/floor_qwen3_4b.py                                     # the paper's setting: Qwen3-4B, one GPU
    python examples/floor_qwen3_4b.py --target FOLDER --anchors 12        # any Qwen3 or Llama-family model
    python examples/floor_qwen3_4b.py --target toy --anchors 24           # no model, no network: ten seconds
    python examples/floor_qwen3_4b.py --target FOLDER --backend reference --limit 2    # NumPy, two anchors a domain

Prints an estimate of memory and time, a progress bar with the running floors, a table per domain and pooled,
and one JSON document as the last line.  `python -m reference.report RECORDS` prints it again without a model.
"""

import argparse
import hashlib
import importlib.metadata
import platform
import subprocess
import sys
import time
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

from models import toy
from models.checkpoint import CheckpointError, digest, locate
from models.config import ConfigError, DecoderConfig
from models.text import Text, TextError, builtin_prompts, read_prompts
from reference import protocol, report
from reference.laws import SamplingLaw
from reference.records import RecordError, RecordFile

ITEM_SIZE = {"bfloat16": 2, "float32": 4, "float64": 8}


def main(arguments=None):
    """Measure, or say in one line what is wrong."""
    options = parse(arguments)
    try:
        run(options)
    except (CheckpointError, ConfigError, TextError, RecordError, ValueError) as error:
        sys.exit(f"error: {error}")


def run(options):
    """Load, estimate, measure or resume, report."""
    say = (lambda *_: None) if options.quiet else (lambda *text: print(*text, flush=True))
    for name in ("limit", "prompt_tokens"):
        if getattr(options, name) is not None and getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    law = SamplingLaw(options.temperature, options.top_k, options.top_p)
    anchors = min(options.anchors, options.limit or options.anchors)
    design = protocol.Design(anchors, options.paths, options.gamma, options.answer_tokens, law, options.seed)
    backend, device, dtype = choose_backend(options)
    if options.plot:
        report.check_plot(options.plot)
    load = load_toy if options.target == "toy" else load_model
    target, prompts, special_ids, about = load(options, design, backend, device, dtype, say)
    provenance = {
        "target": options.target, "revision": None, "design": design.provenance(),
        "prompts": sha([(p.id, p.domain, p.tokens) for p in prompts]), "backend": options.backend, "dtype": dtype,
        "device": device, "hardware": hardware(device), "versions": versions(options.backend), "commit": commit(),
        **about,
    }  # fmt: skip
    name = provenance["target"].replace("/", "--")
    out = options.out or Path("runs") / f"floors-{name}-{options.backend}.jsonl"
    with RecordFile(out, provenance) as records:
        for note in records.notes:
            say(f"note: {note}")
        done = sum(row["kind"] == "anchor" for row in records.rows)
        say(f"records: {out} ({done} anchors done)")
        if not done:
            say(estimate(target, prompts, design, provenance["dtype"]))
        protocol.measure(backend, target, prompts, design, records, special_ids=special_ids, quiet=options.quiet)
    summary = report.summarise(*report.read(out))
    say(report.table(summary))
    if options.plot:
        report.plot(summary, options.plot)
        say(f"figure: {options.plot}")
    print(report.last_line(summary))


def load_model(options, design, backend, device, dtype, say):
    """A language model: (target, encoded prompts, special ids, what identifies it in the provenance)."""
    snapshot = locate(options.target, revision=options.revision)
    config = DecoderConfig.from_folder(snapshot.folder)
    for note in config.notes:
        say(f"note: {note}")
    text = Text.from_folder(snapshot.folder, stop_ids=options.stop_ids)
    if not text.stop_ids:
        say("note: no stop id anywhere; answers run to --answer-tokens")
    prompts = encode(options, design, config, text, say)
    target = backend.Decoder.load(snapshot.folder, dtype=dtype, device=device, stop_ids=text.stop_ids)
    about = {
        "target": snapshot.name, "revision": snapshot.revision or f"files {digest(snapshot.folder)}",
        "config": sha(config), "thinking": options.thinking,
        "template": text.template_hash, "template_source": text.template_source,
        "stop_ids": list(text.stop_ids), "stop_source": text.stop_source, "special_ids": sha(sorted(text.special_ids)),
    }  # fmt: skip
    return target, prompts, text.special_ids, about


def load_toy(options, design, *_):
    """A toy of two domains whose floors can be enumerated, for trying everything without a language model."""
    for name in ("prompts", "revision", "stop_ids", "prompt_tokens"):
        if getattr(options, name):
            raise ValueError(f"--{name.replace('_', '-')} means nothing to the toy target")
    if options.device not in ("auto", "cpu") or options.dtype not in ("auto", "float64"):
        raise ValueError("the toy target is float64 on the CPU; leave out --device and --dtype")
    target, domains = toy.study(design.anchors)
    if unknown := set(options.domains or domains) - set(domains):
        raise ValueError(f"no domain {', '.join(sorted(unknown))}; the toy has {', '.join(domains)}")
    prompts = [
        protocol.EncodedPrompt(f"{name}:{i}", name, tokens)
        for name, all_tokens in domains.items()
        if name in (options.domains or domains)
        for i, tokens in enumerate(all_tokens)
    ]
    return target, prompts, (), {"device": "cpu", "dtype": "float64"}


def parse(arguments):
    """The command line; every default is the paper's."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    add = parser.add_argument
    add(
        "--target", default="Qwen/Qwen3-4B", metavar="ID_OR_FOLDER", help="hub id, folder, or toy (default %(default)s)"
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
    add("--anchors", type=int, default=96, help="anchors, and prompts, per domain (default %(default)s)")
    add("--paths", type=int, default=256, metavar="M", help="continuations per anchor (default %(default)s)")
    add("--gamma", type=int, default=7, help="block length (default %(default)s)")
    add("--answer-tokens", type=int, default=2048, metavar="N", help="cap on an answer's length (default %(default)s)")
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
    add("--out", type=Path, metavar="FILE", help="record file (default: runs/floors-TARGET-BACKEND.jsonl)")
    add("--plot", type=Path, metavar="FILE", help="write the floor curves to this image file (needs matplotlib)")
    add("--quiet", action="store_true", help="print the JSON document only")
    return parser.parse_args(arguments)


def choose_backend(options):
    """(backend package, device, dtype), refusing what the backend cannot do."""
    if options.backend == "reference":
        import reference

        device = "cpu" if options.device == "auto" else options.device
        dtype = "float32" if options.dtype == "auto" else options.dtype
        if device != "cpu" or dtype == "bfloat16":
            raise ValueError(f"the reference backend runs float32 or float64 on the CPU, not {dtype} on {device}")
        return reference, device, dtype
    import torch

    import fast

    device = options.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = options.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    return fast, device, dtype


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


def estimate(target, prompts, design, dtype):
    """Upper bounds on memory and time, from the sizes and from one timed prefill and tree step."""
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
    answers = -(-len(prompts) // protocol.ANSWERS_AT_ONCE) * design.answer_tokens * step[0]
    walks = anchors * (prefill + (design.gamma - 1) * step[1] * design.paths / rows)
    gigabytes = 4 * design.paths * target.vocab_size * max(4, item_size) / 1e9  # rows and their sorted copies
    if hasattr(target, "config"):
        length = max(len(p.tokens) for p in prompts) + design.answer_tokens
        gigabytes += target.config.parameter_count() * item_size / 1e9
        gigabytes += target.config.kv_bytes_per_token(item_size) * length * protocol.ANSWERS_AT_ONCE / 1e9
    return (
        f"estimate: {len(prompts)} answers, {anchors} anchors x {design.paths} paths x {design.gamma} slots; "
        f"at most {gigabytes:.1f} GB and {(answers + walks) / 60:.0f} min (if no answer stops early and no two paths "
        "agree), plus the floors"
    )


def hardware(device):
    """A name for the machine's processor or accelerator."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.get_device_name(device)
    cpu = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in cpu.read_text().splitlines() if line.startswith("model name")]
        if cpu.exists()
        else []
    )
    return f"{names[0]} x {len(names)}" if names else platform.processor() or platform.machine()


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


if __name__ == "__main__":
    main()
