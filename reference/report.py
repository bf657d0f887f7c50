"""Tables, figures and one JSON document from a record file - no model needed.

    python -m reference.report RECORDS.jsonl [--plot FLOORS.png] [--against OTHER.jsonl]

Per slot: the order-0 floor T0 scored on the paths it was fitted to (leans low) and held out (leans high), with
the 95% prompt-bootstrap interval of the first; the order-1 floor T1 plug-in (low), cross-fitted over the cells
that can be split, and the interval that the other cells leave open; the share of T0 that one token removes,
1 - T1/T0 with the cross-fitted T1; and the largest acceptance any all-parallel proposal can reach, 1 - T0.

`pooled` weighs every eligible position alike (Hajek, as in the paper), `equal-domain` every domain alike.  The
tables of whatever else was measured follow (`tables.py`); `--against` compares with a run on the same anchors.
Tests: `tests/test_report.py`.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path

import numpy as np

from reference.records import RecordError, read
from reference.sample import Sample, Table
from reference.stats import hajek_sums, prompt_bootstrap
from reference.tables import compare, tables

# name in the summary: where it is in a record
COLUMNS = {
    "t0_fit": ("order0", "fit"),
    "t0_held_out": ("order0", "held_out"),
    "t1_fit": ("order1", "fit"),
    "t1_held_out": ("order1", "held_out"),
    "t1_split": ("order1", "split"),
    "t1_lower": ("order1", "lower"),
    "t1_upper": ("order1", "upper"),
    "t1_covered": ("order1", "covered"),
    "alive": ("alive",),
    "distinct": ("distinct",),
}


def summarise(provenance, rows, *, replicates=10_000):
    """Every number of the report as one JSON-able dict.

    Args: provenance and rows, as `records.read` returns them; a run that has not finished is reported on the
        anchors it has, a random part of its plan, with the inclusion probabilities shrunk accordingly.
    Returns: {"provenance", "plan", "anchors", "prompts", "measured": {domain: {"anchors", "prompts"}},
        "groups": {group: {column: [per slot]}}, "tables": {name: fields of `Table`}}.
    Raises: RecordError if no anchor was measured or the rows do not belong to one run.
    """
    try:
        plan, anchors = check_rows(rows)
        sample = Sample(anchors, plan, replicates)
        domains, prompts, inclusion = sample.domains, sample.prompts, sample.inclusion
        here = {d: domains == d for d in plan if (domains == d).any()}
        measured = {d: {"anchors": int(h.sum()), "prompts": len(set(prompts[h]))} for d, h in here.items()}
        values = {name: sample.column(*where) for name, where in COLUMNS.items()}
        groups = {}
        for domain, h in here.items():
            mine = {name: column[h] for name, column in values.items()}
            groups[domain] = _group(mine, inclusion[h], prompts[h], None, replicates)
        groups["pooled"] = _group(values, inclusion, prompts, None, replicates)
        groups["equal-domain"] = _group(values, inclusion, prompts, domains, replicates)
        others = {name: asdict(found) for name, found in tables(sample).items()}
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"the rows are not those of one run ({type(error).__name__}: {error})") from None
    return {
        "provenance": {k: v for k, v in provenance.items() if k != "kind"},
        "plan": plan,
        "anchors": len(anchors),
        "prompts": len(set(prompts)),
        "measured": measured,
        "groups": groups,
        "tables": others,
    }


def check_rows(rows):
    """(the plan's domains, the anchor rows) of a run, or a RecordError that says what does not fit together."""
    anchors = [row for row in rows if row["kind"] == "anchor"]
    plans = [row["domains"] for row in rows if row["kind"] == "plan"]
    if not anchors:
        raise RecordError("the record file holds no measured anchor yet; run the measurement first")
    if len(plans) != 1:
        raise RecordError(f"the record file holds {len(plans)} plans instead of one; it was not written by one run")
    keys = [(row["prompt"], row["position"]) for row in anchors]
    if len(set(keys)) < len(keys):
        raise RecordError("the record file holds an anchor twice; it was not written by one run")
    for domain in {row["domain"] for row in anchors}:
        if domain in ("pooled", "equal-domain"):
            raise RecordError(f"a domain is called {domain!r}, the name of a mean over domains; rename it")
        count, planned = (
            sum(row["domain"] == domain for row in anchors),
            plans[0].get(domain, {"anchors": 0})["anchors"],
        )
        if count > planned:
            raise RecordError(f"{count} anchors of {domain} for a plan of {planned}; it was not written by one run")
    return plans[0], anchors


def table(summary):
    """The summary as text for people: a heading with the conditions, then one table per group."""
    lines = [_heading(summary)]
    head = (
        "slot    T0 fit  held-out   95% interval    T1 plug-in  cross-fit  coverage interval   removed   "
        "1 - T0   alive  distinct"
    )
    planned = sum(counts["anchors"] for counts in summary["plan"].values())
    if summary["anchors"] < planned:
        lines.append(
            f"UNFINISHED: {summary['anchors']} of {planned} planned anchors are measured, a random part of them."
        )
    for name, group in summary["groups"].items():
        about = f"{summary['anchors']} anchors of {summary['prompts']} prompts"
        if name in summary["measured"]:
            counts, mine = summary["plan"][name], summary["measured"][name]
            about = (
                f"{mine['anchors']} anchors of {mine['prompts']} prompts, out of {counts['eligible']} positions in "
                f"{counts['prompts']} answers ({counts['cut_answers']} cut by the length cap)"
            )
        lines += ["", f"{name}: {about}", head]
        for k in range(len(group["t0_fit"])):
            cell = {column: group[column][k] for column in group}
            lines.append(
                f"{k:4d}  {_number(cell['t0_fit'], 8)}  {_number(cell['t0_held_out'], 8)}  "
                f"[{_number(cell['t0_low'], 6)},{_number(cell['t0_high'], 6)}]  "
                f"{_number(cell['t1_fit'], 12)}  {_number(cell['t1_held_out'], 9)}   "
                f"[{_number(cell['t1_lower'], 6)},{_number(cell['t1_upper'], 6)}]   "
                f"{_percent(cell['removed'])}   {_number(cell['max_acceptance'], 6)}  {_number(cell['alive'], 6)}  "
                f"{cell['distinct']:8.1f}"
            )
    for found in summary["tables"].values():
        lines += ["", Table(**found).render()]
    return "\n".join(lines)


def last_line(summary):
    """The summary as one line of strict JSON."""
    return json.dumps(summary, allow_nan=False)


def plot(summary, path):
    """Draw the floor curves, one panel for order 0 and one for order 1 (Figs. 2 and 3 form); needs matplotlib."""
    plt = check_plot(path)
    figure, panels = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for name, group in summary["groups"].items():
        bold = name in ("pooled", "equal-domain")
        if name == "equal-domain":
            continue
        slots = np.arange(len(group["t0_fit"]))
        style = {"color": "black", "lw": 2.2, "zorder": 3} if bold else {"lw": 1.3}
        for panel, column in zip(panels, ("t0_fit", "t1_held_out"), strict=True):
            panel.plot(slots, _floats(group[column]), marker="o", ms=3, label=name, **style)
        if bold:
            low, high = _floats(group["t0_low"]), _floats(group["t0_high"])
            panels[0].fill_between(slots, low, high, color="black", alpha=0.12, lw=0, label="95% interval")
    panels[0].set(title="order 0: sees the prefix only", ylabel="information floor", xlabel="slot k", ylim=(0, None))
    panels[1].set(title="order 1: sees one realised token", xlabel="slot k", ylim=panels[0].get_ylim())
    panels[0].legend(fontsize=8, frameon=False)
    figure.suptitle(conditions(summary), fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def check_plot(path):
    """Make sure that a figure can be written to `path` (before a long run), and return matplotlib's pyplot."""
    try:
        import matplotlib
    except ImportError:
        raise RecordError("--plot needs matplotlib: pip install 'blockfloor[plot]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path, known = Path(path), plt.figure().canvas.get_supported_filetypes()
    plt.close()
    if path.suffix.lstrip(".").lower() not in known:
        raise RecordError(f"--plot {path}: name a file that ends in one of .{', .'.join(sorted(known))}")
    try:
        path.touch()
    except OSError as error:
        raise RecordError(f"--plot {path} cannot be written: {error.strerror}") from None
    return plt


def _group(values, inclusion, prompts, strata, replicates):
    """Means of every column with their intervals, and the share of T0 that one token removes."""
    options = {"strata": strata, "replicates": replicates}
    means = prompt_bootstrap(*hajek_sums(np.stack(list(values.values()), axis=1), inclusion), prompts, **options)
    out = {name: _listed(means.value[i]) for i, name in enumerate(values)}
    for i, name in enumerate(values):
        if name in ("t0_fit", "t1_held_out"):
            out[name[:2] + "_low"], out[name[:2] + "_high"] = _listed(means.low[i]), _listed(means.high[i])

    both = np.stack([values["t1_held_out"], values["t0_fit"]], axis=1)
    both[np.isnan(both).any(axis=1, keepdims=True).repeat(2, axis=1)] = np.nan  # the same anchors above and below
    removed = prompt_bootstrap(*hajek_sums(both, inclusion), prompts, combine=_removed, **options)
    out["removed"], out["removed_low"], out["removed_high"] = map(_listed, (removed.value, removed.low, removed.high))
    out["max_acceptance"] = [None if v is None else 1 - v for v in out["t0_fit"]]
    return out


def _removed(ratios):
    """1 - T1 / T0 from means [replicates, strata, 2, slots], the strata weighing alike."""
    t1, t0 = np.moveaxis(ratios.mean(axis=1), 1, 0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(t0 > 0, 1 - t1 / t0, np.nan)


def _listed(array):
    return [None if np.isnan(v) else float(v) for v in array]


def _floats(column):
    return np.array(column, dtype=np.float64)  # None becomes NaN


def _number(value, width):
    return f"{'-':>{width}}" if value is None else f"{value:{width}.4f}"


def _percent(value):
    return f"{'-':>7}" if value is None else f"{100 * value:6.1f}%"


def conditions(summary):
    """What the numbers were measured on, in one line."""
    p = summary["provenance"]
    design = p.get("design", {})
    law = design.get("law", {})
    return (
        f"{p.get('target', 'toy')}: M = {design.get('paths')}, gamma = {design.get('gamma')}, "
        f"temperature {law.get('temperature')}, top-p {law.get('top_p')}, top-k {law.get('top_k')}, "
        f"{p.get('dtype', '')} {p.get('backend', '')}, seed {design.get('seed')}"
    )


def _heading(summary):
    p = summary["provenance"]
    where = f"{p.get('device', '')} {p.get('hardware', '')}, commit {p.get('commit') or 'unknown'}"
    return (
        f"Information floors of {conditions(summary)}\n{where}\n"
        "T0, T1: least rejection of a proposal that sees the prefix, and one realised token more."
    )


def main(arguments=None):
    """Print the tables and the JSON document of a record file; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m reference.report", description="Report a record file.")
    parser.add_argument("records", type=Path)
    parser.add_argument("--plot", type=Path, help="write the floor curves to this image file")
    parser.add_argument("--against", type=Path, metavar="RECORDS", help="compare with a run on the same anchors")
    options = parser.parse_args(arguments)
    try:
        summary = summarise(*read(options.records))
        if options.against:
            found = compare(read(options.records), read(options.against))
            summary["tables"] |= {f"against: {name}": asdict(t) for name, t in found.items()}
        print(table(summary))
        if options.plot:
            plot(summary, options.plot)
    except RecordError as error:
        parser.exit(1, f"error: {error}\n")
    print(last_line(summary))


if __name__ == "__main__":
    main()
