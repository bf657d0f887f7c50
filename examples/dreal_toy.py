"""Which training objective leads a drafter to the longest accepted blocks?

A drafter of the smallest kind, one row of logits for each own last token and the same at all K = 3 slots, drafts a
chain that looks two tokens back, so it can never be perfect.  Its expected accepted length (bonus token counted) is
known exactly, and so is the gradient.  Each objective climbs from the same start, on fresh blocks in every step:

    exact           the gradient of the expected length itself, by enumeration
    dreal           D-REAL, on blocks that the drafter draws
    dpace           D-PACE, and
    static_decay    cross-entropy with exponentially falling weights, on blocks that the target writes
    tv_static       overlap with the target's rows along such blocks, under the same weights

Each mean gradient is scaled to the exact one's length at the start.  `bias` is the distance left between the two then,
over all blocks with their probabilities, and `cosine` that of the angle between them.

    python examples/dreal_toy.py                       # NumPy
    python examples/dreal_toy.py --backend fast        # PyTorch

    objective           bias   cosine     step 0    step 15    step 60   step 240
    exact           0.000000   1.0000     2.4124     2.9776     3.6124     3.6413
    dreal           0.000000   1.0000     2.4124     2.7026     3.5184     3.6348
    dpace           0.234778   0.8890     2.4124     3.3322     3.3258     3.3884
    tv_static       0.164164   0.9457     2.4124     3.2932     3.4096     3.6662
    static_decay    0.276268   0.8463     2.4124     3.4069     3.4418     3.4599

D-REAL climbs the exact gradient and ends with it, as far as the kinks of the overlap let them; here overlap under
static weights ends there too, and cross-entropy does not.  Takes 4 seconds on one core (AMD EPYC), 9 with --backend
fast.  The last line is one JSON document.
"""

import argparse
import json
from itertools import product

import numpy as np

from models import toy

OBJECTIVES = ("dreal", "dpace", "tv_static", "static_decay")
PREFIX, SLOTS, VOCAB = (0, 0), 3, 4


def main(arguments=None):
    """Train one drafter per objective; print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("reference", "fast"), default="reference")
    parser.add_argument("--steps", type=int, default=240, help="default %(default)s")
    parser.add_argument("--blocks", type=int, default=64, help="drawn per step (default %(default)s)")
    parser.add_argument("--rate", type=float, default=2.0, help="of the first step (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 0:
        parser.error(f"--steps must be at least 0, got {options.steps}")
    if options.blocks < 1:
        parser.error(f"--blocks must be at least 1, got {options.blocks}")
    if not 0 < options.rate < np.inf:
        parser.error(f"--rate must be positive and finite, got {options.rate}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    if options.backend == "fast":
        import fast as backend
    else:
        import reference as backend

    rng = np.random.default_rng(options.seed)
    target = toy.markov_chain(rng.dirichlet(np.full(VOCAB, 0.5), size=(VOCAB, VOCAB)))
    start = 0.3 * rng.normal(size=(VOCAB, VOCAB))
    exact = expected_length(target, start)[1]
    every, results = np.array(list(product(range(VOCAB), repeat=SLOTS))), {}
    shown = sorted({0, options.steps // 16, options.steps // 4, options.steps})
    print(f"{'objective':<14}{'bias':>10}{'cosine':>9}" + "".join(f"{f'step {n}':>11}" for n in shown))
    for name in ("exact", *OBJECTIVES):
        mean, draws = exact, np.random.default_rng(options.seed)
        if name != "exact":
            weights = chances(writer(name, target, start), every).prod(axis=1)
            mean = slope(backend, name, target, start, every, weights)
        scale = float(np.linalg.norm(exact) / np.linalg.norm(mean))
        bias = float(np.linalg.norm(scale * mean - exact))
        cosine = float(scale * (mean * exact).sum() / (exact**2).sum())
        z, lengths = start.copy(), []
        for n in range(options.steps + 1):
            length, direction = expected_length(target, z)
            lengths.append(length)
            if name != "exact":
                slots = backend.walk(writer(name, target, z), PREFIX, SLOTS, draws.random((options.blocks, SLOTS)))
                blocks = np.stack([slot.drawn for slot in slots], axis=1)
                direction = slope(backend, name, target, z, blocks, np.full(len(blocks), 1 / len(blocks)))
            z += options.rate / (1 + n / 20) * scale * direction
        lengths = [lengths[n] for n in shown]
        results[name] = {"bias": bias, "cosine": cosine, "scale": scale, "length": lengths}
        print(f"{name:<14}{bias:10.6f}{cosine:9.4f}" + "".join(f"{length:11.4f}" for length in lengths))
    print(json.dumps({"example": "dreal_toy", **vars(options), "shown": shown, "objectives": results}))


def expected_length(target, z):
    """Tokens per round of the drafter with logits z [V, V], and the exact gradient [V, V]."""
    length, slope = toy.drafted_length(target, PREFIX, np.broadcast_to(z, (SLOTS, VOCAB, VOCAB)))
    return length, slope.sum(axis=0)


def drafter(z):
    """The drafter with logits z [V, V] as something to draw blocks from."""
    rows = np.exp(z) / np.exp(z).sum(axis=-1, keepdims=True)
    return toy.ToyTarget(VOCAB, lambda history: rows[history[-1]])


def writer(name, target, z):
    """Who writes the blocks that an objective learns from."""
    return drafter(z) if name == "dreal" else target


def rows_along(source, blocks):
    """The rows of a target or drafter along blocks [B, K]: [B, K, V]."""
    return np.array([[source.next_token((*PREFIX, *block[:k])) for k in range(SLOTS)] for block in blocks])


def chances(source, blocks):
    """The probability of every token of blocks [B, K] under a target or drafter: [B, K]."""
    return np.take_along_axis(rows_along(source, blocks), blocks[..., None], axis=-1)[..., 0]


def slope(backend, name, target, z, blocks, weights):
    """Weighted mean over blocks [B, K] of an objective's ascent direction in the drafter's logits: [V, V]."""
    before = np.concatenate([np.full((len(blocks), 1), PREFIX[-1]), blocks[:, :-1]], axis=1)
    logits, arguments = z[before], [blocks]  # [B, K, V]
    if name in ("dreal", "tv_static"):
        arguments = [rows_along(target, blocks)]
    if name == "dreal":
        arguments += [blocks, chances(drafter(z), blocks)]
    function = getattr(backend, name)
    if backend.__name__ == "fast":
        import torch

        logits = torch.tensor(logits, requires_grad=True)
        function(logits, *map(torch.from_numpy, arguments)).loss.backward()
        grad = logits.grad.numpy()
    else:
        grad = function(logits, *arguments).grad
    if name in ("dreal", "tv_static"):
        grad = SLOTS * grad  # these two are per slot
    total = np.zeros_like(z)
    np.add.at(total, before, -len(blocks) * weights[:, None, None] * grad)  # their mean is over B
    return total


if __name__ == "__main__":
    main()
