"""The paper's tables, each from a record file alone: decompositions, serving, best responses and the companions.

Every number is a Hajek mean over anchors, or a ratio of two such sums, with the 95% interval of one prompt
bootstrap; a difference or a share is formed inside each replicate.  A table is there if the run measured what it
needs (`protocol.Design.also`, drafters), and is left out otherwise.

    intervals       floors of order 0 and 1, share removed                 Table 3
    those of `drafter_tables.py`                                           Tables 5-8, 12, App. F
    recovery        share of the missing information m tokens recover      Table 4
    estimators      the order-1 floor in several ways                      App. B.3, C.2
    concentration   which anchors carry the floor                          Sec. 3.1, App. D.1
    truncation, ladder, k_median                                           App. C.6, C.3, D.2
    compare         two record files on the same anchors                   App. C.3, C.4, C.7

Tests: `tests/test_tables.py`.
"""

from itertools import combinations

import numpy as np

from reference.anchor import CENTRES, INFORMATION_ORDERS, KEPT, ORDERS
from reference.drafter_tables import dependences, drafter, lengths, responses, serving, sweeps, versus
from reference.records import RecordError
from reference.sample import Sample, Table, by_slot, cell, ends, quantile, scalar, share
from reference.stats import concentration, weighted_correlation


def tables(sample):
    """Every table that a `Sample` allows, {name: Table}."""
    out = {}
    for name in sample.drafters:
        out[f"drafter {name}"] = drafter(sample, name)
        out[f"serving {name}"] = serving(sample, name)
        out[f"dependence {name}"] = dependences(sample, name)
        if not np.isnan(sample.column("drafters", name, "responses", "held_out")).all():
            out[f"responses {name}"], out[f"sweeps {name}"] = responses(sample, name), sweeps(sample, name)
    if sample.drafters:
        out["accepted length"] = lengths(sample)
    for a, b in combinations(sample.drafters, 2):
        out[f"versus {a} {b}"] = versus(sample, a, b)
    out["intervals"] = intervals(sample)
    for name, needs, build in (
        ("concentration", ["support"], concentrations),
        ("recovery", ["information"], recovery), ("information", ["information"], information),
        ("estimators", ["soft", "suffix1"], estimators), ("truncation", [f"top{kept}" for kept in KEPT], truncation),
        ("ladder", ["quarter0"], ladder), ("k_median", ["k_median"], k_medians),
    ):  # fmt: skip
        if any(entry in sample for entry in needs):
            out[name] = build(sample)
    return out


def recovery(sample):
    """rho_{k,m}, the share of the missing information that the last m realised tokens recover (Table 4).

    In the divergence form, and from the one realised token of each anchor, over the cells in which the suffix has
    mass, with the median of their effective numbers of paths.

    A token that a single path has recovers everything: the divergence form leans high where few paths are covered,
    which is given for one token.
    """
    covered = sample.mean(sample.column("order1", "covered"))[0].value
    whole, blind, realised = (sample.column("information", n) for n in ("whole", "blind", "realised"))
    columns, rows = ["order", "slot", "rho", "95%", "covered"], []
    if "suffix1" in sample:
        columns += ["one token: rho", "one token: 95%", "cells", "median ESS"]
    for m in INFORMATION_ORDERS:
        part, missing = sample.column("information", f"order{m}"), blind - realised
        won, ess = blind - sample.column(f"suffix{m}", "loss"), sample.column(f"suffix{m}", "ess")
        slots = range(m + 1, sample.gamma)
        for label, here in [*((str(k), [k]) for k in slots), *([("pooled", list(slots))] if slots else [])]:
            row = [m, label, *scalar(share(sample, part[:, here], whole[:, here], pool=True))]
            row.append(float(covered[here].mean()) if m == 1 else None)
            if "suffix1" in sample:
                cells = ess[:, here][~np.isnan(won + missing + ess)[:, here]]
                row += scalar(share(sample, won[:, here], missing[:, here], pool=True))
                row += [len(cells), float(np.median(cells)) if len(cells) else None]
            rows.append(row)
    return Table("share of the missing information that the last m tokens recover", columns, rows)


