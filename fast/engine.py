"""Lossless block-speculative decoding of many requests side by side.  Twin: `reference/engine.py`, where it is told.

A batch owns rows of three caches that are allocated once: the target's, the drafter's and, for a prefix-attention
drafter, its head's.  Each row has its own length, kept on the host: a rejected draft is forgotten by not counting it.
Live requests own the first rows; when one ends, the last takes its row, and the next one waiting joins behind them.

A round is two forwards, each one step for all rows: the drafter's block, and the target over anchors and drafts, which
also writes the drafter's context.  Between them the chains are drawn slot by slot, and every row that a token was drawn
from is kept until that token is judged by it.

No row reads another's numbers.  Below float64 a forward of more rows may still round differently, so a text may part
from the one its request has alone, or by plain decoding, where two tokens nearly tie.  Tests: `tests/test_engine.py`.
"""

from collections import Counter, deque

import numpy as np
import torch

from fast.cuda_graphs import Graphs
from fast.draft_heads import largest
from fast.drafters import Blocks, Contexts
from fast.laws import draw, warp
from fast.verify import residual
from reference.draft_heads import sigmoid
from reference.engine import (
    Completion,
    Request,
    RoundStats,
    Text,
    check_confidence,
    check_settings,
    spent,
    tokens_per_round,
    uniforms,
)
from reference.verify import Verdict

__all__ = ["Completion", "Engine", "Request", "RoundStats", "tokens_per_round", "uniforms"]


