"""Coverage: effects on a step's time that no measured run has, so that nothing checks their part of a forecast.

    uncovered(workload, device_named("h100-80g"))        # ("offload", "2d")

The runs are those of `python -m benchmarks.forecast --leave-out`: decoders in half precision on data, tensor (1d) and
pipeline ranks, with and without ZeRO. Forecasts with an effect of this table have a wider error
(`dslpar.forecast.constants.UNCOVERED`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dslpar.forecast.device import Device
from dslpar.forecast.host_memory import offloads_of
from dslpar.forecast.workload import Workload
from dslpar.schema.sections import Model, TokenModel

MEASURED_DEVICES = ("a100-40g", "a100-80g", "h100-80g", "h200-141g", "v100-16g", "v100-32g")
"""Devices of the measured runs."""


def uncovered(workload: Workload, device: Device) -> tuple[str, ...]:
    """Return the names of a workload's effects that no measured run has."""
    found = [name for name, has in EFFECTS.items() if has(workload)]
    return tuple(found if device.name in MEASURED_DEVICES else [*found, device.name])


def _has_experts(workload: Workload) -> bool:
    return workload.model.num_experts is not None


def _has_other_layers(workload: Workload) -> bool:
    is_own = isinstance(workload.model, Model)
    return workload.costs.is_traced or (is_own and not isinstance(workload.model, TokenModel))


def _in_mode(mode: str) -> Callable[[Workload], bool]:
    return lambda workload: workload.mesh.tensor.mode == mode


EFFECTS: Mapping[str, Callable[[Workload], bool]] = {
    "offload": lambda workload: bool(offloads_of(workload)),
    "experts over data ranks": lambda workload: workload.mesh.tensor.exchanges_tokens,
    "a mixture of experts": _has_experts,
    "context parallelism": lambda workload: workload.mesh.tensor.context > 1,
    **{f"mode {mode}": _in_mode(mode) for mode in ("2d", "2.5d", "3d", "cuboid")},
    "comm_overlap": lambda workload: workload.mesh.tensor.comm_overlap,
    "zero_bubble": lambda workload: workload.schedule.split,
    "mlp_chunks": lambda workload: workload.mlp_chunks > 1,
    "loss_chunks": lambda workload: workload.loss_chunks > 1,
    "adapters": lambda workload: workload.trained(0) < workload.weights(0),
    "fp32": lambda workload: workload.dtype == "fp32",
    "layers other than a decoder's": _has_other_layers,
}
"""Effects by the names that reports print."""
