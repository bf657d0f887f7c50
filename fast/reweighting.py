"""Floors that use every sampled prefix in every information cell, in PyTorch.

Twin: `reference/reweighting.py`, where they are explained.  Weights, halves and the tree are host bookkeeping;
rows and the masses of all (prefix, token) pairs stay on the device of the target.
"""

import numpy as np
import torch

from fast.enumeration import continuations, heaviest
from fast.floors import floor
from fast.laws import warp
from fast.paths import walk
from reference.floors import Floor, halve_paths
from reference.laws import SamplingLaw
from reference.reweighting import ReweightedFloor, WeightedSlot, check_soft, check_suffix, reach, weigh

__all__ = ["ReweightedFloor", "WeightedSlot", "floor_by_reweighting", "force_suffix", "soft_floor", "soften"]


def floor_by_reweighting(target, prefix, suffix, slot_index, uniforms, law=SamplingLaw()):
    """Order-m floor at slot k given one realised suffix: see `reference.reweighting.floor_by_reweighting`.

    Returns: `ReweightedFloor`.
    """
    slot = force_suffix(target, prefix, suffix, slot_index, uniforms, law)
    return ReweightedFloor(**vars(floor(slot, 0)), ess=slot.ess)


def soft_floor(target, prefix, slot_index, uniforms, law=SamplingLaw(), *, budget=1024, cutoff=1e-3):
    """Order-1 floor at slot k, every predecessor using every prefix: see `reference.reweighting.soft_floor`.

    Returns: `Floor`.
    """
    if slot_index < 2:
        check_soft(target, prefix, slot_index, uniforms, budget, cutoff)
        return Floor(0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1)
    return floor(soften(target, prefix, slot_index, uniforms, law, budget=budget, cutoff=cutoff), 1)


def force_suffix(target, prefix, suffix, slot_index, uniforms, law=SamplingLaw()):
    """The slot after a forced suffix: see `reference.reweighting.force_suffix`.

    Returns: `WeightedSlot` whose rows are a tensor.
    """
    suffix = check_suffix(target, suffix, slot_index)
    slot, node, session = reach(walk, target, prefix, slot_index - len(suffix), uniforms, law)
    created, rows, past = int(node[-1]) + 1, slot.rows, slot.past
    halves = halve_paths(slot, np.zeros(len(node), dtype=np.int64)) / len(uniforms)
    share, likelihood = slot.weight, np.ones(len(node))
    for token in suffix:
        likelihood = likelihood * rows[:, token].double().cpu().numpy()
        able = np.flatnonzero(likelihood)
        if not len(able):
            raise ValueError(f"none of the {len(uniforms)} paths can be followed by the suffix {suffix.tolist()}")
        likelihood, share, halves, past = likelihood[able], share[able], halves[:, able], past[able]
        forced = np.full(len(able), token)
        rows = warp(torch.as_tensor(session.grow(node[able], forced)), law)
        node, created = created + np.arange(len(able)), created + len(able)
        past = np.concatenate([past, forced[:, None]], axis=1)
    return weigh(slot_index, rows, past, share, halves, likelihood, len(uniforms))


def soften(target, prefix, slot_index, uniforms, law=SamplingLaw(), *, budget=1024, cutoff=1e-3):
    """The slot of all (sampled prefix, any next token) pairs, the heaviest: see `reference.reweighting.soften`.

    Returns: `WeightedSlot` whose rows are a tensor.
    """
    prefix = check_soft(target, prefix, slot_index, uniforms, budget, cutoff)
    slot, node, session = reach(walk, target, prefix, slot_index - 1, uniforms, law)
    mass = continuations(slot.weight, slot.rows, target.stop_ids).view(-1)  # [U * V]
    alive = float(mass.sum())
    kept = heaviest(mass, budget, cutoff * alive)
    if not len(kept):
        raise ValueError(f"no path reaches slot {slot_index}: every token that may follow is a stop")
    parent, token = np.divmod(kept.cpu().numpy(), target.vocab_size)
    weight = mass[kept].cpu().numpy()
    mass[kept] = 0
    halves = halve_paths(slot, np.zeros(len(node), dtype=np.int64)) / len(uniforms)
    halves = halves[:, parent] * (weight / slot.weight[parent])
    rows = warp(torch.as_tensor(session.grow(node[parent], token)), law)
    past = np.concatenate([slot.past[parent], token[:, None]], axis=1)
    covered = float(weight.sum() / (weight.sum() + float(mass.sum())))
    return WeightedSlot(slot_index, parent, token, weight, rows, past, alive, covered, halves=halves)
