"""How close does each estimate of an information floor come, where the floor is known exactly?

Two targets whose continuations can be enumerated: a chain over two tokens that looks two tokens back, and a table of
random rows without structure.  The floors of order 0, 1 and 2 at slot 3 are estimated from M = 64 paths, 20 times:

    plug-in       scored on the paths it was fitted to: leans low
    cross-fit     fitted on half of a cell's paths and scored on the rest: leans high; says nothing of cells met once
    interval      what those cells leave open around it: mean ends, and how often the floor lies between them
    soft          order 1, every predecessor uses every path, by weight; scored and cross-fitted likewise
    reweighted    one suffix at a time, averaged over those that the paths realised
    bracket       no paths: the heaviest prefixes, exactly, within a budget of rows; then within a larger one

    python examples/toy_floors.py                       # NumPy
    python examples/toy_floors.py --backend fast        # PyTorch

    target           order  exact    estimate              mean     bias      sd
    two-token chain  1      0.0428   plug-in             0.0470  +0.0042  0.0067
                                     cross-fit           0.0523  +0.0095  0.0107
                                     interval          [0.0523, 0.0523], holds in 0%
                                     soft                0.0433  +0.0005  0.0012
                                     soft, cross-fit     0.0452  +0.0024  0.0041
                                     reweighted          0.0428  +0.0000  0.0039
                                     bracket, 16       [0.0428, 0.0428], holds in 100%
                                     bracket, 1000     [0.0428, 0.0428], holds in 100%
    random table     1      0.4362   plug-in             0.4065  -0.0297  0.0263
                                     cross-fit           0.4784  +0.0422  0.0400
                                     interval          [0.4784, 0.4784], holds in 0%
                                     soft                0.4183  -0.0179  0.0198
                                     soft, cross-fit     0.4560  +0.0198  0.0380
                                     reweighted          0.4186  -0.0176  0.0212
                                     bracket, 16       [0.2347, 0.6818], holds in 100%
                                     bracket, 1000     [0.4362, 0.4362], holds in 100%

(The lines of order 1.)  The interval is about cells met once and no sampling error, so it need not hold the floor; the
bracket does.  Takes 3 seconds on one core (AMD EPYC), 10 with --backend fast.  The last line is one JSON document.
"""

import argparse
import json
from functools import cache

import numpy as np

from models import toy

SLOT, ORDERS = 3, (0, 1, 2)


def main(arguments=None):
    """Estimate every floor; print the table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--backend", choices=("reference", "fast"), default="reference")
    parser.add_argument("--paths", type=int, default=64, metavar="M", help="default %(default)s")
    parser.add_argument("--repetitions", type=int, default=20, metavar="N", help="default %(default)s")
    parser.add_argument("--budgets", type=int, nargs="+", default=(16, 1000), metavar="ROWS", help="of the brackets")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.paths < 17:
        parser.error("--paths must be at least 17: fewer may leave no cell of order 2 that can be split")
    if options.repetitions < 1:
        parser.error(f"--repetitions must be at least 1, got {options.repetitions}")
    if min(options.budgets) < SLOT:
        parser.error(f"--budgets must be at least {SLOT}, a row for each slot, got {min(options.budgets)}")
    if options.seed < 0:
        parser.error(f"--seed must be at least 0, got {options.seed}")
    if options.backend == "fast":
        import fast as backend
    else:
        import reference as backend

    table = toy.random_table(4, SLOT + 1, seed=options.seed)
    cases = {
        "two-token chain": (toy.two_token_chain(), (0, 0)),
        "random table": (toy.ToyTarget(4, cache(table.next_token)), (0,)),
    }
    draws = np.random.default_rng(options.seed).random((options.repetitions, options.paths, SLOT + 1))
    print(f"{'target':<17}{'order':<7}{'exact':<9}{'estimate':<18}{'mean':>8}{'bias':>9}{'sd':>8}")
    results = {}
    for name, (target, prefix) in cases.items():
        found = [estimates(backend, target, prefix, uniforms) for uniforms in draws]
        for order in ORDERS:
            exact = toy.exact_floor(target, prefix, SLOT, order)
            rows, label = {}, f"{name:<17}{order:<7}{exact:<9.4f}"
            for estimate in found[0][order]:
                values = np.array([run[order][estimate] for run in found])
                if estimate == "interval":
                    inside = (values[:, 0] - 1e-9 <= exact) & (exact <= values[:, 1] + 1e-9)
                    rows[estimate] = {"ends": values.mean(axis=0).tolist(), "holds": float(inside.mean())}
                else:
                    mean = float(values.mean())
                    rows[estimate] = {"mean": mean, "bias": mean - exact, "sd": float(values.std())}
            for budget in options.budgets:
                *_, slot = backend.enumerate_paths(target, prefix, SLOT + 1, budget=budget, cutoff=0.0)
                bracket = backend.floor(slot, order)
                inside = bracket.lower - 1e-9 <= exact <= bracket.upper + 1e-9
                rows[f"bracket, {budget}"] = {"ends": [bracket.lower, bracket.upper], "holds": float(inside)}
            for estimate, row in rows.items():
                print(f"{label}{estimate:<18}" + describe(row))
                label = " " * len(label)
            results.setdefault(name, {})[order] = {"exact": exact, "estimates": rows}
    print(json.dumps({"example": "toy_floors", **vars(options), "slot": SLOT, "floors": results}))


def estimates(backend, target, prefix, uniforms):
    """One repetition: every estimate from the same paths, {order: {estimate: floor}}."""
    *_, slot = backend.walk(target, prefix, SLOT + 1, uniforms)
    found = {}
    for order in ORDERS:
        grouped = backend.floor(slot, order)
        found[order] = {
            "plug-in": grouped.fit,
            "cross-fit": grouped.held_out,
            "interval": (grouped.lower, grouped.upper),
        }
        if order == 1:
            soft = backend.soft_floor(target, prefix, SLOT, uniforms, cutoff=0.0)
            found[order] |= {"soft": soft.fit, "soft, cross-fit": soft.held_out}
        if order:
            suffixes, which = np.unique(slot.history(order), axis=0, return_inverse=True)
            shares = np.bincount(which.ravel(), slot.weight)
            given = [backend.floor_by_reweighting(target, prefix, z, SLOT, uniforms).fit for z in suffixes]
            found[order]["reweighted"] = float(shares @ given)
    return found


def describe(row):
    """One estimate as text."""
    if "ends" in row:
        return f"[{row['ends'][0]:.4f}, {row['ends'][1]:.4f}], holds in {row['holds']:.0%}"
    return f"{row['mean']:8.4f}{row['bias']:+9.4f}{row['sd']:8.4f}"


if __name__ == "__main__":
    main()
