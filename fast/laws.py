"""Sampling laws in PyTorch.  Twin: `reference/laws.py`, where the definitions are explained."""

from numbers import Integral

import numpy as np
import torch

from reference.laws import SamplingLaw

BLOCK = 1024  # vocabulary entries per partial sum


def warp(logits, law=SamplingLaw()):
    """Apply a sampling law to logits: see `reference.laws.warp`.

    Args: logits, float32 or float64 [..., V]; a NumPy array becomes a tensor.
    Returns: probabilities of the same dtype, each row summing to one.
    """
    logits = torch.as_tensor(logits)
    top = logits.amax(dim=-1, keepdim=True)
    if not top.isfinite().all():
        bad = (~top[..., 0].isfinite()).nonzero()[0]
        raise ValueError(f"logits row {tuple(bad.tolist())} has no finite maximum (NaN, +inf or all -inf)")
    if law.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(dim=-1, keepdim=True), 1.0)
    limits = torch.finfo(logits.dtype)
    temperature = min(max(law.temperature, limits.tiny), limits.max)  # as a number of this dtype, not 0 or infinity
    probs = torch.softmax(logits if temperature == 1 else (logits - top) / temperature, dim=-1)
    if 0 < law.top_k < logits.shape[-1] or law.top_p < 1:
        ranked, order = probs.sort(dim=-1, descending=True, stable=True)
        if law.top_k:
            ranked[..., law.top_k :] = 0
        before = ranked.cumsum(dim=-1, dtype=torch.float64) - ranked
        before[..., 0] = -1  # the first token stays, whatever top_p is
        ranked[before >= law.top_p] = 0
        probs = torch.zeros_like(probs).scatter_(-1, order, ranked)
        probs /= probs.sum(dim=-1, keepdim=True)
    return probs


def truncate(rows, k):
    """Keep each row's k largest probabilities: see `reference.laws.truncate`.

    Args: rows, float [U, V].  Returns: (renormalised rows [U, V], residual mass [U]).
    """
    if not isinstance(k, Integral) or k < 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k}")
    total = rows.sum(dim=-1)
    bad = ~((total > 0) & total.isfinite())
    if bad.any():
        worst = int(bad.int().argmax())
        raise ValueError(f"row {worst} cannot be renormalised: its mass is {float(total[worst])}")
    ranked, order = rows.sort(dim=-1, descending=True, stable=True)
    kept = torch.zeros_like(rows).scatter_(-1, order[..., :k], ranked[..., :k])
    mass = kept.sum(dim=-1)
    return kept / mass[..., None], (total - mass).clamp(min=0)


def draw(rows, uniforms, which=None):
    """Draw tokens by inverse CDF with float64 sums: see `reference.laws.draw`.

    The cumulative sum is taken in two steps, over blocks and then inside the block that holds the token; in one on the
    host, where every row gives one token.

    Args: rows, probabilities [U, V]; uniforms, float64 [n] in [0, 1), NumPy; which, int [n], NumPy.
    Returns: tokens, int64 [n], NumPy (the tree is kept on the host).
    """
    uniforms = np.asarray(uniforms, dtype=np.float64)
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    if which is None and len(uniforms) != len(rows):
        raise ValueError(f"{len(rows)} rows need as many uniforms, or which of them each is for; got {len(uniforms)}")
    if which is None and not rows.is_cuda:
        host = (rows.float() if rows.dtype == torch.bfloat16 else rows).detach().numpy()
        drawn = [_draw_one(i, row, u) for i, (row, u) in enumerate(zip(host, uniforms, strict=True))]
        return np.array(drawn, dtype=np.int64)
    which = np.arange(len(uniforms)) if which is None else np.asarray(which, dtype=np.int64)
    rows = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % BLOCK)).view(len(rows), -1, BLOCK)
    sums = rows.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    total = sums[:, -1].cpu().numpy()
    for row in np.unique(which):
        if not 0 < total[row] < np.inf:
            raise ValueError(f"row {row} cannot be drawn from: its mass is {total[row]}")
    which = torch.from_numpy(which).to(rows.device)
    threshold = torch.from_numpy(uniforms).to(rows.device) * sums[which, -1]
    block = torch.searchsorted(sums[which], threshold[:, None], right=True)[:, 0]
    threshold = threshold - torch.where(block > 0, sums[which, block - 1], 0.0)
    inside = rows[which, block].cumsum(dim=-1, dtype=torch.float64)
    last = (inside < inside[:, -1:]).sum(dim=-1)  # last token of the block that has mass
    token = torch.searchsorted(inside, threshold[:, None], right=True)[:, 0].minimum(last)
    return (block * BLOCK + token).cpu().numpy()


def _draw_one(index, row, uniform):
    """A token of one row, NumPy."""
    sums = row.cumsum(dtype=np.float64)
    if not 0 < sums[-1] < np.inf:
        raise ValueError(f"row {index} cannot be drawn from: its mass is {sums[-1]}")
    last = sums.searchsorted(sums[-1])  # last token that has mass
    return min(sums.searchsorted(uniform * sums[-1], side="right"), last)
