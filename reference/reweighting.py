"""Floors that use every sampled prefix in every information cell, by weight instead of by chance.

Grouping (`floors.py`) puts a path into the cell of the tokens it happened to draw, and most cells stay thin.  But
the target says how probable each prefix s makes any tokens z, so a cell may hold all prefixes at once, weighted by

    w(s) = p(z | X, s) = the product of the target's probabilities along z,

which is the posterior of s given z up to a constant (Bayes).  The row to score is the one AFTER the forced tokens,
p(. | X, s, z).  Two estimators are built on that:

    floor_by_reweighting   one given suffix z*, say what the corpus realised                   (paper App. B.3)
    soft_floor             order 1 for every predecessor z, with outer weight E_s[p(z | X, s)]: the conditional
                           expectation of grouping given the prefixes, so nothing is lost to singletons

The soft slot is a tree of M sampled prefixes whose last step was enumerated: only the heaviest (s, z) are read,
and what was left out widens the interval, as in `enumeration.py`.

Twin: `fast/reweighting.py`.  Tests: `tests/test_reweighting.py` (enumeration, closed forms).
"""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from reference.enumeration import check_enumeration, continuations, heaviest
from reference.floors import Floor, floor, halve_paths
from reference.laws import SamplingLaw, warp
from reference.paths import Slot, check_tokens, walk


@dataclass(frozen=True)
class WeightedSlot(Slot):
    """A `Slot` whose weights are shares of paths times exact probabilities of the tokens forced after them.

    halves   float [2, U], what the even and the odd paths contribute to `weight`; the two add up to it
    ess      effective number of paths, (sum w)^2 / sum w^2 over paths; None where there is no single cell
    """

    halves: np.ndarray | None = None
    ess: float | None = None


@dataclass(frozen=True)
class ReweightedFloor(Floor):
    """A `Floor` given one suffix; `ess` is the effective number of paths behind it, in (0, M]."""

    ess: float


def floor_by_reweighting(target, prefix, suffix, slot_index, uniforms, law=SamplingLaw()):
    """Order-m floor at slot k given one realised suffix z* = Z_{k-m..k-1} (self-normalised; App. B.3).

        min_q  sum_r w_r TV(p(. | x, s_r, z*), q) / sum_r w_r,     w_r = p(z* | x, s_r),     s_r = Z^(r)_{<k-m}

    Averaged over suffixes drawn from the target this is T_k^(m).

    Args: target and prefix, as for `walk`; suffix, z*, 1 to k token ids; slot_index, k; uniforms, float64 [M, n]
        with n > k - m, which draw the same paths as in `walk`; law, the sampling law.
    Returns: `ReweightedFloor`; with m = k every path has the same row, the floor is exactly 0 and ess is M.
    Raises: ValueError for a suffix that is too long, holds a stop id or has no mass after any path.
    """
    slot = force_suffix(target, prefix, suffix, slot_index, uniforms, law)
    return ReweightedFloor(**vars(floor(slot, 0)), ess=slot.ess)


def soft_floor(target, prefix, slot_index, uniforms, law=SamplingLaw(), *, budget=1024, cutoff=1e-3):
    """Order-1 floor at slot k where every predecessor uses every prefix, softly (Rao-Blackwell form of grouping).

        sum_z W_z min_q  sum_s w_s p(z | x, s) TV(p(. | x, s, z), q) / W_z,        W_z = sum_s w_s p(z | x, s)

    Args: target, prefix and law, as for `walk`; slot_index, k; uniforms, float64 [M, n] with n >= k; budget, most
        (s, z) pairs to read, the heaviest first; cutoff, share of their mass that may be left out.
    Returns: `Floor`.  `covered` is the share c of the mass that was read, `fit` (leans low) its floor, and
        [lower, upper] = [c fit, c fit + 1 - c].  `held_out` (leans high) fits on one half of the paths and scores
        on the other.  0 at slots 0 and 1, where one token is the whole history.
    Raises: ValueError for a bad argument, or if no path reaches slot k.
    """
    if slot_index < 2:
        check_soft(target, prefix, slot_index, uniforms, budget, cutoff)
        return Floor(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1)
    return floor(soften(target, prefix, slot_index, uniforms, law, budget=budget, cutoff=cutoff), 1)


