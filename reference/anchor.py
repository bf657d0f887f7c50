"""What is measured at one anchor: floors, a drafter's risks and everything else, from one walk of the target.

The walk hands out one slot at a time, and whatever wants that slot's rows reads them before the next slot replaces
them: floors always; on request (`also`) the companions below; and for every drafter its risk on the realised
predecessors, its risk on its own, and the accept factors of the M paths, from which serving and best responses
follow.  The paper ran the target once for each of these.

    information   mutual information in the divergence form, and cross-entropies of the realised token   App. A.3
    soft          the order-1 floor with every predecessor weighted by every prefix                      (ours)
    suffix        order-m floors and cross-entropies given the realised suffix, by reweighting           App. B.3
    truncated     floors read on the largest probabilities only, with their band                         App. C.6
    k_median      K proposals instead of one                                                             App. D.2
    ladder        the floors again on the first quarter of the paths                                     App. C.3
    response      best responses at every slot and coordinate sweeps, for every drafter                  App. F.4-F.6

Tests: `tests/test_anchor.py`.
"""

from dataclasses import asdict, replace
from types import SimpleNamespace

import numpy as np

from reference.laws import SamplingLaw
from reference.response import BlockPaths
from reference.serving import accept_factors, serve

ALSO = ("information", "soft", "suffix", "truncated", "k_median", "ladder", "response")
ORDERS = (0, 1)  # of the floors
INFORMATION_ORDERS = (1, 2, 4)
KEPT = (20, 256)  # probabilities kept by a truncated read
CENTRES = (2, 4)
EXACT_VOCABULARY = 256  # up to here the drafter's own tokens are summed over instead of drawn
CHUNK = 64  # proposals held at a time


def measure_anchor(backend, target, prefix, uniforms, design, *, realised=(), drafters=None, draft_uniforms=None):
    """Everything about one anchor, as lists over slots; None where fewer than two paths are alive.

    Args: backend, the `reference` or `fast` package; target, as for `paths.walk`; prefix; uniforms [M, gamma];
        design, a `protocol.Design`; realised, the answer's next gamma tokens, which `information` and `suffix`
        read; drafters, {name: drafter}; draft_uniforms [M, gamma], which draw their chains.
    Returns: {"alive", "distinct", "support": [gamma], "order0", "order1": fields of `Floor`, one entry for each of
        `design.also`, "drafters": {name: fields of `DraftMeter`}}.
    Raises: ValueError for a drafter that proposes fewer than gamma tokens.
    """
    drafters, gamma = drafters or {}, design.gamma
    check_drafters(drafters, gamma)
    if {"information", "suffix"} & set(design.also) and len(realised) < gamma:
        raise ValueError(f"information and suffix read the {gamma} realised tokens, {len(realised)} were given")
    session = target.open(prefix, taps_of(drafters)) if drafters else target.open(prefix)
    exact = target.vocab_size <= EXACT_VOCABULARY
    meters = {
        name: DraftMeter(
            backend, *propose(drafter, drafters, session, prefix, design.law), draft_uniforms, design, exact
        )
        for name, drafter in drafters.items()
    }
    row = {"alive": [0.0] * gamma, "distinct": [0] * gamma, "support": [None] * gamma}
    opened = SimpleNamespace(vocab_size=target.vocab_size, stop_ids=target.stop_ids, open=lambda _: session)
    nodes = 0  # of the session, the prefix not counted
    for slot in backend.walk(opened, prefix, gamma, uniforms, design.law):
        k = slot.index
        nodes += len(slot.rows) if k else 0
        row["alive"][k], row["distinct"][k] = slot.alive, len(slot.rows)
        for meter in meters.values():
            meter.read(slot)
        if slot.alive * len(uniforms) < 1.5:
            continue
        row["support"][k] = backend.effective_support(slot.weight, len(uniforms))
        for name, values in read_slot(backend, target, prefix, slot, uniforms, design, realised).items():
            put(row, name, k, gamma, values)
    if "information" in design.also:
        for k, loss in enumerate(realised_losses(backend, session, nodes, realised, design.law)):
            put(row, "information", k, gamma, {"realised": loss})
    if meters:
        row["drafters"] = {name: meter.finish("response" in design.also) for name, meter in meters.items()}
    return row


