"""Information floors in PyTorch.  Twin: `reference/floors.py`, where they are defined."""

from dataclasses import replace

import numpy as np
import torch

from fast.distance import barycentre, barycentre_risk, distributions
from fast.laws import truncate
from reference.floors import Floor, band, cells_of, count_paths, halve_paths, summarise

__all__ = ["Floor", "floor", "truncated_floor"]


def floor(slot, order=0):
    """Information floor T_k^(order) of one slot by grouping: see `reference.floors.floor`.

    Args: slot, a `Slot` with a tensor of rows; order m.  Returns: `Floor`.
    """
    cells = cells_of(slot, order)
    weights, halves = count_paths(slot), halve_paths(slot, cells)
    fit = held_out = split = splittable = 0.0
    for cell in range(cells.max() + 1):
        here = (cells == cell).nonzero()[0]
        rows = slot.rows if len(here) == len(cells) else slot.rows[torch.from_numpy(here).to(slot.rows.device)]
        weight, (even, odd) = weights[here], halves[:, here]
        if len(here) == 1:  # one prefix is its own best proposal, held out or not
            splittable += weight.sum() if even.any() and odd.any() else 0
            continue
        if not (even.any() and odd.any()):
            fit += weight.sum() * barycentre_risk(rows, barycentre(rows, weight), weight)
            continue
        q, q_even, q_odd = barycentre(rows, np.stack([weight, even, odd]))
        odd_risk, even_risk = barycentre_risk(rows, q_even, odd), barycentre_risk(rows, q_odd, even)
        fit += weight.sum() * barycentre_risk(rows, q, weight)
        splittable += weight.sum()
        held_out += even.sum() * even_risk + odd.sum() * odd_risk
        split += weight.sum() * odd_risk
    if splittable:
        held_out, split = float(held_out / splittable), float(split / splittable)
    return summarise(slot, order, float(fit / weights.sum()), held_out, split, splittable / weights.sum())


def truncated_floor(slot, k, order=0):
    """Information floor read on each row's k largest probabilities: see `reference.floors.truncated_floor`.

    Args: slot, a `Slot` with a tensor of rows; k; order m.  Returns: `Floor`.
    """
    rows, residual = truncate(distributions(slot.rows), k)
    return band(slot, floor(replace(slot, rows=rows), order), residual.double().cpu().numpy(), order)
