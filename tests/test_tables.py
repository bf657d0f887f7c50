"""reference/sample.py and reference/tables.py: every cell from hand-made rows, against plain loops over anchors.

Values are sums over the rows; intervals resample the same prompts, anchor by anchor and replicate by replicate.
"""

import json
import math

import numpy as np
import pytest

from reference.records import RecordError
from reference.sample import Sample, Table, by_slot, cell, quantile, share
from reference.tables import compare, tables
from tests.agreement import assert_agree

GAMMA, REPLICATES = 6, 25
PLAN = {"sums": {"anchors": 9}, "talk": {"anchors": 6}}
DRAFTERS = {"parallel": 0, "chained": 1, "whole": None}
FLOOR = ("fit", "held_out", "split", "lower", "upper", "covered", "support")


# --- hand-made rows ---------------------------------------------------------------------------------------------


def drafter_entry(rng, order, alive):
    """What one drafter leaves in a row; slots without a path are None or 0."""
    lives, gamma = alive > 0, len(alive)
    risk, factor = rng.uniform(0.1, 0.9, gamma), rng.uniform(0.3, 1, gamma)
    arrival = np.concatenate([[1.0], np.cumprod(factor)[:-1]]) * alive

    def slots(values):
        return [float(v) if here else None for v, here in zip(values, lives, strict=True)]

    def sweep():
        return {field: rng.uniform(-0.1, 1, 3).tolist() for field in ("train", "held_out")}

    fields = ("train", "held_out", "leftover", "effective_paths")
    return {
        "order": order, "risk": slots(risk), "tempered": slots(risk * 0.9),
        "self_risk": [None] * gamma if order == 0 else slots(risk * rng.uniform(0.9, 1.5, gamma)),
        "arrival": arrival.tolist(), "rejected": (arrival * rng.uniform(0.1, 0.9, gamma)).tolist(),
        "responses": {field: rng.uniform(-0.1, 1, gamma).tolist() for field in fields},
        "forward": sweep(), "backward": sweep(),
    }  # fmt: skip


def anchor_row(rng, domain, prompt, position, drafters=DRAFTERS, gamma=GAMMA, slots=None):
    """An anchor with every entry; from slot `slots` on fewer than two paths are alive, from the next on none."""
    slots = gamma if slots is None else slots
    alive = np.cumprod(rng.uniform(0.8, 1, gamma)) * (np.arange(gamma) <= slots)
    alive[0] = 1.0

    def column(low=0.0, high=1.0, first=0, holes=0.0):
        values = rng.uniform(low, high, gamma)
        gone = (np.arange(gamma) >= slots) | (np.arange(gamma) < first) | (rng.random(gamma) < holes)
        return [None if g else float(v) for v, g in zip(values, gone, strict=True)]

    def floor(holes=0.0):
        return {name: column(0, 0.6, holes=holes if name in ("held_out", "split") else 0) for name in FLOOR}

    row = {
        "kind": "anchor", "domain": domain, "prompt": prompt, "position": position, "context": position + 3,
        "stratum": [0, 0], "inclusion": float(rng.choice([0.125, 0.25, 0.5, 1.0])), "alive": alive.tolist(),
        "distinct": [1] * gamma, "support": column(1, 40), "order0": floor(), "order1": floor(0.3),
        "quarter0": floor(), "quarter1": floor(0.4), "soft": floor(),
        "information": {name: column(0, 0.5) for name in ("order1", "order2", "order4")}
        | {"whole": column(0.5, 1), "blind": column(2, 3, holes=0.1), "commit": column(3, 4),
           "realised": column(0, 1, holes=0.1)},
        "k_median": {f"{field}{k}": column(0, 0.3) for field in ("risk", "spread") for k in (2, 4)},
    }  # fmt: skip
    for kept in (20, 256):
        row[f"top{kept}"] = {f"order{m}_{field}": column() for m in (0, 1) for field in ("fit", "lower", "upper")}
    for m in (1, 2, 4):
        if slots > m + 1:
            row[f"suffix{m}"] = {field: column(1, 2, m + 1, 0.2) for field in ("fit", "held_out", "ess", "loss")}
    return row | {"drafters": {name: drafter_entry(rng, order, alive) for name, order in drafters.items()}}


def finished(seed=0, drafters=DRAFTERS):
    """A finished run of 15 anchors of 7 prompts; some paths stop early, one anchor has a drafter less, one has none."""
    rng = np.random.default_rng(seed)
    rows = [anchor_row(rng, "sums", f"sums:{i % 4}", i, drafters, slots={3: 4, 5: 1}.get(i)) for i in range(9)]
    rows += [anchor_row(rng, "talk", f"talk:{i % 3}", i, drafters, slots={2: 5}.get(i)) for i in range(6)]
    rows[7]["drafters"].pop("chained", None)
    rows[11].pop("drafters")
    return [rows[i] for i in rng.permutation(len(rows))]


