"""The log-loss companion in PyTorch.  Twin: `reference/information.py`, where it is explained.

Rows stay on their device and are read cell by cell.  What acts on one number per path or per anchor (jackknife,
recovery, effective support) has nothing to accelerate and is shared.
"""

import torch

from fast.distance import distributions
from reference.floors import cells_of
from reference.information import LogMean, RealisedLoss, effective_support, jackknife, recovery, summarise_loss

__all__ = [
    "LogMean",
    "RealisedLoss",
    "ce_realised",
    "effective_support",
    "jackknife",
    "mutual_information",
    "recovery",
]


def mutual_information(slot, order=None):
    """I(Z_k; last m realised tokens | X) in nats, divergence form: see `reference.information.mutual_information`.

    The divergence is summed, never two entropies subtracted, so float32 rows lose nothing.

    Args: slot, a `Slot` with a tensor of rows; order m, None = the whole history.  Returns: float.
    """
    rows, weights = distributions(slot.rows), slot.weight / slot.weight.sum()
    cells = cells_of(slot, slot.index if order is None else order)
    mean = _mean(rows, weights)
    used = mean > 0
    information = 0.0
    for cell in sorted(set(cells[weights > 0].tolist())):
        here = (cells == cell).nonzero()[0]
        inside = rows if len(here) == len(cells) else rows[torch.from_numpy(here).to(rows.device)]
        information += weights[here].sum() * _divergence(_mean(inside, weights[here])[used], mean[used])
    return max(0.0, float(information))


def _mean(rows, weights):
    mean = torch.from_numpy(weights / weights.sum()).to(rows) @ rows
    return mean / mean.sum(dtype=torch.float64).to(mean.dtype)  # float32 rows sum to one only nearly


def _divergence(p, q):  # KL(p || q) for q > 0
    return float(torch.special.xlogy(p, p / q).sum(dtype=torch.float64))


def ce_realised(slot, token):
    """Blind and committed cross-entropy of one realised token: see `reference.information.ce_realised`.

    Args: slot, a `Slot` with a tensor of rows; token, y_k.  Returns: `RealisedLoss`.
    """
    if not 0 <= token < slot.rows.shape[1]:
        raise ValueError(f"token {token} lies outside the vocabulary of {slot.rows.shape[1]}")
    return summarise_loss(slot, slot.rows[:, token].double().cpu().numpy())
