"""Targets whose floors are known exactly: small laws that can be enumerated.

Each has the target's interface (`vocab_size`, `stop_ids`, `open(prefix)`), so that everything that measures a
language model also measures a toy, and `exact_floor` gives the answer that the measurement should approach.
Tests: `tests/test_toy.py`.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np


class ToyTarget:
    """A target given by a function from a token history to next-token probabilities.

    Args: vocab_size; next_token, maps a tuple of token ids (prefix and continuation) to probabilities [V];
        stop_ids, ids that end a continuation.
    """

    def __init__(
        self, vocab_size: int, next_token: Callable[[tuple[int, ...]], np.ndarray], stop_ids: Sequence[int] = ()
    ):
        self.vocab_size, self.next_token, self.stop_ids = vocab_size, next_token, tuple(stop_ids)

    def open(self, prefix, taps: Sequence[int] = ()) -> "ToySession":
        """Start a tree of continuations of `prefix`; a toy has no layers to tap."""
        return ToySession(self, tuple(int(t) for t in prefix))

    def logits(self, history: tuple[int, ...]) -> np.ndarray:
        """Log-probabilities after a history, -inf where there is no mass: float64 [V]."""
        with np.errstate(divide="ignore"):
            return np.log(np.asarray(self.next_token(history), dtype=np.float64))


class ToySession:
    """Nodes of a tree of continuations; -1 is the prefix itself, others count up in order of creation.

    `features`, what a toy drafter may see of the prefix, are its tokens [S, 1].  While there is no tree, the prefix
    itself can be extended and cropped.
    """

    def __init__(self, target: ToyTarget, prefix: tuple[int, ...]):
        self.target, self.histories = target, {-1: prefix}
        self.features = np.array(prefix)[:, None]
        self.root_logits = target.logits(prefix)

    def grow(self, parents, tokens) -> np.ndarray:
        """Add one node per (parent, token) pair and return its logits [n, V]."""
        rows = []
        for parent, token in zip(parents, tokens, strict=True):
            history = self.histories[int(parent)] + (int(token),)
            self.histories[len(self.histories) - 1] = history
            rows.append(self.target.logits(history))
        return np.stack(rows)

    def extend(self, tokens) -> tuple[np.ndarray, np.ndarray]:
        """Read more of the prefix: log-probabilities after each token [n, V], and the tokens as features [n, 1]."""
        rows = []
        for token in tokens:
            self._set_prefix((*self.histories[-1], int(token)))
            rows.append(self.target.logits(self.histories[-1]))
        return np.stack(rows), np.array(tokens)[:, None]

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens of the prefix."""
        self._set_prefix(self.histories[-1][:length])

    def _set_prefix(self, prefix: tuple[int, ...]) -> None:
        if len(self.histories) > 1:
            raise ValueError("a prefix that continuations have grown from can no longer change")
        self.histories[-1] = prefix


def point_masses(tokens: Sequence[Sequence[int]], vocab_size: int) -> ToyTarget:
    """A uniform choice between given continuations of the empty history, each then followed with certainty.

    Started from a prefix of one token, the prefix is ignored.  With M continuations that differ everywhere the
    order-0 floor at slot k >= 1 is 1 - 1/M, and one token removes it.
    """
    tokens = [tuple(t) for t in tokens]

    def next_token(history):
        past = history[1:]
        going = [t for t in tokens if t[: len(past)] == past and len(t) > len(past)]
        if not going:
            raise ValueError(f"no continuation of {past} is left; give longer ones")
        return np.bincount([t[len(past)] for t in going], minlength=vocab_size) / len(going)

    return ToyTarget(vocab_size, next_token)


def markov_chain(table: np.ndarray, stop_ids: Sequence[int] = ()) -> ToyTarget:
    """A Markov chain of order n: `table` of shape [V] * n + [V] holds P(next | last n tokens), oldest first.

    Histories shorter than n are extended to the left with token 0.
    """
    table = np.asarray(table, dtype=np.float64)
    order, vocab_size = table.ndim - 1, table.shape[-1]
    if any(size != vocab_size for size in table.shape) or order < 0:
        raise ValueError(f"a chain's table is [V] * order + [V], got {table.shape}")
    if (abs(table.sum(axis=-1) - 1) > 1e-9).any() or (table < 0).any():
        raise ValueError("every row of a chain's table must be a distribution")
    return ToyTarget(vocab_size, lambda h: table[((0,) * order + h)[len(h) :]], stop_ids)