# --- plain loops ------------------------------------------------------------------------------------------------


def at(row, k, *path):
    """A recorded number, None where any step of the path is absent."""
    for name in path:
        row = None if row is None else row.get(name)
    return None if row is None else row[k]


def term(function, *paths):
    """function of the recorded numbers at the paths, None where one of them is absent: (row, k) -> number."""

    def value(row, k):
        found = [path(row, k) if callable(path) else at(row, k, *path) for path in paths]
        return None if None in found else function(*found)

    return value


def over(top, bottom=None):
    """Ratio of two sums weighted by 1 / inclusion where both are there, or a mean: (rows, k) -> number."""

    def value(rows, k):
        above = below = 0.0
        for row in rows:
            pair = top(row, k), 1.0 if bottom is None else bottom(row, k)
            if None not in pair:
                above += pair[0] / row["inclusion"]
                below += pair[1] / row["inclusion"]
        return above / below if below > 0 else math.nan

    return value


def mean(*path):
    return over(term(lambda a: a, path))


def combined(function, *parts):
    """A function of several such ratios."""

    def value(rows, k):
        try:
            return function(*(part(rows, k) for part in parts))
        except ZeroDivisionError:
            return math.nan

    return value


def resampled(rows, replicates=REPLICATES):
    """The samples of the bootstrap: whole prompts, with all their anchors, as often as each is drawn."""
    prompts = sorted({row["prompt"] for row in rows})
    rng = np.random.default_rng(20260818)
    for times in rng.multinomial(len(prompts), np.full(len(prompts), 1 / len(prompts)), size=replicates):
        yield [row for p, n in zip(prompts, times, strict=True) for row in rows if row["prompt"] == p for _ in range(n)]


def assert_cell(found, expected):
    if not np.isfinite(expected).all():
        assert found is None
    else:
        assert_agree(np.array(found, dtype=np.float64), np.array(expected, dtype=np.float64), "golden")


def assert_column(found, rows, statistic, slots=range(GAMMA)):
    """A column of a table: its numbers, or its intervals if it holds lists."""
    samples = list(resampled(rows))
    for k, got in zip(slots, found, strict=True):
        if isinstance(got, list) or all(isinstance(v, list | None) for v in found):
            values = np.array([statistic(sample, k) for sample in samples])
            values = values[np.isfinite(values)]
            assert_cell(got, np.percentile(values, [2.5, 97.5]) if len(values) else [math.nan] * 2)
        else:
            assert_cell(got, statistic(rows, k))


def columns_of(table):
    assert len(set(table.columns)) == len(table.columns)
    assert {len(row) for row in table.rows} == {len(table.columns)}
    return dict(zip(table.columns, map(list, zip(*table.rows, strict=True)), strict=True))


def assert_slots(table, rows, expected):
    """A table with a row per slot: exactly these columns, each against its plain loop."""
    found = columns_of(table)
    assert found.pop("slot") == list(range(GAMMA))
    assert list(found) == list(expected)
    for name, statistic in expected.items():
        assert_column(found[name], rows, statistic)
    assert any(isinstance(v, float) for column in found.values() for v in column)


@pytest.fixture(scope="module")
def rows():
    return finished()


@pytest.fixture(scope="module")
def found(rows):
    return tables(Sample(rows, PLAN, REPLICATES))


# --- drafters ---------------------------------------------------------------------------------------------------


def of(name, field):
    return "drafters", name, field


def floor_term(name):
    """The floor that bounds a drafter."""
    order = DRAFTERS[name]
    path = ("order1", "held_out") if order == 1 else ("order0", "fit")
    return term(lambda t: 0.0 if order is None else t, path)


def test_every_table_is_there(found):
    per_drafter = ("drafter", "serving", "dependence", "responses", "sweeps")
    assert set(found) == {f"{table} {name}" for table in per_drafter for name in DRAFTERS} | {
        "accepted length", "versus parallel chained", "versus chained whole", "versus parallel whole", "recovery",
        "intervals", "information", "estimators", "concentration", "truncation", "ladder", "k_median",
    }  # fmt: skip


