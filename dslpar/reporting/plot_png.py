"""Plot curves as a PNG with matplotlib; content and colours are the same as in `plot_svg`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from dslpar.core.visible import visible
from dslpar.reporting.curves import Panel, segments
from dslpar.reporting.plot_svg import COLORS, X_TITLES


def write(path: Path, panels: Sequence[Panel], x: str = "step", log: Collection[str] = ()) -> None:
    """Write panels to a file; `log` names the metrics with a logarithmic scale.

    Raises:
        OSError: the file cannot be written.
    """
    figure = Figure(figsize=(9, 2.6 * len(panels) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
    for axes, panel in zip(all_axes, panels, strict=True):
        axes.set_title(panel.metric, loc="left")
        axes.grid(visible=True, alpha=0.3)
        if panel.metric in log:
            axes.set_yscale("log")
        for number, curve in enumerate(panel.curves):
            parts = segments(curve, panel.metric in log)
            for index, points in enumerate(parts):
                name = _escaped(curve.run) if index == 0 else None
                mark = "." if len(points) == 1 else ""
                color, dash = COLORS[number % len(COLORS)], ("-", "--", ":", "-.")[number // len(COLORS) % 4]
                axes.plot(*zip(*points, strict=True), dash, marker=mark, color=color, label=name, linewidth=1.2)
    if all_axes[0].get_legend_handles_labels()[1]:
        all_axes[0].legend(fontsize="small")
    all_axes[-1].set_xlabel(X_TITLES[x])
    figure.savefig(path, format="png", dpi=120)


def _escaped(name: str) -> str:
    """Escape a name for matplotlib: `$` begins a formula there, and a leading `_` hides a label."""
    name = visible(name).replace("$", r"\$")
    return f" {name}" if name.startswith("_") else name
