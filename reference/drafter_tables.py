"""The paper's tables about drafters, each from a `Sample` of measured anchors (see `tables.py`).

    drafter         risk, floor, gap, exposure per slot                    Tables 5, 6
    versus          paired differences between two drafters                Table 12
    serving         free and serving risk, and why they differ             Table 7, App. F.1
    dependences     joint survival over independent survival               Table 8, App. F.2
    lengths         accepted length, and what it bounds                    App. F.3
    responses, sweeps   single-slot best responses; all slots refitted     App. F.5, F.6

Tests: `tests/test_tables.py`.
"""

import numpy as np

from reference.sample import Table, by_slot, ends, scalar
from reference.serving import Serving, accepted_length_product, dependence, largest_risk_from_length, serving_risk


def drafter(sample, name):
    """Risk = floor + gap at every slot, and exposure, over the anchors that have both (Tables 5 and 6).

    The cross-fitted T1 leans high, more so the fewer paths share a predecessor, and the gap that it leaves leans low.
    The plug-in T1 leans low, so the two shares of the gap enclose what many more paths would give.
    """
    order, risk, floor = order_of(sample, name), sample.column("drafters", name, "risk"), floor_of(sample, name)
    both = 0 * (risk + floor)  # NaN where one of them is absent
    least, met, gap, part = sample.statistic(
        [sample.sums(floor + both), sample.sums(risk + both)], lambda m: [*m, m[1] - m[0], 1 - m[0] / m[1]]
    )
    columns = {
        f"T{'k' if order is None else order}": least.value, "R" if order == 0 else "R oracle": met.value,
        "gap": gap.value, "gap 95%": ends(gap), "gap / R": part.value, "share 95%": ends(part),
    }  # fmt: skip
    if order != 0:
        own = sample.column("drafters", name, "self_risk") + both
        own, exposure = sample.mean(own, own - risk)
        columns |= {"R self": own.value, "exposure": exposure.value, "exposure 95%": ends(exposure)}
    if order == 1:
        fit = sample.column("order1", "fit") + both
        least, part = sample.statistic([sample.sums(fit), sample.sums(risk + both)], lambda m: [m[0], 1 - m[0] / m[1]])
        columns |= {"T1 plug-in": least.value, "gap / R, plug-in": part.value}
        columns["covered"] = sample.mean(sample.column("order1", "covered") + 0 * risk)[0].value
    tempered = sample.column("drafters", name, "tempered") + both
    if not np.isnan(tempered).all():
        columns["R tempered only"] = sample.mean(tempered)[0].value
    return by_slot(f"{name}: rejection = floor + gap", columns)


def versus(sample, a, b):
    """What the second drafter changes on the same anchors and paths, second minus first (Table 12 form)."""
    risk, own = ([sample.column("drafters", n, field) for n in (a, b)] for field in ("risk", "self_risk"))
    gap = [r - floor_of(sample, n) for r, n in zip(risk, (a, b), strict=True)]
    exposure = [o - r for o, r in zip(own, risk, strict=True)]
    columns = {}
    pairs = {"R": risk, "gap": gap, "R self": own, "exposure": exposure}
    if order_of(sample, a) != order_of(sample, b):
        del pairs["gap"]  # their floors differ, whatever the drafters do
    for label, (first, second) in pairs.items():
        change = second - first
        if not np.isnan(change).all():
            found = sample.mean(change)[0]
            columns |= {label: found.value, f"{label} 95%": ends(found)}
    return by_slot(f"{b} minus {a}", columns)


def serving(sample, name):
    """Free risk, serving risk, and the parts of their difference (Table 7 with App. F.1's two reasons)."""
    risk, arrival, rejected = (sample.column("drafters", name, field) for field in ("risk", "arrival", "rejected"))
    weight = 1 / sample.inclusion[:, None]
    pooled = weight * np.nan_to_num(rejected), weight * np.nan_to_num(arrival)
    change = sample.statistic([pooled, sample.sums(risk)], lambda ratios: [ratios[0] - ratios[1]])[0]
    parts = serving_risk(Serving(None, risk, np.nan_to_num(arrival), np.nan_to_num(rejected)), 1 / sample.inclusion)
    return by_slot(
        f"{name}: risk over all target paths, and over those that arrive",
        {
            "free": parts.free, "serving": parts.risk, "change": change.value, "change 95%": ends(change),
            "within anchors": parts.within, "between anchors": parts.between,
        },
    )  # fmt: skip


