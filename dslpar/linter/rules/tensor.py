"""TEN101 and following: mode, size and options of tensor parallelism, from the table `dslpar.layout.modes.MODES`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress

from dslpar.core import mesh
from dslpar.layout import divisors
from dslpar.layout.modes import MODES, ON_ITS_AXIS, combines
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem, UnknownValueError
from dslpar.linter.rule import rule

_GATHERED = {"x": "activations", "w": "weights"}
_OPTIONS = tuple(dict.fromkeys(option for row in MODES.values() for option in row.options))


@rule("TEN101", "no-mode")
def no_mode(cx: Context) -> Iterator[Problem]:
    """Tensor parallelism over more than one rank has no mode."""
    tensor = cx.tensor.section
    if tensor is not None and tensor.mode is None and tensor.size > 1:
        message = f"tensor parallelism of size {tensor.size} has no mode"
        yield cx.problem("parallel.tensor.size", message, f"tensor=dict(size={tensor.size}, mode='1d')")


@rule("TEN102", "unknown-mode")
def unknown_mode(cx: Context) -> Iterator[Problem]:
    """An unknown mode of tensor parallelism."""
    yield from cx.misreads("TEN102")


@rule("TEN103", "not-a-cube")
def not_a_cube(cx: Context) -> Iterator[Problem]:
    """The size of mode '3d' is not a cube."""
    yield from _not_a_power(cx, "3d", 3)


@rule("TEN104", "not-a-square")
def not_a_square(cx: Context) -> Iterator[Problem]:
    """The size of mode '2d' is not a square."""
    yield from _not_a_power(cx, "2d", 2)


@rule("TEN105", "no-depth")
def no_depth(cx: Context) -> Iterator[Problem]:
    """Mode '2.5d' has no depth."""
    tensor = cx.tensor.section
    if tensor is not None and tensor.mode == "2.5d" and tensor.depth is None and tensor.size > 1:
        depths = [str(depth) for depth in _depths(tensor.size)]
        yield cx.problem("parallel.tensor.mode", "mode '2.5d' needs a depth", f"depth={' or '.join(depths)}")


@rule("TEN106", "not-depth-times-square")
def not_depth_times_square(cx: Context) -> Iterator[Problem]:
    """The size of mode '2.5d' is not depth * q * q."""
    tensor = cx.tensor.section
    if tensor is not None and tensor.mode == "2.5d" and tensor.depth and MODES["2.5d"].axes(tensor) is None:
        message = f"size {tensor.size} is not depth {tensor.depth} times a square"
        depths = " or ".join(map(str, _depths(tensor.size)))
        sizes = _fitting(cx, [tensor.depth * side**2 for side in _roots(tensor.size / tensor.depth, 2)])
        hint = f"depth={depths}" + (f"; or size={' or '.join(map(str, sizes))}" if sizes else "")
        yield cx.problem("parallel.tensor.depth", message, hint)


@rule("TEN107", "shape-is-not-the-size")
def shape_is_not_the_size(cx: Context) -> Iterator[Problem]:
    """Mode 'cuboid' has no shape, or the product of the shape is not the size."""
    tensor = cx.tensor.section
    if tensor is None or tensor.mode != "cuboid" or MODES["cuboid"].axes(tensor) is not None:
        return
    if tensor.shape is None:
        hint = f"choose a shape=(x, y, z) of x*y*z = {tensor.size} ranks"
        yield cx.problem("parallel.tensor.mode", "mode 'cuboid' needs a shape", hint)
    else:
        ranks = math.prod(tensor.shape)
        message = f"shape {'*'.join(map(str, tensor.shape))} has {ranks} ranks, but size is {tensor.size}"
        fits = f"size={ranks}; or " if _fitting(cx, [ranks]) else ""
        yield cx.problem("parallel.tensor.shape", message, f"{fits}choose a shape of {tensor.size} ranks")


@rule("TEN108", "option-of-another-mode")
def option_of_another_mode(cx: Context) -> Iterator[Problem]:
    """A key of parallel.tensor has no effect in the given mode."""
    tensor = cx.spec.parallel.tensor
    if tensor is None or (tensor.mode is None and tensor.size > 1) or tensor.mode not in (None, *MODES):
        return
    meant = MODES[tensor.mode].options if tensor.mode else ()
    for option in _OPTIONS:
        if option not in meant and getattr(tensor, option) is not None:
            modes = " or ".join(repr(mode) for mode, row in MODES.items() if option in row.options)
            message = f"{option} has no effect " + (f"in mode {tensor.mode!r}" if tensor.mode else "without a mode")
            yield cx.problem(f"parallel.tensor.{option}", message, f"leave it out: {option} belongs to mode {modes}")


@rule("TEN109", "context-does-not-combine")
def context_does_not_combine(cx: Context) -> Iterator[Problem]:
    """Context parallelism cannot be combined with this tensor mode, or ulysses_size does not divide its size."""
    tensor, context = cx.tensor.section, cx.spec.parallel.context
    if context is None:
        return
    if tensor is not None and not combines(tensor, context):
        message = f"mode {tensor.mode!r} {ON_ITS_AXIS[str(tensor.mode)]}"
        other = "" if tensor.mode == "2.5d" else "mode='1d'; or "
        yield cx.problem("parallel.tensor.mode", message, f"{other}leave parallel.context out")
    if context.size % (context.ulysses_size or 1):
        legal = " or ".join(map(str, divisors.divisors(context.size)))
        message = f"context of {context.size} ranks is not a multiple of {context.ulysses_size}"
        yield cx.problem("parallel.context.ulysses_size", message, f"choose {legal}; or leave it out")


@rule("TEN112", "ulysses-size-without-hybrid")
def ulysses_size_without_hybrid(cx: Context) -> Iterator[Problem]:
    """ulysses_size is set, but impl is not 'hybrid'."""
    context = cx.spec.parallel.context
    if context is not None and context.ulysses_size is not None and context.impl != "hybrid":
        message = f"ulysses_size has no effect with impl {context.impl or 'ring'!r}"
        yield cx.problem("parallel.context.ulysses_size", message, "impl='hybrid'; or leave it out")


@rule("DEAD109", "keep-without-effect", "warning")
def keep_without_effect(cx: Context) -> Iterator[Problem]:
    """parallel.tensor.keep names activations or weights that no layer gathers."""
    tensor, cuboid = cx.tensor.section, cx.tensor.cuboid
    if tensor is None or tensor.keep is None or (tensor.size == 1 and tensor.mode):
        return  # DEAD110 reports options of one rank
    kept = {"x": {"x"}, "w": {"w"}, "both": {"x", "w"}, "none": set()}[tensor.keep]
    gathered = gathered_panels(cuboid)
    where = f"in mode {cuboid.mode!r} of shape {'*'.join(map(str, cuboid.shape))}" if cuboid.mode else "without a mode"
    if not gathered:
        message = f"keep={tensor.keep!r} has no effect: no layer gathers tensors {where}"
        yield cx.problem("parallel.tensor.keep", message, "leave it out")
    elif not kept <= gathered:
        (panel,) = kept - gathered
        same = "".join(kept & gathered) or "none"
        message = f"keep={tensor.keep!r}, but no layer gathers {_GATHERED[panel]} {where}"
        yield cx.problem("parallel.tensor.keep", message, f"keep={same!r} means the same")


@rule("TEN130", "layers-not-parallel")
def layers_not_parallel(cx: Context) -> Iterator[Problem]:
    """A layers_cfg has torch.nn layers with parameters, which tensor parallelism does not shard."""
    model, size = cx.model.other, cx.tensor.cuboid.size
    if size == 1 or cx.model.unlisted:
        return
    from dslpar.schema.torch_layers import LAYERS  # most configs do not need it

    for index, layer in enumerate(model.layers or ()):
        name = str(layer.get("type", "")).removeprefix("torch.nn.")
        if name in LAYERS and LAYERS[name].parameters:
            message = f"{name} is not sharded: each of {size} tensor ranks would hold all of it"
            key = f"model.layers_cfg.{index}"
            yield Problem(
                cx.config.at(key),
                message,
                f"{cx.tensor.key}=1; or choose layers of dslpar.layers, by their full names",
                key,
            )
            return


@rule("TEN204", "sequence-does-not-divide")
def sequence_does_not_divide(cx: Context) -> Iterator[Problem]:
    """The sequence length is not a multiple of the number of ranks that split the sequence."""
    longest, key = cx.model.longest_sequence
    length = cx.spec.data.seq_len or longest
    for by in (condition.by for condition in divisors.sequence(length, cx.tensor.cuboid) if not condition.holds):
        from dslpar.layout.nearest import multiples  # only a mistake needs it

        legal = [str(size) for size in multiples(length, by) if not cx.spec.data.seq_len or size <= longest]
        nearest = " or ".join(legal) or f"data.seq_len={by} with {key}={by}"
        message = f"sequences of {length} tokens cannot be split evenly over {by} ranks"
        yield cx.problem(("data.seq_len", key), message, f"nearest legal: {nearest}")


def gathered_panels(cuboid: mesh.TensorMesh) -> set[str]:
    """Return what a linear layer gathers before its matrix product: "x" for activations, "w" for weights.

    docs/architecture.md, The cuboid, calls these gathered tensors the X panel and the W panel.
    """
    x = cuboid.z > 1 or (cuboid.y > 1 and cuboid.residual != "replicated")
    return {name for name, there in (("x", x), ("w", cuboid.q > 1)) if there}


def _roots(value: float, power: int) -> tuple[int, int]:
    """Return the whole numbers below and above a root, at least 1."""
    root = max(1, math.floor(value ** (1 / power) + 1e-9))
    return root, root + 1


def _fitting(cx: Context, sizes: list[int]) -> list[int]:
    """Return the tensor sizes that divide the world; all of them if the world size is unknown."""
    with suppress(UnknownValueError):
        return [size for size in sizes if cx.world.size % (cx.pipeline.stages * size) == 0]
    return sizes


def _depths(size: int) -> list[int]:
    """Return the depths for which the size is depth * q * q, in rising order."""
    return [size // side**2 for side in range(math.isqrt(size), 0, -1) if size % side**2 == 0]


def _not_a_power(cx: Context, mode: str, power: int) -> Iterator[Problem]:
    tensor = cx.tensor.section
    if tensor is None or tensor.mode != mode or MODES[mode].axes(tensor) is not None:
        return
    below, above = (root**power for root in _roots(tensor.size, power))
    message = f"size {tensor.size}, and mode {mode!r} needs {'*'.join('q' * power)} ranks"
    hint = f"nearest legal: {below} or {above}; or choose mode 'cuboid', and a shape"
    yield cx.problem("parallel.tensor.size", message, hint)


RULES = (
    no_mode,
    unknown_mode,
    not_a_cube,
    not_a_square,
    no_depth,
    not_depth_times_square,
    shape_is_not_the_size,
    option_of_another_mode,
    context_does_not_combine,
    ulysses_size_without_hybrid,
    keep_without_effect,
    layers_not_parallel,
    sequence_does_not_divide,
)