@pytest.mark.parametrize("name", DRAFTERS)
def test_risk_is_floor_plus_gap(rows, found, name):
    order, floor = DRAFTERS[name], floor_term(name)
    risk, own, loose = (of(name, field) for field in ("risk", "self_risk", "tempered"))
    least, met = over(term(lambda t, r: t, floor, risk)), over(term(lambda t, r: r, floor, risk))
    gap, part = combined(lambda t, r: r - t, least, met), combined(lambda t, r: 1 - t / r, least, met)
    expected = {
        f"T{'k' if order is None else order}": least, "R" if order == 0 else "R oracle": met, "gap": gap,
        "gap 95%": gap, "gap / R": part, "share 95%": part,
    }  # fmt: skip
    if order != 0:
        exposure = over(term(lambda t, r, s: s - r, floor, risk, own))
        expected |= {"R self": over(term(lambda t, r, s: s, floor, risk, own))}
        expected |= {"exposure": exposure, "exposure 95%": exposure}
    if order == 1:
        low = over(term(lambda f, t, r: f, ("order1", "fit"), floor, risk))
        expected |= {"T1 plug-in": low, "gap / R, plug-in": combined(lambda t, r: 1 - t / r, low, met)}
        expected["covered"] = over(term(lambda c, r: c, ("order1", "covered"), risk))
    expected["R tempered only"] = over(term(lambda t, r, x: x, floor, risk, loose))
    assert_slots(found[f"drafter {name}"], rows, expected)
    columns = columns_of(found[f"drafter {name}"])
    labels = list(columns)[1:4]
    for t, r, g in zip(*(columns[label] for label in labels), strict=True):
        assert t is r is g is None or assert_cell(t + g, r) is None


@pytest.mark.parametrize(("a", "b"), [("parallel", "chained"), ("chained", "whole"), ("parallel", "whole")])
def test_two_drafters_are_compared_on_the_anchors_that_have_both(rows, found, a, b):
    risk, own = ([of(name, field) for name in (a, b)] for field in ("risk", "self_risk"))
    change = over(term(lambda x, y: y - x, *risk))
    gap = over(term(lambda x, s, y, t: (y - t) - (x - s), risk[0], floor_term(a), risk[1], floor_term(b)))
    expected = {"R": change, "R 95%": change}
    if DRAFTERS[a] == DRAFTERS[b]:
        expected |= {"gap": gap, "gap 95%": gap}
    if 0 not in (DRAFTERS[a], DRAFTERS[b]):
        self_change = over(term(lambda x, y: y - x, *own))
        exposure = over(term(lambda x, r, y, s: (y - s) - (x - r), own[0], risk[0], own[1], risk[1]))
        expected |= {"R self": self_change, "R self 95%": self_change}
        expected |= {"exposure": exposure, "exposure 95%": exposure}
    assert_slots(found[f"versus {a} {b}"], rows, expected)


@pytest.mark.parametrize("name", DRAFTERS)
def test_serving_risk_is_a_ratio_of_sums(rows, found, name):
    arrival, rejected, risk = (of(name, field) for field in ("arrival", "rejected", "risk"))
    free = mean(*risk)
    pooled = over(term(lambda x: x, rejected), term(lambda x: x, arrival))
    alone = over(term(lambda w, x, r: x / w if w else r, arrival, rejected, risk))
    change = combined(lambda a, b: a - b, pooled, free)
    expected = {
        "free": free, "serving": pooled, "change": change, "change 95%": change,
        "within anchors": combined(lambda a, b: a - b, alone, free),
        "between anchors": combined(lambda a, b: a - b, pooled, alone),
    }  # fmt: skip
    assert_slots(found[f"serving {name}"], rows, expected)


def survival(name):
    return term(lambda w, x: w - x, of(name, "arrival"), of(name, "rejected"))


def independent(name, k_risks, alive):
    return alive * math.prod(1 - r for r in k_risks)


def pooled_independent(name):
    """alive_k prod_{j<=k} (1 - R_j) on the pooled numbers of the anchors that have the drafter."""

    def value(rows, k):
        alive = over(term(lambda a, w: a, ("alive",), of(name, "arrival")))(rows, k)
        risks = [mean(*of(name, "risk"))(rows, j) for j in range(k + 1)]
        return alive * math.prod(1 - r for r in risks)

    return value


def own_independent(name):
    def value(row, k):
        if name not in row.get("drafters", {}):
            return None
        return row["alive"][k] * math.prod(1 - (at(row, j, *of(name, "risk")) or 0.0) for j in range(k + 1))

    return value


@pytest.mark.parametrize("name", DRAFTERS)
def test_dependence(rows, found, name):
    joint, pooled, alone = over(survival(name)), pooled_independent(name), over(own_independent(name))
    ratio = combined(lambda a, b: a / b, joint, pooled)
    expected = {
        "survival": joint, "survival 95%": joint, "D": ratio, "D 95%": ratio,
        "within anchors": combined(lambda a, b: a / b, joint, alone),
        "between anchors": combined(lambda a, b: a / b, alone, pooled),
    }  # fmt: skip
    assert_slots(found[f"dependence {name}"], rows, expected)