class Engine:
    """Decodes requests with a drafter's help; every text has the target's law, token by token.

    Args: target, a `Decoder`; the others as for `reference.Engine`, batch being the rows that are allocated.
    Attributes: seconds, as in `reference.Engine` (the drafter's context is written while the target reads, so that is
        "verify"); graphs, which replay the steps on CUDA; `graphs.enabled = False` turns them off.
    """

    def __init__(
        self,
        target,
        drafter,
        capacity,
        *,
        batch=8,
        draft_law=None,
        lattice=None,
        threshold=0.0,
        uniforms=uniforms,
    ):
        check_settings(capacity, batch, threshold)
        self.target, self.drafter, self.capacity, self.batch = target, drafter, capacity, batch
        self.draft_law, self.threshold, self.uniforms = draft_law, threshold, uniforms
        self.slots, self.taps, positions = 0, (), capacity
        if drafter is not None:
            self.slots, self.taps = drafter.gamma, drafter.taps
            self.lattice = drafter.lattice if lattice is None else lattice
            positions = capacity + self.slots  # a block that reaches beyond the last position is written all the same
            self.contexts = Contexts(drafter, batch, positions)
            dtype = torch.float64 if drafter.dtype == torch.float64 else torch.float32
            shape = batch, self.slots, target.vocab_size
            self.draft_probs = torch.zeros(shape, dtype=dtype, device=target.device)
        self.cache = target.cache(batch, positions)
        self.graphs = Graphs(target.device, batch, positions)
        self.seconds = Counter()

    @torch.no_grad()
    def generate(self, requests, speculate=True, finished=None):
        """Continue every request: list of `Completion`, in order.

        Args: requests, list of `Request`, any number; speculate, False = plain decoding from the same caches;
            finished, called with (`Request`, `Completion`) as each one ends.
        Raises: ValueError, before anything is run, for a prompt that is empty, out of vocabulary or too long.
        """
        texts = [Text(request, self.target, self.capacity) for request in requests]
        waiting, live = deque(text for text in texts if not text.done), []
        speculate = speculate and self.drafter is not None
        finished = finished or (lambda request, completion: None)
        for text in texts:
            if text.done:
                finished(text.request, text.completion())
        while waiting or live:
            while waiting and len(live) < self.batch:
                live.append(waiting.popleft())
                self._open(live[-1], len(live) - 1, speculate)
                self._release(live, finished)
            if live:
                self._round(live, self.slots if speculate else 0)
                self._release(live, finished)
        return [text.completion() for text in texts]

    def _open(self, text, row, speculate):
        """Read a prompt into a row and draw its first token."""
        text.begin()
        with spent(self.seconds, "prefill"):
            logits, features = self.target.prefill(self.cache, row, text.prompt, self.taps if speculate else ())
            if speculate:
                self.contexts.write(features[None], self._ids([0]), row)
            u = self.uniforms(text.request.seed, text.anchor, 0)
            text.commit(draw(warp(logits[None], text.request.law), u))

    def _release(self, live, finished):
        """Let the texts go that are done; rows above a free one move down."""
        for row in reversed(range(len(live))):
            if live[row].done:
                finished(live[row].request, live[row].completion())
                last = live.pop()
                if row < len(live):
                    live[row] = last
                    self.cache.move(len(live), row, last.anchor)
                    if self.drafter is not None:
                        self.contexts.move(len(live), row, last.anchor)

    def _round(self, live, slots):
        """Draft, read, verify and commit for every live text; `slots` 0 = a step of plain decoding."""
        u = np.stack([self.uniforms(text.request.seed, text.anchor, slots) for text in live])
        anchors, most = np.array([text.anchor for text in live]), np.array([min(slots, text.room) for text in live])
        chains, drafted = np.array([[text.tokens[-1]] for text in live]), np.zeros(len(live), dtype=np.int64)
        step = self._read
        if most.any():
            with spent(self.seconds, "draft"):
                chains, drafted = self._draft(live, chains, anchors, most, u[:, :slots])
            step = self._read_for_both
        with spent(self.seconds, "verify"):
            inputs = self._ids(chains), self._ids(anchors)
            (logits,) = self.graphs.run(step, inputs, int(anchors.max()) + chains.shape[1])
            target_probs = self._warp(logits, [text.request.law for text in live])
            draft_probs = self.draft_probs[: len(live)] if most.any() else None
            verdicts = verify_rows(target_probs, draft_probs, chains[:, 1:], drafted, u[:, slots:])
        with spent(self.seconds, "commit"):
            for text, chain, count, verdict in zip(live, chains, drafted, verdicts, strict=True):
                text.end_round(chain[1 : 1 + count], verdict)

    def _draft(self, live, chains, anchors, most, uniforms):
        """Draft at most `most` [n] tokens per text: (chains int [n, 1 + slots], anchors first; how many count [n])."""
        n, span = len(live), int(anchors.max())
        tokens, places = self._ids(chains[:, 0]), self._ids(anchors)
        rows, base, candidates = self.graphs.run(self._block, (tokens, places), span)
        past = self.drafter.past(self.contexts.memory(n, span), places, tokens)
        blocks = Blocks(self.drafter, rows, base, candidates, past)
        laws = [self.draft_law or text.request.law for text in live]
        chains, drafted = np.pad(chains, ((0, 0), (0, self.slots))), np.zeros(n, dtype=np.int64)
        going = np.ones(n, dtype=bool)
        for slot in range(most.max()):
            seen = self._ids(chains[:, : slot + 1])
            going &= slot < most
            if self.threshold:
                trust = check_confidence(blocks.confidence(slot, seen))
                going &= sigmoid(trust.double().cpu().numpy()) >= self.threshold
            if not going.any():
                break
            q = self._warp(blocks.logits(slot, seen), laws)
            self.draft_probs[:n, slot] = q
            chains[:, slot + 1] = draw(q, uniforms[:, slot])
            drafted += going
        return chains, drafted

    def _block(self, tokens, anchors, span):
        """Step: the drafter's forward, and the logits of all slots before their predecessors are known."""
        rows = self.drafter.hidden(self.contexts.memory(len(tokens), span), anchors, tokens)
        base = self.drafter.scores(rows[:, self.drafter.first :])
        return rows, base, largest(base, self.lattice) if self.lattice else None

    def _read(self, tokens, anchors, span):
        """Step: the target's logits after anchors and drafts."""
        return self.target.extend(self.cache, tokens, anchors, span)[:1]

    def _read_for_both(self, tokens, anchors, span):
        """Step: the same, and the features go to the drafter's context."""
        logits, features = self.target.extend(self.cache, tokens, anchors, span, self.taps)
        self.contexts.write(features, anchors)
        return (logits,)

    def _warp(self, logits, laws):
        """Probabilities of logits [n, ..., V], row by row under its own law."""
        if len(set(laws)) == 1:
            return warp(logits, laws[0])
        probs = torch.empty_like(logits)
        for law in set(laws):
            here = self._ids([row for row, own in enumerate(laws) if own == law])
            probs[here] = warp(logits[here], law)
        return probs

    def _ids(self, values):
        return torch.as_tensor(np.ascontiguousarray(values), device=self.target.device)


def verify_rows(target_probs, draft_probs, tokens, drafted, uniforms):
    """`verify_block` for n blocks of different lengths at once: list of `Verdict`.

    Of every row only two numbers leave the device until the next token's is known.

    Args: target_probs [n, K+1, V]; draft_probs [n, K, V], the rows that tokens int [n, K] were drawn from (None if
        nothing was drafted); drafted int [n], how many of a block's tokens count; uniforms float64 [n, K+1].
    """
    n, slots = tokens.shape
    accepted = np.zeros(n, dtype=np.int64)
    if draft_probs is not None:
        ids = torch.from_numpy(np.ascontiguousarray(tokens)).to(target_probs.device)[..., None]
        p, q = (rows[:, :slots].gather(2, ids)[..., 0].double().cpu().numpy() for rows in (target_probs, draft_probs))
        kept = (uniforms[:, :slots] * q < p) & (np.arange(slots) < drafted[:, None])
        accepted = np.cumprod(kept, axis=1).sum(axis=1)
    laws = [
        residual(p[a], draft_probs[row, a]) if a < drafted[row] else p[a].double()
        for row, (p, a) in enumerate(zip(target_probs, accepted, strict=True))
    ]
    following = draw(torch.stack(laws), uniforms[:, -1])
    return [Verdict(int(a), int(token)) for a, token in zip(accepted, following, strict=True)]
