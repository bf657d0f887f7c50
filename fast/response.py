"""Best responses and coordinate sweeps in PyTorch.  Twin: `reference/response.py`, where they are derived.

The records of an anchor are small, so everything is float64 on the CPU; what is fast is that nothing is looped
over paths, tokens, cells or folds.  A slot's paths are arranged once - by fold and cell, by token, by falling
probability - and refilled with each new credit: a running sum per token gives the slopes, a sort the order of the
segments, and a running sum per cell says where the mass runs out.  Both add in the reference's order, so that the
two break ties alike.
"""

import numpy as np
import torch

from fast.serving import accept_factors, reach
from reference.response import BestResponse, BlockPaths, Sweep, check_fill, check_paths, halve

__all__ = ["BestResponse", "BlockPaths", "Sweep", "best_response", "credit", "fit_proposal", "sweep", "water_fill"]


def water_fill(tokens, probs, credit):
    """The distribution that maximises sum_r credit_r min(1, q(token_r) / prob_r): see `reference.response.water_fill`.

    Args: tokens, int [n]; probs [n]; credit [n].  Returns: (allocation {token: mass}, leftover).
    """
    tokens, probs, credit = map(torch.from_numpy, check_fill(*map(_host, (tokens, probs, credit))))
    if not len(tokens):
        return {}, 1.0
    basins = _Basins(tokens, probs, torch.zeros_like(tokens), torch.ones(1, len(tokens), dtype=torch.bool))
    allocation, leftover = basins.fill(credit[None])
    masses = zip(tokens.unique().tolist(), allocation[0].tolist(), strict=True)
    return {token: mass for token, mass in masses if mass > 0}, float(leftover)


def credit(factors, slot):
    """What an accepted draft at one slot is worth, W_{k-1} F_k, [..., M]: see `reference.response.credit`.

    Args: factors, accept factors [..., M, gamma]; slot k.
    """
    if not 0 <= slot < factors.shape[-1]:
        raise ValueError(f"slot {slot} lies outside a block of {factors.shape[-1]}")
    arrive = onward = torch.ones_like(factors[..., 0])
    for j in range(slot):
        arrive = arrive * factors[..., j]
    for j in range(factors.shape[-1] - 1, slot, -1):
        onward = 1 + factors[..., j] * onward  # F_{j-1} = 1 + a_j F_j
    return arrive * onward


def fit_proposal(paths, credit, slot, order, fit):
    """Fit one slot's best response on some paths, read it at every path: see `reference.response.fit_proposal`.

    Args: paths, `BlockPaths`; credit [M]; slot; order, 0 or 1; fit, bool [M].  Returns: (q, float64 [M]; leftover).
    """
    paths = _tensors(paths, slot, order)
    basins = _arrange(paths, slot, order, torch.as_tensor(fit)[None])
    q, leftover = basins.propose(torch.as_tensor(credit)[None].double(), paths.draft_p[:, slot])
    return q[0], float(basins.average(leftover))


def best_response(paths, slot, order=0, smoothing=0.0):
    """Cross-fitted gain from the best proposal at one slot: see `reference.response.best_response`.

    Args: paths, `BlockPaths` of arrays or tensors; slot; order, 0 or 1; smoothing.  Returns: `BestResponse`.
    """
    paths = _tensors(paths, slot, order)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"smoothing is a share between 0 and 1, got {smoothing}")
    p, base = paths.target_p[:, slot], paths.draft_p[:, slot]
    factors = accept_factors(paths.target_p, paths.draft_p)
    worth, fit = credit(factors, slot), torch.from_numpy(halve(len(factors)))
    basins = _arrange(paths, slot, order, fit)
    q, leftover = basins.propose(worth.expand(2, -1), base)
    gain = worth * (accept_factors(p, (1 - smoothing) * q + smoothing * base) - factors[:, slot])  # [2, M]
    here = worth * (fit & paths.alive[:, slot])
    squares = here.square().sum(dim=1)
    effective = here.sum(dim=1) ** 2 / torch.where(squares > 0, squares, 1)
    folds = _mean(gain, fit), _mean(gain, ~fit), basins.average(leftover), effective
    return BestResponse(*(float(values.mean()) for values in folds))


def sweep(paths, order=0, rounds=8, backward=False):
    """Refit slot after slot, round after round, both folds side by side: see `reference.response.sweep`.

    Args: paths, `BlockPaths` of arrays or tensors; order, 0 or 1; rounds; backward.  Returns: `Sweep`.
    """
    paths = _tensors(paths, 0, order)
    base = accept_factors(paths.target_p, paths.draft_p)
    fit = torch.from_numpy(halve(len(base)))
    slots = range(base.shape[1])[:: -1 if backward else 1]
    basins = {slot: _arrange(paths, slot, order, fit) for slot in slots}
    p, q = paths.target_p.T.contiguous(), paths.draft_p.T.contiguous()
    divisor = torch.where(p > 0, p, 1)  # a stopped path's factor is 0
    factors = torch.stack([base, base]).permute(2, 0, 1).contiguous().permute(1, 2, 0)  # one slot's lie together
    gains = []
    for _ in range(rounds):
        for slot in slots:
            proposed, _ = basins[slot].propose(credit(factors, slot), q[slot])
            factors[:, :, slot] = torch.minimum(p[slot], proposed) / divisor[slot]
        gain = (reach(factors) - reach(base)).sum(dim=-1)
        gains.append([float(_mean(gain, half).mean()) for half in (fit, ~fit)])
    train, held_out = np.reshape(gains, (rounds, 2)).T.tolist()
    return Sweep(tuple(train), tuple(held_out))