def test_accepted_length(rows, found):
    columns = columns_of(found["accepted length"])
    assert columns["drafter"] == list(DRAFTERS)
    for i, name in enumerate(DRAFTERS):

        def tau(row, _, name=name):
            parts = [survival(name)(row, k) for k in range(GAMMA)]
            return None if None in parts else 1 + sum(parts)

        assert_column([columns["tau"][i]], rows, over(tau), [0])
        assert_column([columns["tau 95%"][i]], rows, over(tau), [0])
        product = 1 + sum(pooled_independent(name)(rows, k) for k in range(GAMMA))
        assert_cell(columns["tau if independent"][i], product)
        largest = max(mean(*of(name, "risk"))(rows, k) for k in range(GAMMA))
        assert_cell(columns["largest R"][i], largest)
        r = columns["bound on largest R"][i]  # f(r) = tau, see App. F.3
        assert_cell(1 + sum(max(0.0, 1 - (j + 1) * r) for j in range(GAMMA)), columns["tau"][i])


@pytest.mark.parametrize("name", DRAFTERS)
def test_best_responses_and_sweeps(rows, found, name):
    gain, train = (("drafters", name, "responses", field) for field in ("held_out", "train"))
    expected = {
        "gain": mean(*gain), "gain 95%": mean(*gain),
        "fitted minus held out": over(term(lambda a, b: b - a, gain, train)),
        "effective paths": mean("drafters", name, "responses", "effective_paths"),
    }  # fmt: skip
    assert_slots(found[f"responses {name}"], rows, expected)

    def last(direction, field):
        return over(term(lambda values: values, lambda row, _: at(row, -1, "drafters", name, direction, field)))

    def all_slots(row, _):
        return None if name not in row.get("drafters", {}) else sum(at(row, k, *gain) for k in range(GAMMA))

    single, forward, backward = over(all_slots), last("forward", "held_out"), last("backward", "held_out")
    expected = {
        "sum of single gains": single, "forward sweeps": forward, "backward sweeps": backward,
        "forward / sum": combined(lambda a, b: a / b, forward, single),
        "backward - forward": combined(lambda a, b: a - b, backward, forward),
        "fitted minus held out": combined(lambda a, b: a - b, last("forward", "train"), forward),
    }  # fmt: skip
    columns = columns_of(found[f"sweeps {name}"])
    assert columns[""] == list(expected)
    for i, statistic in enumerate(expected.values()):
        assert_column([columns["value"][i]], rows, statistic, [0])
        assert_column([columns["95%"][i]], rows, statistic, [0])


# --- companions -------------------------------------------------------------------------------------------------


def pooled(top, bottom, slots):
    """Ratio of sums over anchors and slots."""

    def value(rows, _):
        parts = [[], []]
        for k in slots:
            for row in rows:
                pair = top(row, k), bottom(row, k)
                if None not in pair:
                    for part, number in zip(parts, pair, strict=True):
                        part.append(number / row["inclusion"])
        return sum(parts[0]) / sum(parts[1]) if sum(parts[1]) > 0 else math.nan

    return value


def test_recovery(rows, found):
    columns = columns_of(found["recovery"])
    places = [(m, k) for m in (1, 2, 4) for k in [*range(m + 1, GAMMA), "pooled"]]
    assert list(zip(columns["order"], columns["slot"], strict=True)) == [(m, str(k)) for m, k in places]
    for i, (m, k) in enumerate(places):
        slots = range(m + 1, GAMMA) if k == "pooled" else [k]
        part, whole = ("information", f"order{m}"), ("information", "whole")
        rho = pooled(term(lambda a, b: a, part, whole), term(lambda a, b: b, part, whole), slots)
        paths = ("information", "blind"), ("information", "realised"), (f"suffix{m}", "loss")
        won, missing = term(lambda b, y, c: b - c, *paths), term(lambda b, y, c: b - y, *paths)
        for label, statistic in (("", rho), ("one token: ", pooled(won, missing, slots))):
            assert_column([columns[label + "rho"][i]], rows, statistic, [0])
            interval = "one token: 95%" if label else "95%"
            assert_column([columns[interval][i]], rows, statistic, [0])
        if m == 1 and k != "pooled":
            assert_column([columns["covered"][i]], rows, mean("order1", "covered"), [k])
        assert m == 1 or columns["covered"][i] is None
        effective = term(lambda ess, _: ess, (f"suffix{m}", "ess"), won)
        cells = [ess for k in slots for row in rows if (ess := effective(row, k)) is not None]
        assert columns["cells"][i] == len(cells)
        assert_cell(columns["median ESS"][i], np.median(cells))


def test_recovery_without_realised_suffixes():
    rows = finished()
    for row in rows:
        for m in (1, 2, 4):
            row.pop(f"suffix{m}", None)
    table = tables(Sample(rows, PLAN, REPLICATES))["recovery"]
    assert table.columns == ["order", "slot", "rho", "95%", "covered"]
    assert {len(row) for row in table.rows} == {5}


