"""Lossless block-speculative decoding: many tokens per forward of the target, and not one bit of its law lost.

A round starts from the anchor, the last committed token, at position p; the target has read what is before it.

    draft     x_0 .. x_{K-1}, each drawn from its row q_k given the drafts before it          (drafters.py)
    read      one forward over the anchor and the drafts gives the target's rows p_0 .. p_K    (decoder.py)
    verify    the first a drafts stay and one more token follows them                        (verify.py)
    commit    a + 1 tokens: the target forgets the rejected drafts, the drafter gets the features of what stays

Without drafts (K = 0) a round is a step of plain decoding, so both run on the same state.  How many drafts a round
makes may depend on anything known before a draft is looked at: on the tokens still wanted, and on the drafter's
confidence in a slot, which sees the token before the slot and not its own.  A round never commits behind a stop id.

Randomness is an argument.  A round's uniforms are a function of its request's seed and of the anchor's position, so a
text depends on its own prompt, law and seed, and on no neighbour.

Twin: `fast/engine.py`.  Tests: `tests/test_engine.py` (the law by enumeration, loops of the authors' own code).
"""

import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from reference.draft_heads import sigmoid
from reference.laws import SamplingLaw, draw, warp
from reference.paths import check_tokens
from reference.verify import verify_block


@dataclass(frozen=True)
class Request:
    """A prompt to be continued by at most `max_new_tokens` tokens under a sampling law.

    `seed`, one number or several: requests that differ in nothing else are independent if their seeds differ.
    """

    prompt: tuple[int, ...]
    max_new_tokens: int
    law: SamplingLaw = field(default_factory=SamplingLaw)
    seed: int | tuple[int, ...] = 0


@dataclass(frozen=True)
class RoundStats:
    """One round: tokens `drafted` and judged, drafts `accepted`, and tokens `committed`, 1..drafted + 1.

    Usually committed = accepted + 1.  A stop id among the accepted drafts ends the round there: what follows it counts
    as neither, so accepted = committed.
    """

    drafted: int
    accepted: int
    committed: int


@dataclass(frozen=True)
class Completion:
    """What a request became.

    tokens      new tokens, the stop id included where one ended the text
    finish      "stop", or "length" where the tokens asked for, or the positions there are, were used up
    rounds      of drafting and verifying, in order; the first token comes from the prompt's forward and from no round
    seconds     from joining the batch to the last token: no part of what the request became, so `==` leaves it out
    """

    tokens: tuple[int, ...]
    finish: str
    rounds: tuple[RoundStats, ...]
    seconds: float = field(default=0.0, compare=False)


def tokens_per_round(completions):
    """Measured accepted length: committed tokens over rounds, pooled over completions; NaN without any round.

    **The bonus token is counted**, the first token of a text is not (no round brought it), and a round that a stop id
    cut short, or that was shortened near the end, counts what it committed.  Plain decoding gives 1.
    """
    rounds = [r for completion in completions for r in completion.rounds]
    return sum(r.committed for r in rounds) / len(rounds) if rounds else float("nan")


def uniforms(seed, position, slots):
    """Uniforms of the round whose anchor is at `position`, float64 [2 slots + 1] in [0, 1), functions of all three.

    The first `slots` draw the drafts, the next judge them, and the last draws the token that follows.
    """
    key = np.atleast_1d(seed).tolist()
    return np.random.default_rng([position, len(key), *key]).random(2 * slots + 1)  # the length tells 1 from (1, 0)