def information(sample):
    """What the block's own tokens tell, in nats: divergence form, and from the one realised token (App. A.3).

    An anchor whose realised token has no mass on any path is left out of the cross-entropies, and those are counted:
    under a truncating law this makes them lean low.
    """
    names = ("whole", "order1", "blind", "realised", "commit")
    whole, first, blind, realised, commit = (sample.column("information", n) for n in names)
    both = 0 * (blind + realised)  # an infinite loss takes its anchor out of every cross-entropy
    endless = (np.isnan(commit) & ~np.isnan(both)).any(axis=0)  # infinite at one anchor, infinite on average
    commit = np.where(endless, np.nan, commit + both)
    loss = sample.mean(blind - realised)[0]
    means = sample.mean(whole, first, realised + both, blind + both, commit)
    return by_slot(
        "missing information in nats",
        {
            "I(whole)": means[0].value, "I 95%": ends(means[0]), "I(last 1)": means[1].value, "CE_A": means[2].value,
            "CE_B": means[3].value, "CE_commit": means[4].value, "CE_B - CE_A": loss.value,
            "one token: 95%": ends(loss), "anchors": (~np.isnan(both)).sum(axis=0),
        },
    )  # fmt: skip


def intervals(sample):
    """Floors, and the share of T0 that one token removes, with their intervals (Table 3)."""
    t0, t1 = sample.column("order0", "fit"), sample.column("order1", "held_out")
    (zero,) = sample.mean(t0)
    both = [sample.sums(t1 + 0 * t0), sample.sums(t0 + 0 * t1)]  # the same anchors above and below
    one, removed = sample.statistic(both, lambda m: [m[0], np.where(m[1] > 0, 1 - m[0] / m[1], np.nan)])
    return by_slot(
        "floors and the share of T0 that one token removes",
        {
            "T0": zero.value, "T0 95%": ends(zero), "T1 cross-fit": one.value, "T1 95%": ends(one),
            "removed": removed.value, "removed 95%": ends(removed),
        },
    )  # fmt: skip


def concentrations(sample):
    """Who carries the floor: the many anchors with next to none, and the tenth with the most (Sec. 3.1, App. D.1)."""
    floor, support, rows = sample.column("order0", "fit"), sample.column("support"), []
    for k, (t, effective) in enumerate(zip(floor.T, support.T, strict=True)):
        if np.isnan(t).all():
            rows.append([k, *[None] * 6])
            continue
        found = concentration(t, 1 / sample.inclusion)
        median, most = (quantile(effective, sample.inclusion, q) for q in (0.5, 0.9))
        correlation = weighted_correlation(np.log(effective), t, 1 / sample.inclusion)
        rows.append([k, *map(cell, (found.below, found.carried, found.top, median, most, correlation))])
    columns = [
        "slot", "T0 < .01", "these carry", "top tenth carries", "median N_eff", "p90 N_eff", "corr(log N_eff, T0)",
    ]  # fmt: skip
    return Table("concentration of the order-0 floor, and the effective number of continuations", columns, rows)


def estimators(sample):
    """The order-1 floor by grouping, softly, and given the realised predecessor (App. B.3, C.2)."""
    columns = {
        "plug-in": ("order1", "fit"), "one direction": ("order1", "split"), "cross-fit": ("order1", "held_out"),
        "soft": ("soft", "fit"), "soft held out": ("soft", "held_out"), "soft lower": ("soft", "lower"),
        "soft upper": ("soft", "upper"), "reweighted": ("suffix1", "fit"),
        "reweighted held out": ("suffix1", "held_out"), "ESS": ("suffix1", "ess"),
    }  # fmt: skip
    found = {label: sample.column(*path) for label, path in columns.items()}
    found = {label: values for label, values in found.items() if not np.isnan(values).all()}
    out = {n: m.value for n, m in zip(found, sample.mean(*found.values()), strict=True)}
    for label in ("soft held out", "reweighted held out"):
        if label in found:
            change = sample.mean(found[label] - found["cross-fit"])[0]  # over the anchors that have both
            out |= {f"{label} - cross-fit": change.value, f"{label} 95%": ends(change)}
    return by_slot("order-1 floor by several estimators", out)


