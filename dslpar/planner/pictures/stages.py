"""Picture of the stages: each pipeline rank's layers, and its compute relative to the mean.

made = draw(job)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from dslpar.layout import bubble
from dslpar.layout.resolve import Job
from dslpar.reporting.picture import CHAR, WIDTH, Picture, bar, label, upright

MOST_ROWS = 64
"""The most pipeline ranks that are drawn."""
_LEFT, _RIGHT, _TOP, _ROW, _BAR = 66, 50, 26, 28, 22
_INNER = WIDTH - _LEFT - _RIGHT


class Stage(NamedTuple):
    """A stage of the pipeline."""

    rank: int
    """Pipeline rank that holds the stage."""
    number: int
    """Number of the stage, in the order of the forward."""
    layers: str
    """Range of layers, such as "0-3"; empty if it is unknown before the model is built, or if there is no layer."""
    num_layers: int | None
    """Number of layers; None if it is unknown before the model is built."""
    load: float
    """Compute relative to the mean of all stages."""

    @property
    def name(self) -> str:
        """Label of the stage's bar."""
        if self.num_layers is None:
            return f"stage {self.number}"
        if self.num_layers == 0:
            return f"stage {self.number}: no layer"
        return f"stage {self.number}: {'layer' if self.num_layers == 1 else 'layers'} {self.layers}"


def stages_of(job: Job) -> list[Stage]:
    """Return all stages, in the order of the forward."""
    counts, loads, chunks = job.stages.counts, bubble.durations_of(job).forward, job.chunks
    ends = list(accumulate(counts)) if counts is not None else []
    found = []
    for number, load in enumerate(loads):
        count = counts[number] if counts is not None else None
        layers = _range(ends[number] - count, count) if count else ""
        found.append(Stage(chunks.rank_of(number), number, layers, count, load))
    return found


def _range(first: int, count: int) -> str:
    return f"{first}-{first + count - 1}" if count > 1 else f"{first}"


def draw(job: Job) -> Picture:
    """Draw one row per pipeline rank; a rank with several stages has their bars side by side."""
    stages, chunks = stages_of(job), job.chunks
    loads = [sum(stages[number].load for number in chunks.held_by(rank)) / chunks.num for rank in range(chunks.pipe)]
    shown = min(chunks.pipe, MOST_ROWS)
    wide = _INNER / max(loads)
    bottom = _TOP + _ROW * shown
    elements = []
    for rank in range(shown):
        y = _TOP + _ROW * rank
        elements.append(label(_LEFT - 8, y + 15, f"pipe {rank}", anchor="end"))
        held = [stages[number] for number in chunks.held_by(rank)]
        elements += _bars(held, y, wide / chunks.num)
        elements.append(label(_LEFT + _INNER + 8, y + 15, f"{loads[rank]:.2f}"))
    mean = _LEFT + wide
    elements.append(upright(mean, _TOP - 6, bottom, "limit warning"))
    elements.append(label(mean, _TOP - 12, "mean", "soft", "middle"))
    more = f"; {chunks.pipe - shown} more ranks are in the table" if chunks.pipe > shown else ""
    elements.append(label(_LEFT, bottom + 16, f"a bar's length: forward work of a rank over the mean{more}", "soft"))
    most = f"the busiest of {chunks.pipe} ranks computes {max(loads):.2f} times the mean"
    return Picture(
        "stages", "Stages", f"Layers and work of each rank of the pipeline: {most}", WIDTH, bottom + 26, elements
    )


def _bars(held: Sequence[Stage], y: float, wide: float) -> Iterator[str]:
    x = float(_LEFT)
    for chunk, stage in enumerate(held):
        width = wide * stage.load
        yield bar(x, y, width, _BAR, "stage odd" if chunk % 2 else "stage", f"{stage.name}, work {stage.load:.2f}")
        for text in (stage.name, f"stage {stage.number}", stage.layers):
            if text and CHAR * len(text) + 12 < width:
                yield label(x + 8, y + 15, text)
                break
        x += width