def random_table(
    vocab_size: int, depth: int, seed: int, concentration: float = 0.5, stop_ids: Sequence[int] = ()
) -> ToyTarget:
    """An independent Dirichlet row for every history of up to `depth` further tokens: no structure at all.

    The table is a function of (seed, history), so it needs no storage and any depth can be asked.
    """

    def next_token(history):
        rng = np.random.default_rng([seed, *history[-depth:]])
        return rng.dirichlet(np.full(vocab_size, concentration))

    return ToyTarget(vocab_size, next_token, stop_ids)


def two_token_chain() -> ToyTarget:
    """The binary chain of order 2 with P(1 | 00, 01, 10, 11) = .2, .7, .4, .9.

    From the context (0, 0) its floors T_k^(m), m = 0, 1, .., are (0), (.1, 0), (.19, .04, 0), (.255, .0428, 0, 0).
    """
    ones = np.array([[0.2, 0.7], [0.4, 0.9]])
    return markov_chain(np.stack([1 - ones, ones], axis=-1))


def parity() -> ToyTarget:
    """The next token is the parity of everything before it, over the tokens {0, 1} (paper App. G.2).

    Nothing is random, so every information floor is 0.  Yet a proposal that cannot compute parity gives the right
    token at most 1/2 over uniform prefixes: its whole risk of 1/2 is model gap, and none of it is missing information.
    """
    return ToyTarget(2, lambda history: np.eye(2)[sum(history) % 2])


def mixture(weights: Sequence[float], sharpness: float = 1.0) -> ToyTarget:
    """A first token names one of n modes with the given probabilities, and the mode decides everything after it.

    From a prefix of one token, every later row puts `sharpness` on the mode's own token and spreads the rest evenly.
    Two modes are `sharpness` apart in total variation, so from slot 1 on the order-0 floor is
    sharpness * (1 - max weight); one token of the first slot, or any later one if sharpness is 1, removes it.
    """
    first, n = np.asarray(weights, dtype=np.float64), len(weights)

    def next_token(history):
        if len(history) == 1:
            return first / first.sum()
        return sharpness * np.eye(n)[history[1]] + (1 - sharpness) / n

    return ToyTarget(n, next_token)


def states(count: int, tokens: int, seed: int) -> ToyTarget:
    """Slot 0 names one of `count` states, slot 1 one of `tokens` predecessors, and slot 2 depends on both.

    States are equally likely; a state's predecessors have a Dirichlet(.3) law and each pair's row a Dirichlet(.5).
    From a prefix of one token the order-1 floor of slot 2 is what the predecessor does not tell about the state.
    """
    rows: dict[tuple[int, ...], np.ndarray] = {}

    def next_token(history):
        if len(history) == 1:
            return np.repeat([1 / count, 0], [count, tokens - count])
        key = history[1:3]
        if key not in rows:
            rows[key] = np.random.default_rng([seed, *key]).dirichlet(np.full(tokens, 0.3 if len(key) == 1 else 0.5))
        return rows[key]

    return ToyTarget(tokens, next_token)


def study(prompts: int) -> tuple[ToyTarget, dict[str, list[tuple[int, ...]]]]:
    """A target and prompts to try the whole protocol on without a language model.

    64 tokens, the last one a stop.  Mostly the last token decides the next; the rest of the time it depends on
    the last two, and how often that is depends on the domain, which a prompt's first token names.
    Returns: (target, {domain: prompts}).
    """
    vocab_size, surprise, rows = 64, {"constrained": 0.1, "open": 0.3}, {}

    def next_token(history):
        key = (history[0], *history[-2:])
        if key not in rows:
            row = list(surprise.values())[history[0]] * np.random.default_rng(key).dirichlet(np.full(vocab_size, 0.05))
            row[5 * history[-1] % (vocab_size - 1)] += 1 - row.sum()
            rows[key] = 0.99 * row
            rows[key][-1] += 0.01
        return rows[key]

    target = ToyTarget(vocab_size, next_token, stop_ids=(vocab_size - 1,))
    return target, {name: [(d, 2 + i) for i in range(min(prompts, 60))] for d, name in enumerate(surprise)}


