"""One round of lossless verification: how many drafted tokens stay, and which token follows them.

A token x drawn from q is kept with probability min(1, p(x) / q(x)); if it is not, the residual max(p - q, 0)
replaces it and the round ends.  Token v then comes out with probability

    q(v) min(1, p(v) / q(v)) + (1 - a) max(p - q, 0)(v) / (1 - a) = min(p, q)(v) + max(p - q, 0)(v) = p(v),

where a = sum_v min(p, q)(v) is the chance to be kept and 1 - a the mass of the residual.  So whatever the drafter
proposes, the text has the target's law, provided that q here is the very array the token was drawn from.  After K
kept tokens the target's next row gives one more, the bonus token.

Twin: `fast/verify.py`.  Tests: `tests/test_verify.py` (the output law by enumeration).
"""

from dataclasses import dataclass

import numpy as np

from reference.laws import draw


@dataclass(frozen=True)
class Verdict:
    """What a round commits: the first `accepted` drafted tokens, 0..K, and then `token`."""

    accepted: int
    token: int


def verify_block(target_probs, draft_probs, draft_tokens, uniforms):
    """Verify a drafted block against the target, token by token (D-REAL paper Sec. 3.1, Eq. 1 and 2).

    Token x of slot k is kept while u_k q_k(x) < p_k(x).  The last uniform draws the token that follows, from the
    residual at the first slot that is not kept or from the bonus row.  Greedy verification is the case of one-hot
    rows: a draft is kept while it is the target's argmax.

    Args:
        target_probs: [K+1, V], the target's rows along the block; row K is the bonus row.
        draft_probs: [K, V], the rows that draft_tokens were drawn from, not recomputed and not at another precision.
        draft_tokens: int [K]; K may be 0.
        uniforms: float64 [K+1] in [0, 1).
    Returns: `Verdict`.  What follows a stop id inside the kept tokens is for the caller to cut.
    Raises: ValueError for a wrong shape, naming tensor and row where a row is no distribution (NaN, negative, sum
        not within 1e-4 of one), and naming a draft token that its own row gives no mass.
    """
    target_probs, draft_probs = (np.asarray(rows, dtype=np.float64) for rows in (target_probs, draft_probs))
    tokens, uniforms = check_round(target_probs.shape, draft_probs.shape, draft_tokens, uniforms)
    for name, rows in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        check_rows(name, rows.min(axis=-1), rows.sum(axis=-1))
    check_drawn(tokens, draft_probs[np.arange(len(tokens)), tokens])
    for k, token in enumerate(tokens):
        p, q = target_probs[k], draft_probs[k]
        if uniforms[k] * q[token] >= p[token]:
            return Verdict(k, int(draw(residual(p, q)[None], uniforms[-1:])[0]))
    return Verdict(len(tokens), int(draw(target_probs[-1:], uniforms[-1:])[0]))


def residual(p, q):
    """The law of the token that replaces a rejected one: max(p - q, 0) over its mass, float64 [V].

    Where nothing of p exceeds q, which only rounding can bring about after a rejection, it is p itself.

    Args: p, q, probabilities [V].
    """
    p = np.asarray(p, dtype=np.float64)
    excess = np.maximum(p - q, 0)
    law = excess if excess.any() else p
    return law / law.sum()


def check_round(target_shape, draft_shape, draft_tokens, uniforms):
    """Draft tokens, int64 [K], and uniforms, float64 [K+1], or a ValueError that says what does not fit."""
    tokens, uniforms = np.asarray(draft_tokens, dtype=np.int64), np.asarray(uniforms, dtype=np.float64)
    if tokens.ndim != 1:
        raise ValueError(f"draft_tokens must be [K], got shape {tokens.shape}")
    slots, vocab_size = len(tokens), target_shape[-1]
    for name, shape, rows in (("target_probs", target_shape, slots + 1), ("draft_probs", draft_shape, slots)):
        if tuple(shape) != (rows, vocab_size) or not vocab_size:
            raise ValueError(f"{slots} draft tokens need {name} [{rows}, V], V as the target's, got {tuple(shape)}")
    if uniforms.shape != (slots + 1,) or not ((uniforms >= 0) & (uniforms < 1)).all():
        raise ValueError(f"{slots} draft tokens need {slots + 1} uniforms in [0, 1), got {uniforms}")
    if ((tokens < 0) | (tokens >= vocab_size)).any():
        raise ValueError(f"draft_tokens holds ids outside the vocabulary of {vocab_size}: {tokens}")
    return tokens, uniforms


def check_rows(name, smallest, sums):
    """A ValueError that names the first row that is no distribution, from each row's smallest entry and sum."""
    bad = ~(np.abs(sums - 1) <= 1e-4) | (smallest < 0)
    if bad.any():
        row = int(bad.argmax())
        raise ValueError(f"{name} row {row} is no distribution: sum {sums[row]}, smallest entry {smallest[row]}")


def check_drawn(tokens, drawn):
    """A ValueError if a draft token has no mass in the row it is said to be drawn from; drawn, that mass [K]."""
    if not (drawn > 0).all():
        slot = int((drawn <= 0).argmax())
        raise ValueError(
            f"draft token {tokens[slot]} at slot {slot} was not drawn from draft_probs: it has no mass there"
        )