def test_information(rows, found):
    def part(name):
        return mean("information", name)

    both = ("information", "blind"), ("information", "realised")
    missing = over(term(lambda b, y: b - y, *both))
    expected = {
        "I(whole)": part("whole"), "I 95%": part("whole"), "I(last 1)": part("order1"),
        "CE_A": over(term(lambda b, y: y, *both)), "CE_B": over(term(lambda b, y: b, *both)),
        "CE_commit": over(term(lambda b, y, c: c, *both, ("information", "commit"))), "CE_B - CE_A": missing,
        "one token: 95%": missing,
    }  # fmt: skip
    table = found["information"]
    counts = [row[-1] for row in table.rows]
    assert_slots(Table(table.title, table.columns[:-1], [row[:-1] for row in table.rows]), rows, expected)
    assert table.columns[-1] == "anchors"
    assert counts == [sum(None not in (at(r, k, *both[0]), at(r, k, *both[1])) for r in rows) for k in range(GAMMA)]


def test_an_infinite_loss_takes_its_anchor_out_of_every_cross_entropy():
    # was once: CE_B, CE_A and their difference were means over different anchors, and CE_commit below CE_B
    rows = finished()
    rows[0]["information"]["blind"][1] = rows[1]["information"]["commit"][1] = None
    columns = columns_of(tables(Sample(rows, PLAN, REPLICATES))["information"])
    for blind, realised, change in zip(*(columns[c] for c in ("CE_B", "CE_A", "CE_B - CE_A")), strict=True):
        assert_cell(change, blind - realised)
    assert columns["CE_commit"][1] is None
    assert columns["anchors"][1] == columns["anchors"][0] - 1


def test_intervals(rows, found):
    t1, t0 = ("order1", "held_out"), ("order0", "fit")
    one, zero = over(term(lambda a, b: a, t1, t0)), over(term(lambda a, b: b, t1, t0))
    removed = combined(lambda a, b: 1 - a / b, one, zero)
    expected = {
        "T0": mean(*t0), "T0 95%": mean(*t0), "T1 cross-fit": one, "T1 95%": one, "removed": removed,
        "removed 95%": removed,
    }  # fmt: skip
    assert_slots(found["intervals"], rows, expected)


def test_estimators(rows, found):
    expected = {
        "plug-in": mean("order1", "fit"), "one direction": mean("order1", "split"),
        "cross-fit": mean("order1", "held_out"), "soft": mean("soft", "fit"),
        "soft held out": mean("soft", "held_out"), "soft lower": mean("soft", "lower"),
        "soft upper": mean("soft", "upper"), "reweighted": mean("suffix1", "fit"),
        "reweighted held out": mean("suffix1", "held_out"), "ESS": mean("suffix1", "ess"),
    }  # fmt: skip
    for label, entry in (("soft held out", "soft"), ("reweighted held out", "suffix1")):
        change = over(term(lambda a, b: a - b, (entry, "held_out"), ("order1", "held_out")))
        expected |= {f"{label} - cross-fit": change, f"{label} 95%": change}
    assert_slots(found["estimators"], rows, expected)


def test_truncation(rows, found):
    expected = {}
    for m in (0, 1):
        expected[f"T{m} full"] = mean(f"order{m}", "fit")
        for kept in (20, 256):
            read = [(f"top{kept}", f"order{m}_{field}") for field in ("fit", "lower", "upper")]
            change = over(term(lambda a, b: a - b, read[0], (f"order{m}", "fit")))
            expected |= {f"T{m} top {kept}: change": change, f"T{m} top {kept} 95%": change}
            expected[f"T{m} top {kept}: band"] = over(term(lambda low, high: (high - low) / 2, *read[1:]))
    assert_slots(found["truncation"], rows, expected)


def test_ladder(rows, found):
    expected = {}
    for label, m, field in (("T0 fit", 0, "fit"), ("T1 plug-in", 1, "fit"), ("T1 cross-fit", 1, "held_out")):
        change = over(term(lambda few, all_: all_ - few, (f"quarter{m}", field), (f"order{m}", field)))
        expected |= {f"{label} at M/4": mean(f"quarter{m}", field), f"{label}: change": change, f"{label} 95%": change}
    assert_slots(found["ladder"], rows, expected)


def test_k_medians(rows, found):
    one, expected = ("order0", "fit"), {"K = 1": mean("order0", "fit")}
    for k in (2, 4):
        paths = one, ("k_median", f"risk{k}")
        removed = over(term(lambda a, b: a - b, *paths), term(lambda a, b: a, *paths))
        expected |= {f"K = {k}": mean("k_median", f"risk{k}"), f"removed by {k}": removed}
        expected |= {f"removed by {k} 95%": removed, f"spread {k}": mean("k_median", f"spread{k}")}
    assert_slots(found["k_median"], rows, expected)


def weighted_quantile(pairs, q):
    """Smallest value whose cumulative weight share reaches q."""
    total, reached = sum(w for _, w in pairs), 0.0
    for value, weight in sorted(pairs):
        reached += weight
        if reached >= q * total - 1e-12 * total:
            return value


