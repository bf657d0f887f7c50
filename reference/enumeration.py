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

Where many continuations matter, what is dropped leaves a wide bracket, and it can be sampled instead
(`stratify_paths`).  Of the children, with weights w, those above a level b are kept as they are; the others lie end
to end and are picked by points that are b apart, all moved by one random shift, so that a child is met with
probability w/b and then weighs b.  The expected weight of every prefix is its probability, and among all unbiased
choices of n children the one with  sum min(w/b, 1) = n  changes the weights least (in mean square).

Twin: `fast/enumeration.py`.  Tests: `tests/test_enumeration.py` (brute-force floors).
"""

from dataclasses import dataclass
from numbers import Integral

import numpy as np

from reference.laws import SamplingLaw, draw, warp
from reference.paths import Slot, check_tokens, check_walk


@dataclass(frozen=True)
class StratifiedSlot(Slot):
    """A `Slot` whose weights estimate the prefixes' probabilities without bias; the heavy ones have their own.

    halves   float [2, U], what the even and the odd samples contribute to `weight`, adding up to it; None if
             there is a single sample
    """

    halves: np.ndarray | None = None


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


def stratify_paths(target, prefix, gamma, uniforms, law=SamplingLaw(), *, budget=1024, cutoff=1e-3):
    """Follow the heaviest target continuations exactly and the others by chance, yielding a `StratifiedSlot`.

    At every slot E[sum_u weight_u f(prefix_u)] = E[f(Z_<k); alive], for any f, and without stops the weights sum
    to one exactly.  With budget to spare and cutoff 0 the slots are those of `enumerate_paths`.

    The n rows of uniforms are n independent samples, each with its share of the budget, whose weights are averaged;
    a prefix costs one row however many of them hold it.  A floor read on the slots leans low as on walked paths;
    from two samples on its `held_out`, fitted on the even samples and scored on the odd and vice versa, leans high.

    Args: target, prefix and law, as for `walk`; uniforms, float64 [n, gamma] in [0, 1), the shift of each sample
        at each slot (the last column goes unused); budget, forward rows spent on slots 1..gamma-1 together; cutoff,
        weight in [0, 1) up to which a prefix is left to chance even if there are rows for all.
    Yields: StratifiedSlot with float64 rows, without `path_node` and `drawn`, covered 1.  It ends early when every
        prefix ends in a stop.
    Raises: ValueError for a budget below one row per sample and slot, or a cutoff outside [0, 1).
    """
    prefix, uniforms = check_stratification(target, prefix, gamma, uniforms, budget, cutoff)
    session = target.open(prefix)
    logits, created = np.asarray(session.root_logits)[None], 0
    node, parent, token = np.array([-1]), np.array([-1]), prefix[-1:]  # `node` holds the session's ids
    past, weights = prefix[None, -gamma:], np.ones((len(uniforms), 1))  # [n, U], each sample's own
    for k in range(gamma):
        rows = warp(logits, law)
        yield average(k, parent, token, weights, rows, past)
        if k == gamma - 1:
            return

        most = budget // (gamma - 1 - k) // len(uniforms)
        masses = (continuations(weight, rows, target.stop_ids).ravel() for weight in weights)
        thinned = [thin(mass, most, cutoff, shift) for mass, shift in zip(masses, uniforms[:, k], strict=True)]
        kept, weights = merge(thinned)
        if not len(kept):
            return
        budget -= len(kept)
        parent, token = np.divmod(kept, target.vocab_size)
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


def thin(mass, most, cutoff, shift):
    """Places of at most `most` entries of mass [n] and their new weights: the heavy ones' own, else a level c.

    The h heaviest stay, h the first number for which no other entry exceeds the level: the mass of the others over
    the most - h places left, or the cutoff if that is more.  Systematic sampling takes the others: they lie end to
    end, and of points one level apart, the first `shift` of a level from the start, each picks what it falls on.

    Returns: (int64 [n'], float64 [n']).
    """
    order = np.argsort(-mass, kind="stable")[:most]
    order = order[mass[order] > 0]
    light = mass.copy()
    light[order] = 0
    rest = light.sum() + np.cumsum(mass[order][::-1])[::-1]  # all but the h heaviest, h = 0, 1, ..
    level = np.maximum(rest / (most - np.arange(len(order))), cutoff)
    heavy, others = np.split(order, [(mass[order] > level * (1 + 1e-12)).sum()])
    light[others] = mass[others]
    points = spread(light.sum(), most - len(heavy), cutoff, shift)
    picked, times = np.unique(draw(light[None], points, np.zeros(len(points), dtype=np.int64)), return_counts=True)
    return np.concatenate([heavy, picked]), np.concatenate([mass[heavy], light.sum() * times / len(points)])


def spread(total, most, cutoff, shift):
    """Evenly spaced points in [0, 1): at most `most`, and no more than let each stand for a mass of `cutoff`."""
    if not total:
        return np.empty(0)
    count = int(max(1, min(most, float(total) / cutoff * (1 + 1e-12)))) if cutoff else most
    return np.minimum((shift + np.arange(count)) / count, np.nextafter(1, 0))  # a shift near one may round up


def merge(thinned):
    """All places that some sample keeps, in rising order, and the samples' weights there: int64 [U], [n, U]."""
    kept = np.unique(np.concatenate([places for places, _ in thinned]))
    weights = np.zeros((len(thinned), len(kept)))
    for mine, (places, weight) in zip(weights, thinned, strict=True):
        mine[np.searchsorted(kept, places)] = weight
    return kept, weights


def average(k, parent, token, weights, rows, past):
    """The slot of several samples with weights [n, U]: their mean, and its two halves."""
    n, weight = len(weights), weights.mean(axis=0)
    halves = np.stack([weights[::2].sum(axis=0), weights[1::2].sum(axis=0)]) / n if n > 1 else None
    return StratifiedSlot(k, parent, token, weight, rows, past, float(weight.sum()), halves=halves)


def check_stratification(target, prefix, gamma, uniforms, budget, cutoff):
    """Prefix and uniforms of `stratify_paths` as arrays, or a ValueError that says which argument is wrong."""
    check_enumeration(target, prefix, gamma, budget, cutoff)
    prefix, uniforms = check_walk(target, prefix, gamma, uniforms)
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    if budget < len(uniforms) * (gamma - 1):
        raise ValueError(
            f"{len(uniforms)} samples at slots 1..{gamma - 1} need a budget of at least one row each, got {budget}"
        )
    return prefix, uniforms


def check_enumeration(target, prefix, gamma, budget, cutoff):
    """The prefix of `enumerate_paths` as an array, or a ValueError that says which argument is wrong."""
    if gamma < 1:
        raise ValueError(f"block length gamma must be at least 1, got {gamma}")
    if not isinstance(budget, Integral) or budget < gamma - 1:
        raise ValueError(f"slots 1..{gamma - 1} need a whole budget of at least {gamma - 1} rows, got {budget}")
    if not 0 <= cutoff < 1:
        raise ValueError(f"cutoff must be a mass in [0, 1), got {cutoff}")
    return check_tokens(prefix, target.vocab_size)
