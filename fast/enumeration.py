"""The heaviest target continuations in PyTorch.  Twin: `reference/enumeration.py`, where they are explained.

The masses of all children are compared on the device of the rows, in float64; the tree is kept on the host.
"""

import numpy as np
import torch

from fast.laws import draw, warp
from reference.enumeration import StratifiedSlot, average, check_enumeration, check_stratification, merge, spread
from reference.laws import SamplingLaw
from reference.paths import Slot

__all__ = ["StratifiedSlot", "enumerate_paths", "stratify_paths"]


def enumerate_paths(target, prefix, gamma, *, law=SamplingLaw(), budget=1024, cutoff=1e-3):
    """Follow the heaviest target continuations exactly: see `reference.enumeration.enumerate_paths`.

    Yields: Slot whose rows are a tensor, float32 (float64 for a float64 target); all else is NumPy.
    """
    prefix = check_enumeration(target, prefix, gamma, budget, cutoff)
    session = target.open(prefix)
    logits, created = torch.as_tensor(session.root_logits)[None], 0
    node, parent, token = np.array([-1]), np.array([-1]), prefix[-1:]  # `node` holds the session's ids
    past, weight, dropped = prefix[None, -gamma:], np.ones(1), 0.0
    for k in range(gamma):
        rows = warp(logits, law)
        alive = float(weight.sum() + dropped)
        yield Slot(k, parent, token, weight, rows, past, alive, float(weight.sum()) / alive)
        if k == gamma - 1:
            return

        mass = continuations(weight, rows, target.stop_ids).view(-1)  # [U * V]
        spare = cutoff * (k + 1) / (gamma - 1) - dropped
        kept = heaviest(mass, budget // (gamma - 1 - k), spare)
        if not len(kept):
            return
        budget -= len(kept)
        parent, token = np.divmod(kept.cpu().numpy(), target.vocab_size)
        weight = mass[kept].cpu().numpy()
        mass[kept] = 0
        dropped += float(mass.sum())
        logits = torch.as_tensor(session.grow(node[parent], token))
        node = created + np.arange(len(parent))
        created += len(parent)
        past = np.concatenate([past[parent], token[:, None]], axis=1)


def stratify_paths(target, prefix, gamma, uniforms, law=SamplingLaw(), *, budget=1024, cutoff=1e-3):
    """Follow the heaviest exactly and the others by chance: see `reference.enumeration.stratify_paths`.

    Yields: StratifiedSlot whose rows are a tensor, float32 (float64 for a float64 target); all else is NumPy.
    """
    prefix, uniforms = check_stratification(target, prefix, gamma, uniforms, budget, cutoff)
    session = target.open(prefix)
    logits, created = torch.as_tensor(session.root_logits)[None], 0
    node, parent, token = np.array([-1]), np.array([-1]), prefix[-1:]  # `node` holds the session's ids
    past, weights = prefix[None, -gamma:], np.ones((len(uniforms), 1))  # [n, U], each sample's own
    for k in range(gamma):
        rows = warp(logits, law)
        yield average(k, parent, token, weights, rows, past)
        if k == gamma - 1:
            return

        most = budget // (gamma - 1 - k) // len(uniforms)
        masses = (continuations(weight, rows, target.stop_ids).view(-1) for weight in weights)
        thinned = [thin(mass, most, cutoff, shift) for mass, shift in zip(masses, uniforms[:, k], strict=True)]
        kept, weights = merge(thinned)
        if not len(kept):
            return
        budget -= len(kept)
        parent, token = np.divmod(kept, target.vocab_size)
        logits = torch.as_tensor(session.grow(node[parent], token))
        node = created + np.arange(len(parent))
        created += len(parent)
        past = np.concatenate([past[parent], token[:, None]], axis=1)


def continuations(weight, rows, stop_ids):
    """Mass of every one-token continuation that goes on, float64 [U, V], from rows made to sum to one."""
    mass = rows.to(torch.float64, copy=True)
    mass *= torch.from_numpy(weight).to(mass)[:, None] / mass.sum(dim=1, keepdim=True)
    mass[:, list(stop_ids)] = 0
    return mass


def heaviest(mass, most, spare):
    """Places of the heaviest entries of mass [n], in rising order: see `reference.enumeration.heaviest`.

    Only the entries above the last kept one are sorted; entries level with it are taken from the front.
    """
    most = min(most, int((mass > 0).sum()))
    if not most:
        return mass.new_empty(0, dtype=torch.int64)
    rounded = mass.round(decimals=12)
    edge = rounded.topk(most).values[-1]
    above = (rounded > edge).nonzero()[:, 0]
    above = above[rounded[above].argsort(descending=True, stable=True)]
    level = ((rounded == edge) & (mass > 0)).nonzero()[: most - len(above), 0]
    kept = torch.cat([above, level])
    rest = (mass.sum() - mass[kept].sum()).clamp(min=0)
    tail = rest + mass[kept].flip(0).cumsum(0)  # left out when so many more are dropped
    drop = min(int((tail <= spare * (1 + 1e-12)).sum()), most - 1)
    return kept[: most - drop].sort().values


def thin(mass, most, cutoff, shift):
    """At most `most` entries of mass [n] and their new weights: see `reference.enumeration.thin`.

    Returns: (places int64 [n'], weights float64 [n']), NumPy; `mass` loses its heavy entries.
    """
    ranked, order = mass.topk(min(most, len(mass)))
    ranked, order = ranked[ranked > 0], order[ranked > 0]
    mass[order] = 0
    rest = mass.sum() + ranked.flip(0).cumsum(0).flip(0)  # all but the h heaviest, h = 0, 1, ..
    level = (rest / (most - torch.arange(len(ranked), device=mass.device))).clamp(min=cutoff)
    h = int((ranked > level * (1 + 1e-12)).sum())
    mass[order[h:]] = ranked[h:]
    total = float(mass.sum())
    points = spread(total, most - h, cutoff, shift)
    picked, times = np.unique(draw(mass[None], points, np.zeros(len(points), dtype=np.int64)), return_counts=True)
    heavy, own = order[:h].cpu().numpy(), ranked[:h].cpu().numpy()
    return np.concatenate([heavy, picked]), np.concatenate([own, total * times / len(points)])
