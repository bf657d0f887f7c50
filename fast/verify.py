"""One round of lossless verification in PyTorch.  Twin: `reference/verify.py`, where it is derived.

Of every row only a few numbers leave the device; all slots are judged at once, and the one row that the next token
comes from is formed in float64, so that both backends draw the same token from the same rows.
"""

import numpy as np
import torch

from fast.laws import draw
from reference.verify import Verdict, check_drawn, check_round, check_rows

__all__ = ["Verdict", "residual", "verify_block"]


def verify_block(target_probs, draft_probs, draft_tokens, uniforms):
    """Verify a drafted block against the target: see `reference.verify.verify_block`.

    Args: target_probs [K+1, V] and draft_probs [K, V], float32 or float64 on one device; draft_tokens, int [K], and
        uniforms, float64 [K+1], on the host.
    Returns: `Verdict`.
    """
    tokens, uniforms = check_round(target_probs.shape, draft_probs.shape, draft_tokens, uniforms)
    for name, rows in (("target_probs", target_probs), ("draft_probs", draft_probs)):
        check_rows(name, _numpy(rows.amin(dim=-1)), _numpy(rows.sum(dim=-1, dtype=torch.float64)))
    drafted = torch.from_numpy(tokens).to(target_probs.device)[:, None]
    p, q = _numpy(target_probs[:-1].gather(1, drafted)[:, 0]), _numpy(draft_probs.gather(1, drafted)[:, 0])
    check_drawn(tokens, q)
    rejected = np.flatnonzero(uniforms[:-1] * q >= p)
    accepted = int(rejected[0]) if len(rejected) else len(tokens)
    law = residual(target_probs[accepted], draft_probs[accepted]) if len(rejected) else target_probs[-1]
    return Verdict(accepted, int(draw(law[None], uniforms[-1:])[0]))


def residual(p, q):
    """The law of the token that replaces a rejected one, float64 [V]: see `reference.verify.residual`.

    Args: p, q, probabilities [V].
    """
    p = p.double()
    excess = (p - q.double()).clamp(min=0)
    law = torch.where(excess.any(), excess, p)
    return law / law.sum()


def _numpy(values):
    return values.double().cpu().numpy()
