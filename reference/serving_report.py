"""What serving costs with and without a drafter, from the records of finished requests alone - no model needed.

    python -m reference.serving_report RECORDS.jsonl [--seeds] [--plot SURVIVAL.png]

A row is one request, in one cell: a drafter ("plain" for decoding without one), a temperature, so many requests side by
side, a task.  The requests of a cell run as one batch that is refilled as they end.  A row carries the seconds since
the one before it, so those of a cell add up to its wall clock however often the run was stopped.

Several processes may serve the requests of a cell, each with an engine of its own that holds so many side by side.
A row's seconds are those of its own engine, so a cell adds up to seconds of engines, and tokens/s, latency and speed-up
stay those of one engine (at the end of a cell with fewer neighbours: more engines want more prompts).  How many ran at
once is in the row and in the report's heading, for on shared hardware they slow one another down.

**Accepted length.**  A round commits N tokens, the bonus token counted; a text's first token is of no round.

    tau = tokens committed by rounds / rounds of verification = sum_(t >= 1) Pr(N >= t)

pooled over the rounds of a task; "macro" is the mean of the tasks' tau, "pooled" that of all rounds together.  Others
report the mean over requests of the same ratio, or count the first token too (tokens / rounds); both stand beside it.
Drafters are compared on the same prompts, and intervals resample the prompts of all drafters at once.  With --seeds
drafters whose names differ only in a last number behind a dash are seeds of one training: tau is then the mean of
theirs, with the smallest and the largest, and rounds are counted together.  Differences between trainings of the same
seeds are paired seed by seed.  Intervals are over prompts, not over trainings.

Tests: `tests/test_serve_compare.py`.
"""

import argparse
import json
from collections import Counter
from dataclasses import asdict
from itertools import combinations
from pathlib import Path

import numpy as np

from reference.records import RecordError, key_of, read
from reference.report import check_plot
from reference.sample import Table, cell, seed_runs
from reference.stats import prompt_bootstrap

PLAIN, MACRO, POOLED = "plain", "macro", "pooled"
PARTS = ("prefill", "draft", "verify", "commit")
DEFINITIONS = {
    "tau": "committed tokens / verify rounds, bonus token counted, first token of a text not; pooled over rounds",
    "per request": "mean over requests of a request's own tau",
    "tokens / rounds": "tokens of the texts, the first one too, / verify rounds",
    "macro": "mean of the tasks' values, every task alike",
    "seeds": "smallest and largest of the seeds' own values, where a row is the mean of several",
    "cut": "texts that were not finished, at the most tokens asked for or the end of the context",
    "N": "tokens that a round commits, bonus token counted",
    "tokens/s": "tokens of the finished texts / wall clock, prompts included; of one engine where several run",
    "ms/token": "milliseconds between two tokens as a request sees them: its seconds in the batch / its tokens",
    "latency": "seconds from joining the batch to the last token",
    "speed-up": "tokens/s over that of plain decoding in the same engine at as many requests side by side",
    "same text": "share of the texts at temperature 0 that are token by token those of plain decoding",
}


def request_row(drafter, temperature, concurrency, prompt, completion, wall, parts, text, *, engines=1):
    """One finished request as a row of the record file.

    Args: prompt, `EncodedPrompt`; completion, `Completion`; wall, seconds since the row before; parts, {part: seconds}
        of the engine in that time; text, a digest of the tokens; engines, how many ran at once.
    """
    rounds = Counter((r.drafted, r.accepted, r.committed) for r in completion.rounds)
    return {
        "kind": "request", "drafter": drafter, "temperature": temperature, "concurrency": concurrency,
        "domain": prompt.domain, "prompt": prompt.id, "prompt_tokens": len(prompt.tokens),
        "tokens": len(completion.tokens), "text": text, "finish": completion.finish,
        "rounds": [[*kind, times] for kind, times in sorted(rounds.items())],
        "latency": completion.seconds, "wall": wall, "parts": dict(parts), "engines": engines,
    }  # fmt: skip


