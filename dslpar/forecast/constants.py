"""Constants of the time forecast: how much of their peak devices, links and hosts reach; fitted, not looked up.

    constants, error = load("calibration.json")          # as `dslpar plan --calibrate` wrote it
    constants = replace(DEFAULT, nic_efficiency=0.3)     # a slower network

The defaults are one set for all devices, frameworks and clusters, fitted to 2,000 published runs
(`python -m benchmarks.forecast --fit`). They cannot know one cluster's hosts, network and kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

FORMAT = 2
"""Version of a calibration file; in 1, launches of collectives were among those of a layer's kernels."""
MOST_ERROR = 10.0


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Fitted constants of a step's time, besides sizes and data sheets."""

    product_efficiency: float = 0.7771
    """Share of a device's peak that deep products of whole waves of tiles reach."""
    wide_products: float = 0.8546
    """Factor on `product_efficiency` for devices with wide tiles (Hopper and later)."""
    product_depth: float = 210.1
    """Depth of a product, in elements, at which it reaches half of that share."""
    misaligned_products: float = 1.681
    """Factor on the time of a product whose depth or columns are not a multiple of 64."""
    fused_attention: float = 0.3168
    """Share of a device's peak that fused attention reaches."""
    wide_attention: float = 0.5489
    """Factor on `fused_attention` for devices with wide tiles."""
    plain_attention: float = 0.6088
    """Share of a device's peak that attention's products reach if attention keeps its scores."""
    elementwise_passes: float = 1.437
    """Factor on the counted passes through memory of elements between products."""
    logit_bytes: float = 60.69
    """Bytes through memory per logit, in the forward and backward of the loss."""
    layer_launch_s: float = 0.0005257
    """Seconds that a host needs to launch the forward of a layer."""
    backward_launch: float = 4.0
    """Factor on `layer_launch_s` for a backward."""
    collective_launch_s: float = 4.837e-05
    """Seconds that a host needs to launch a collective of a layer."""
    tensor_launch: float = 0.004036
    """Share by which a tensor group's further ranks in a node, squared, lengthen launches: the slowest host counts."""
    blocking_launch: float = 1.334
    """Share by which each doubling of a tensor group lengthens launches if the host waits for messages."""
    link_efficiency: float = 0.95
    """Share of the links within a node that collectives reach."""
    nic_efficiency: float = 0.8008
    """Share of a node's network cards that collectives reach."""
    nic_crowding: float = 0.0006898
    """Share by which each further node slows the bytes of a collective."""
    link_latency_s: float = 3.982e-05
    """Seconds per hop within a node."""
    nic_latency_s: float = 4.889e-05
    """Seconds per hop between nodes."""
    hop_s: float = 0.0002946
    """Seconds that a message between stages takes besides its bytes."""
    reduction_exposed: float = 0.06923
    """Share of a gradient reduction that the backward above it does not hide."""
    weights_exposed: float = 1.0
    """Share of ZeRO 2's and 3's traffic per micro-batch that is added to the time of the compute it runs under."""
    gather_passes: float = 11.22
    """Factor on the gather of changed weights, over one collective of as many bytes."""
    optimizer_bytes: float = 17.95
    """Bytes through memory per weight that a fused optimizer updates."""
    unfused_optimizer: float = 26.28
    """Factor on `optimizer_bytes` for an optimizer that is not fused."""
    step_s: float = 0.00127
    """Seconds per step that nothing else explains."""


BOUNDS: dict[str, tuple[float, float]] = {
    "product_efficiency": (0.3, 0.97),
    "wide_products": (0.5, 1.2),
    "product_depth": (20, 3000),
    "misaligned_products": (1, 2.5),
    "fused_attention": (0.1, 1.2),
    "wide_attention": (0.2, 1.5),
    "plain_attention": (0.05, 1.5),
    "elementwise_passes": (0.3, 8),
    "logit_bytes": (6, 120),
    "layer_launch_s": (0.05e-3, 4e-3),
    "backward_launch": (1, 4),
    "collective_launch_s": (5e-6, 400e-6),
    "tensor_launch": (0.0002, 0.1),
    "blocking_launch": (0.05, 6),
    "link_efficiency": (0.1, 0.95),
    "nic_efficiency": (0.05, 1),
    "nic_crowding": (1e-4, 0.5),
    "link_latency_s": (2e-6, 200e-6),
    "nic_latency_s": (2e-6, 400e-6),
    "hop_s": (0.01e-3, 20e-3),
    "reduction_exposed": (0.02, 1.5),
    "weights_exposed": (0.001, 1),
    "gather_passes": (0.3, 30),
    "optimizer_bytes": (8, 200),
    "unfused_optimizer": (1, 40),
    "step_s": (0.1e-3, 1),
}
"""Bounds of each constant in a calibration, wider than anything that was measured."""


class Error(NamedTuple):
    """Shares by which a forecast errs at most, on runs that its constants were not fitted to."""

    half: float
    """In half of the cases."""
    four_of_five: float
    nine_of_ten: float


DEFAULT = Constants()
ERROR = Error(half=0.046, four_of_five=0.106, nine_of_ten=0.155)
"""Cross-validated error of constants for all software stacks (`python -m benchmarks.forecast`), each weighted alike."""


def dump(constants: Constants, error: Error = ERROR, num_runs: int = 0) -> str:
    """Return the text of a calibration file: constants, their errors, and the number of runs behind the errors."""
    values = {item.name: getattr(constants, item.name) for item in fields(constants)}
    whole = {"format": FORMAT, "num_runs": num_runs, "error": error._asdict(), "constants": values}
    import json  # most plans do not need a calibration

    return json.dumps(whole, indent=1) + "\n"


def load(path: str) -> tuple[Constants, Error]:
    """Read a calibration file; constants and errors that it leaves out keep their defaults.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not a calibration, has another format, or has a value that is unknown, not a number, or out
            of bounds.
    """
    from dslpar.core.json_values import mapping, parse

    with open(path, "rb") as file:
        read = mapping(parse(file.read()), "the file", "format", "constants")
    if read["format"] != FORMAT:
        raise ValueError(
            f"its format is {read['format']!r}, and this version of dslpar reads {FORMAT}: calibrate again"
        )
    constants = _numbers(read["constants"], "constants", BOUNDS)
    error = _numbers(read.get("error", {}), "error", dict.fromkeys(Error._fields, (0.0, MOST_ERROR)))
    return Constants(**constants), ERROR._replace(**error)


def _numbers(values: object, at: str, bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return a mapping's numbers, each known and within its bounds."""
    from dslpar.core.json_values import mapping

    found = {}
    for name, value in mapping(values, at).items():
        if name not in bounds:
            raise ValueError(f"unknown {at}.{name}; there are {', '.join(bounds)}")
        least, most = bounds[name]
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise ValueError(f"{at}.{name} is {value!r}, not a number from {least:g} to {most:g}")
        found[name] = float(value)
    return found
