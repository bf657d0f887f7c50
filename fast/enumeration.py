"""The heaviest target continuations in PyTorch.  Twin: `reference/enumeration.py`, where they are explained.

The masses of all children are compared on the device of the rows, in float64; the tree is kept on the host.
"""

import numpy as np
import torch

from fast.laws import warp
from reference.enumeration import check_enumeration
from reference.laws import SamplingLaw
from reference.paths import Slot

__all__ = ["enumerate_paths"]


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
