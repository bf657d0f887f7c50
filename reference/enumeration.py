"""The heaviest target continuations, followed exactly: floors with a certificate instead of a sampling error.

At most anchors a few continuations hold nearly all the mass (paper App. D.1).  So instead of drawing paths,
follow the prefixes themselves, each with its exact probability, and drop only the lightest.  The tree grows slot
by slot (every estimator reads one slot at a time), so which prefixes are worth a row is decided slot by slot too:
of all children of the kept prefixes the heaviest stay, as many as an even share of the rows still in the budget,
or fewer where the rest weighs no more than the cutoff allows so far.

What was dropped bounds the error.  Let c be the kept mass and d all mass ever dropped.  Some of d may have met a
stop since, so between c and c + d is alive; a floor is at least the kept part's share of it, and at most that
with everything else lost,

    c/(c+d) T_kept  <=  T  <=  (c T_kept + d)/(c+d),

which is the interval [covered T, covered T + 1 - covered] of `Floor` with covered = c/(c+d), alive = c + d.

Twin: `fast/enumeration.py`.  Tests: `tests/test_enumeration.py` (brute-force floors).
"""

import numpy as np

from reference.laws import SamplingLaw, warp
from reference.paths import Slot, check_tokens


def enumerate_paths(target, prefix, gamma, *, law=SamplingLaw(), budget=1024, cutoff=1e-3):
    """Follow the heaviest target continuations exactly, yielding a `Slot` for k = 0..gamma-1.

    `weight` holds exact probabilities, `alive` the most that can be alive and `covered` the least share of it that
    the prefixes stand for, so that `floor(slot, m)` brackets T_k^(m) between `lower` and `upper` for every m.
    With budget to spare and cutoff 0 nothing is dropped, covered is 1 and the floors are exact.

    Args: target and prefix, as for `walk`; law, the sampling law; budget, forward rows spent on slots 1..gamma-1
        together (slot 0 reads the prefix); cutoff, mass in [0, 1) that may be dropped by the last slot: a budget
        that is too small drops more.
    Yields: Slot with float64 rows, without `path_node` and `drawn`.  The enumeration ends early when every kept
        prefix ends in a stop.
    Raises: ValueError for a budget below one row per slot, or a cutoff outside [0, 1).
    """
    prefix = check_enumeration(target, prefix, gamma, budget, cutoff)
    session = target.open(prefix)
    logits, created = np.asarray(session.root_logits)[None], 0
    node, parent, token = np.array([-1]), np.array([-1]), prefix[-1:]  # `node` holds the session's ids
    past, weight, dropped = prefix[None, -gamma:], np.ones(1), 0.0
    for k in range(gamma):
        rows = warp(logits, law)
        alive = float(weight.sum() + dropped)
        yield Slot(k, parent, token, weight, rows, past, alive, float(weight.sum()) / alive)
        if k == gamma - 1:
            return

        mass = continuations(weight, rows, target.stop_ids)  # [U, V]
        spare = cutoff * (k + 1) / (gamma - 1) - dropped
        kept = heaviest(mass.ravel(), budget // (gamma - 1 - k), spare)
        if not len(kept):
            return
        budget -= len(kept)
        parent, token = np.divmod(kept, target.vocab_size)
        weight = mass[parent, token]
        mass[parent, token] = 0
        dropped += mass.sum()
        logits = np.asarray(session.grow(node[parent], token))
        node = created + np.arange(len(parent))
        created += len(parent)
        past = np.concatenate([past[parent], token[:, None]], axis=1)


def continuations(weight, rows, stop_ids):
    """Mass of every one-token continuation that goes on: weight [U] times rows [U, V], zero at stop ids."""
    mass = weight[:, None] * rows
    mass[:, list(stop_ids)] = 0
    return mass


def heaviest(mass, most, spare):
    """Places of the heaviest entries of mass [n], in rising order.

    At most `most`, and none without mass; the lightest go while all that is left out weighs at most `spare`, but
    never the last one.  Masses that agree to 1e-12 count as equal and the lower place goes first, so that a
    rounding error does not decide between them.
    """
    order = np.argsort(-np.round(mass, 12), kind="stable")
    order = order[mass[order] > 0]
    kept, rest = order[:most], order[most:]
    tail = mass[rest].sum() + np.cumsum(mass[kept][::-1])  # left out when so many more are dropped
    drop = min((tail <= spare * (1 + 1e-12)).sum(), max(len(kept) - 1, 0))
    return np.sort(kept[: len(kept) - drop])


def check_enumeration(target, prefix, gamma, budget, cutoff):
    """The prefix of `enumerate_paths` as an array, or a ValueError that says which argument is wrong."""
    if gamma < 1:
        raise ValueError(f"block length gamma must be at least 1, got {gamma}")
    if budget != int(budget) or budget < gamma - 1:
        raise ValueError(f"slots 1..{gamma - 1} need a whole budget of at least {gamma - 1} rows, got {budget}")
    if not 0 <= cutoff < 1:
        raise ValueError(f"cutoff must be a mass in [0, 1), got {cutoff}")
    return check_tokens(prefix, target.vocab_size)
