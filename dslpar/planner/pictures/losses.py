"""Picture of the loss curves in a job's run folder, if a run has written any: training and held-out loss in one panel.

panel, problems = read(Path(job.output_dir))
made = draw(panel)
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dslpar.reporting import plot_svg, run_dir
from dslpar.reporting.curves import Panel, read_panels
from dslpar.reporting.picture import Picture

NAMES = {"loss": "training", "eval_loss": "held-out"}


def read(folder: Path) -> tuple[Panel | None, list[str]]:
    """Return a run's panel, or None if it has no losses, and the problems in its metrics file."""
    if not os.path.isfile(folder / run_dir.METRICS):  # False for an impossible path, where pathlib raises
        return None, []
    panels, problems = read_panels([folder], list(NAMES))
    curves = [
        curve._replace(run=NAMES[panel.metric]) for panel in panels for curve in panel.curves if _values(curve.ys)
    ]
    return (Panel("loss", curves) if curves else None), problems


def _values(ys: Sequence[float | None]) -> list[float]:
    return [y for y in ys if y is not None]


def draw(panel: Panel) -> Picture:
    """Draw the curves of a run."""
    ends = [f"{curve.run} {_values(curve.ys)[-1]:.4g} after step {curve.xs[-1]:,.0f}" for curve in panel.curves]
    return plot_svg.picture([panel], "losses", "Losses", f"Loss over steps; at the end {', '.join(ends)}")


def rows(panel: Panel) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows: the loss's name, the number of values, first, lowest and last value, and last step."""
    for curve in panel.curves:
        values = _values(curve.ys)
        numbers = (f"{values[0]:.4g}", f"{min(values):.4g}", f"{values[-1]:.4g}")
        yield curve.run, f"{len(values):,}", *numbers, f"{curve.xs[-1]:,.0f}"
