"""The tree of target continuations that every estimator reads.

At an anchor with prefix X the paper draws M independent continuations Z^(1)..Z^(M) of gamma tokens and reads
the target row p_k(. | X, Z_<k) along each (App. B.3).  Paths that agree so far share their row, so the M paths
are walked as one tree: each distinct prefix is one node with one forward row, weighted by the share of paths
that run through it.  This is the law of M independent paths, unchanged, at the cost of the distinct prefixes.

Randomness is an argument: path r draws its token at slot k with uniforms[r, k], so two backends walk the same
tree, and the first 256 of 1024 paths are the 256-path run.

Twin: `fast/paths.py`.  Tests: `tests/test_paths.py`.
"""

from dataclasses import dataclass

import numpy as np

from reference.laws import SamplingLaw, draw, warp


@dataclass(frozen=True)
class Answer:
    """What the target wrote: `tokens` up to the first stop id (left out); `stopped` is False if the cap came first."""

    tokens: tuple[int, ...]
    stopped: bool


def write_answers(target, prompts, uniforms, law=SamplingLaw()):
    """Let the target write one answer per prompt, at most as many tokens as it is given uniforms (App. B.2).

    Args: target, as for `walk`; prompts, B lists of token ids; uniforms, float64 [B, L] in [0, 1).
    Returns: list of B `Answer`.
    """
    prompts, uniforms = check_answers(target, prompts, uniforms)
    return [_write_answer(target, prompt, row, law) for prompt, row in zip(prompts, uniforms, strict=True)]


def _write_answer(target, prompt, uniforms, law):
    session = target.open(prompt)
    logits, tokens = np.asarray(session.root_logits)[None], []
    for u in uniforms:
        token = int(draw(warp(logits, law), [u])[0])
        if token in target.stop_ids:
            return Answer(tuple(tokens), True)
        tokens.append(token)
        if len(tokens) < len(uniforms):
            logits = np.asarray(session.grow([len(tokens) - 2], [token]))  # -1, the prompt itself, at first
    return Answer(tuple(tokens), False)


@dataclass(frozen=True)
class Slot:
    """All distinct target prefixes at one slot of the block.

    index       k, 0..gamma-1
    parent      int [U], each prefix's position among the previous slot's prefixes (-1 at slot 0)
    token       int [U], Z_{k-1}, the token that leads here (at slot 0 the last token of X)
    weight      float [U], share of the M paths (sampled) or exact probability (enumerated); sums to `covered` x `alive`
    rows        float [U, V], p_k under the sampling law
    past        int [U, L + k], the last L tokens of X followed by Z_<k
    alive       share of paths that have not stopped before this slot
    covered     share of the alive probability that the prefixes stand for (1 when sampled)
    path_node   int [M], position of each path's prefix, -1 once it has stopped (sampled only)
    drawn       int [M], Z_k of each path, -1 once it has stopped (sampled only)
    """

    index: int
    parent: np.ndarray
    token: np.ndarray
    weight: np.ndarray
    rows: np.ndarray
    past: np.ndarray
    alive: float
    covered: float = 1.0
    path_node: np.ndarray | None = None
    drawn: np.ndarray | None = None

    def history(self, m):
        """The last m realised tokens before this slot, int [U, m]; tokens of X stand in where k < m."""
        if m > self.past.shape[1]:
            raise ValueError(f"history of {m} tokens asked, {self.past.shape[1]} known at slot {self.index}")
        return self.past[:, self.past.shape[1] - m :]