class _Basins:
    """One slot's paths arranged for water filling: a basin per fold and cell, in it a column per token.

    Args: token, cell, int64 [M]; prob [M], where 0 takes no part; fit, bool [F, M], the paths each fold is fitted on.
    """

    def __init__(self, token, prob, cell, fit):
        tokens, token = token.unique(return_inverse=True)
        cells, self.cell = cell.unique(return_inverse=True)
        columns, self.column = (self.cell * len(tokens) + token).unique(return_inverse=True)
        self.folds, self.cells, self.columns = len(fit), len(cells), len(columns)

        fold, path = (fit & (prob > 0)).nonzero(as_tuple=True)  # the n items that are filled with
        order = prob[path].argsort(descending=True, stable=True)
        order = order[(fold * self.columns + self.column[path])[order].argsort(stable=True)]
        fold, path = fold[order], path[order]
        self.item, self.prob = fold * len(prob) + path, prob[path]
        self.item_column = fold * self.columns + self.column[path]
        self.item_basin = fold * self.cells + self.cell[path]
        self.in_column, self.in_basin = _Runs(self.item_column), _Runs(self.item_basin)
        same = self.item_column.diff(append=self.item_column.new_tensor([-1])) == 0
        self.width = self.prob - torch.where(same, self.prob.roll(-1), 0)

    def fill(self, credit):
        """Water fills under a credit [F, M]: (mass [F, columns], leftover [F, cells], 1 where nothing was fitted)."""
        value = credit.reshape(-1)[self.item] / self.prob
        slope = self.in_column.sums(value)[0] + value
        order = slope.argsort(descending=True, stable=True)
        order = order[self.item_basin[order].argsort(stable=True)]
        width = torch.where(slope > 0, self.width, 0)[order]
        filled, total = self.in_basin.sums(width)
        mass = torch.minimum(width, (1 - filled).clamp(min=0))
        allocation = mass.new_zeros(self.folds * self.columns).index_add_(0, self.item_column[order], mass)
        leftover = mass.new_ones(self.folds * self.cells)
        leftover[self.in_basin.keys] = (1 - total).clamp(min=0)
        return allocation.view(self.folds, -1), leftover.view(self.folds, -1)

    def propose(self, credit, base):
        """The fitted proposals at every path's token, [F, M], and the leftover of their cells, [F, cells]."""
        allocation, leftover = self.fill(credit)
        return allocation[:, self.column] + leftover[:, self.cell] * base, leftover

    def average(self, leftover):
        """The leftover averaged over the cells that were fitted, [F]; 1 where none was."""
        fitted = (self.in_basin.keys // self.cells).bincount(minlength=self.folds)
        return 1 - (1 - leftover).sum(dim=1) / fitted.clamp(min=1)


class _Runs:
    """Running sums within runs of equal keys [n], through a table with one run per row.

    Sums that start anew in each row are exact where a difference of two sums over everything would cancel.
    """

    def __init__(self, keys):
        self.keys, counts = keys.unique_consecutive(return_counts=True)
        starts = counts.cumsum(0) - counts
        longest = max(counts.tolist(), default=0) + 1
        rank = torch.arange(len(keys)) - starts.repeat_interleave(counts)
        self.place = torch.arange(len(counts)).repeat_interleave(counts) * longest + rank
        self.shape = len(counts), longest

    def sums(self, values):
        """(sum of the values before each one in its run [n], total of each run)."""
        table = values.new_zeros(self.shape)
        table.view(-1)[self.place + 1] = values
        table = table.cumsum(1)
        return table.view(-1)[self.place], table[:, -1]


def _arrange(paths, slot, order, fit):
    token = paths.token[:, slot]
    cell = paths.predecessor[:, slot] if order else torch.zeros_like(token)
    return _Basins(token, paths.target_p[:, slot], cell, fit)


def _mean(values, mask):
    """Mean over the masked paths of each fold, [F, M] -> [F]."""
    return torch.where(mask, values, 0).sum(dim=-1) / mask.sum(dim=-1)


def _host(array):
    return array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array


def _tensors(paths, slot, order):
    paths = check_paths(BlockPaths(*map(_host, vars(paths).values())), slot, order)
    return BlockPaths(*map(torch.from_numpy, vars(paths).values()))