def dependences(sample, name):
    """Survival, and its ratio to survival under independent slots, within and between anchors (Table 8)."""
    served = served_of(sample, name)
    survival = sample.mean(served.survival)[0]
    has = ~np.isnan(served.alive[:, 0])
    whole = dependence(Serving(*(values[has] for values in vars(served).values())), 1 / sample.inclusion[has])

    def ratio(means):
        survival, risk, alive = means
        return [survival / (np.cumprod(1 - risk, axis=-1) * alive)]

    sums = [sample.sums(served.survival), sample.sums(served.risk), sample.sums(served.alive)]
    interval = sample.statistic(sums, ratio)[0]
    return by_slot(
        f"{name}: do acceptances hang together?",
        {
            "survival": survival.value, "survival 95%": ends(survival), "D": whole.ratio, "D 95%": ends(interval),
            "within anchors": whole.within, "between anchors": whole.between,
        },
    )  # fmt: skip


def lengths(sample):
    """Accepted length of every drafter, the bonus token counted; as if slots were independent; and what it bounds."""
    rows = []
    for name in sample.drafters:
        served = served_of(sample, name)
        tau = sample.mean(1 + served.survival.sum(axis=1))[0]
        risk, alive = (m.value for m in sample.mean(served.risk, served.alive))
        product = accepted_length_product(np.nan_to_num(risk), alive)
        bound = largest_risk_from_length(float(np.clip(tau.value[0], 1, sample.gamma + 1)), sample.gamma)
        rows.append([name, *scalar(tau), product, bound, float(np.nanmax(risk))])
    columns = ["drafter", "tau", "tau 95%", "tau if independent", "bound on largest R", "largest R"]
    return Table("expected tokens of a round that begins at an anchor, bonus token counted", columns, rows)


def responses(sample, name):
    """What one slot's best response would add, in tokens per round, held out and fitted (App. F.5)."""
    fields = "held_out", "train", "effective_paths"
    held, train, paths = (sample.column("drafters", name, "responses", f) for f in fields)
    gain, over, effective = sample.mean(held, train - held, paths)
    return by_slot(
        f"{name}: gain in tau from one slot's best response",
        {
            "gain": gain.value, "gain 95%": ends(gain), "fitted minus held out": over.value,
            "effective paths": effective.value,
        },
    )  # fmt: skip


def sweeps(sample, name):
    """All slots refitted in turn, against the sum of the single responses (App. F.6)."""

    def last(direction, field):
        found = (row.get("drafters", {}).get(name, {}).get(direction) for row in sample.anchors)
        return np.array([f[field][-1] if f else np.nan for f in found])

    single = sample.column("drafters", name, "responses", "held_out").sum(axis=1)
    forward, backward = last("forward", "held_out"), last("backward", "held_out")
    over = last("forward", "train") - forward
    found = sample.statistic(
        [sample.sums(v) for v in (single, forward, backward, over)],
        lambda m: [m[0], m[1], m[2], m[1] / m[0], m[2] - m[1], m[3]],
    )
    names = (
        "sum of single gains", "forward sweeps", "backward sweeps", "forward / sum", "backward - forward",
        "fitted minus held out",
    )  # fmt: skip
    rows = [[n, *scalar(f)] for n, f in zip(names, found, strict=True)]
    return Table(f"{name}: gain in tau from refitting all slots", ["", "value", "95%"], rows)


def order_of(sample, name):
    """How many tokens of the block a drafter reads."""
    return next(row["drafters"][name]["order"] for row in sample.anchors if name in row.get("drafters", {}))


def floor_of(sample, name):
    """The floor that bounds a drafter's risk: T0 as fitted, T1 cross-fitted, 0 for one that reads the whole block."""
    order, floor = order_of(sample, name), sample.column("order0", "fit")
    return sample.column("order1", "held_out") if order == 1 else floor if order == 0 else 0 * floor


def served_of(sample, name):
    """The `Serving` of every anchor, [N, gamma]; NaN for one without this drafter."""
    risk, arrival, rejected = (sample.column("drafters", name, f) for f in ("risk", "arrival", "rejected"))
    return Serving(sample.column("alive") + 0 * arrival, risk, arrival, rejected)