def walk(target, prefix, gamma, uniforms, law=SamplingLaw()):
    """Walk M sampled target continuations as one tree, yielding a `Slot` for k = 0..gamma-1 (App. B.3).

    A path that draws a stop id at slot k is alive at k and gone afterwards; the walk ends early when no path is
    left.  Slots are yielded one at a time so that only one slot's rows need to be held.

    Args:
        target: anything with `vocab_size`, `stop_ids` and `open(prefix)` giving a session with `root_logits`
            [V] and `grow(parents [n], tokens [n]) -> logits [n, V]`; node ids count up in order of creation
            and -1 is the prefix itself.
        prefix: token ids of X, at least one.
        uniforms: float64 [M, gamma] in [0, 1).
    Yields: Slot with float64 rows.
    """
    prefix, uniforms = check_walk(target, prefix, gamma, uniforms)
    session = target.open(prefix)
    logits, created = np.asarray(session.root_logits)[None], 0
    node, parent, token = np.array([-1]), np.array([-1]), prefix[-1:]  # `node` holds the session's ids
    past, path_node = prefix[None, -gamma:], np.zeros(len(uniforms), dtype=np.int64)
    for k in range(gamma):
        rows = warp(logits, law)
        alive = path_node >= 0
        drawn = np.full(len(uniforms), -1)
        drawn[alive] = draw(rows, uniforms[alive, k], path_node[alive])
        weight = np.bincount(path_node[alive], minlength=len(rows)) / len(uniforms)
        yield Slot(k, parent, token, weight, rows, past, float(alive.mean()), 1.0, path_node, drawn)

        parent, token, path_node = branch(path_node, drawn, target.stop_ids)
        if k == gamma - 1 or not len(parent):
            return
        logits = np.asarray(session.grow(node[parent], token))
        node = created + np.arange(len(parent))
        created += len(parent)
        past = np.concatenate([past[parent], token[:, None]], axis=1)


def branch(path_node, drawn, stop_ids):
    """The next slot's prefixes: the distinct (prefix, drawn token) pairs of the paths that go on.

    Args: path_node int [M] and drawn int [M] as in `Slot`; stop_ids, the ids that end a path.
    Returns: parent int [U], token int [U], sorted by (parent, token); path_node int [M], -1 where stopped.
    """
    alive = (path_node >= 0) & ~np.isin(drawn, list(stop_ids))
    pairs, place = np.unique(np.stack([path_node, drawn], axis=1)[alive], axis=0, return_inverse=True)
    successor = np.full(len(path_node), -1)
    successor[alive] = place.ravel()
    return pairs[:, 0], pairs[:, 1], successor


def check_walk(target, prefix, gamma, uniforms):
    """The arguments of `walk` as arrays, or a ValueError that says which is wrong."""
    prefix, uniforms = check_tokens(prefix, target.vocab_size), np.asarray(uniforms, dtype=np.float64)
    if gamma < 1:
        raise ValueError(f"block length gamma must be at least 1, got {gamma}")
    if uniforms.ndim != 2 or uniforms.shape[1] != gamma or not len(uniforms):
        raise ValueError(f"uniforms must be [M, gamma] with gamma = {gamma} and M >= 1, got {uniforms.shape}")
    return prefix, uniforms


def check_answers(target, prompts, uniforms):
    """The arguments of `write_answers` as arrays, or a ValueError that says which is wrong."""
    uniforms = np.asarray(uniforms, dtype=np.float64)
    if uniforms.ndim != 2 or len(uniforms) != len(prompts) or not uniforms.shape[1]:
        raise ValueError(f"{len(prompts)} prompts need uniforms [{len(prompts)}, L], L >= 1, got {uniforms.shape}")
    return [check_tokens(prompt, target.vocab_size) for prompt in prompts], uniforms


def check_tokens(tokens, vocab_size, name="prefix"):
    """Token ids as int64 [n], or a ValueError if there are none or some lie outside the vocabulary."""
    tokens = np.array(tokens, dtype=np.int64)
    if tokens.ndim != 1 or not tokens.size:
        raise ValueError(f"a {name} needs at least one token")
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"the {name} holds token ids outside the vocabulary of {vocab_size}")
    return tokens


def check_growth(parents, tokens, nodes, vocab_size):
    """The arguments of a session's `grow` as int64 arrays, or a ValueError; `nodes` exist before the call."""
    parents, tokens = np.array(parents, dtype=np.int64), check_tokens(tokens, vocab_size)
    if parents.shape != tokens.shape or parents.min() < -1 or parents.max() >= nodes:
        raise ValueError(f"each new token needs a parent among -1..{nodes - 1}, the nodes there are; got {parents}")
    return parents, tokens
