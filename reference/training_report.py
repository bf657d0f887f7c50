"""How trainings went: the expected accepted length on answers they kept out, against the tokens they had read.

    python -m reference.training_report RUN.steps.jsonl ... [--plot CURVES.png]

The files are the logs of trainings with --held-out.  Files of one folder whose names differ only in a last number
behind a dash are seeds of one run: their mean is given, and the range of what they gained.  The length is tokens per
round at temperature 1, the bonus token counted, of blocks that the drafter drafts behind fixed anchors
(`fast.posttraining.expected_length`).

Tests: `tests/test_training_report.py`.
"""

import argparse
import json
import sys
from pathlib import Path

import numpy as np

from reference.records import RecordError
from reference.report import check_plot
from reference.sample import Table, seed_runs


def read_log(path):
    """(steps, tokens read by then, expected lengths) at every save of a training, int, int and float64 [n]."""
    try:
        whole = Path(path).read_text(encoding="utf-8").rpartition("\n")[0]  # a last line may be half-written
        rows = [json.loads(text) for text in whole.splitlines()]
        read = np.cumsum([int(row["tokens"]) for row in rows])
        saves = [i for i, row in enumerate(rows) if "held_out" in row]
        steps = np.array([int(rows[i]["step"]) for i in saves], dtype=np.int64)
        lengths = np.array([float(rows[i]["held_out"]) for i in saves])
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, OverflowError):
        raise RecordError(f"{path} is not the log of a training; give files OUT.steps.jsonl") from None
    if not saves or not np.isfinite(lengths).all():
        raise RecordError(f"{path} has no held-out length; train with --held-out")
    return steps, read[saves], lengths


def runs_of(paths):
    """{run: (steps, mean tokens [n], lengths [seeds, n])}; RecordError where seeds of a run saved at other steps."""
    paths = [Path(path) for path in paths]
    if len({path.resolve() for path in paths}) < len(paths):
        raise RecordError("a log is given twice")
    names = [path.name.removesuffix(".jsonl").removesuffix(".steps") for path in paths]
    if len({path.parent for path in paths}) > 1:
        names = [f"{path.parent}/{name}" for path, name in zip(paths, names, strict=True)]
    found = {}
    for run, places in seed_runs(names).items():
        logs = [read_log(paths[place]) for place in places.values()]
        if len({tuple(steps) for steps, *_ in logs}) > 1:
            raise RecordError(f"the logs of {run} saved at different steps; let them all finish")
        steps, tokens, lengths = zip(*logs, strict=True)
        found[run] = (steps[0], np.mean(tokens, axis=0), np.array(lengths))
    return found


def table(runs):
    """First, last and best expected length of every run, and its gain with the range over seeds."""
    rows = []
    for name, (steps, tokens, lengths) in runs.items():
        mean, gain = lengths.mean(axis=0), lengths[:, -1] - lengths[:, 0]
        best = int(mean.argmax())
        rows.append([
            name, len(lengths), int(steps[-1]), int(tokens[-1]), mean[0], mean[-1], float(gain.mean()),
            [float(gain.min()), float(gain.max())], mean[best], int(steps[best]),
        ])  # fmt: skip
    columns = ["run", "seeds", "steps", "tokens", "first", "last", "gain", "smallest, largest", "best", "at step"]
    return Table("expected accepted length on held-out answers, bonus token counted", columns, rows)


def plot(runs, path):
    """Expected accepted length against tokens read, a line for each run and a panel for each folder.

    A line starts at the seeds' mean; shaded is the range of what they have gained since, where there are several.
    """
    plt = check_plot(path)
    panels: dict = {}
    for name, run in runs.items():
        folder, _, short = name.rpartition("/")
        panels.setdefault(folder, []).append((short, run))
    figure, axes = plt.subplots(1, len(panels), figsize=(1 + 5 * len(panels), 3.8), layout="constrained", squeeze=False)
    for panel, (title, some) in zip(axes[0], panels.items(), strict=True):
        for name, (_, tokens, lengths) in some:
            start = lengths[:, :1].mean()
            gained = start + lengths - lengths[:, :1]
            (line,) = panel.plot(tokens / 1e3, gained.mean(axis=0), marker="o", ms=3, label=name)
            panel.fill_between(
                tokens / 1e3, gained.min(axis=0), gained.max(axis=0), color=line.get_color(), alpha=0.15, lw=0
            )
        panel.set(title=title[-50:], xlabel="thousand tokens read", ylabel="expected accepted length, bonus counted")
        panel.legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main(arguments=None):
    """Print the table, draw the figure, or say in one line what is wrong."""
    title, _, about = __doc__.partition("\n\n")
    parser = argparse.ArgumentParser(description=title, epilog=about, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("logs", nargs="+", type=Path, metavar="RUN.steps.jsonl")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="write the curves to this image file (needs matplotlib)"
    )
    options = parser.parse_args(arguments)
    try:
        runs = runs_of(options.logs)
        print(table(runs).render())
        if options.plot:
            plot(runs, options.plot)
    except RecordError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