def summarise(provenance, rows, *, seeds=False, replicates=10_000):
    """Every number of the report as one JSON-able dict: {"provenance", "definitions", "requests", "engines", "tables"}.

    Args: provenance and rows, as `records.read` returns them; seeds, drafters NAME-1, NAME-2 ... are reported together.
    Raises: RecordError if there is no request, one stands there twice, or the rows are not those of one run.
    """
    try:
        check_rows(rows)
        found = {}
        for row in rows:
            at = found.setdefault(row["temperature"], {}).setdefault(row["concurrency"], {})
            at.setdefault(row["drafter"], {})[row["prompt"]] = row
        tables = {}
        for temperature, by_concurrency in sorted(found.items()):
            about, first = f"temperature {temperature:g}", by_concurrency[min(by_concurrency)]
            drafters = {name: mine for name, mine in first.items() if name != PLAIN}
            if drafters:
                tables[f"tau, {about}"], differences = lengths(about, drafters, seeds, replicates)
                if differences.rows:
                    tables[f"differences, {about}"] = differences
                tables[f"survival, {about}"], tables[f"accepted, {about}"] = histograms(about, drafters, seeds)
            tables[f"speed, {about}"] = speed(about, by_concurrency)
    except RecordError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError(f"the rows are not those of one run ({type(error).__name__}: {error})") from None
    return {
        "provenance": {k: v for k, v in provenance.items() if k != "kind"},
        "definitions": DEFINITIONS,
        "requests": len(rows),
        "engines": sorted({row.get("engines", 1) for row in rows}),
        "tables": {name: asdict(found) for name, found in tables.items()},
    }


def check_rows(rows):
    """A RecordError for rows that are not the finished requests of one run."""
    if not rows:
        raise RecordError("the record file holds no finished request yet; run the comparison first")
    if any(row["kind"] != "request" for row in rows):
        raise RecordError("the record file is of another program: it holds more than requests")
    if len({key_of(row) for row in rows}) < len(rows):
        raise RecordError("the record file holds a request twice; it was not written by one run")
    check_tasks({row["domain"] for row in rows})


def check_tasks(tasks):
    """A RecordError for a task that is called like a mean over tasks."""
    for name in (MACRO, POOLED):
        if name in tasks:
            raise RecordError(f"a task is called {name!r}, the name of a mean over tasks; rename it")


def shared(found):
    """The prompts that every drafter has served, in order, and their tasks: two arrays."""
    first, *others = found.values()
    kept = [row for prompt, row in first.items() if all(prompt in other for other in others)]
    return np.array([row["prompt"] for row in kept]), np.array([row["domain"] for row in kept])


def counts(row):
    """(tokens committed by rounds, rounds) of a request."""
    return sum(n * times for *_, n, times in row["rounds"]), sum(times for *_, times in row["rounds"])


def runs_of(names, seeds):
    """{run: {seed: place among the names}}: see `seed_runs`; without `seeds` every drafter is a run."""
    return seed_runs(list(names)) if seeds else {name: {None: i} for i, name in enumerate(names)}


def spread(values):
    """[smallest, largest] of several values, else None."""
    return cell([np.min(values), np.max(values)]) if len(values) > 1 else None


def lengths(about, found, seeds, replicates):
    """Tables of tau by drafter and task, and of its differences between drafters on the same prompts.

    Args: about, the conditions; found, {drafter: {prompt: row}}; seeds, as for `summarise`.
    """
    prompts, tasks = shared(found)
    if not len(prompts):
        raise RecordError("no prompt is served by all drafters yet; let the run finish")
    rows = [[mine[prompt] for mine in found.values()] for prompt in prompts]
    committed, rounds = np.moveaxis(np.array([[counts(row) for row in line] for line in rows], dtype=float), 2, 0)
    tokens = np.array([[row["tokens"] for row in line] for line in rows], dtype=float)
    cut = np.array([[row["finish"] == "length" for row in line] for line in rows])
    titles = (
        f"Accepted length, {about}: committed tokens / rounds, bonus token counted",
        f"Difference of tau on the same prompts, {about}",
    )
    means, differences = tau_tables(titles, list(found), prompts, tasks, committed, rounds, seeds, replicates)
    groups, runs, table = groups_of(tasks), runs_of(found, seeds), []
    for line in means.rows:
        chosen = [(mask, i) for i in runs[line[0]].values() for mask in groups[line[1]]]
        own = np.mean([mean_ratio(committed[at], rounds[at]) for at in chosen])
        served = np.mean([sum_ratio(tokens[at], rounds[at]) for at in chosen])
        table.append([*line[:3], int(sum(cut[at].sum() for at in chosen)), *line[3:], cell(own), cell(served)])
    columns = [*means.columns[:3], "cut", *means.columns[3:], "per request", "tokens / rounds"]
    return Table(means.title, columns, table), differences


def groups_of(tasks):
    """{task, or the name of a mean over them: masks of the prompts whose ratios it averages}."""
    each = {str(name): [tasks == name] for name in dict.fromkeys(tasks)}
    return each | {MACRO: [mask for (mask,) in each.values()], POOLED: [np.ones(len(tasks), dtype=bool)]}


