"""Drafters for toys: a proposal given by a function, in the form of the networks that draft for language models.

Tests: `tests/test_toy_drafters.py`.
"""

from collections.abc import Callable
from typing import Any

import numpy as np


class ToyDrafter:
    """A block drafter given by a function from what it sees to its next-token probabilities.

    Args: backend, the `reference` or `fast` package; gamma, tokens it proposes; order, how many tokens of the block
        it reads (None = all of them); next_token, maps (prefix, slot k, the tokens it reads) to probabilities [V].
        Token ids come in tuples; at slot 0 the last token of the prefix stands for a predecessor.
    """

    taps = ()

    def __init__(self, backend: Any, gamma: int, order: int | None, next_token: Callable[..., np.ndarray]):
        self.backend, self.gamma, self.order, self.next_token = backend, gamma, order, next_token

    def context(self) -> "ToyContext":
        """An empty context."""
        return ToyContext()

    def propose(self, context: "ToyContext", token: int, law: Any) -> "ToyProposal":
        """The proposal for the block after `token`, under a sampling law."""
        return ToyProposal(self, (*context.tokens, int(token)), law)


class ToyContext:
    """The tokens before the last one of the prefix: a toy's features are its tokens."""

    def __init__(self) -> None:
        self.tokens: tuple[int, ...] = ()

    def append(self, features: np.ndarray) -> None:
        """Add the features of the next positions, [s, 1]."""
        self.tokens += tuple(int(t) for t in features[:, 0])


class ToyProposal:
    """What a toy drafter proposes after one prefix."""

    def __init__(self, drafter: ToyDrafter, prefix: tuple[int, ...], law: Any):
        self.drafter, self.prefix, self.law = drafter, prefix, law
        self.gamma, self.order = drafter.gamma, drafter.order

    def probs(self, slot: int, history: np.ndarray) -> Any:
        """q_k [n, V] after histories int [n, h], whose last columns are the tokens of the block (see `ToyDrafter`)."""
        seen = slot + 1 if self.order is None else self.order
        rows = [self.drafter.next_token(self.prefix, slot, tuple(map(int, h[len(h) - seen :]))) for h in history]
        with np.errstate(divide="ignore"):
            return self.drafter.backend.warp(np.log(np.array(rows, dtype=np.float64)), self.law)

    def sample(self, uniforms: np.ndarray) -> np.ndarray:
        """Independent chains of h <= gamma tokens, int [n, h]: token k by inverse CDF with uniforms[:, k]."""
        chains = np.full((len(uniforms), 1), self.prefix[-1])
        for k in range(uniforms.shape[1]):
            drawn = self.drafter.backend.draw(self.probs(k, chains), uniforms[:, k])
            chains = np.concatenate([chains, drawn[:, None]], axis=1)
        return chains[:, 1:]


def study_drafters(backend: Any, gamma: int) -> dict[str, ToyDrafter]:
    """Two drafters for `toy.study`, which know that 5 t mod 63 mostly follows t but not what else may.

    "parallel" (order 0) follows that rule from the prefix alone and is less sure slot by slot; "chained" (order 1)
    follows it from the predecessor it is given.
    """

    def guess(token: int, sure: float) -> np.ndarray:
        row = np.full(64, (1 - sure) / 64)
        row[5 * token % 63] += sure
        return row

    def parallel(prefix, slot, _):
        token = prefix[-1]
        for _ in range(slot):
            token = 5 * token % 63
        return guess(token, 0.75 ** (slot + 1))

    return {
        "parallel": ToyDrafter(backend, gamma, 0, parallel),
        "chained": ToyDrafter(backend, gamma, 1, lambda prefix, slot, seen: guess(seen[-1], 0.75)),
    }