def enumerate_rows(
    target: ToyTarget, prefix: Sequence[int], slot: int
) -> tuple[list[tuple[int, ...]], np.ndarray, np.ndarray]:
    """Every continuation Z_<k that reaches a slot: (continuations, their probabilities [U], target rows [U, V])."""
    prefix = tuple(int(t) for t in prefix)
    found = []
    for past in product(range(target.vocab_size), repeat=slot):
        weight = 1.0
        for i, token in enumerate(past):
            weight *= 0.0 if token in target.stop_ids else target.next_token(prefix + past[:i])[token]
            if weight == 0:
                break
        else:
            found.append((past, weight, target.next_token(prefix + past)))
    return [f[0] for f in found], np.array([f[1] for f in found]), np.array([f[2] for f in found])


def exact_floor(target: ToyTarget, prefix: Sequence[int], slot: int, order: int) -> float:
    """T_k^(m) at one prefix by enumeration, over continuations that reach the slot.

    Each cell's best proposal is the common beta-quantile of its rows (see `reference/distance.py`), found here
    by plain bisection on beta: slow, and independent of the estimators it checks.
    """
    pasts, weights, rows = enumerate_rows(target, prefix, slot)
    cells: dict[tuple[int, ...], list[int]] = {}
    for i, past in enumerate(pasts):
        cells.setdefault(past[slot - min(order, slot) :], []).append(i)
    risk = sum(_least_risk(rows[members], weights[members]) for members in cells.values())
    return float(risk / weights.sum())


def _least_risk(rows: np.ndarray, weights: np.ndarray) -> float:
    """min_q sum_u w_u TV(row_u, q), by bisection on the quantile level between which the mass crosses one."""

    def quantiles(beta):  # smallest value whose cumulative weight reaches beta of the whole, per column
        out = np.empty(rows.shape[1])
        for v, column in enumerate(rows.T):
            order = np.argsort(column)
            reached = np.cumsum(weights[order]) >= beta * weights.sum() - 1e-15
            out[v] = column[order][reached.argmax()]
        return out

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if quantiles(middle).sum() < 1 else (low, middle)
    below, above = quantiles(low), quantiles(high)
    gap = above.sum() - below.sum()
    q = above if gap <= 0 else below + (above - below) * min(1.0, max(0.0, (1 - below.sum()) / gap))
    return float(weights @ np.abs(rows - q).sum(axis=1) / 2)


def drafted_length(target: ToyTarget, prefix: Sequence[int], draft_logits: np.ndarray) -> tuple[float, np.ndarray]:
    """Expected tokens per round of a tabular drafter, bonus token counted, and its slope in the drafter's logits.

    The drafter reads its own last token: draft_logits [K, V, V] holds one row per slot and predecessor, which at slot
    0 is the last token of the prefix.  Exact, by recursion over all blocks.  With s = min(p, q) and A the accepted
    drafts still to come,

        A(past) = sum_v s(v) (1 + A(past, v)),      dA/dq(v) = 1[q(v) < p(v)] (1 + A(past, v)),

    and a past counts with the probability prod s that verification gets there.  A stop id ends the block.
    Returns: (1 + A() in tokens, slope [K, V, V]).
    """
    prefix, slots, slope = tuple(int(t) for t in prefix), len(draft_logits), np.zeros(draft_logits.shape)

    def follow(past, reached):
        row = len(past), (prefix + past)[-1]
        q, p = np.exp(draft_logits[row] - draft_logits[row].max()), target.next_token(prefix + past)
        q /= q.sum()
        kept, worth = np.minimum(p, q), np.ones(len(q))
        if len(past) + 1 < slots:
            for token in set(range(len(q))) - set(target.stop_ids):
                worth[token] += follow((*past, token), reached * kept[token])
        g = (q < p) * worth
        slope[row] += reached * q * (g - g @ q)
        return float(kept @ worth)

    return 1 + follow((), 1.0), slope
