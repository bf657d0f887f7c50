"""How can a drafter lose half of its tokens when nothing at all is hidden from it?

The target's next token is the parity of the prefix ("Beyond Parallel Blindness", App. G.2), so it is certain and the
information floor is 0.  A drafter of a class that cannot compute parity is rejected half of the time all the same.
Over all prefixes of n tokens, alike probable, the risk of a proposal is the sum of three parts:

    floor      what nobody can avoid who sees the prefix
    slack      what the best proposal of the class loses beyond that (architectural)
    training   what this proposal loses beyond the best of its class

    python examples/parity.py                       # NumPy
    python examples/parity.py --backend fast        # PyTorch

    what the class reads     proposal         risk    floor    slack  training
    nothing                  best           0.5000   0.0000   0.5000    0.0000
    nothing                  untrained      0.5000   0.0000   0.5000    0.0000
    the last token           best           0.5000   0.0000   0.5000    0.0000
    the last token           untrained      0.5000   0.0000   0.5000    0.0000
    all but the first        best           0.5000   0.0000   0.5000    0.0000
    all but the first        untrained      0.5000   0.0000   0.5000    0.0000
    how many ones, up to 2   best           0.4062   0.0000   0.4062    0.0000
    how many ones, up to 2   untrained      0.4685   0.0000   0.4062    0.0622
    everything               best           0.0000   0.0000   0.0000    0.0000
    everything               untrained      0.4711   0.0000   0.0000    0.4711

The last two parts are the model gap.  Of a class that is blind to parity no proposal is better than another.  Takes 1
second on one core (AMD EPYC), 3 with --backend fast.  The last line is one JSON document.
"""

import argparse
import json
from itertools import product

import numpy as np

from models import toy

VIEWS = {  # what the proposals of a class can depend on
    "nothing": lambda prefix: (),
    "the last token": lambda prefix: prefix[-1:],
    "all but the first": lambda prefix: prefix[1:],
    "how many ones, up to 2": lambda prefix: min(sum(prefix), 2),
    "everything": lambda prefix: prefix,
}


def main(arguments=None):
    """Take every class's risk apart; print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("reference", "fast"), default="reference")
    parser.add_argument("--tokens", type=int, default=6, metavar="N", help="length of the prefix (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the untrained proposals (default %(default)s)")
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        parser.error(f"--tokens must be at least 1, got {options.tokens}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    if options.backend == "fast":
        import torch

        import fast as backend

        array = torch.from_numpy
    else:
        import reference as backend

        array = np.asarray

    prefixes = list(product((0, 1), repeat=options.tokens))
    slots = [next(iter(backend.enumerate_paths(toy.parity(), prefix, 1))) for prefix in prefixes]
    floor = float(np.mean([backend.floor(slot, 0).fit for slot in slots]))
    rows = np.concatenate([np.asarray(slot.rows) for slot in slots])
    rng, results = np.random.default_rng(options.seed), {}
    print(f"{'what the class reads':<25}{'proposal':<12}{'risk':>9}{'floor':>9}{'slack':>9}{'training':>10}")
    for name, view in VIEWS.items():
        cells, draft = [view(prefix) for prefix in prefixes], np.empty_like(rows)
        for cell in sorted(set(cells)):  # the best of the class: one barycentre for all prefixes that look alike
            here = [i for i, other in enumerate(cells) if other == cell]
            draft[here] = np.asarray(backend.barycentre(array(rows[here])))
        untrained = {cell: rng.dirichlet(np.ones(2)) for cell in sorted(set(cells))}
        risks = {
            "best": risk(backend, array, slots, draft),
            "untrained": risk(backend, array, slots, np.array([untrained[cell] for cell in cells])),
        }
        for proposal, value in risks.items():
            parts = {"risk": value, "floor": floor, "slack": risks["best"] - floor, "training": value - risks["best"]}
            results[f"{name}, {proposal}"] = parts
            print(f"{name:<25}{proposal:<12}{value:9.4f}{floor:9.4f}{parts['slack']:9.4f}{parts['training']:10.4f}")
    print(json.dumps({"example": "parity", **vars(options), "classes": results}))


def risk(backend, array, slots, draft):
    """Mean risk over the prefixes, each with its own proposal: draft [N, V]."""
    return float(np.mean([backend.risk(slot, array(q)) for slot, q in zip(slots, draft, strict=True)]))


if __name__ == "__main__":
    main()
