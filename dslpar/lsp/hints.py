"""Values that follow from a config, shown at the ends of its lines, and a summary above `parallel`.

    for hint in hints(analysis): ...   # "data 2", "layers 6 6", "4 x 8 x 2", "24.5 of 79.6 GiB"
    summary(analysis)     # "64 ranks: pipe 2 x data 8 x tensor 4 · 24.5 of 79.6 GiB · about 10.8 s a step"

Memory and time are those of `dslpar plan`. They are shown if the config, the project or the first-line comment names
the device: an editor's machine is not the cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from dslpar.core.errors import Location
from dslpar.forecast.device import GIB
from dslpar.forecast.machine import MachineError, machine_of
from dslpar.forecast.plan import Forecast, forecast
from dslpar.forecast.workload import workload_of
from dslpar.layout.resolve import Job
from dslpar.lsp.analysis import Analysis, whole_of
from dslpar.planner.report import seconds


class Hint(NamedTuple):
    """A text after a place."""

    at: Location
    """It is shown at the end."""
    text: str
    why: str


def hints(analysis: Analysis) -> list[Hint]:
    """Return the hints of a config without errors, for its first world; none if that is not known."""
    job = analysis.job()
    return [] if job is None else [*_hints(analysis, job)]


def summary(analysis: Analysis) -> tuple[Location, str] | None:
    """Return the place of `parallel`, and a line about its layout in each world; None if no world is known."""
    place = _place(analysis, "parallel")
    node = analysis.config.root.get("parallel")
    if place is None or node is None:
        return None
    place = whole_of(node.key_location or node.location, node.location)
    texts = [_of_world(analysis, world) for world in analysis.checked if world is not None]
    return (place, " | ".join(texts)) if texts else None


def _of_world(analysis: Analysis, world: int) -> str:
    job = analysis.job(world)
    # Said, since Neovim 0.7 goes on to show the line that it had when there is none any more.
    return f"{world} ranks: no layout while the config has errors" if job is None else _layout(analysis, job)


def _forecast(analysis: Analysis, job: Job) -> Forecast | None:
    """Return the forecast; None if no device is named, or the costs of the model's layers are unknown."""
    if not (job.spec.cluster.device or analysis.settings.device):
        return None
    workload = workload_of(job)
    try:
        return (
            None if workload is None else forecast(workload, machine_of(job, project_device=analysis.settings.device))
        )
    except MachineError:
        return None  # lint reports it


def _memory(made: Forecast) -> str:
    return f"{made.binding.total / GIB:.1f} of {made.machine.device.memory_bytes / GIB:.1f} GiB"


def _layout(analysis: Analysis, job: Job) -> str:
    mesh, batch = job.mesh, job.batch
    sizes = (("pipe", mesh.pipe), ("data", mesh.data), ("tensor", mesh.tensor.size))
    layout = " x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one process"
    made = _forecast(analysis, job)
    facts = [_memory(made), f"about {seconds(made.time.step_s)} a step"] if made is not None else []
    samples = f"{batch.micro_size} x {batch.accumulation} x {mesh.data} samples a step"
    return " · ".join([f"{mesh.world_size} ranks: {layout}", *(facts or [samples])])


def _hints(analysis: Analysis, job: Job) -> Iterator[Hint]:
    spec, batch = job.spec, job.batch
    if place := _place(analysis, "parallel"):
        if spec.parallel.data.size is None and job.mesh.data > 1:
            yield Hint(place, f"data {job.mesh.data}", "replicas: ranks that pipeline and tensor parallelism leave")
        tensor = job.mesh.tensor
        if tensor.size > 1 and tensor.mode != "1d":
            x, y, z = tensor.shape
            at = _place(analysis, "parallel.tensor") or place
            yield Hint(at, f"x {x}, y {y}, z {z}", "axes of the cuboid, as `dslpar show` prints them")
        if (made := _forecast(analysis, job)) is not None:
            where = f"pipe {made.binding_rank}" if len(made.memory) > 1 else "each rank"
            yield Hint(place, _memory(made), f"memory that `dslpar plan` forecasts for the fullest rank: {where}")
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