def truncation(sample):
    """Floors read on the largest probabilities only, against the full read (App. C.6)."""
    columns = {}
    for order in ORDERS:
        full = sample.column(f"order{order}", "fit")
        columns[f"T{order} full"] = sample.mean(full)[0].value
        for kept in KEPT:
            fit, lower, upper = (sample.column(f"top{kept}", f"order{order}_{f}") for f in ("fit", "lower", "upper"))
            change, band = sample.mean(fit - full, (upper - lower) / 2)
            label = f"T{order} top {kept}"
            columns |= {f"{label}: change": change.value, f"{label} 95%": ends(change), f"{label}: band": band.value}
    return by_slot("floors from truncated reads, minus the full read; half the certified band", columns)


def ladder(sample):
    """Do the floors move between a quarter of the paths and all of them? (App. C.3)"""
    columns = {}
    for label, order, field in (("T0 fit", 0, "fit"), ("T1 plug-in", 1, "fit"), ("T1 cross-fit", 1, "held_out")):
        few, all_ = sample.column(f"quarter{order}", field), sample.column(f"order{order}", field)
        at_few, change = sample.mean(few, all_ - few)
        columns |= {f"{label} at M/4": at_few.value, f"{label}: change": change.value, f"{label} 95%": ends(change)}
    return by_slot("floors at M minus floors at M/4, same paths", columns)


def k_medians(sample):
    """K proposals instead of one, an oracle choosing among them (App. D.2)."""
    one = sample.column("order0", "fit")
    columns = {"K = 1": sample.mean(one)[0].value}
    for k in CENTRES:
        several, spread = (sample.column("k_median", f"{field}{k}") for field in ("risk", "spread"))
        removed, (risk, spread) = share(sample, one - several, one), sample.mean(several, spread)
        columns |= {
            f"K = {k}": risk.value, f"removed by {k}": removed.value, f"removed by {k} 95%": ends(removed),
            f"spread {k}": spread.value,
        }  # fmt: skip
    return by_slot("risk of K proposals, the best chosen by an oracle (an upper bound)", columns)


def compare(first, second, replicates=10_000):
    """Two runs on the same anchors, second minus first: another law, more paths, other drafters (App. C.3, C.4, C.7).

    Args: first, second: (provenance, rows) of the record files.
    Returns: {name: Table}, over the anchors and slots that both have.
    Raises: RecordError if they share no anchor.
    """
    rows = [by_prefix(rows) for _, rows in (first, second)]
    keys = [key for key in rows[0] if key in rows[1]]
    if not keys:
        raise RecordError("the two record files share no anchor; measure the second one with the first one's anchors")
    plan = next(row["domains"] for row in first[1] if row["kind"] == "plan")
    a, b = (Sample([r[key] for key in keys], plan, replicates) for r in rows)
    gamma, out = min(a.gamma, b.gamma), {}
    paths = {"T0 fit": ("order0", "fit"), "T1 cross-fit": ("order1", "held_out")}
    for name in (n for n in a.drafters if n in b.drafters):
        paths |= {f"R {name}": ("drafters", name, "risk"), f"R self {name}": ("drafters", name, "self_risk")}
    for label, path in paths.items():
        before, after = (s.column(*path)[:, :gamma] for s in (a, b))
        both = 0 * (before + after)  # NaN where one of them is absent
        if np.isnan(both).all():
            continue
        old, new, change, relative = a.statistic(
            [a.sums(before + both), a.sums(after + both)], lambda m: [*m, m[1] - m[0], m[1] / m[0] - 1]
        )
        out[label] = by_slot(
            f"{label} on {len(keys)} shared anchors, second minus first",
            {
                "first": old.value, "second": new.value, "change": change.value, "95%": ends(change),
                "relative": relative.value,
            },
        )  # fmt: skip
    return out


def by_prefix(rows):
    """The anchors of a run by prompt and prefix: the same position of another answer is another anchor."""
    answers, found = {row["prompt"]: row for row in rows if row["kind"] == "answer"}, {}
    for row in rows:
        if row["kind"] == "anchor":
            if row["prompt"] not in answers:
                raise RecordError(
                    f"the answer to {row['prompt']} is missing; the record file was not written by one run"
                )
            answer = answers[row["prompt"]]
            found[row["prompt"], *answer["prompt_tokens"], *answer["tokens"][: row["position"]]] = row
    return found