def test_concentration(rows, found):
    columns = columns_of(found["concentration"])
    assert columns.pop("slot") == list(range(GAMMA))
    for k in range(GAMMA):
        here = [row for row in rows if row["order0"]["fit"][k] is not None]
        t, n = (
            [row[a][k] if b is None else row[a][b][k] for row in here]
            for a, b in (("order0", "fit"), ("support", None))
        )
        w = [1 / row["inclusion"] for row in here]
        total, carried = sum(w), sum(a * b for a, b in zip(w, t, strict=True))
        large = weighted_quantile(list(zip(t, w, strict=True)), 0.9)
        logs = np.log(n)
        centred = [x - np.average(x, weights=w) for x in (logs, np.array(t))]
        xy, xx, yy = (np.average(a * b, weights=w) for a, b in (centred, [centred[0]] * 2, [centred[1]] * 2))
        expected = [
            sum(b for a, b in zip(t, w, strict=True) if a < 0.01) / total,
            sum(a * b for a, b in zip(t, w, strict=True) if a < 0.01) / carried,
            sum(a * b for a, b in zip(t, w, strict=True) if a >= large) / carried,
            *(weighted_quantile(list(zip(n, w, strict=True)), q) for q in (0.5, 0.9)),
            xy / math.sqrt(xx * yy),
        ]
        for column, value in zip(columns.values(), expected, strict=True):
            assert_cell(column[k], float(value))


# --- known answers ----------------------------------------------------------------------------------------------


def contexts(factors, gamma=3, inclusion=None):
    """The tables of anchors whose every draft is accepted with one probability of their own."""
    rows = []
    for i, (a, pi) in enumerate(zip(factors, inclusion or [1.0] * len(factors), strict=True)):
        arrival = [a**k for k in range(gamma)]
        entry = {
            "order": 0, "risk": [1 - a] * gamma, "self_risk": [None] * gamma, "arrival": arrival,
            "rejected": [w * (1 - a) for w in arrival],
        }  # fmt: skip
        floors = {"fit": [0.0] * gamma, "held_out": [0.0] * gamma, "covered": [1.0] * gamma}
        rows.append({"kind": "anchor", "domain": "sums", "prompt": str(i), "position": 0, "inclusion": pi,
                     "alive": [1.0] * gamma, "order0": floors, "order1": floors, "drafters": {"d": entry}})  # fmt: skip
    return tables(Sample(rows, {"sums": {"anchors": len(rows)}}, REPLICATES))


def test_an_easy_and_a_hard_context():
    """Catalogue 28: D = 1, 1.444, 2.333 without any dependence inside a context; serving is no mean of ratios."""
    found = contexts([1.0, 0.2])
    depend, serve = columns_of(found["dependence d"]), columns_of(found["serving d"])
    assert_agree(np.array(depend["D"]), np.array([1, 0.52 / 0.36, 0.504 / 0.216]), "float64")
    assert_agree(np.array(depend["within anchors"]), np.ones(3), "float64")
    assert_agree(np.array(depend["between anchors"]), np.array(depend["D"]), "float64")
    assert_agree(np.array(serve["free"]), np.full(3, 0.4), "float64")
    assert_agree(np.array(serve["serving"]), np.array([0.8 / 2, 0.16 / 1.2, 0.032 / 1.04]), "float64")
    assert_agree(np.array(serve["within anchors"]), np.zeros(3), "float64")
    (length,) = found["accepted length"].rows
    assert_agree(length[1], 1 + 0.6 + 0.52 + 0.504, "float64")
    assert_agree(length[3], 1 + 0.6 + 0.36 + 0.216, "float64")


@pytest.mark.parametrize("seed", range(5))
def test_a_perfect_drafter(seed):
    # was once: the mean of accepted lengths 5 rounds above 5, the most that any risk allows
    inclusion = np.random.default_rng(seed).uniform(0.05, 1, 9).tolist()
    found = contexts([1.0] * 9, gamma=4, inclusion=inclusion)
    (length,) = found["accepted length"].rows
    assert_agree(np.array(length[1:2] + length[3:]), np.array([5, 5, 0, 0.0]), "float64")
    assert columns_of(found["drafter d"])["gap / R"] == [None] * 4


def test_a_useless_drafter():
    found = contexts([0.0, 0.0])
    (length,) = found["accepted length"].rows
    assert_agree(np.array(length[1:2] + length[3:]), np.array([1, 1, 1, 1.0]), "float64")
    assert columns_of(found["serving d"])["serving"] == [1.0, None, None]
    assert columns_of(found["dependence d"])["D"] == [None] * 3
    json.dumps([table.rows for table in found.values()], allow_nan=False)


# --- samples ----------------------------------------------------------------------------------------------------


