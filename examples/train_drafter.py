"""Train a block drafter for a target, on answers that the target writes itself.

The target answers the prompts once, at temperature 1 (OUT.answers.jsonl, written line by line and resumable).  Then it
stays frozen: each step reads some answers with it, once each, and trains the drafter behind many random positions of
them.  Nothing else is stored.  Defaults are those of the released drafters for Qwen3.

    python examples/train_drafter.py --target Qwen/Qwen3-4B --family dspark --out dspark --prompts PROMPTS.jsonl
    torchrun --nproc-per-node 8 examples/train_drafter.py --target Qwen/Qwen3-4B --family dspark --out dspark ...
    python examples/train_drafter.py --target TINY_TARGET --preset tiny --family attention --out head    # on a laptop
    python examples/train_drafter.py ... --limit 4                        # a trial of every part in seconds
    python examples/train_drafter.py ... --resume                         # go on after an interruption

OUT becomes a folder in the format in which such drafters are released, which SGLang and vLLM load; the training's state
is OUT.checkpoint.  Every number of processes makes the same steps.  The last line is one JSON document.
"""

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed
from tqdm import tqdm

from fast import training
from fast.decoder import Decoder
from fast.draft_losses import RECIPES
from fast.paths import write_answers
from models.checkpoint import digest, locate
from models.config import DecoderConfig
from models.drafter_config import DrafterConfig
from models.text import Text, builtin_prompts, read_prompts
from reference.laws import SamplingLaw
from reference.program import sha
from reference.records import RecordFile, read

SIZES = {  # of a drafter, of a step, of its data
    "released": {"layers": 5, "taps": 5, "rank": None, "anchors": 512, "sequences": 512, "learning_rate": 6e-4,
                 "answer_tokens": 4096},
    "tiny": {"layers": 2, "taps": 3, "rank": 32, "anchors": 64, "sequences": 8, "learning_rate": 2e-3,
             "answer_tokens": 512},
}  # fmt: skip
RANKS = {"dflash": 0, "dspark": 256, "attention": 512, "dflash2": 256}  # of the head, in the released sizes
BLOCKS = {"dflash": 7, "dspark": 7, "attention": 7, "dflash2": 8}
HEADS, CANDIDATES, GROUP = 4, 16, 16  # of a prefix-attention head, of a slot, channels of a convolution's kernel
ANSWERS_AT_ONCE, ANSWER_SEED = 16, 0


def main(arguments=None):
    """Train, or say in one line what is wrong."""
    options = parse(arguments)
    try:
        report = run(options)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    if report:
        print(json.dumps(report))


