"""Coverage: effects on a step's time that no fitted run has, with the error of forecasts that have them.

    effects_of(workload, device_named("h100-80g"))        # {"offload": UNCOVERED, SENT: MIXTURES}

The fitted runs are those of `python -m benchmarks.forecast`: decoders in half precision on data, tensor (1d) and
pipeline ranks, with and without ZeRO. Of mixtures that send tokens to their experts, published steps measure the error
(`MIXTURES`). Nothing measures that of the other effects, which are *uncovered* (`UNCOVERED`, or more).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dslpar.forecast.constants import MIXTURES, UNCOVERED, Error, widest
from dslpar.forecast.device import Device
from dslpar.forecast.host_memory import offloads_of
from dslpar.forecast.workload import Workload
from dslpar.schema.sections import Model, TokenModel

MEASURED_DEVICES = ("a100-40g", "a100-80g", "h100-80g", "h200-141g", "v100-16g", "v100-32g")
"""Devices of the fitted runs."""
SENT = "a mixture that sends its tokens"
"""The effect of which published steps measure the error."""
GATHERED = "a mixture that gathers its tokens"
"""An uncovered effect, whose error cannot be smaller than that of `SENT`."""


def effects_of(workload: Workload, device: Device) -> dict[str, Error]:
    """Return a workload's effects that no fitted run has, and the error of forecasts that have them."""
    found = {name: UNCOVERED for name, has in EFFECTS.items() if has(workload)}
    if workload.model.num_experts is not None:
        sends = workload.mesh.tensor.exchanges_tokens
        found |= {SENT: MIXTURES} if sends else {GATHERED: widest(UNCOVERED, MIXTURES)}
    return found if device.name in MEASURED_DEVICES else found | {device.name: UNCOVERED}


def _has_other_layers(workload: Workload) -> bool:
    is_own = isinstance(workload.model, Model)
    return workload.costs.is_traced or (is_own and not isinstance(workload.model, TokenModel))


def _in_mode(mode: str) -> Callable[[Workload], bool]:
    return lambda workload: workload.mesh.tensor.mode == mode


EFFECTS: Mapping[str, Callable[[Workload], bool]] = {
    "offload": lambda workload: bool(offloads_of(workload)),
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
"""Uncovered effects but `GATHERED`, by the names that reports print."""
