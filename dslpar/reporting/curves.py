"""Curves for a plot: one panel per metric, one curve per run, over steps, tokens or time.

    panels, problems = read_panels([Path("outputs/a"), Path("outputs/b")], ["loss", "lr"], x="tokens", smooth=10)
    panels[0].metric, panels[0].curves[1].xs, panels[0].curves[1].ys

A null in metrics.jsonl marks a skipped step. It becomes None in a curve, and a gap in the plot. A line without the
metric, such as `eval_loss` in most lines, makes no gap. Long curves are thinned to the lowest and the highest value per
column of the plot, as oscilloscopes do, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from dslpar.reporting import metrics_file, run_dir
from dslpar.reporting.metrics_file import MetricsError, Record

METRICS = ("loss", "grad_norm", "lr", "tokens_per_s")
"""Metrics drawn by default."""
XS = ("step", "tokens", "time")
"""Possible x axes. "time" is the sum of seconds spent in steps."""
_SAMPLES = {"tokens": "images", "tokens_per_s": "images_per_s"}
"""Names of the metrics that a run on images has in place of those for tokens."""


class Curve(NamedTuple):
    """A metric of one run."""

    run: str
    xs: Sequence[float]
    """Positions on the x axis, ascending."""
    ys: Sequence[float | None]
    """One per x; None is a gap."""


class Panel(NamedTuple):
    """A plot of one metric with a curve per run."""

    metric: str
    curves: Sequence[Curve]

    def finite(self) -> list[float]:
        """Return all values, without gaps."""
        return [y for curve in self.curves for y in curve.ys if y is not None]


def read_panels(
    folders: Sequence[Path], metrics: Sequence[str], x: str = "step", smooth: int = 1
) -> tuple[list[Panel], list[str]]:
    """Read the curves of runs; return the panels, and the problems in the runs' files.

    x: the x axis, one of XS.
    smooth: each value becomes the mean of the last `smooth` values. Gaps do not count, and `eval_loss` is not smoothed.
    """
    runs: dict[str, list[Record]] = {}
    problems = []
    for name, folder in zip(short_names(folders), folders, strict=True):
        try:
            runs[name], found = metrics_file.read_records(folder / run_dir.METRICS)
            problems += [f"{folder / run_dir.METRICS}: {problem}" for problem in found]
        except MetricsError as error:
            problems.append(f"{folder / run_dir.METRICS}: {error}")
    panels = [
        Panel(
            metric,
            [
                _curve(name, records, metric, x, 1 if metric == "eval_loss" else smooth)
                for name, records in runs.items()
            ],
        )
        for metric in metrics
    ]
    return panels, problems


def short_names(folders: Sequence[Path]) -> list[str]:
    """Return the folders' paths without the parent folders that they all share.

    >>> short_names([Path("outputs/a/1"), Path("outputs/b/1")])
    ['a/1', 'b/1']
    """
    parts = [folder.absolute().parts for folder in folders]
    same = 0
    while all(len(each) > same + 1 for each in parts) and len({each[: same + 1] for each in parts}) == 1:
        same += 1
    return [str(Path(*each[same:])) for each in parts]


def _curve(run: str, records: Sequence[Record], metric: str, x: str, smooth: int) -> Curve:
    points = [
        (at, metrics_file.number(record, name))
        for at, record in zip(_positions(records, x), records, strict=True)
        if (name := _name_in(record, metric)) and at is not None
    ]
    return Curve(run, [at for at, _ in points], _smoothed([y for _, y in points], smooth))


def _name_in(record: Record, metric: str) -> str:
    """Return the name under which a record has a metric; empty if the record lacks the metric."""
    return next((name for name in (metric, _SAMPLES.get(metric, "")) if name in record), "")


def _positions(records: Sequence[Record], x: str) -> Iterator[float | None]:
    """Yield each record's position on the x axis; None if the record lacks the axis's metric."""
    time_s = 0.0
    for record in records:
        time_s += metrics_file.number(record, "step_s") or 0.0
        yield time_s if x == "time" else metrics_file.number(record, _name_in(record, x))


def _smoothed(ys: Sequence[float | None], size: int) -> list[float | None]:
    """Return, at each position, the mean of the last `size` values. Gaps (None) stay, and do not count in means."""
    window: deque[float | None] = deque(maxlen=size)
    smoothed: list[float | None] = []
    for y in ys:
        window.append(y)
        there = [value for value in window if value is not None]
        smoothed.append(None if y is None else y if size == 1 else math.fsum(there) / len(there))
    return smoothed


# ---- for a plot with a number of columns ----


def segments(curve: Curve, log: bool) -> list[list[tuple[float, float]]]:
    """Return the points of a curve between its gaps; on a log scale, values of 0 and below are gaps."""
    found: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.xs, curve.ys, strict=True):
        if y is None or (log and y <= 0):
            found.append([])
        else:
            found[-1].append((x, y))
    return [points for points in found if points]


def thinned(points: Sequence[tuple[float, float]], columns: int) -> list[tuple[float, float]]:
    """Return at most four points per column: the first, the lowest, the highest and the last, in order."""
    if len(points) <= 4 * columns:
        return list(points)
    low, width = points[0][0], (points[-1][0] - points[0][0]) or 1.0
    by_column: dict[int, list[tuple[float, float]]] = {}
    for point in points:
        by_column.setdefault(min(int((point[0] - low) / width * columns), columns - 1), []).append(point)
    kept = []
    for inside in by_column.values():
        lowest, highest = (pick(range(len(inside)), key=lambda at: inside[at][1]) for pick in (min, max))
        kept += [inside[at] for at in sorted({0, lowest, highest, len(inside) - 1})]
    return kept