def read_slot(backend, target, prefix, slot, uniforms, design, realised):
    """The floors of a slot and what `design.also` asks for, as {entry: {field: value}}."""
    out = {f"order{m}": asdict(backend.floor(slot, m)) for m in ORDERS}
    k, law = slot.index, design.law
    if "information" in design.also:
        loss = backend.ce_realised(slot, realised[k])
        out["information"] = {f"order{m}": backend.mutual_information(slot, m) for m in INFORMATION_ORDERS} | {
            "whole": backend.mutual_information(slot), "blind": finite(loss.blind.value), "commit": finite(loss.commit),
        }  # fmt: skip
    if "soft" in design.also:
        out["soft"] = asdict(backend.soft_floor(target, prefix, k, uniforms, law, budget=len(uniforms)))
    if "suffix" in design.also:
        for m in (m for m in INFORMATION_ORDERS if m < k):
            out[f"suffix{m}"] = read_suffix(backend, target, prefix, slot, realised, m, uniforms, law)
    if "truncated" in design.also:
        for kept in KEPT:
            reads = {f"order{m}": backend.truncated_floor(slot, kept, m) for m in ORDERS}
            fields = ("fit", "lower", "upper")
            out[f"top{kept}"] = {f"{m}_{f}": getattr(read, f) for m, read in reads.items() for f in fields}
    if "k_median" in design.also:
        found = {n: backend.k_median(slot.rows, slot.weight, n, seed=design.seed) for n in CENTRES}
        out["k_median"] = {f"risk{n}": f.risk for n, f in found.items()} | {
            f"spread{n}": f.spread for n, f in found.items()
        }
    if "ladder" in design.also and (part := first_paths(slot, len(uniforms) // 4)):
        out |= {f"quarter{m}": asdict(backend.floor(part, m)) for m in ORDERS}
    return out


def read_suffix(backend, target, prefix, slot, realised, order, uniforms, law):
    """Floor and cross-entropy at a slot given the realised suffix of `order` tokens; None where no path can have it."""
    suffix = realised[slot.index - order : slot.index]
    try:
        forced = backend.force_suffix(target, prefix, suffix, slot.index, uniforms, law)
    except ValueError:  # the law leaves the realised suffix, or every path to it, without mass
        return {"fit": None, "held_out": None, "ess": None, "loss": None}
    given, loss = backend.floor(forced, 0), backend.ce_realised(forced, realised[slot.index])
    return {"fit": given.fit, "held_out": given.held_out, "ess": forced.ess, "loss": finite(loss.blind.plugin)}


def realised_losses(backend, session, nodes, realised, law):
    """CE_A = C_{k,k} = -log p_T(y_k | x, y_<k) at every slot, in nats, from one path grown into the session."""
    logits, parent = session.root_logits, -1
    for k, token in enumerate(realised):
        if k:
            logits = session.grow([parent], [realised[k - 1]])[0]
            parent = nodes + k - 1
        with np.errstate(divide="ignore"):
            yield finite(-np.log(float(backend.warp(logits, law)[token])))


def first_paths(slot, paths):
    """The slot as the first `paths` of its paths alone would have it, or None if fewer than two of them are alive.

    Only `parent` stays as it was, counted among the previous slot's prefixes on all paths.
    """
    path_node = slot.path_node[:paths]
    nodes, place = np.unique(path_node[path_node >= 0], return_inverse=True)
    if len(place) < 2:
        return None
    successor = np.full(paths, -1)
    successor[path_node >= 0] = place
    return replace(
        slot, parent=slot.parent[nodes], token=slot.token[nodes], weight=np.bincount(place) / paths,
        rows=slot.rows[nodes], past=slot.past[nodes], alive=len(place) / paths, path_node=successor,
        drawn=slot.drawn[:paths],
    )  # fmt: skip


class DraftMeter:
    """One drafter at one anchor, read slot by slot; means over the living paths, be it a single one.

    risk, self_risk     R_k on the realised predecessors (R^oracle for a proposal that reads one), and on its own
                        (None for a proposal that reads none)
    tempered            R_k of the proposal under the law's temperature only, where the law truncates
    arrival, rejected   E[W_{k-1}] and E[W_{k-1} TV_k], see `serving.Serving`
    responses, sweeps   `BestResponse` of every slot, held-out and fitted gains of the sweeps in both directions

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
        for start in range(0, len(distinct), CHUNK):
            rows = check_proposals(self.proposal.probs(k, distinct[start : start + CHUNK]), slot)
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
        for i, seen in enumerate(distinct):
            members = np.flatnonzero(which == i)
            q = check_proposals(proposal.probs(slot.index, seen[None]), slot)[0]
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


def finite(value):
    """A float for the record file, None where it is infinite (a realised token without mass) or undefined."""
    return float(value) if np.isfinite(value) else None


def host(values):
    """An array of either backend in NumPy, float64."""
    return np.asarray(values.cpu() if hasattr(values, "cpu") else values, dtype=np.float64)
