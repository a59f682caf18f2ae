"""Picture of the load of a mixture's experts in a job's run folder, if a run has measured it: layers by experts.

measured = expert_loads.read(Path(job.output_dir))
made = draw(step, loads)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.reporting.expert_loads import LayerLoad
from dslpar.reporting.picture import CHAR, WIDTH, Picture, bar, label

MOST_ROWS = 64
"""The most layers that are drawn."""
_TOP, _RIGHT, _ROW, _GAP = 8, 150, 18, 2


def draw(step: int, loads: Sequence[LayerLoad]) -> Picture:
    """Draw a row per layer and a cell per expert; the darker a cell, the more tokens its expert gets."""
    shown = loads[:MOST_ROWS]
    left = 12 + CHAR * max(len(each.layer) for each in shown)
    wide = (WIDTH - left - _RIGHT) / max(len(each.shares) for each in shown)
    elements = []
    for row, load in enumerate(shown):
        y = _TOP + _ROW * row
        elements.append(label(left - 8, y + 12, load.layer, anchor="end"))
        for expert, share in enumerate(load.shares):
            times = share * len(load.shares)
            tip = f"{load.layer}, expert {expert}: {times:.2f} times the mean"
            shade = f' fill-opacity="{_shade(times, load):.3f}"'
            elements.append(bar(left + wide * expert, y, wide, _ROW - _GAP, "load", tip, shade))
        x = left + wide * len(load.shares) + 8
        elements.append(label(x, y + 12, f"most {load.max_over_mean:.2f} times the mean"))
    bottom = _TOP + _ROW * len(shown)
    more = f"; {len(loads) - len(shown)} more layers are in the table" if len(loads) > len(shown) else ""
    legend = f"experts from 0, by layer; white: no token, full: all that one expert can get; after step {step:,}{more}"
    elements.append(label(left, bottom + 14, legend, "soft"))
    uneven = max(loads, key=lambda each: each.max_over_mean)
    told = f"The most uneven is {uneven.layer}, where an expert gets {uneven.max_over_mean:.2f} times the mean"
    return Picture("experts", "Experts", f"Tokens by layer and expert. {told}", WIDTH, bottom + 24, elements)


def _shade(times: float, load: LayerLoad) -> float:
    """Return a cell's opacity: 0 without tokens, a half at the mean, and 1 if every token chooses the expert."""
    most = len(load.shares) / load.top_k
    if times <= 1 or most <= 1:
        return min(times, 1) / 2
    return 0.5 + 0.5 * (times - 1) / (most - 1)


def rows(loads: Sequence[LayerLoad]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table: sizes, the most over the mean, the effective number, the range's ends, and drops."""
    for each in loads:
        fullest, emptiest = each.shares.index(max(each.shares)), each.shares.index(min(each.shares))
        sizes = f"{len(each.shares)}", f"{each.top_k}"
        row = each.layer, *sizes, f"{each.max_over_mean:.2f}", f"{each.effective:.1f}", f"{fullest}", f"{emptiest}"
        yield (*row, "none" if each.dropped is None else f"{100 * each.dropped:.1f} %")