def run(options):
    """Answers, drafter, training, the drafter's folder; returns the report, None but in the first process."""
    rank, processes = join(options)
    say = (lambda *text: print(*text, file=sys.stderr, flush=True)) if rank == 0 else (lambda *_: None)
    checkpoint = Path(f"{options.out}.checkpoint")
    if checkpoint.exists() and not options.resume:
        raise ValueError(f"{checkpoint} exists; add --resume to go on, or choose another --out")
    snapshot = locate(options.target, revision=options.revision)
    text = Text.from_folder(snapshot.folder)
    target = Decoder.load(snapshot.folder, dtype=options.dtype, device=options.device, stop_ids=text.stop_ids)
    raw = new_config(
        json.loads((snapshot.folder / "config.json").read_bytes()), options, mask_id(options, target, text)
    )
    config = DrafterConfig.from_dict(raw)
    about = {"target": snapshot.name, "revision": snapshot.revision or f"files {digest(snapshot.folder)}"}
    origin, sequences = read_sequences(options, target, text, about, say)

    steps = options.steps or options.epochs * (len(sequences) // options.sequences)
    settings = training.Settings(
        min(steps, options.limit or steps), options.sequences, options.anchors, options.at_once,
        options.learning_rate, seed=options.seed,
    )  # fmt: skip
    autocast = torch.bfloat16 if options.dtype == "bfloat16" else None
    drafter = training.new_drafter(config, target, options.seed)
    trainer = training.Trainer(target, drafter, sequences, settings, RECIPES[options.objective], autocast)
    identity = about | {
        "config": sha(raw), "answers": sha((origin, len(sequences), options.max_tokens)),
        "objective": options.objective, "dtype": options.dtype, **asdict(settings),
    }  # fmt: skip
    if options.resume:
        training.load_checkpoint(checkpoint, trainer, identity)
    say(estimate(trainer, processes))

    trainer.seconds.clear()
    begin, first, step = time.perf_counter(), trainer.step, None
    with tqdm(total=settings.steps, initial=first, unit="step", disable=None if rank == 0 else True) as bar:
        while trainer.step < settings.steps:
            step = trainer.update()
            bar.update()
            bar.set_postfix(loss=f"{step.loss:.3f}", tau=f"{step.tau:.2f}", refresh=False)
            if rank == 0 and (trainer.step % options.save_every == 0 or trainer.step == settings.steps):
                training.save_checkpoint(checkpoint, trainer, identity)
                write_drafter(Path(options.out), raw, drafter)
    seconds = time.perf_counter() - begin
    if options.profile:
        say(profile(trainer.seconds, seconds))
    if rank:
        return None
    read_per_step = np.mean([len(s.tokens) for s in trainer.sequences]) * settings.sequences
    return about | {
        "family": config.family, "parameters": config.parameter_count(), "sequences": len(trainer.sequences),
        "steps": trainer.step, "processes": processes, "seconds": round(seconds, 2),
        "tokens_per_second": round(read_per_step * (trainer.step - first) / seconds),
        "loss": step and round(step.loss, 4), "tau": step and round(step.tau, 4),
    }  # fmt: skip


def join(options):
    """Join the processes that torchrun started, if it did, and fill in where to run: (rank, number of processes)."""
    cuda = torch.cuda.is_available()
    if options.device == "auto":
        options.device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu"
    if options.dtype == "auto":
        options.dtype = "float32" if options.device == "cpu" else "bfloat16"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1 and not distributed.is_initialized():
        if options.device != "cpu":
            torch.cuda.set_device(options.device)
        backend = "gloo" if options.device == "cpu" else "nccl"
        distributed.init_process_group(backend, timeout=timedelta(days=30))  # the others wait for the answers
    return training.place()


# The drafter


def new_config(target, options, mask):
    """config.json of a new drafter as its family is released: the target's own, with the drafter's keys.

    dflash, dspark: DeepSpec's dialect; attention: the same with specfloor's keys; dflash2: z-lab's.
    """
    family, layers = options.family, options.layers
    widths = DecoderConfig.from_dict(target)
    config = target | {
        "model_type": "qwen3", "architectures": ["Qwen3DSparkModel"], "num_hidden_layers": layers,
        "num_target_layers": widths.num_layers, "layer_types": ["full_attention"] * layers,
        "head_dim": widths.head_dim, "attention_bias": False, "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip
    if "rope_parameters" in config:  # both spellings of the rotary base: readers look for one of them
        config["rope_theta"] = widths.rope.theta
    elif not config.get("rope_scaling"):
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": widths.rope.theta}
    block = {
        "block_size": options.block_size, "mask_token_id": mask,
        "target_layer_ids": spread_taps(widths.num_layers, options.taps),
    }  # fmt: skip
    if family == "dflash2":
        selector = {"selector_rank": options.rank, "selector_top_k": CANDIDATES}
        conv = {"conv_kernel_size": 2, "conv_group_size": GROUP}
        return config | {
            "architectures": ["DFlash2DraftModel"], "is_causal": False, "dflash_config": block | selector | conv,
        }  # fmt: skip
    config |= block | {
        "sample_from_anchor": True, "num_anchors": options.anchors, "markov_rank": options.rank,
        "enable_confidence_head": family != "dflash",
    }  # fmt: skip
    if family == "dflash":
        return config
    config |= {"confidence_head_with_markov": True, "markov_head_type": "attn" if family == "attention" else "vanilla"}
    if family == "dspark":
        return config
    return config | {
        "markov_num_heads": HEADS, "markov_head_dim": options.rank // HEADS, "markov_mlp_hidden": 4 * options.rank,
        "markov_gate_mode": "none", "markov_anchor_kv": False, "markov_out_scale": 0.35,
        "markov_seed_std_pred": 0.0602, "markov_seed_std_succ": 0.0664,
        "slot_embed_std": 0.02, "slot_embed_depth_frac": 0.4,
        "short_conv": True, "short_conv_group_size": GROUP, "slot_embed": True,
        "nominate_alpha": RECIPES["attention"].nomination, "nominate_topk": CANDIDATES,
        "causal_draft_mask": False, "is_causal": False,
        "dflash_config": {"slot_embed": True, "short_conv_kernel_size": 2, "short_conv_group_size": GROUP},
    }  # fmt: skip


def spread_taps(layers, count):
    """Up to `count` different layers of the target, evenly from the second to the fourth-last."""
    low = min(1, layers - 2)
    return [int(tap) for tap in np.unique(np.linspace(low, max(layers - 3, low), count).round())]


def mask_id(options, target, text):
    """The id that fills the block: asked for, the tokenizer's mask, or the first row of the table without a token."""
    if options.mask_id is not None:
        return options.mask_id
    if "mask_token" in text.special_tokens:
        return text.tokenizer.token_to_id(text.special_tokens["mask_token"])
    if text.vocab_size == target.vocab_size:
        raise ValueError(
            "the tokenizer names no mask token and leaves no spare id; say which one to use with --mask-id"
        )
    return text.vocab_size


def write_drafter(folder, raw, drafter):
    """The drafter's folder: config.json and bfloat16 weights, with copies of the target's tables where it is custom."""
    weights = dict(drafter.state_dict())
    if drafter.config.family != "dflash2":
        weights |= {"embed_tokens.weight": drafter.embedding, "lm_head.weight": drafter.head}
    weights = {name: tensor.to("cpu", torch.bfloat16, copy=True).contiguous() for name, tensor in weights.items()}
    folder.mkdir(parents=True, exist_ok=True)
    data = f"{json.dumps(raw, indent=2)}\n".encode()
    training.write_atomically(folder / "config.json", lambda path: path.write_bytes(data))
    training.write_atomically(folder / "model.safetensors", lambda path: save_file(weights, path, {"format": "pt"}))


# Its data


def read_sequences(options, target, text, about, say):
    """Every prompt with the target's answer, written now where it is missing: (what decided them, the sequences)."""
    path = Path(options.answers or f"{options.out}.answers.jsonl")
    thinking = {"off": False, "on": True, "unset": None}[options.thinking]
    prompts = read_prompts(options.prompts or builtin_prompts())[: options.limit]
    encoded = [text.chat([{"role": "user", "content": p.text}], thinking=thinking) for p in prompts]
    if len(encoded) < options.sequences:
        raise ValueError(f"{len(encoded)} prompts cannot fill a step of {options.sequences}; give more or --sequences")
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
    """Let the target answer the prompts that have no record yet; an answer depends on its prompt and place only."""
    law, done = SamplingLaw(), len(records.rows)
    with tqdm(total=len(prompts), initial=done, unit="answer", disable=None) as bar:
        for start in range(done, len(prompts), ANSWERS_AT_ONCE):
            places = range(start, min(start + ANSWERS_AT_ONCE, len(prompts)))
            uniforms = [np.random.default_rng([ANSWER_SEED, i]).random(answer_tokens) for i in places]
            some = [prompts[i] for i in places]
            for prompt, answer in zip(some, write_answers(target, some, uniforms, law), strict=True):
                records.append({"kind": "answer", "prompt": prompt, "tokens": answer.tokens, "stopped": answer.stopped})
            bar.update(len(some))


def sequence_of(row, stop_ids, longest):
    """A record's tokens and which are the answer's, its stop token (the first of the target's) among them."""
    tokens = np.array([*row["prompt"], *row["tokens"], *stop_ids[:1] * row["stopped"]], dtype=np.int64)[:longest]
    return training.Sequence(tokens, np.arange(len(tokens)) >= len(row["prompt"]))


# What it takes


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


def parse(arguments):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], epilog=__doc__.split("\n\n", 1)[1],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = parser.add_argument
    add("--target", required=True, metavar="ID_OR_FOLDER")
    add("--revision", help="branch, tag or commit of a hub id")
    add("--family", required=True, choices=tuple(RANKS))
    add("--out", required=True, metavar="FOLDER", help="the drafter's folder")
    add("--preset", choices=tuple(SIZES), default="released", help="sizes for a large model or for a tiny one")
    add("--layers", type=int)
    add("--block-size", type=int)
    add("--rank", type=int, help="width of the head")
    add("--taps", type=int, help="how many of the target's layers are read")
    add("--mask-id", type=int, help="the id that fills the block (default: the tokenizer's mask, or a spare id)")
    add("--prompts", nargs="+", type=Path, metavar="FILE", help="JSONL files (default: the project's, for a trial)")
    add("--answers", type=Path, metavar="FILE", help="the target's answers (default: OUT.answers.jsonl)")
    add("--answer-tokens", type=int, metavar="N", help="cap on an answer's length")
    add("--max-tokens", type=int, default=4096, metavar="N", help="longer sequences are cut")
    add("--thinking", choices=("off", "on", "unset"), default="off", help="passed to the chat template")
    add("--objective", choices=tuple(RECIPES), help="default: the family's own")
    add("--sequences", type=int, help="sequences of a step, over all processes")
    add("--anchors", type=int, help="most anchors of a sequence")
    add("--at-once", type=int, default=0, metavar="N", help="anchors held in memory at a time (default: all)")
    add("--epochs", type=int, default=10)
    add("--steps", type=int, help="length in steps instead")
    add("--learning-rate", type=float)
    add("--seed", type=int, default=42)
    add("--device", default="auto", help="cpu, cuda or cuda:N (default: cuda if there is one)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="of products; weights are float32")
    add("--save-every", type=int, default=100, metavar="STEPS")
    add("--resume", action="store_true", help="go on from OUT.checkpoint")
    add("--limit", type=int, metavar="N", help="smoke run: at most N prompts and steps")
    add("--profile", action="store_true", help="print where the time of a step goes")
    options = parser.parse_args(arguments)
    for name, value in SIZES[options.preset].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.rank = 0 if options.family == "dflash" else options.rank or RANKS[options.family]
    options.block_size = options.block_size or BLOCKS[options.family]
    options.objective = options.objective or options.family
    if options.limit:
        options.sequences = min(options.sequences, options.limit)
    return options


if __name__ == "__main__":
    main()