class Engine:
    """Decodes requests with a drafter's help; every text has the target's law, token by token.

    Args:
        target: a `Decoder`, or anything whose `open(prefix, taps)` gives a session that can `extend` and `crop`.
        drafter: a `Drafter` on this target, or None to decode plainly.
        capacity: positions of a request, prompt and answer together; the text ends where they are used up.
        batch: how many requests run side by side in `fast`; here they run one by one, with the same tokens.
        draft_law: the law that drafts are drawn from, None = the request's own.  Any is lossless.
        lattice: candidates per slot as for `Drafter.propose`.
        threshold: a block is cut before the first slot whose confidence is below it; 0 = never.
        uniforms: (seed, position, slots) -> float64 [2 slots + 1].
    Attributes: seconds, a `Counter` of where the time went so far: "prefill" (prompts), "draft", "verify" (the target's
        forward and the judging), "commit".
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
        self.options = {} if lattice is None else {"lattice": lattice}
        self.seconds = Counter()

    def generate(self, requests, speculate=True, finished=None):
        """Continue every request: list of `Completion`, in order.

        Args: requests, list of `Request`; speculate, False = plain decoding of the same state, one token a round;
            finished, called with (`Request`, `Completion`) as each one ends.
        Raises: ValueError, before anything is run, for a prompt that is empty, out of vocabulary or too long.
        """
        texts = [Text(request, self.target, self.capacity) for request in requests]
        for text in texts:
            if not text.done:
                self._continue(text, self.drafter if speculate else None)
            if finished:
                finished(text.request, text.completion())
        return [text.completion() for text in texts]

    def _continue(self, text, drafter):
        text.begin()
        law = text.request.law
        with spent(self.seconds, "prefill"):
            session = self.target.open(text.prompt, drafter.taps if drafter else ())
            context, features = drafter and drafter.context(), session.features
            text.commit(draw(warp(session.root_logits[None], law), self._uniforms(text, 0)))
        while not text.done:
            slots, start = drafter.gamma if drafter else 0, text.anchor
            u = self._uniforms(text, slots)
            with spent(self.seconds, "draft"):
                if drafter:
                    context.append(features)
                drafts, rows = self._draft(drafter, context, text, u[:slots]) if slots and text.room else ([], [])
            with spent(self.seconds, "verify"):
                logits, features = session.extend([text.tokens[-1], *drafts])
                rows = np.reshape(rows, (len(drafts), self.target.vocab_size))
                judging = [*u[slots : slots + len(drafts)], u[-1]]
                verdict = verify_block(warp(logits, law), rows, drafts, judging)
            with spent(self.seconds, "commit"):
                text.end_round(drafts, verdict)
                session.crop(text.anchor)
                features = features[: text.anchor - start]

    def _draft(self, drafter, context, text, uniforms):
        """Tokens drafted for one round, and the rows [V] that they were drawn from."""
        chain, rows = [text.tokens[-1]], []
        proposal = drafter.propose(context, chain[0], self.draft_law or text.request.law, **self.options)
        for slot, u in enumerate(uniforms[: text.room]):
            history = np.array([chain])
            if self.threshold and self._distrusts(proposal.confidence(slot, history)):
                break
            q = proposal.probs(slot, history)
            chain.append(int(draw(q, [u])[0]))
            rows.append(q[0])
        return chain[1:], rows

    def _distrusts(self, logits):
        return sigmoid(check_confidence(logits)[0]) < self.threshold

    def _uniforms(self, text, slots):
        return self.uniforms(text.request.seed, text.anchor, slots)


class Text:
    """One request as it grows, in numbers alone: what is committed, and how much more is wanted.

    tokens      new tokens so far
    anchor      position of the last committed token; before the first new one, of the prompt's last
    room        drafts that can still be of use: with them and the token that follows, the text is full
    """

    def __init__(self, request, target, capacity):
        self.request, self.prompt = request, check_tokens(request.prompt, target.vocab_size)
        if len(self.prompt) > capacity:
            raise ValueError(f"a prompt of {len(self.prompt)} tokens does not fit a capacity of {capacity} positions")
        if request.max_new_tokens < 0:
            raise ValueError(f"max_new_tokens must be 0 or more, got {request.max_new_tokens}")
        self.stop_ids, self.limit = set(target.stop_ids), min(request.max_new_tokens, capacity - len(self.prompt))
        self.tokens, self.rounds, self.stopped = [], [], False
        self.begun, self.seconds = time.perf_counter(), 0.0

    @property
    def anchor(self):
        return len(self.prompt) + len(self.tokens) - 1

    @property
    def room(self):
        return self.limit - len(self.tokens) - 1

    @property
    def done(self):
        return self.stopped or len(self.tokens) == self.limit

    def begin(self):
        """Start the clock of `Completion.seconds`, which the last token stops."""
        self.begun = time.perf_counter()

    def commit(self, tokens):
        """Add tokens up to the first stop id: how many were added."""
        before = len(self.tokens)
        for token in tokens:
            self.tokens.append(int(token))
            if token in self.stop_ids:
                self.stopped = True
                break
        if self.done:
            self.seconds = time.perf_counter() - self.begun
        return len(self.tokens) - before

    def end_round(self, drafts, verdict):
        """Commit what a `Verdict` leaves of the drafts, and the token behind them."""
        committed = self.commit([*drafts[: verdict.accepted], verdict.token])
        self.rounds.append(RoundStats(len(drafts), min(verdict.accepted, committed), committed))

    def completion(self):
        """The `Completion` so far."""
        return Completion(tuple(self.tokens), "stop" if self.stopped else "length", tuple(self.rounds), self.seconds)


@contextmanager
def spent(seconds, part):
    """Add the seconds that a block takes to a part of a `Counter`."""
    begun = time.perf_counter()
    yield
    seconds[part] += time.perf_counter() - begun


def check_settings(capacity, batch, threshold):
    """A ValueError for settings of an `Engine` that make no sense."""
    for name, count in (("capacity", capacity), ("batch", batch)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1, got {count}")
    if not 0 <= threshold < 1:
        raise ValueError(f"threshold must be a probability in [0, 1), 0 = off, got {threshold}")


def check_confidence(logits):
    """Confidence logits as they are, or a ValueError if the drafter has none."""
    if logits is None:
        raise ValueError("this drafter has no confidence head: set threshold to 0")
    return logits