def force_suffix(target, prefix, suffix, slot_index, uniforms, law=SamplingLaw()):
    """The slot after a forced suffix, weighted by the share of paths times the suffix's probability after each.

    Prefixes that the suffix cannot follow are left out.  Arguments as in `floor_by_reweighting`.
    Returns: `WeightedSlot`; `alive` estimates p(z* | x).  Its `ce_realised` is the conditional loss C_{k,m}.
    """
    suffix = check_suffix(target, suffix, slot_index)
    slot, node, session = reach(walk, target, prefix, slot_index - len(suffix), uniforms, law)
    created, rows, past = int(node[-1]) + 1, slot.rows, slot.past
    halves = halve_paths(slot, np.zeros(len(node), dtype=np.int64)) / len(uniforms)
    share, likelihood = slot.weight, np.ones(len(node))
    for token in suffix:
        likelihood = likelihood * rows[:, token]
        able = np.flatnonzero(likelihood)
        if not len(able):
            raise ValueError(f"none of the {len(uniforms)} paths can be followed by the suffix {suffix.tolist()}")
        likelihood, share, halves, past = likelihood[able], share[able], halves[:, able], past[able]
        forced = np.full(len(able), token)
        rows = warp(np.asarray(session.grow(node[able], forced)), law)
        node, created = created + np.arange(len(able)), created + len(able)
        past = np.concatenate([past, forced[:, None]], axis=1)
    return weigh(slot_index, rows, past, share, halves, likelihood, len(uniforms))


def soften(target, prefix, slot_index, uniforms, law=SamplingLaw(), *, budget=1024, cutoff=1e-3):
    """The slot whose prefixes are all (sampled prefix, any next token) pairs, the heaviest of them.

    Arguments as in `soft_floor`, slot_index at least 1.  Returns: `WeightedSlot`, to be read by any estimator.
    """
    prefix = check_soft(target, prefix, slot_index, uniforms, budget, cutoff)
    slot, node, session = reach(walk, target, prefix, slot_index - 1, uniforms, law)
    mass = continuations(slot.weight, slot.rows, target.stop_ids)
    kept = heaviest(mass.ravel(), budget, cutoff * mass.sum())
    if not len(kept):
        raise ValueError(f"no path reaches slot {slot_index}: every token that may follow is a stop")
    parent, token = np.divmod(kept, target.vocab_size)
    weight, alive = mass[parent, token], mass.sum()
    mass[parent, token] = 0
    halves = halve_paths(slot, np.zeros(len(node), dtype=np.int64)) / len(uniforms)
    halves = halves[:, parent] * slot.rows[parent, token]
    rows = warp(np.asarray(session.grow(node[parent], token)), law)
    past = np.concatenate([slot.past[parent], token[:, None]], axis=1)
    covered = float(weight.sum() / (weight.sum() + mass.sum()))
    return WeightedSlot(slot_index, parent, token, weight, rows, past, float(alive), covered, halves=halves)


def reach(walk, target, prefix, slot_index, uniforms, law):
    """Walk to a slot in a session that can be grown further: (slot, ids of its nodes, session)."""
    prefix = check_tokens(prefix, target.vocab_size)
    uniforms = check_uniforms(uniforms, slot_index + 1)
    session, nodes = target.open(prefix), 0
    held = SimpleNamespace(vocab_size=target.vocab_size, stop_ids=target.stop_ids, open=lambda _: session)
    for slot in walk(held, prefix, slot_index + 1, uniforms[:, : slot_index + 1], law):
        nodes += len(slot.rows) if slot.index else 0  # slot 0 is the prefix itself, node -1
    if slot.index < slot_index:
        raise ValueError(f"every path has stopped before slot {slot_index}")
    return slot, np.arange(nodes - len(slot.rows), nodes) if slot_index else np.array([-1]), session


def weigh(slot_index, rows, past, share, halves, likelihood, paths):
    """Assemble the `WeightedSlot` of a forced suffix from each prefix's share of the paths and its likelihood."""
    weight, relative = share * likelihood, likelihood / likelihood.max()  # its square must not underflow
    ess = float(paths * (share @ relative) ** 2 / (share @ relative**2))
    parent, alive, halves = np.arange(len(rows)), float(weight.sum()), halves * likelihood
    return WeightedSlot(slot_index, parent, past[:, -1], weight, rows, past, alive, halves=halves, ess=ess)


def check_soft(target, prefix, slot_index, uniforms, budget, cutoff):
    """The prefix of `soft_floor` as an array, or a ValueError that says which argument is wrong."""
    if slot_index < 0:
        raise ValueError(f"the slots of a block count from 0, got {slot_index}")
    check_uniforms(uniforms, slot_index)
    return check_enumeration(target, prefix, 2, budget, cutoff)


def check_uniforms(uniforms, slots):
    """Uniforms that draw the paths' tokens at so many slots or more, as an array, or a ValueError."""
    uniforms = np.asarray(uniforms, dtype=np.float64)
    if uniforms.ndim != 2 or not len(uniforms) or uniforms.shape[1] < slots:
        raise ValueError(f"the walk needs uniforms [M, n] with M >= 1 and n >= {slots}, got {uniforms.shape}")
    return uniforms


def check_suffix(target, suffix, slot_index):
    """The suffix as an array, or a ValueError that says why it cannot precede the slot."""
    suffix = check_tokens(suffix, target.vocab_size, "suffix")
    if len(suffix) > slot_index:
        raise ValueError(f"a suffix of {len(suffix)} tokens is longer than the {slot_index} before slot {slot_index}")
    if np.isin(suffix, list(target.stop_ids)).any():
        raise ValueError(f"nothing follows a suffix with a stop id: {suffix.tolist()}")
    return suffix
