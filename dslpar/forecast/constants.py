"""Constants of the time forecast: the shares of their peak that devices and links reach, and the overhead of hosts.

    constants = load("calibration.json").constants       # a file of `dslpar plan --calibrate`
    constants = replace(DEFAULT, nic_efficiency=0.3)     # a slower network

The defaults are fitted to 2,000 published runs (`python -m benchmarks.forecast --fit`). One set serves all devices,
frameworks and clusters, so it cannot reflect the hosts, network and kernels of your cluster. `dslpar plan --calibrate`
fits the constants to your own runs.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from typing import NamedTuple

from dslpar.core.json_values import count, items, mapping, parse, text

FORMAT = 3
"""Version of the calibration file. Up to version 2, `gather_passes` and `weights_exposed` also held for DeepSpeed."""
MOST_ERROR = 10.0
"""The largest error, as a share, that a calibration file may have."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Fitted constants of a step's time.

    `dslpar.forecast.kernels` explains tiles, waves and depth of matrix products, and `dslpar.forecast.links` hops.
    """

    product_efficiency: float = 0.7771
    """Share of a device's peak that a matrix product reaches if its depth is large and it fills all waves of tiles."""
    wide_products: float = 0.8546
    """Factor on `product_efficiency` for devices with tiles wider than 128 columns (Hopper and later)."""
    product_depth: float = 210.1
    """Depth of a product, in elements, at which it reaches half of `product_efficiency`."""
    misaligned_products: float = 1.681
    """Factor on the time of a product whose depth or columns are not a multiple of 64."""
    fused_attention: float = 0.3168
    """Share of a device's peak that fused attention reaches."""
    wide_attention: float = 0.5489
    """Factor on `fused_attention` for devices with tiles wider than 128 columns."""
    plain_attention: float = 0.6088
    """Share of a device's peak that the products of attention reach without a fused kernel."""
    elementwise_passes: float = 1.437
    """Factor on the time of elementwise operations, which is counted as bytes over the memory's bandwidth."""
    logit_bytes: float = 60.69
    """Bytes that the loss reads and writes per logit, forward and backward."""
    layer_launch_s: float = 0.0005257
    """Seconds that a host needs to launch the kernels of a layer's forward."""
    backward_launch: float = 4.0
    """Factor on `layer_launch_s` for a layer's backward."""
    collective_launch_s: float = 4.837e-05
    """Seconds that a host needs to launch a collective of a layer."""
    tensor_launch: float = 0.004036
    """Lengthens launches by this share times (n - 1)^2 for n ranks of a tensor group in a node: the slowest counts."""
    blocking_launch: float = 1.334
    """Lengthens launches by this share times log2(n) if the host waits for messages between stages (n as above)."""
    link_efficiency: float = 0.95
    """Share of the bandwidth within a node that collectives reach."""
    nic_efficiency: float = 0.8008
    """Share of the bandwidth of a node's network cards that collectives reach."""
    nic_crowding: float = 0.0006898
    """Share by which each node after the first lengthens the transfer of a collective's bytes between nodes."""
    link_latency_s: float = 3.982e-05
    """Seconds per hop within a node."""
    nic_latency_s: float = 4.889e-05
    """Seconds per hop between nodes."""
    hop_s: float = 0.0002946
    """Fixed seconds of a message between stages, in addition to the transfer of its bytes."""
    reduction_exposed: float = 0.06923
    """Share of an overlapped gradient reduction that the backward does not hide."""
    weights_exposed: float = 1.0
    """Without prefetch, the share of ZeRO 2's and 3's collectives per micro-batch that compute does not hide."""
    exposed_layers: float = 1.0
    """With prefetch, the number of layers per micro-batch whose collectives compute does not hide: the first."""
    gather_passes: float = 11.22
    """Factor on the time of ZeRO 1's and 2's gather of updated weights, if weights are gathered one by one."""
    flat_gather_passes: float = 1.0
    """The same factor if weights are gathered in large buffers, as DeepSpeed does: one all-gather of the bytes."""
    optimizer_bytes: float = 17.95
    """Bytes that a fused optimizer reads and writes per weight."""
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
    "exposed_layers": (0.1, 100),
    "gather_passes": (0.3, 30),
    "flat_gather_passes": (0.3, 30),
    "optimizer_bytes": (8, 200),
    "unfused_optimizer": (1, 40),
    "step_s": (0.1e-3, 1),
}
"""Bounds of each constant in a calibration. They are wider than all measured values."""