def tau_tables(titles, names, prompts, tasks, committed, rounds, seeds, replicates, counted=("requests", "rounds")):
    """Tables of tau and of its differences between drafters on the same prompts, by task.

    Args: titles of the two; names of D drafters; prompts and tasks, labels [N]; committed and rounds [N, D]; seeds, as
        for `summarise`; counted, what the columns are called that count prompts and rounds.
    """
    runs, means, differences = runs_of(names, seeds), [], []
    places = {name: list(own.values()) for name, own in runs.items()}
    pairs = list(combinations(runs, 2))

    def paired(ratios):  # [replicates + 1, tasks, drafters] -> [replicates + 1, runs and pairs of them]
        tau = ratios.mean(axis=1)
        means = {name: tau[:, own].mean(axis=1) for name, own in places.items()}
        return np.stack([*means.values(), *(means[b] - means[a] for a, b in pairs)], axis=1)

    for task, groups in groups_of(tasks).items():
        here = np.any(groups, axis=0)
        tau = prompt_bootstrap(
            committed[here], rounds[here], prompts[here], strata=tasks[here] if task == MACRO else None, combine=paired,
            replicates=replicates,
        )  # fmt: skip
        own = np.array([
            np.mean([sum_ratio(committed[g, i], rounds[g, i]) for g in groups]) for i in range(len(names))
        ])  # fmt: skip
        for i, (name, its) in enumerate(places.items()):
            means.append([
                name, task, int(here.sum()) * len(its), int(rounds[here][:, its].sum()), cell(tau.value[i]),
                cell([tau.low[i], tau.high[i]]), spread(own[its]),
            ])  # fmt: skip
        for i, (a, b) in enumerate(pairs, start=len(runs)):
            same = runs[a].keys() == runs[b].keys() or 1 in (len(runs[a]), len(runs[b]))
            each = own[places[b]] - own[places[a]] if same else []
            interval = cell([tau.low[i], tau.high[i]])
            differences.append([b, a, task, cell(tau.value[i]), interval, spread(each)])
    tables = (
        Table(titles[0], ["drafter", "task", *counted, "tau", "tau 95%", "seeds"], means),
        Table(titles[1], ["drafter", "less", "task", "difference", "difference 95%", "seeds"], differences),
    )
    if not seeds:
        tables = [Table(t.title, t.columns[:-1], [row[:-1] for row in t.rows]) for t in tables]
    return tables


def histograms(about, found, seeds):
    """Tables over all rounds of each drafter: Pr(N >= t), which sums to tau; shares of rounds by accepted drafts."""
    runs, (prompts, _), every = runs_of(found, seeds), shared(found), list(found.values())
    rounds = [[kind for p in prompts for i in own.values() for kind in every[i][p]["rounds"]] for own in runs.values()]
    rounds = [np.array(kinds, dtype=np.int64).reshape(-1, 4) for kinds in rounds]
    longest = max(kinds[:, 2].max(initial=1) for kinds in rounds)
    accepted, committed = (
        np.array([np.bincount(kinds[:, i], weights=kinds[:, 3], minlength=longest + 1) for kinds in rounds]).T
        for i in (1, 2)
    )  # [longest + 1, drafters]
    total = accepted.sum(axis=0)
    survival = committed[::-1].cumsum(axis=0)[::-1]
    tables = []
    for title, column, values in (
        (f"Pr(N >= t), {about}: N tokens committed by a round, bonus token counted", "t", survival),
        (f"Share of rounds by accepted drafts, {about}", "accepted", accepted),
    ):
        start = int(column == "t")
        shares = [[cell(ratio(n, t)) for n, t in zip(line, total, strict=True)] for line in values]
        tables.append(Table(title, [column, *runs], [[i, *shares[i]] for i in range(start, longest + 1)]))
    return tables