def test_an_unfinished_run_shrinks_the_inclusion():
    rows = [row for row in finished() if row["domain"] == "talk" or row["position"] < 3]
    assert [sum(row["domain"] == d for row in rows) for d in PLAN] == [3, 6]
    shrunk = [{**row, "inclusion": row["inclusion"] * (1 / 3 if row["domain"] == "sums" else 1)} for row in rows]
    sample = Sample(rows, PLAN, REPLICATES)
    for row, inclusion in zip(shrunk, sample.inclusion, strict=True):
        assert_agree(inclusion, row["inclusion"], "float64")
    found = tables(Sample(rows, PLAN, REPLICATES))
    paths = of("parallel", "risk"), ("order0", "fit")
    gap = columns_of(found["drafter parallel"])
    assert_column(gap["gap"], shrunk, over(term(lambda r, t: r - t, *paths)))
    assert_column(gap["gap 95%"], shrunk, over(term(lambda r, t: r - t, *paths)))


def test_rows_without_drafters_or_companions_have_no_tables():
    rows = finished()
    floors_only = [{n: v for n, v in row.items() if n in ("domain", "prompt", "inclusion", "alive", "order0", "order1")}
                   for row in rows]  # fmt: skip
    assert list(tables(Sample(floors_only, PLAN, REPLICATES))) == ["intervals"]


def test_an_anchor_that_stops_at_once_takes_no_table_away():
    # was once: one anchor without paths at slot 2 has no suffix1, and nobody's suffixes are reported
    rows = finished()
    assert not all("suffix1" in row for row in rows)
    assert not all("suffix4" in row for row in rows if "suffix1" in row)
    found = tables(Sample(rows, PLAN, REPLICATES))
    assert found["recovery"].columns[-1] == "median ESS"
    assert "reweighted" in found["estimators"].columns


def test_one_prompt_gives_no_interval():
    rows = [{**row, "prompt": "sums:0"} for row in finished()]
    for table in tables(Sample(rows, PLAN, REPLICATES)).values():
        for name, column in columns_of(table).items():
            if "95%" in name:
                assert set(column) == {None}


@pytest.mark.parametrize("hole", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(2))
def test_tables_are_json_and_text_whatever_is_missing(seed, hole):
    """Every list may be absent, every number None, 0 or 1."""
    rng = np.random.default_rng(seed)

    def spoil(value, name=""):
        if isinstance(value, dict):
            return {n: spoil(v, n) for n, v in value.items()}
        if isinstance(value, list) and name in ("alive", "arrival", "rejected", "stratum", "distinct"):
            return value
        if (
            isinstance(value, list)
            and all(isinstance(v, float | None) for v in value)
            and name not in ("train", "held_out")
        ):
            odd = [None, 0.0, 1.0, 1.0 if name == "support" else 0.0]
            return [odd[rng.integers(len(odd))] if rng.random() < hole and k else v for k, v in enumerate(value)]
        return value

    rows = [spoil(row) for row in finished(seed)]
    for row in rows:
        row["support"] = [None if v is None else max(1.0, v) for v in row["support"]]
        row["support"] = [
            None if t is None else s or 1.0 for s, t in zip(row["support"], row["order0"]["fit"], strict=True)
        ]
    for table in tables(Sample(rows, PLAN, 5)).values():
        text = json.dumps(vars(table), allow_nan=False)
        assert Table(**json.loads(text)).render() == table.render()
        assert len(table.render().splitlines()) == len(table.rows) + 2


def test_text():
    table = by_slot("a title", {"value": np.array([0.25, np.nan]), "95%": np.array([[0, 1], [np.nan, 1]])})
    assert table == Table("a title", ["slot", "value", "95%"], [[0, 0.25, [0.0, 1.0]], [1, None, None]])
    assert table.render().splitlines() == [
        "a title",
        "slot   value               95%",
        "   0  0.2500  [0.0000, 1.0000]",
        "   1       -                 -",
    ]
    assert cell(np.inf) is cell([0.0, np.inf]) is cell(None) is None


def test_a_statistic_is_evaluated_on_resampled_sums():
    rows = finished()
    sample = Sample(rows, PLAN, REPLICATES)
    values = sample.column("order0", "fit")
    assert values.shape == (15, GAMMA)
    assert np.isnan(values).sum() == 2 + 5 + 1  # the slots without two paths
    (ratio,) = sample.statistic(
        [sample.sums(values[:, 0]), sample.sums(values[:, 1:3])], lambda m: [m[1] / m[0][:, None]]
    )
    plain = [combined(lambda a, b: a / b, mean("order0", "fit"), lambda rows, _: mean("order0", "fit")(rows, 0))] * 2
    for i, statistic in enumerate(plain):
        assert_column([float(ratio.value[i])], rows, statistic, [i + 1])
        assert_column([[float(ratio.low[i]), float(ratio.high[i])]], rows, statistic, [i + 1])


