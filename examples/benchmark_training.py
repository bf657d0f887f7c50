"""The training rows of `examples/benchmark.py`: a D-REAL step of a tiny drafter, against a baseline step."""

import json
import statistics

import numpy as np
import torch
from benchmark_engine import seconds
from benchmark_floors import in_own_process, peak_memory

import fast
from fast.posttraining import trainer_of
from fast.training import Settings, anchor_places
from fast.training_program import sequence_of
from models.checkpoint import locate
from models.text import Text, builtin_prompts, read_prompts
from reference.laws import SamplingLaw

DRAFTERS = ("tiny/dspark", "tiny/attention", "tiny/dflash2", "tiny/dflash")
ANSWERS, ANSWER_TOKENS, ANCHORS, STEPS = 32, 256, 64, 8  # STEPS of each objective after one that is not timed


def training_rows(seed):
    """Time and peak memory of a D-REAL step over those of a baseline step, equal anchors, for every tiny drafter."""
    target = fast.Decoder.load(locate("tiny").folder)
    sequences = answers(target)
    for name in DRAFTERS:
        both = [trainer(objective, name, target, sequences, seed) for objective in ("baseline", "dreal")]
        for warm_up in both:
            warm_up.update()
        pairs = [[seconds(timed.update) for timed in both] for _ in range(STEPS)]
        shares = both[1].totals
        memory = [peak_of(objective, name, seed) for objective in ("baseline", "dreal")]
        yield {
            "work": f"a D-REAL step of {name}, 8 answers, up to {ANCHORS} anchors in each",
            "peer": "a step of the drafter's first objective on the same anchors",
            "cost": round(statistics.median(b / a for a, b in pairs), 2),
            "reused": round(shares["reused"] / shares["slots"], 2),
            "memory": round(memory[1] / memory[0], 2),
            "ours_s": round(statistics.median(b for _, b in pairs), 2),
            "peer_s": round(statistics.median(a for a, _ in pairs), 2),
            "peak_gb": memory,
        }


def answers(target):
    """What the target answers to every third of the project's own prompts, as sequences to train on."""
    text = Text.from_folder(locate("tiny").folder)
    prompts = [text.chat([{"role": "user", "content": p.text}]) for p in read_prompts(builtin_prompts())[::3][:ANSWERS]]
    uniforms = np.random.default_rng(0).random((len(prompts), ANSWER_TOKENS))
    written = fast.write_answers(target, prompts, uniforms, SamplingLaw())
    rows = [{"prompt": p, "tokens": a.tokens, "stopped": a.stopped} for p, a in zip(prompts, written, strict=True)]
    sequences = [sequence_of(row, text.stop_ids) for row in rows]
    return [sequence for sequence in sequences if len(anchor_places(sequence.supervised))]


def trainer(objective, name, target, sequences, seed):
    """The trainer of an objective on a tiny drafter."""
    drafter = fast.Drafter.load(locate(name).folder, target)
    settings = Settings(STEPS + 1, 8, ANCHORS, 0, 1e-4, seed=seed)
    return trainer_of(objective, target, drafter, sequences, settings)


def peak_of(objective, name, seed):
    """Peak memory of a process that does STEPS steps, in GB above what it held before the first.

    oneDNN keeps what it has prepared for every size of matrix it meets, and D-REAL steps meet many: left alone, that
    cache would be what is measured.
    """
    code = f"import benchmark_training as b; b.measure({objective!r}, {name!r}, {seed}, {torch.get_num_threads()})"
    return in_own_process(code, ONEDNN_PRIMITIVE_CACHE_CAPACITY="8", LRU_CACHE_CAPACITY="8")


def measure(objective, name, seed, threads):
    """Print how far the steps of one objective raise the peak memory of this process."""
    torch.set_num_threads(threads)
    target = fast.Decoder.load(locate("tiny").folder)
    made = trainer(objective, name, target, answers(target), seed)
    before = peak_memory()
    for _ in range(STEPS):
        made.update()
    print(json.dumps(round(peak_memory() - before, 3)))
