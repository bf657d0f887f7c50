"""Sampling laws: from a row of logits to the distribution that tokens are drawn from.

One law shapes everything that is measured: the paths are drawn from it, the rows p_k are read under it, and a
proposal is warped by it before it is verified.  The paper's primary law is temperature 1 without truncation
(App. B.1); its App. C.7 repeats the measurement at temperature 0.7, top-p 0.8, top-k 20.

Twin: `fast/laws.py`.  Tests: `tests/test_laws.py`.
"""

from dataclasses import dataclass
from numbers import Integral
from operator import index

import numpy as np


@dataclass(frozen=True)
class SamplingLaw:
    """Temperature, then top-k, then top-p.

    `temperature` 0 is the greedy limit (all mass on the first largest logit), `top_k` 0 switches top-k off and
    `top_p` 1 switches top-p off.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be finite and at least 0, got {self.temperature}")
        try:
            object.__setattr__(self, "top_k", index(self.top_k))
        except TypeError:
            raise ValueError(f"top_k must be a whole number, 0 (off) or more, got {self.top_k}") from None
        if self.top_k < 0:
            raise ValueError(f"top_k must be a whole number, 0 (off) or more, got {self.top_k}")
        if not 0 <= self.top_p <= 1:
            raise ValueError(f"top_p must lie in [0, 1], got {self.top_p}")


def warp(logits, law=SamplingLaw()):
    """Apply a sampling law to logits.

        p = softmax(logits / temperature); keep the top_k largest; keep token j while the mass before it, in
        falling order of p, is below top_p (the first is always kept); divide by what is left.

    Ties are kept lowest id first.  The mass before j is counted before any renormalisation, so top_k 3 with
    top_p 0.82 on (.5, .3, .15, .05) keeps three tokens (App. C.7, where this one law draws the paths and is read along
    them).

    Args: logits, float [..., V]; -inf marks a forbidden token.
    Returns: probabilities, float64 [..., V], each row summing to one.
    Raises: ValueError naming the row if it holds NaN or +inf, or if every entry is -inf.
    """
    logits = np.asarray(logits, dtype=np.float64)
    top = logits.max(axis=-1, keepdims=True)  # NaN if any entry is NaN
    bad = np.argwhere(~np.isfinite(top[..., 0]))
    if len(bad):
        raise ValueError(f"logits row {tuple(map(int, bad[0]))} has no finite maximum (NaN, +inf or all -inf)")
    if law.temperature == 0:
        probs = np.zeros_like(logits)
        np.put_along_axis(probs, logits.argmax(axis=-1, keepdims=True), 1.0, axis=-1)
        return probs
    probs = np.exp((logits - top) / law.temperature)
    probs /= probs.sum(axis=-1, keepdims=True)
    if 0 < law.top_k < logits.shape[-1] or law.top_p < 1:
        order = np.argsort(-probs, axis=-1, kind="stable")
        ranked = np.take_along_axis(probs, order, axis=-1)
        if law.top_k:
            ranked[..., law.top_k :] = 0
        before = np.cumsum(ranked, axis=-1) - ranked
        before[..., 0] = -1  # the first token stays, whatever top_p is
        ranked[before >= law.top_p] = 0
        np.put_along_axis(probs, order, ranked, axis=-1)
        probs /= probs.sum(axis=-1, keepdims=True)
    return probs


def truncate(rows, k):
    """Read only each row's k largest probabilities, as a truncated interface would return them.

    Renormalising what was kept moves a row by TV(p, p~) = residual exactly, so a floor computed from truncated
    rows lies within the weighted mean residual of the true one - on either side (App. C.6).

    Args: rows, float [U, V]; k, how many entries to keep (ties: lowest ids).
    Returns: (rows renormalised on their k largest, float64 [U, V]; residual mass, float64 [U]).
    Raises: ValueError for a bad k, or naming a row that has no mass.
    """
    if not isinstance(k, Integral) or k < 1:
        raise ValueError(f"k must be a whole number of at least 1, got {k}")
    rows = np.asarray(rows, dtype=np.float64)
    total = rows.sum(axis=-1)
    bad = ~((total > 0) & (total < np.inf))
    if bad.any():
        worst = int(bad.argmax())
        raise ValueError(f"row {worst} cannot be renormalised: its mass is {total[worst]}")
    order = np.argsort(-rows, axis=-1, kind="stable")[..., :k]
    kept = np.zeros_like(rows)
    np.put_along_axis(kept, order, np.take_along_axis(rows, order, axis=-1), axis=-1)
    mass = kept.sum(axis=-1)
    return kept / mass[..., None], np.maximum(total - mass, 0)


def draw(rows, uniforms, which=None):
    """Draw tokens by inverse CDF: the first id whose cumulative mass exceeds u x total mass.

    Cumulative sums are float64, and a token without mass never exceeds what its predecessor reached, so it is
    never drawn.

    Args: rows, probabilities [U, V]; uniforms, float64 [n] in [0, 1); which, int [n], the row each draw reads
        (None: row i for draw i).
    Returns: tokens, int64 [n].
    Raises: ValueError for uniforms outside [0, 1), for more or fewer than there are rows to read, or naming a row that
        has no mass.
    """
    uniforms = np.asarray(uniforms, dtype=np.float64)
    if which is None and len(uniforms) != len(rows):
        raise ValueError(f"{len(rows)} rows need as many uniforms, or which of them each is for; got {len(uniforms)}")
    which = np.arange(len(uniforms)) if which is None else np.asarray(which, dtype=np.int64)
    if not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError("uniforms must lie in [0, 1)")
    tokens = np.empty(len(uniforms), dtype=np.int64)
    for row in np.unique(which):
        cumulative = np.cumsum(rows[row], dtype=np.float64)
        if not 0 < cumulative[-1] < np.inf:
            raise ValueError(f"row {row} cannot be drawn from: its mass is {cumulative[-1]}")
        here = which == row
        tokens[here] = np.searchsorted(cumulative, uniforms[here] * cumulative[-1], side="right")
    return tokens
