"""Values that follow from a config, shown at the ends of its lines, and a summary above `parallel`.

for hint in hints(analysis): ...       # "data 2", "layers 6 6", "micro-batch 4 x 8"
summary(analysis)                      # "64 ranks: pipe 2 x data 8 x tensor 4 · ..."
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dslpar.core.errors import DslparError, Location
from dslpar.layout.resolve import Job
from dslpar.linter.problem import UnknownValueError
from dslpar.lsp.analysis import Analysis


class Hint(NamedTuple):
    """A text after a place."""

    at: Location
    """It is shown at the end."""
    text: str
    why: str


def hints(analysis: Analysis) -> list[Hint]:
    """Return the hints of a config without errors, for its first world; none if that is not known."""
    job = _job(analysis)
    return [] if job is None else [*_hints(analysis, job)]


def summary(analysis: Analysis) -> tuple[Location, str] | None:
    """Return the place of `parallel`, and a line about its layout in each world."""
    place = _place(analysis, "parallel")
    if place is None:
        return None
    texts = [_layout(job) for world in analysis.checked if (job := _job(analysis, world)) is not None]
    return (place, " | ".join(texts)) if texts else None


def _job(analysis: Analysis, world: int | None = None) -> Job | None:
    checked = analysis.first if world is None else analysis.checked[world]
    try:
        return None if checked.has_errors else checked.job
    except (UnknownValueError, DslparError):
        return None


def _layout(job: Job) -> str:
    mesh, batch = job.mesh, job.batch
    sizes = (("pipe", mesh.pipe), ("data", mesh.data), ("tensor", mesh.tensor.size))
    layout = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one process"
    return f"{mesh.world_size} ranks: {layout} · {batch.micro_size} x {batch.accumulation} x {mesh.data} samples a step"


def _hints(analysis: Analysis, job: Job) -> Iterator[Hint]:
    spec, batch = job.spec, job.batch
    if place := _place(analysis, "parallel"):
        if spec.parallel.data.size is None and job.mesh.data > 1:
            yield Hint(place, f"data {job.mesh.data}", "replicas: ranks that pipeline and tensor parallelism leave")
        tensor = job.mesh.tensor
        if tensor.size > 1 and tensor.mode != "1d":
            sizes = " ".join(f"{letter} {getattr(tensor, letter)}" for letter in "dqyz" if getattr(tensor, letter) > 1)
            yield Hint(_place(analysis, "parallel.tensor") or place, sizes, "axes of the cuboid")
    if place := _place(analysis, "parallel.pipeline"):
        counts = " ".join(map(str, job.stages.counts or ()))
        yield Hint(place, f"layers {counts}", "layers of each stage")
    if place := _place(analysis, "batch"):
        yield Hint(
            place, f"{batch.micro_size} x {batch.accumulation} x {job.mesh.data}", "micro-batch x accumulation x data"
        )


def _place(analysis: Analysis, key: str) -> Location | None:
    """Return the place of a key that this file writes, up to the end of its value."""
    node = analysis.config.root.get(key)
    if node is None or node.value is None or node.location.path != analysis.path:
        return None
    begin = node.key_location or node.location
    if begin.path != analysis.path:
        return None
    return Location(analysis.path, begin.line, begin.column, node.location.end_line, node.location.end_column)
