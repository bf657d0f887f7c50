"""One drafter at one anchor: its risks, its own chains, its accept factors, read from the target's walk slot by slot.

At every slot the proposal is asked once for all it can see: the realised predecessors, for R_k (R^oracle) and for
q_k(Z_k) of each path, and the predecessors that one drafted chain per path has led to, for R_k^self (paper Sec. 3.3,
App. B.5).  The same rows draw the chains on by a token.  A drafter of order 1 over a small vocabulary is summed over
its tokens' law instead.  What verification makes of the factors, and best responses, follow when the walk is over.

Tests: `tests/test_anchor.py`.
"""

from dataclasses import asdict

import numpy as np

from reference.laws import SamplingLaw
from reference.response import BlockPaths
from reference.serving import accept_factors, serve

EXACT_VOCABULARY = 256  # up to here the drafter's own tokens are summed over instead of drawn
CHUNK = 64  # proposals held at a time


class DraftMeter:
    """One drafter at one anchor, read slot by slot; means over the living paths, be it a single one.

    risk, self_risk     R_k on the realised predecessors (R^oracle for a proposal that reads one), and on its own
                        (None for a proposal that reads none)
    tempered            R_k of the proposal under the law's temperature only, where the law truncates
    arrival, rejected   E[W_{k-1}] and E[W_{k-1} TV_k], see `serving.Serving`
    responses           fields of the `BestResponse` of every slot
    forward, backward   fields of the `Sweep` in either direction

    No more than `CHUNK` proposals are held at a time.
    """

    def __init__(self, backend, proposal, tempered, uniforms, design, exact):
        self.backend, self.proposal, self.tempered, self.uniforms = backend, proposal, tempered, uniforms
        self.order, self.gamma, self.columns = proposal.order, design.gamma, {}
        self.exact, self.chains = exact and proposal.order == 1, None
        shape = design.paths, design.gamma
        self.token, self.predecessor = np.full(shape, -1), np.full(shape, -1)
        self.target_p, self.draft_p, self.risks = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.alive = np.zeros(shape, dtype=bool)

    def read(self, slot):
        """Take in one slot of the walk."""
        k, alive = slot.index, slot.path_node >= 0
        node, token = slot.path_node[alive], slot.drawn[alive]
        risks, draft_p, own = self._score(slot, node, token, alive)
        self.alive[:, k], self.token[alive, k] = alive, token
        self.predecessor[alive, k] = self._distinct(slot.history(k + 1), k)[1][node]  # which of its views it has
        self.target_p[alive, k] = host(slot.rows[node, token])
        self.draft_p[alive, k], self.risks[alive, k] = draft_p, risks[node]
        values = {
            "risk": risks[node].mean(),
            "self_risk": self._exact_self_risk(slot, risks, node) if self.exact else own,
        }
        if self.tempered is not None:
            values["tempered"] = self._score_prefixes(slot, self.tempered)[node].mean()
        put(self.columns, "slots", k, self.gamma, {n: None if v is None else float(v) for n, v in values.items()})

    def finish(self, respond):
        """The drafter's entry in the anchor's row, with best responses and sweeps if asked."""
        served = serve(accept_factors(self.target_p, self.draft_p), self.risks, self.alive)
        out = {
            "order": self.order, **self.columns["slots"],
            "arrival": served.arrival.tolist(), "rejected": served.rejected.tolist(),
        }  # fmt: skip
        if respond:
            paths = BlockPaths(self.token, self.target_p, self.draft_p, self.predecessor, self.alive)
            order = 0 if self.order == 0 else 1
            found = [self.backend.best_response(paths, k, order) for k in range(self.gamma)]
            out["responses"] = {f: [getattr(b, f) for b in found] for f in vars(found[0])}
            for name, backward in (("forward", False), ("backward", True)):
                out[name] = asdict(self.backend.sweep(paths, order, backward=backward))
        return out

    def _score(self, slot, node, token, alive):
        """One pass over what the proposal can see at a slot, realised or drafted.

        Returns: TV(p_k, q_k) at each prefix [U]; q_k at each living path's token; mean TV to the proposals of one
        drafted chain per path, each chain drawn on by a token (None for a drafter that reads no tokens).
        """
        k, prefixes = slot.index, len(slot.rows)
        histories = slot.history(k + 1)
        chained = self.order != 0 and not self.exact
        if chained:
            self.chains = np.repeat(histories[:1], len(alive), axis=0) if k == 0 else self.chains
            histories = np.concatenate([histories, self.chains])
        distinct, which = self._distinct(histories, k)
        risks, draft_p, own, drawn = np.zeros(prefixes), np.zeros(len(node)), 0.0, np.zeros(len(alive), dtype=np.int64)
        for start, rows in chunks_of(self.proposal, slot, distinct):
            for i, q in enumerate(rows, start):
                members = np.flatnonzero(which[:prefixes] == i)
                risks[members] = self._distances(slot, members, q)
                paths = np.isin(node, members)
                draft_p[paths] = host(q[token[paths]])
                if chained:
                    met, counts = np.unique(node[which[prefixes:][alive] == i], return_counts=True)
                    own += counts @ self._distances(slot, met, q)
            if chained:
                here = (which[prefixes:] >= start) & (which[prefixes:] < start + CHUNK)
                drawn[here] = self.backend.draw(rows, self.uniforms[here, k], which[prefixes:][here] - start)
        if chained:
            self.chains = np.concatenate([self.chains, drawn[:, None]], axis=1)
        return risks, np.minimum(draft_p, 1), own / len(node) if chained else None

    def _score_prefixes(self, slot, proposal):
        """TV(p_k, q_k) of another proposal of the same drafter at each prefix, [U]."""
        distinct, which = self._distinct(slot.history(slot.index + 1), slot.index)
        risks = np.zeros(len(slot.rows))
        for start, rows in chunks_of(proposal, slot, distinct):
            for i, q in enumerate(rows, start):
                members = np.flatnonzero(which == i)
                risks[members] = self._distances(slot, members, q)
        return risks

    def _distinct(self, histories, k):
        """What the proposal sees of histories [n, k + 1]: the distinct ones, and which of them each is, int [n]."""
        if self.order == 0:
            return histories[:1], np.zeros(len(histories), dtype=np.int64)
        seen = histories if self.order is None else histories[:, -self.order :]
        distinct, which = np.unique(seen, axis=0, return_inverse=True)
        return distinct, which.ravel()

    def _exact_self_risk(self, slot, risks, node):
        """R_k^self over the law of the drafter's own predecessors instead of drawn ones (Sec. 3.3)."""

        def after(k):
            return lambda predecessors: self.proposal.probs(k, host(predecessors).astype(np.int64)[:, None])

        k = slot.index
        if k == 0:
            return risks[node].mean()
        if k == 1:
            self.marginal = self.proposal.probs(0, slot.past[:1, -2:-1])[0]
        else:
            self.marginal = self.backend.propagate(self.marginal, after(k - 1))
        return self.backend.self_risk(slot, after(k), self.marginal)

    def _distances(self, slot, members, q):
        if not len(members):
            return np.zeros(0)
        rows = slot.rows[members] if len(members) > 1 else slot.rows[members[0]][None]  # a view of the only one
        return host(self.backend.total_variation(rows, q))