def speed(about, found):
    """Table of throughput, latency and where the time went, by drafter, requests side by side, and task.

    Args: found, {concurrency: {drafter: {prompt: row}}}.
    """
    columns = [
        "drafter", "concurrency", "task", "tau", "tokens/s", "ms/token", "speed-up", "p50 s", "p90 s", "p99 s",
        *PARTS, "same text",
    ]  # fmt: skip
    table = []
    for concurrency, by_drafter in sorted(found.items()):
        plain = by_drafter.get(PLAIN, {})
        for name, mine in by_drafter.items():
            for task in [*dict.fromkeys(row["domain"] for row in mine.values()), POOLED]:
                rows, base = ([r for r in c.values() if task in (POOLED, r["domain"])] for c in (mine, plain))
                wall, tokens = (sum(row[field] for row in rows) for field in ("wall", "tokens"))
                latencies = [row["latency"] for row in rows]
                parts = [cell(ratio(sum(row["parts"].get(p, 0) for row in rows), wall)) for p in PARTS]
                same = [row["text"] == plain[row["prompt"]]["text"] for row in rows if row["prompt"] in plain]
                greedy = name != PLAIN and rows[0]["temperature"] == 0
                table.append([
                    name, concurrency, str(task), cell(ratio(*map(sum, zip(*map(counts, rows), strict=True)))),
                    cell(ratio(tokens, wall)), cell(1000 * ratio(sum(latencies), tokens)),
                    cell(ratio(ratio(tokens, wall), throughput(base))),
                    *np.percentile(latencies, [50, 90, 99]).tolist(), *parts,
                    cell(ratio(sum(same), len(same))) if greedy else None,
                ])  # fmt: skip
    return Table(f"Speed, {about}; prefill to commit are shares of the wall clock", columns, table)


def throughput(rows):
    """Tokens per second of wall clock; NaN without any."""
    return ratio(sum(row["tokens"] for row in rows), sum(row["wall"] for row in rows))


def ratio(numerator, denominator):
    """Their ratio, NaN unless the denominator is positive."""
    return numerator / denominator if denominator > 0 else float("nan")


def sum_ratio(numerator, denominator):
    """Ratio of the sums of two arrays."""
    return ratio(numerator.sum(), denominator.sum())


def mean_ratio(numerator, denominator):
    """Mean of the ratios of arrays [N] where the denominator is positive."""
    here = denominator > 0
    return ratio((numerator[here] / denominator[here]).sum(), here.sum())


def conditions(summary):
    """What was served under which conditions, in one line."""
    p = summary["provenance"]
    design = p.get("design", {})
    return (
        f"{p.get('target')}: at most {design.get('answer_tokens')} new tokens, top-p {design.get('top_p')}, "
        f"top-k {design.get('top_k')}, {p.get('dtype', '')} {p.get('backend', '')}, seed {design.get('seed')}"
    )


def table(summary):
    """The summary as text for people."""
    p = summary["provenance"]
    where = f"{p.get('device', '')} {p.get('hardware', '')}, commit {p.get('commit') or 'unknown'}"
    engines = " or ".join(map(str, summary["engines"]))
    heading = f"Serving {conditions(summary)}\n{where}; {summary['requests']} requests, engines at once: {engines}"
    return "\n\n".join([heading, *(Table(**found).render() for found in summary["tables"].values())])


def plot(summary, path):
    """Draw Pr(N >= t), one panel a temperature and one line a drafter; needs matplotlib."""
    plt = check_plot(path)
    found = {name.split(", ")[1]: t for name, t in summary["tables"].items() if name.startswith("survival")}
    figure, panels = plt.subplots(1, len(found), figsize=(4.4 * len(found), 3.4), sharey=True, squeeze=False)
    for panel, (temperature, table) in zip(panels[0], found.items(), strict=True):
        t, *drafters = np.array(table["rows"], dtype=float).T
        for name, survival in zip(table["columns"][1:], drafters, strict=True):
            panel.plot(t, survival, marker="o", ms=3, label=f"{name}: tau {survival.sum():.2f}")
        panel.set(title=temperature, xlabel="t, tokens of a round", ylim=(0, 1.02))
        panel.legend(fontsize=8, frameon=False)
    panels[0][0].set(ylabel="Pr(N >= t)")
    figure.suptitle(conditions(summary), fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments=None):
    """Print the tables and the JSON document of a record file; see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m reference.serving_report", description="Report a serving run.")
    parser.add_argument("records", type=Path)
    parser.add_argument(
        "--seeds", action="store_true", help="report NAME-1, NAME-2 ... together, as seeds of one training"
    )
    parser.add_argument("--plot", type=Path, help="write the survival curves to this image file")
    options = parser.parse_args(arguments)
    try:
        summary = summarise(*read(options.records), seeds=options.seeds)
        print(table(summary))
        if options.plot:
            plot(summary, options.plot)
    except RecordError as error:
        parser.exit(1, f"error: {error}\n")
    print(json.dumps(summary, allow_nan=False))


if __name__ == "__main__":
    main()
