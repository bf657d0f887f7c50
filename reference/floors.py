"""Information floors: the least rejection that a proposal can have, given what it may look at.

A proposal of order m sees the prefix X and the last m realised tokens of the block.  Whatever it is, its risk
at slot k is at least

    T_k^(m) = E[ min_q E[ TV(p_k, q) | X, last m tokens ] ]                       (paper Sec. 2, Eq. 2)

so at one anchor: split the sampled prefixes into cells that agree on what the proposal sees, find each cell's
TV barycentre, and average the risks that are left.  Order 0 has a single cell; order 1 groups by predecessor.

Two estimates show both sides of the bias.  Scoring a barycentre on the rows it was fitted to leans low (a cell with
one path scores 0).  Fitting on one half of a cell's paths and scoring on the other leans high, for the cells that
can be split; it is cross-fitted here: every path of such a cell is scored once, by the half it is not in (App. B.3
uses one direction).  Cells met by a single path are left out of the second and may have any floor, which the
coverage interval allows for.  None of this is sampling error: that is the prompt bootstrap's (`stats.py`).

A truncated interface shows only the largest probabilities of a row.  Renormalised, the row has moved by the residual
r it left out, TV(p, p~) = r, so every risk moves by at most r and |T - T~| <= mean r - up or down (`truncated_floor`).

Twin: `fast/floors.py`.  Tests: `tests/test_floors.py` (closed forms, enumeration).
"""

from dataclasses import dataclass, replace
from numbers import Integral

import numpy as np

from reference.distance import barycentre, barycentre_risk, distributions
from reference.laws import truncate


@dataclass(frozen=True)
class Floor:
    """An estimated information floor at one anchor and slot; probabilities in [0, 1].

    fit         risk of the barycentres on the rows they were fitted to (leans low)
    held_out    cross-fitted in both directions; leans high for the splittable cells, the only ones it is about;
                None if there are none
    split       one direction only, fit on even and score on odd paths: the paper's T^(1)
    lower,      [c T, c T + 1 - c], where the floor over all mass can lie if the mass that T does not stand for may
    upper       have any floor; T = held_out, under exact or soft weights T = fit
    covered     c, share of the mass that the estimate stands for
    support     number of distinct prefixes
    """

    fit: float
    held_out: float | None
    split: float | None
    lower: float
    upper: float
    covered: float
    support: int


def floor(slot, order=0):
    """Information floor T_k^(order) of one slot by grouping (paper Eq. 2; App. B.3).

    Args: slot, a `Slot`; order m, how many realised tokens the proposal sees.
    Returns: `Floor`.  From order k on the cell is the whole prefix and every estimate is exactly 0.
    """
    cells = cells_of(slot, order)
    weights, halves = count_paths(slot), halve_paths(slot, cells)
    fit = held_out = split = splittable = 0.0
    for cell in range(cells.max() + 1):
        here = cells == cell
        rows, weight = slot.rows[here], weights[here]
        fit += weight.sum() * barycentre_risk(rows, barycentre(rows, weight), weight)
        even, odd = halves[:, here]
        if even.any() and odd.any():
            q_even, q_odd = barycentre(rows, halves[:, here])
            odd_risk, even_risk = barycentre_risk(rows, q_even, odd), barycentre_risk(rows, q_odd, even)
            splittable += weight.sum()
            held_out += even.sum() * even_risk + odd.sum() * odd_risk
            split += weight.sum() * odd_risk
    if splittable:
        held_out, split = float(held_out / splittable), float(split / splittable)
    return summarise(slot, order, float(fit / weights.sum()), held_out, split, splittable / weights.sum())


def truncated_floor(slot, k, order=0):
    """Information floor read on each row's k largest probabilities, with the band for the full rows (App. C.6).

        fit - E[r]  <=  fit on the full rows  <=  fit + E[r],        r, a row's mass outside its k largest

    Args: slot, a `Slot` with full rows; k, entries kept, at least 1; order m.
    Returns: `Floor` of the truncated rows whose lower and upper are that band, cut to [0, 1]; under exact weights
        that cover a share c it is widened to [c lower, c upper + 1 - c].  `held_out` has no such band.  From order
        k on every floor is 0, whatever was read.
    """
    rows, residual = truncate(distributions(slot.rows), k)
    return band(slot, floor(replace(slot, rows=rows), order), residual, order)


def cells_of(slot, order):
    """Which information cell each prefix is in: int [U], equal where the last `order` tokens agree."""
    if not isinstance(order, Integral) or order < 0:
        raise ValueError(f"order must be a whole number, 0 or more, got {order}")
    return np.unique(slot.history(min(order, slot.index)), axis=0, return_inverse=True)[1].ravel()


def count_paths(slot):
    """Weights of the prefixes: how many paths are on each (whole numbers), or their probabilities if enumerated."""
    if slot.path_node is None:
        return slot.weight
    return np.bincount(slot.path_node[slot.path_node >= 0], minlength=len(slot.rows)).astype(np.float64)


def halve_paths(slot, cells):
    """Alternate each cell's paths between two halves: how many are on each prefix, float [2, U].

    Zero everywhere when the slot was enumerated and there are no paths to split; a slot that brings its `halves`
    (see `reweighting.py`) keeps them.
    """
    if getattr(slot, "halves", None) is not None:
        return slot.halves
    halves = np.zeros((2, len(cells)))
    if slot.path_node is not None:
        node = slot.path_node[slot.path_node >= 0]
        node = node[np.argsort(cells[node], kind="stable")]  # cell by cell, in path order
        rank = np.arange(len(node)) - np.searchsorted(cells[node], cells[node])
        np.add.at(halves, (rank % 2, node), 1)
    return halves


def summarise(slot, order, fit, held_out, split, covered):
    """Assemble a `Floor`: held_out and split count if `covered`, the share of splittable cells, is positive."""
    if order >= slot.index:  # identity T_k^(k) = 0: nothing is left to condition on, split or covered or not
        return Floor(fit, fit, fit, 0.0, 0.0, 1.0, len(slot.rows))
    if not covered:
        held_out = split = None
    exact = slot.path_node is None  # every cell is known as far as its weight goes, split or not
    covered = slot.covered if exact else float(covered)
    lower = covered * (fit if exact or held_out is None else held_out)
    return Floor(fit, held_out, split, lower, lower + (1 - covered), covered, len(slot.rows))


def band(slot, found, residual, order):
    """A floor on truncated rows with the band that the residual masses [U] leave for the fit on the full rows."""
    if order >= slot.index:
        return found
    weights, c = count_paths(slot), slot.covered
    moved = float(weights @ residual / weights.sum())
    lower, upper = max(0.0, found.fit - moved), min(1.0, found.fit + moved)
    return replace(found, lower=c * lower, upper=c * upper + (1 - c), covered=c)