def chunks_of(proposal, slot, histories):
    """Yield a slot's proposals after histories int [H, h], some at a time: (place of the first, rows [n, V])."""
    for start in range(0, len(histories), CHUNK):
        yield start, check_proposals(proposal.probs(slot.index, histories[start : start + CHUNK]), slot)


def check_proposals(rows, slot):
    """Proposals [n, V] as they are, or a ValueError if they are no distributions over the target's tokens."""
    sums, smallest = host(rows.sum(-1)), float(rows.min())
    if rows.shape[-1] != slot.rows.shape[-1] or not (abs(sums - 1) <= 1e-4).all() or smallest < 0:
        raise ValueError(
            f"a proposal at slot {slot.index} is no distribution over {slot.rows.shape[-1]} tokens: it has "
            f"{rows.shape[-1]}, sums {sums.min()} to {sums.max()}, smallest entry {smallest}"
        )
    return rows


def propose(drafter, drafters, session, prefix, law):
    """A drafter's proposals for the block after `prefix`: under the law, and under its temperature alone (or None).

    The drafter sees the features of all of the prefix but its last token, which has not been through the target.
    """
    context = drafter.context()
    if len(prefix) > 1:
        context.append(features_of(drafter, drafters, session)[: len(prefix) - 1])
    proposal = drafter.propose(context, int(prefix[-1]), law)
    truncates = law.top_k or law.top_p < 1
    return proposal, drafter.propose(context, int(prefix[-1]), SamplingLaw(law.temperature)) if truncates else None


def check_drafters(drafters, gamma):
    """A ValueError if some drafter's block is shorter than the one to be measured."""
    for name, drafter in drafters.items():
        if drafter.gamma < gamma:
            raise ValueError(f"drafter {name} proposes {drafter.gamma} tokens, gamma is {gamma}; lower --gamma")


def taps_of(drafters):
    """Every decoder layer that some drafter reads, in rising order."""
    return tuple(sorted({tap for drafter in drafters.values() for tap in drafter.taps}))


def features_of(drafter, drafters, session):
    """The columns of the session's features that one of several drafters reads, [S, taps * H]."""
    taps, features = taps_of(drafters), session.features
    if tuple(drafter.taps) == taps:
        return features
    parts = features.reshape(len(features), len(taps), -1)
    return parts[:, [taps.index(tap) for tap in drafter.taps]].reshape(len(features), -1)


def put(columns, entry, k, gamma, values):
    """Write a slot's values into lists over slots."""
    lists = columns.setdefault(entry, {})
    for name, value in values.items():
        lists.setdefault(name, [None] * gamma)[k] = value


def host(values):
    """An array of either backend in NumPy, float64."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values, dtype=np.float64)
