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

from reference.draft_meter import EXACT_VOCABULARY, DraftMeter, check_drafters, propose, put, taps_of

ALSO = ("information", "soft", "suffix", "truncated", "k_median", "ladder", "response")
ORDERS = (0, 1)  # of the floors
INFORMATION_ORDERS = (1, 2, 4)
KEPT = (20, 256)  # probabilities kept by a truncated read
CENTRES = (2, 4)


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


def finite(value):
    """A float for the record file, None where it is infinite (a realised token without mass) or undefined."""
    return float(value) if np.isfinite(value) else None
