"""FIT: check that a step fits into the memory of the target devices.

The device comes from the config (`cluster`), the hostfile (`# device: h100-80g`), or this machine. Without a device
these rules report nothing. FIT101 and FIT102 check only layouts without errors, and models whose costs are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.core.errors import Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule

if TYPE_CHECKING:
    from dslpar.forecast.plan import Forecast, Machine

GIB = 2**30


@rule("FIT101", "does-not-fit")
def does_not_fit(cx: Context) -> Iterator[Problem]:
    """A step needs more memory than the device has."""
    made = _forecast(cx)
    if made is not None and made.verdict == "does not fit":
        yield _problem(cx, made)


@rule("FIT102", "thrashes", "warning")
def thrashes(cx: Context) -> Iterator[Problem]:
    """A step needs so much of the device's memory that the allocator would keep freeing and requesting blocks."""
    made = _forecast(cx)
    if made is not None and made.verdict == "tight" and made.thrashes:
        yield _problem(cx, made)


@rule("FIT103", "unknown-device")
def unknown_device(cx: Context) -> Iterator[Problem]:
    """The device is not in dslpar's table of devices."""
    name, cluster = cx.spec.cluster.device, cx.world.cluster
    of_hosts = cluster.device if cluster is not None else None
    if name is None and of_hosts is None:
        return
    from dslpar.forecast.device import device_hint, find_device

    if name is not None and find_device(name) is None:
        yield cx.problem("cluster.device", f"unknown device {name!r}", device_hint(name))
    if cluster is not None and of_hosts is not None and find_device(of_hosts) is None:
        location = cluster.device_location or Location(cluster.path)
        yield Problem(location, f"unknown device {of_hosts!r}", device_hint(of_hosts))


def has_device(cx: Context) -> bool:
    """Return whether the target device of the run is known."""
    if cx.spec.cluster.device is not None or (cx.world.cluster is not None and cx.world.cluster.device is not None):
        return True
    from dslpar.forecast.local_device import local_device

    return local_device() is not None


def known_machine(cx: Context) -> Machine | None:
    """Return the target devices and nodes; None if the device or the costs of the job are unknown."""
    if not cx.forecasts or not has_device(cx):
        return None
    # Only configs with a device need a forecast.
    from dslpar.forecast.machine import MachineError, machine_of
    from dslpar.forecast.workload import workload_of

    if workload_of(cx.job) is None:
        return None
    try:
        return machine_of(cx.job, cluster=cx.world.cluster, calibrated=False)
    except MachineError:
        raise UnknownValueError("machine") from None  # FIT103 reports an unknown name; else no forecast is needed


def _forecast(cx: Context) -> Forecast | None:
    """Return the forecast of a step; None if the device or the costs of the job are unknown."""
    machine = known_machine(cx)
    if machine is None:
        return None
    from dslpar.forecast.plan import forecast
    from dslpar.forecast.workload import workload_of

    workload = workload_of(cx.job)
    assert workload is not None, "the costs are known"
    return forecast(workload, machine)


def _problem(cx: Context, made: Forecast) -> Problem:
    """Make the problem of a step that needs too much memory; it names the largest parts."""
    memory, device = made.binding, made.machine.device
    parts = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
    largest = sorted(((getattr(memory, name), name) for name in parts), reverse=True)[:3]
    shown = ", ".join(f"{name} {size / GIB:.1f}" for size, name in largest)
    where = f"stage {made.binding_rank} needs" if len(made.memory) > 1 else "a rank needs"
    message = f"{where} {memory.total / GIB:.1f} GiB of {device.memory_bytes / GIB:.1f} ({device.name}): {shown}"
    return cx.problem(("batch.micro_size", "model"), message, _repair(cx, made.machine))


def _repair(cx: Context, machine: Machine) -> str:
    """Return the hint: the smallest change with which a step fits, as `key=value` words."""
    from dslpar.forecast.candidate import Workloads, overrides
    from dslpar.forecast.search import nearest

    workloads = Workloads(cx.job, machine.nodes.per_node)
    for option in nearest(workloads, machine):
        words = " with ".join(overrides(cx.job, option.candidate, cx.reading.written))
        return f"{words} ({option.bytes / GIB:.1f} GiB)"
    return "choose more ranks, a larger device, or a smaller model: no change of one setting fits (see dslpar plan)"


RULES = (does_not_fit, thrashes, unknown_device)