class Error(NamedTuple):
    """Quantiles of the relative error of forecast step times, on runs that the constants were not fitted to."""

    half: float
    """The error is at most this share in half of the cases."""
    four_of_five: float
    """In four of five cases."""
    nine_of_ten: float
    """In nine of ten cases."""


DEFAULT = Constants()

# `python -m benchmarks.forecast --leave-out` prints the next five values; `benchmarks.leave_out` explains them.

ERROR = Error(half=0.176, four_of_five=0.318, nine_of_ten=0.467)
"""Error on runs of a software stack (a framework on a cluster) that no constant was fitted on."""
UNCOVERED = Error(half=0.342, four_of_five=0.545, nine_of_ten=0.627)
"""Error for an effect that no run has: the largest error of any effect all of whose runs were left out of the fit."""
MIXTURES = Error(half=0.431, four_of_five=0.431, nine_of_ten=0.531)
"""Error of published steps of mixtures that send tokens to their experts, which no constant was fitted on."""
CALIBRATED = Error(half=0.084, four_of_five=0.227, nine_of_ten=0.289)
"""Error on other runs of a stack after a calibration with `ENOUGH_RUNS` of its runs."""
RATIO = Error(half=0.115, four_of_five=0.387, nine_of_ten=0.478)
"""Error of the ratio of two layouts' times, of a stack that no constant was fitted on."""
ENOUGH_RUNS = 3
"""The fewest runs that calibrate a forecast, so that `ERROR` no longer bounds it."""


_RENAMED = {
    "a mixture of experts": "a mixture that gathers its tokens",
    "experts over data ranks": "a mixture that sends its tokens",
}
"""Earlier names of effects in calibration files."""


def widest(*errors: Error) -> Error:
    """Return the largest of each quantile."""
    return Error(*map(max, zip(*errors, strict=True)))


class CalibrationFile(NamedTuple):
    """The content of a calibration file."""

    constants: Constants
    error: Error
    num_runs: int = 0
    """Your own runs that the constants were fitted to."""
    covers: frozenset[str] = frozenset()
    """Effects of these runs that no fitted run has (`dslpar.forecast.coverage`)."""


def dump(constants: Constants, error: Error = ERROR, num_runs: int = 0, covers: Collection[str] = ()) -> str:
    """Return the text of a calibration file; see `CalibrationFile`."""
    values = {item.name: getattr(constants, item.name) for item in fields(constants)}
    whole = {
        "format": FORMAT,
        "num_runs": num_runs,
        "covers": sorted(covers),
        "error": error._asdict(),
        "constants": values,
    }
    return json.dumps(whole, indent=1) + "\n"


def load(path: str) -> CalibrationFile:
    """Read a calibration file; what is missing in it keeps its default.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a calibration or has another format. Or one of its values has an unknown name, is
            not a number, or is out of bounds.
    """
    with open(path, "rb") as file:
        read = mapping(parse(file.read()), "the file", "format", "constants")
    if read["format"] != FORMAT:
        raise ValueError(
            f"its format is {read['format']!r}, but this version of dslpar reads {FORMAT}: calibrate again"
        )
    constants = _numbers(read["constants"], "constants", BOUNDS)
    error = _numbers(read.get("error", {}), "error", dict.fromkeys(Error._fields, (0.0, MOST_ERROR)))
    num_runs = count(read.get("num_runs", 0), "num_runs")
    names = (text(each, "covers") for each in items(read.get("covers", []), "covers"))
    covers = frozenset(_RENAMED.get(name, name) for name in names)
    return CalibrationFile(Constants(**constants), ERROR._replace(**error), num_runs, covers)


def _numbers(values: object, at: str, bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return a mapping of names to numbers.

    Raises:
        ValueError: a name has no bounds, or its value is not a number within them.
    """
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