def test_a_share_has_the_same_anchors_above_and_below():
    rows = [
        {"domain": "sums", "prompt": str(i), "inclusion": pi, "alive": [1.0]} for i, pi in enumerate((0.5, 0.25, 1))
    ]
    sample = Sample(rows, {"sums": {"anchors": 3}}, REPLICATES)
    part, whole = np.array([[1.0], [np.nan], [3.0]]), np.array([[2.0], [100.0], [4.0]])
    assert_agree(share(sample, part, whole).value, np.array([5 / 8]), "float64")
    pool = share(sample, np.tile(part, 2), np.concatenate([whole, 2 * whole], axis=1), pool=True)
    assert_agree(pool.value, np.array([10 / 24]), "float64")
    assert quantile(np.array([1.0, np.nan, 2.0]), sample.inclusion, 0.5) == 1.0
    assert quantile(np.full(3, np.nan), sample.inclusion, 0.5) is None


# --- two runs ---------------------------------------------------------------------------------------------------


def run_of(rows):
    """A record file's content: every prompt's answer, the plan, the anchors."""
    answers = [{"kind": "answer", "prompt": p, "domain": p.split(":")[0], "stopped": True, "prompt_tokens": [1],
                "tokens": list(range(20))} for p in sorted({row["prompt"] for row in rows})]  # fmt: skip
    return {"kind": "provenance"}, [*answers, {"kind": "plan", "domains": PLAN}, *rows]


def test_compare_pairs_the_anchors_that_both_runs_have():
    first, second = finished(0), finished(1)[:-4]
    for row in first:
        row.get("drafters", {}).pop("whole", None)
    shared = {(row["prompt"], row["position"]) for row in second}
    pairs = [{"a": row, "b": other, **{n: row[n] for n in ("prompt", "domain", "position", "inclusion")}}
             for row in first for other in second
             if (row["prompt"], row["position"]) == (other["prompt"], other["position"])]  # fmt: skip
    counts = {d: sum(pair["domain"] == d for pair in pairs) for d in PLAN}
    for pair in pairs:
        pair["inclusion"] *= counts[pair["domain"]] / PLAN[pair["domain"]]["anchors"]
    found = compare(run_of(first), run_of(second), REPLICATES)
    paths = {"T0 fit": ("order0", "fit"), "T1 cross-fit": ("order1", "held_out")}
    for name in ("parallel", "chained"):
        paths |= {f"R {name}": of(name, "risk"), f"R self {name}": of(name, "self_risk")}
    del paths["R self parallel"]
    assert list(found) == list(paths)
    for label, path in paths.items():
        both = ("a", *path), ("b", *path)
        old, new = over(term(lambda x, y: x, *both)), over(term(lambda x, y: y, *both))
        change = combined(lambda x, y: y - x, old, new)
        relative = combined(lambda x, y: y / x - 1, old, new)
        assert_slots(
            found[label], pairs, {"first": old, "second": new, "change": change, "95%": change, "relative": relative}
        )
        assert f"{len(shared)} shared anchors" in found[label].title


def test_a_longer_block_is_compared_on_the_slots_of_the_shorter():
    first, second = finished(0), finished(0)
    for row in first:
        for name in ("order0", "order1"):
            row[name] = {field: values[:4] for field, values in row[name].items()}
        row["alive"], row["drafters"] = row["alive"][:4], {}
    for a, b in ((first, second), (second, first)):
        found = compare(run_of(a), run_of(b), REPLICATES)
        assert list(found) == ["T0 fit", "T1 cross-fit"]
        columns = columns_of(found["T0 fit"])
        assert columns["slot"] == [0, 1, 2, 3]
        assert columns["change"] == [0.0] * 4


def test_a_floor_that_was_zero_has_no_relative_change():
    # was once: the infinite ratio goes into a document that must be strict JSON
    first, second = finished(0), finished(0)
    for row in first:
        row["order0"]["fit"] = [v and 0.0 for v in row["order0"]["fit"]]
    found = compare(run_of(first), run_of(second), REPLICATES)["T0 fit"]
    assert columns_of(found)["relative"] == [None] * GAMMA
    json.dumps(vars(found), allow_nan=False)


def test_runs_without_a_shared_anchor_are_refused():
    others = [{**row, "position": row["position"] + 9} for row in finished()]
    with pytest.raises(RecordError, match="share no anchor; measure the second one with the first one's anchors"):
        compare(run_of(finished()), run_of(others), REPLICATES)


def test_the_same_position_of_another_answer_is_another_anchor():
    # was once: two runs that wrote different answers are paired by position, and the text is taken for the law
    first, second = run_of(finished()), run_of(finished())
    for row in second[1]:
        if row["kind"] == "answer" and row["domain"] == "sums":
            row["tokens"] = row["tokens"][:2] + [30] * 18
    found = compare(first, second, REPLICATES)["T0 fit"]
    assert f"{6 + 3} shared anchors" in found.title  # all of talk, positions 0, 1 and 2 of sums
    for row in second[1]:
        if row["kind"] == "answer":
            row["prompt_tokens"] = [2]
    with pytest.raises(RecordError, match="share no anchor"):
        compare(first, second, REPLICATES)
