"""reference/report.py: every printed number from hand-made rows, against plain loops."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from reference import report
from reference.protocol import Design
from reference.records import RecordError, RecordFile, read
from reference.sample import Sample, Table
from reference.tables import compare, tables
from tests.agreement import assert_agree

ROOT = Path(__file__).resolve().parents[1]
GAMMA = 3
PROVENANCE = {
    "kind": "provenance",
    "target": "toy",
    "design": Design(anchors=6, paths=8, gamma=GAMMA).provenance(),
    "dtype": "float64",
    "backend": "reference",
    "device": "cpu",
    "hardware": "a machine",
    "commit": None,
}
PLANNED = {"sums": 6, "talk": 4, "none": 0}
FIELDS = ("fit", "held_out", "split", "lower", "upper", "covered", "support")


def anchor(rng, domain, prompt, position, *, slots=GAMMA):
    """A row with random floors, the first `slots` of them present; T1 is below T0 and None where it is not split."""
    t0 = [float(v) for v in rng.uniform(0.2, 0.6, GAMMA)]
    floors = {}
    for order, scale in (("order0", 1.0), ("order1", 0.5)):
        columns = {name: [scale * v * float(rng.uniform(0.9, 1.1)) for v in t0] for name in FIELDS}
        floors[order] = {name: values[:slots] + [None] * (GAMMA - slots) for name, values in columns.items()}
    if position % 3 == 0:
        floors["order1"]["held_out"][1] = floors["order1"]["split"][1] = None
    return {
        "kind": "anchor",
        "domain": domain,
        "prompt": prompt,
        "position": position,
        "context": position + 3,
        "stratum": [0, 0],
        "inclusion": float(rng.choice([0.125, 0.25, 0.5, 1.0])),
        "alive": [1.0, 0.75, 0.5 if slots == GAMMA else 0.125],
        "distinct": [1, 3, 4],
        **floors,
    }


def plan_row(planned=PLANNED):
    return {
        "kind": "plan",
        "domains": {
            domain: {"prompts": 3, "cut_answers": 1, "answer_tokens": 99, "eligible": 5 * n, "anchors": n}
            for domain, n in planned.items()
        },
    }


def answer_row(prompt):
    return {"kind": "answer", "prompt": prompt, "domain": "sums", "stopped": True, "prompt_tokens": [1], "tokens": [2]}


def finished(seed=0):
    """The rows of a finished run: two domains with anchors and one without any."""
    rng = np.random.default_rng(seed)
    anchors = [anchor(rng, "sums", f"sums:{i % 3}", i, slots=GAMMA - (i == 4)) for i in range(PLANNED["sums"])]
    anchors += [anchor(rng, "talk", f"talk:{i % 2}", i) for i in range(PLANNED["talk"])]
    return [answer_row("sums:0"), plan_row(), *(anchors[i] for i in rng.permutation(len(anchors)))]


def summarise(rows, **options):
    return report.summarise(PROVENANCE, rows, **{"replicates": 300} | options)


def anchors_of(rows, domain=None):
    return [row for row in rows if row["kind"] == "anchor" and domain in (None, row["domain"])]


def cell(row, column, k):
    """One number of one anchor by the name of its column."""
    if column in ("alive", "distinct"):
        return row[column][k]
    order, field = report.COLUMNS[column]
    return row[order][field][k]


def plain_hajek(rows, value):
    """sum(y / pi) / sum(1 / pi) over the rows where the value is present, None if there are none."""
    top = bottom = 0.0
    for row in rows:
        if (y := value(row)) is not None:
            top += y / row["inclusion"]
            bottom += 1 / row["inclusion"]
    return top / bottom if bottom else None


def assert_column(actual, expected):
    assert [v is None for v in actual] == [v is None for v in expected]
    for one, other in zip(actual, expected, strict=True):
        if other is not None:
            assert_agree(one, float(other), "float64")


ALL_COLUMNS = (*report.COLUMNS, "alive", "distinct")


def parts_of(rows):
    """The anchors behind every group of the report, in the parts whose means it averages."""
    parts = {"sums": [anchors_of(rows, "sums")], "talk": [anchors_of(rows, "talk")], "pooled": [anchors_of(rows)]}
    return parts | {"equal-domain": parts["sums"] + parts["talk"]}


def mean_of_parts(parts, value):
    means = [plain_hajek(part, value) for part in parts]
    return None if None in means else sum(means) / len(means)


@pytest.mark.parametrize("column", ALL_COLUMNS)
def test_means_against_plain_loops(column):
    rows = finished()
    groups, expected = summarise(rows)["groups"], parts_of(rows)
    assert list(groups) == list(expected)
    for name, parts in expected.items():
        mean = [mean_of_parts(parts, lambda row, k=k: cell(row, column, k)) for k in range(GAMMA)]
        assert_column(groups[name][column], mean)
    if column not in ("alive", "distinct"):
        assert groups["pooled"][column][0] != groups["equal-domain"][column][0]


def test_derived_columns_against_plain_loops():
    rows = finished()
    groups = summarise(rows)["groups"]
    for name, parts in parts_of(rows).items():
        removed = []
        for k in range(GAMMA):
            both = [
                [row for row in part if None not in (cell(row, "t0_fit", k), cell(row, "t1_held_out", k))]
                for part in parts
            ]
            t0, t1 = (mean_of_parts(both, lambda row, c=c, k=k: cell(row, c, k)) for c in ("t0_fit", "t1_held_out"))
            removed.append(1 - t1 / t0)
        assert_column(groups[name]["removed"], removed)
        assert_column(groups[name]["max_acceptance"], [1 - v for v in groups[name]["t0_fit"]])


@pytest.mark.parametrize("seed", range(3))
def test_intervals_bracket_and_are_repeatable(seed):
    rows = finished(seed)
    summary = summarise(rows)
    assert summarise(rows) == summary
    for group in summary["groups"].values():
        for low, value, high in (
            ("t0_low", "t0_fit", "t0_high"),
            ("t1_low", "t1_held_out", "t1_high"),
            ("removed_low", "removed", "removed_high"),
        ):
            for k in range(GAMMA):
                assert group[low][k] <= group[value][k] <= group[high][k]
                assert group[low][k] < group[high][k]


def test_one_prompt_gives_no_interval():
    rng = np.random.default_rng(1)
    rows = [plan_row({"sums": 3}), *(anchor(rng, "sums", "sums:0", i) for i in (1, 2, 4))]
    for group in summarise(rows)["groups"].values():
        assert group["t0_low"] == group["t0_high"] == [None] * GAMMA
        assert None not in group["t0_fit"]


def test_absent_values_take_no_part():
    rows = finished()
    hidden = [r for r in anchors_of(rows) if r["order0"]["fit"][-1] is None]
    assert len(hidden) == 1
    full = summarise(rows)["groups"]["pooled"]
    less = [row for row in rows if row is not hidden[0]]
    less[1] = plan_row({**PLANNED, "sums": PLANNED["sums"] - 1})
    part = summarise(less)["groups"]["pooled"]
    assert_column(full["t0_fit"][-1:], part["t0_fit"][-1:])
    assert full["t0_fit"][0] != part["t0_fit"][0]


def without_last_slot(rows):
    for row in anchors_of(rows):
        for order in ("order0", "order1"):
            for name in FIELDS:
                row[order][name][-1] = None
    return rows


def test_a_slot_without_any_value_is_null_and_a_dash():
    summary = summarise(without_last_slot(finished()))
    for group in summary["groups"].values():
        for column, values in group.items():
            assert (values[-1] is None) == (column not in ("alive", "distinct"))
            assert None not in values[:-1]
    floors, _, _ = report.table(summary).partition("\nfloors and the share")
    lines = [line for line in floors.splitlines() if re.match(r" +2  ", line)]
    assert len(lines) == len(summary["groups"])
    for line in lines:
        numbers = re.findall(r"(?<![\w.])-?\d+\.\d+%?|(?<=[ \[,])-(?=[ \],])", line)
        assert numbers == ["-"] * 10 + [numbers[10], "4.0"]
        assert re.fullmatch(r"0\.\d{4}", numbers[10])


def test_floors_that_no_anchor_has_are_null():
    rows = finished()
    for row in anchors_of(rows):
        row["order1"] = {}
    group = summarise(rows)["groups"]["pooled"]
    assert group["t1_held_out"] == group["removed"] == group["t1_low"] == [None] * GAMMA
    assert None not in group["t0_fit"]


def test_a_part_of_a_run_shrinks_the_inclusion():
    rows = finished()
    kept = [row for row in rows if row["kind"] != "anchor"] + anchors_of(rows, "sums")[:2] + anchors_of(rows, "talk")
    summary = summarise(kept)
    assert summary["anchors"] == 2 + PLANNED["talk"]
    shrunk = [
        {**row, "inclusion": row["inclusion"] * (2 / PLANNED["sums"] if row["domain"] == "sums" else 1)}
        for row in anchors_of(kept)
    ]
    for column in ALL_COLUMNS:
        expected = [plain_hajek(shrunk, lambda row, c=column, k=k: cell(row, c, k)) for k in range(GAMMA)]
        assert_column(summary["groups"]["pooled"][column], expected)
    unshrunk = plain_hajek(anchors_of(kept), lambda row: cell(row, "t0_fit", 0))
    assert summary["groups"]["pooled"]["t0_fit"][0] != unshrunk


@pytest.mark.parametrize(("here", "everywhere"), [(7, 25), (14, 25), (29, 35), (48, 96), (96, 384)])
def test_positions_that_are_all_measured_have_inclusion_one(here, everywhere):
    # was once: mean(domain) * anchors / planned rounds to 1.0000000000000002 for 7 of 25 anchors, and a finished
    # run whose strata were taken whole ends in "inclusion probabilities must lie in (0, 1]"
    rng = np.random.default_rng(2)
    sizes = {"sums": here, "talk": everywhere - here}
    rows = [plan_row(sizes)]
    for domain, n in sizes.items():
        rows += [{**anchor(rng, domain, f"{domain}:{i % 5}", i), "inclusion": 1.0} for i in range(n)]
    group = summarise(rows, replicates=2)["groups"]["pooled"]
    assert_agree(group["t0_fit"][0], float(np.mean([row["order0"]["fit"][0] for row in rows[1:]])), "float64")


def test_an_anchor_twice_is_refused():
    rows = finished()
    with pytest.raises(RecordError, match="an anchor twice"):
        summarise([*rows, anchors_of(rows)[0]])


@pytest.mark.parametrize("rows", [[], [answer_row("sums:0")], [answer_row("sums:0"), plan_row()]])
def test_a_file_without_anchors_is_refused(rows):
    with pytest.raises(RecordError, match="no measured anchor"):
        summarise(rows)


@pytest.mark.parametrize("name", ["pooled", "equal-domain"])
def test_a_domain_named_like_a_mean_is_not_overwritten_by_it(name):
    # was once: a prompts file pooled.jsonl makes a domain whose numbers the pooled mean replaces
    rows = json.loads(json.dumps(finished()).replace('"talk"', json.dumps(name)))
    try:
        summary = summarise(rows)
    except RecordError:
        return
    assert len(summary["groups"]) == 4


def test_the_summary_carries_conditions_and_counts():
    summary = summarise(finished())
    assert summary["provenance"] == {k: v for k, v in PROVENANCE.items() if k != "kind"}
    assert summary["plan"] == plan_row()["domains"]
    assert (summary["anchors"], summary["prompts"]) == (10, 5)


def test_the_last_line_is_one_line_of_strict_json():
    for rows in (finished(), without_last_slot(finished())):
        summary = summarise(rows)
        line = report.last_line(summary)
        assert "\n" not in line
        assert json.loads(line, parse_constant=pytest.fail) == summary


def test_the_table_has_a_line_per_slot_and_group():
    summary = summarise(finished())
    floors, _, _ = report.table(summary).partition("\nfloors and the share")
    lines = floors.splitlines()
    slots = [line for line in lines if re.match(r" +\d  ", line)]
    assert [int(line[:4]) for line in slots] == list(range(GAMMA)) * 4
    headings = [line.split(":")[0] for line in lines if re.match(r"(sums|talk|none|pooled|equal-domain):", line)]
    assert headings == list(summary["groups"])
    assert "toy: M = 8, gamma = 3, temperature 1.0, top-p 1.0, top-k 0, float64 reference, seed 20260818" in lines[0]
    assert lines[1] == "cpu a machine, commit unknown"
    assert "sums: 6 anchors of 3 prompts, out of 30 positions in 3 answers (1 cut by the length cap)" in lines
    assert "pooled: 10 anchors of 5 prompts" in lines
    assert not any("UNFINISHED" in line for line in lines)
    pooled = summary["groups"]["pooled"]
    first = slots[2 * GAMMA]
    for column in ("t0_fit", "t0_held_out", "t0_low", "t0_high", "t1_fit", "t1_held_out", "t1_lower", "t1_upper"):
        assert f"{pooled[column][0]:.4f}" in first
    assert f"{100 * pooled['removed'][0]:.1f}%" in first
    assert f"{1 - pooled['t0_fit'][0]:.4f}" in first


def test_an_unfinished_run_says_so():
    rows = finished()
    table = report.table(summarise(rows[:-1]))
    assert "UNFINISHED: 9 of 10 planned anchors are measured" in table


def with_drafter(rows, scale=1.0):
    """The rows with a drafter of order 0, whose risk is a little above the floor, and the effective support."""
    rows = json.loads(json.dumps(rows))
    for row in anchors_of(rows):
        risk = [0.9 if t is None else scale * t + 0.1 for t in row["order0"]["fit"]]
        row["support"] = [None if t is None else 1 + 9 * t for t in row["order0"]["fit"]]
        row["drafters"] = {"d": {
            "order": 0, "risk": risk, "self_risk": [None] * GAMMA, "arrival": row["alive"],
            "rejected": [a * r for a, r in zip(row["alive"], risk, strict=True)],
        }}  # fmt: skip
    return rows


def test_tables_of_what_else_was_measured_follow():
    assert list(summarise(finished())["tables"]) == ["intervals"]
    rows = with_drafter(finished())
    summary = summarise(rows)
    found = tables(Sample(anchors_of(rows), plan_row()["domains"], 300))
    assert list(summary["tables"]) == [
        "drafter d", "serving d", "dependence d", "accepted length", "intervals", "concentration",
    ]  # fmt: skip
    assert {name: Table(**table) for name, table in summary["tables"].items()} == found
    assert json.loads(report.last_line(summary), parse_constant=pytest.fail)["tables"] == summary["tables"]
    text = report.table(summary)
    assert text.startswith(report.table({**summary, "tables": {}}))
    assert text.endswith("\n\n".join(["", *(table.render() for table in found.values())]))
    rows[-1]["drafters"]["d"]["risk"].pop()
    with pytest.raises(RecordError, match="not those of one run"):
        summarise(rows)


@pytest.mark.parametrize(
    "fault", ["no plan", "two plans", "too many", "no kind", "unknown domain", "inclusion", "short list"]
)
def test_rows_that_are_not_of_one_run_are_a_named_error(fault):
    rows = json.loads(json.dumps(finished()))
    plan = next(row for row in rows if row["kind"] == "plan")
    last = anchors_of(rows)[-1]
    if fault == "no plan":
        rows.remove(plan)
    elif fault == "two plans":
        rows.append(plan)
    elif fault == "too many":
        rows.append({**last, "position": last["position"] + 1000})
    elif fault == "no kind":
        del last["kind"]
    elif fault == "unknown domain":
        last["domain"] = "elsewhere"
    elif fault == "inclusion":
        last["inclusion"] = 1.5
    else:
        last["order0"]["fit"].pop()
    with pytest.raises(RecordError):
        summarise(rows)


# --- as a program -----------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "records.jsonl"
    with RecordFile(path, {k: v for k, v in PROVENANCE.items() if k != "kind"}) as records:
        for row in finished():
            records.append(row)
    return path


def test_the_program_prints_the_table_and_the_same_json(path):
    before = path.read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "reference.report", path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    summary = report.summarise(*read(path))
    table, _, line = done.stdout.rstrip("\n").rpartition("\n")
    assert json.loads(line, parse_constant=pytest.fail) == summary
    assert table == report.table(summary)
    assert path.read_bytes() == before


def refused(capsys, *arguments):
    """The one line on stderr of a run that must fail."""
    with pytest.raises(SystemExit) as end:
        report.main([str(a) for a in arguments])
    assert end.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    return line


def test_the_program_refuses_bad_files_in_one_line(tmp_path, path, capsys):
    assert "none.jsonl" in refused(capsys, tmp_path / "none.jsonl")
    assert str(tmp_path) in refused(capsys, tmp_path)
    other = tmp_path / "notes.txt"
    other.write_text("not a record\n")
    assert "line 1" in refused(capsys, other)
    lines = path.read_bytes().splitlines(keepends=True)
    other.write_bytes(b"".join(lines[:3]))
    assert "no measured anchor" in refused(capsys, other)
    other.write_bytes(b"".join([*lines, lines[-1]]))
    assert "an anchor twice" in refused(capsys, other)


def write(path, rows):
    """A record file that holds an answer to every prompt."""
    answers = [{**answer_row(p), "tokens": list(range(9))} for p in sorted({row["prompt"] for row in anchors_of(rows)})]
    with RecordFile(path, {"target": "toy"}) as records:
        for row in [*answers, *(row for row in rows if row["kind"] != "answer")]:
            records.append(row)
    return path


def test_a_run_against_another_on_the_same_anchors(tmp_path, capsys):
    paths = [write(tmp_path / str(scale), with_drafter(finished(), scale)) for scale in (1.0, 1.2)]
    report.main([str(paths[0]), "--against", str(paths[1])])
    text, _, line = capsys.readouterr().out.rstrip("\n").rpartition("\n")
    summary = json.loads(line, parse_constant=pytest.fail)
    found = compare(*map(read, paths))
    assert list(found) == ["T0 fit", "T1 cross-fit", "R d"]
    alone = report.summarise(*read(paths[0]))
    more = {f"against: {name}": json.loads(json.dumps(vars(table))) for name, table in found.items()}
    assert summary == {**alone, "tables": alone["tables"] | more}
    assert text == report.table(summary)
    table = found["R d"]
    first, second, change = (table.columns.index(name) for name in ("first", "second", "change"))
    for row in table.rows:
        assert_agree(row[change], row[second] - row[first], "float64")
        assert row[change] > 0


def test_what_cannot_be_compared_is_one_line(tmp_path, path, capsys):
    whole = write(tmp_path / "whole.jsonl", finished())
    assert "none.jsonl" in refused(capsys, whole, "--against", tmp_path / "none.jsonl")
    assert "share no anchor" in refused(capsys, whole, "--against", write(tmp_path / "empty.jsonl", [plan_row()]))
    assert "the answer to" in refused(capsys, whole, "--against", path)


def test_plot_without_matplotlib_says_what_to_install(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    line = refused(capsys, path, "--plot", tmp_path / "floors.png")
    assert "--plot needs matplotlib: pip install 'blockfloor[plot]'" in line
    assert not (tmp_path / "floors.png").exists()


@pytest.mark.parametrize(
    "rows", [finished, lambda: without_last_slot(finished())], ids=["all", "a slot without values"]
)
def test_plot_writes_an_image(tmp_path, rows):
    pytest.importorskip("matplotlib")
    image = tmp_path / "floors.png"
    report.plot(summarise(rows()), image)
    assert image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


@pytest.mark.parametrize("name", ["floors.nonsense", "no/such/folder/floors.png"])
def test_a_figure_that_cannot_be_written_is_one_line(path, tmp_path, capsys, name):
    # was once: an unknown format (ValueError) or a folder that is not there (OSError) is a traceback
    pytest.importorskip("matplotlib")
    refused(capsys, path, "--plot", tmp_path / name)
