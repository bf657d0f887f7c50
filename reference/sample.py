"""Anchors as a weighted sample: Hajek means, ratios and differences with one prompt bootstrap, and tables of them.

A statistic is a function of several ratios of sums over anchors.  It is evaluated on the whole sample and, with
the same resampled prompts for all its parts, in every replicate, so that differences and shares come with intervals
of their own.  Tests: `tests/test_tables.py`.
"""

import re
from dataclasses import dataclass

import numpy as np

from reference.records import RecordError
from reference.stats import Interval, hajek_sums, prompt_bootstrap, weighted_quantile


@dataclass(frozen=True)
class Table:
    """A table for people and for JSON: cells are labels, numbers, None, or an interval [low, high]."""

    title: str
    columns: list[str]
    rows: list[list]

    def render(self):
        """The table as text."""
        cells = [[_text(cell) for cell in row] for row in self.rows]
        widths = [max(map(len, column)) for column in zip(self.columns, *cells, strict=True)]
        lines = [
            "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) for line in (self.columns, *cells)
        ]
        return "\n".join([self.title, *lines])


class Sample:
    """The measured anchors of a run, with their weights and their one bootstrap.

    Args: anchors, anchor rows; plan, the plan's domains; replicates.
    """

    def __init__(self, anchors, plan, replicates=10_000):
        self.anchors, self.replicates = anchors, replicates
        self.gamma, self.prompts = len(anchors[0]["alive"]), np.array([row["prompt"] for row in anchors])
        self.domains = np.array([row["domain"] for row in anchors])
        self.inclusion = np.array([row["inclusion"] for row in anchors], dtype=np.float64)
        for domain in np.unique(self.domains):  # an unfinished run is a further, random sampling stage
            here = self.domains == domain
            self.inclusion[here] *= here.sum() / plan[domain]["anchors"]
        self.drafters = list(dict.fromkeys(name for row in anchors for name in row.get("drafters", {})))

    def __contains__(self, entry):
        """Whether some anchor has this entry; one whose paths all stopped early lacks those of later slots."""
        return any(entry in row for row in self.anchors)

    def column(self, *path):
        """One recorded list over slots of every anchor, float64 [N, gamma], NaN where it is None or absent."""
        rows = []
        for value in self.anchors:
            for name in path:
                value = value.get(name) if value is not None else None
            rows.append([None] * self.gamma if value is None else value)
        return np.array(rows, dtype=np.float64)

    def mean(self, *values):
        """Hajek means of columns [N, ...], bootstrapped together: an `Interval` for each."""
        return self.statistic([self.sums(v) for v in values], lambda means: means)

    def sums(self, values):
        """Hajek sums of a column over the anchors where it is present, to be passed to `statistic`."""
        return hajek_sums(values, self.inclusion)

    def statistic(self, sums, combine):
        """Statistics of several ratios of sums, bootstrapped together.

        Args: sums, pairs of arrays [N, ...] (numerator, denominator); combine, maps the list of their ratios
            [replicates + 1, ...] to the list of statistics.
        Returns: list of `Interval` of flat arrays; NaN where a statistic is not finite, and a replicate in which it
            is not has no part in the ends.
        """
        shapes = [np.shape(n)[1:] for n, _ in sums]
        numerator, denominator = (
            np.concatenate([np.reshape(s[i], (len(s[i]), -1)) for s in sums], axis=1) for i in (0, 1)
        )
        edges = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]
        sizes = []

        def combined(ratios):  # [replicates + 1, 1, columns]
            parts = [p.reshape(-1, *s) for p, s in zip(np.split(ratios[:, 0], edges, axis=1), shapes, strict=True)]
            with np.errstate(invalid="ignore", divide="ignore"):
                out = [np.asarray(value).reshape(len(ratios), -1) for value in combine(parts)]
            sizes[:] = [value.shape[1] for value in out]
            out = np.concatenate(out, axis=1)
            return np.where(np.isfinite(out), out, np.nan)

        whole = prompt_bootstrap(numerator, denominator, self.prompts, combine=combined, replicates=self.replicates)
        ends = np.cumsum(sizes)[:-1]
        return [
            Interval(*parts)
            for parts in zip(
                *(np.split(np.atleast_1d(p), ends) for p in (whole.value, whole.low, whole.high)), strict=True
            )
        ]


def share(sample, part, whole, pool=False):
    """Ratio of the Hajek sums of two columns [N, slots] where both are present, slot by slot or pooled over slots."""
    absent, weight = np.isnan(part + whole), 1 / sample.inclusion[:, None]
    parts = [np.where(absent, 0, values) * weight for values in (part, whole)]
    return sample.statistic([[p.sum(axis=1, keepdims=True) if pool else p for p in parts]], lambda ratios: ratios)[0]


def quantile(values, inclusion, q):
    """Weighted quantile over the anchors that have the value."""
    here = ~np.isnan(values)
    return weighted_quantile(values[here], 1 / inclusion[here], q) if here.any() else None


def by_slot(title, columns):
    """A `Table` with one row per slot from lists over slots."""
    rows = [[k, *(cell(column[k]) for column in columns.values())] for k in range(len(next(iter(columns.values()))))]
    return Table(title, ["slot", *columns], rows)


def ends(interval):
    """[low, high] per slot."""
    return np.stack([interval.low, interval.high], axis=1)


def scalar(interval):
    """(value, [low, high]) of a statistic that is a single number."""
    return cell(interval.value[0]), cell(ends(interval)[0])


def seed_runs(names):
    """{run: {seed: place}}: names NAME-1, NAME-2 ... are the seeds of a run NAME, every other name is a run of its own.

    Places are those among the names; seeds are in order, and the seed of a run with one name, which it keeps, is None.
    Raises: RecordError where that leaves two with one name.
    """
    found: dict = {}
    for place, name in enumerate(names):
        numbered = re.fullmatch(r"(.+)-(\d+)", name)
        run, seed = (numbered[1], int(numbered[2])) if numbered else (name, None)
        if seed in found.setdefault(run, {}):
            raise RecordError(f"{name} is there twice, as a name or as seed {seed} of {run}; rename one")
        found[run][seed] = place
    runs = {}
    for run, places in found.items():
        if len(places) > 1 and None in places:
            raise RecordError(f"{run} is one of the names and would be that of its numbered ones; rename it")
        (first, *_) = places.values()
        runs |= {run: dict(sorted(places.items()))} if len(places) > 1 else {names[first]: {None: first}}
    return runs


def cell(value):
    """A number or an interval for JSON: None where it is undefined."""
    value = np.asarray(value, dtype=np.float64)  # None becomes NaN
    return value.tolist() if np.isfinite(value).all() else None


def _text(cell):
    if cell is None:
        return "-"
    if isinstance(cell, list):
        return f"[{cell[0]:.4f}, {cell[1]:.4f}]"
    return f"{cell:.4f}" if isinstance(cell, float) else str(cell)
