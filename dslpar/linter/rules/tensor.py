"""TEN101 and on: the mode of tensor parallelism against its size (DESIGN, section 5)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from dslpar.core import mesh
from dslpar.core.suggest import did_you_mean
from dslpar.layout import divisors
from dslpar.layout.resolve import MODES
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.schema import sections
from dslpar.schema.reader import recase_fix

_OPTIONS = ("depth", "shape", "sequence", "impl", "residual", "inner")


@rule("TEN101", "no-mode")
def no_mode(cx: Context) -> Iterator[Problem]:
    """Tensor parallelism over more than one rank has no mode.

    What it does:
        Asks for a mode where parallel.tensor has a size over 1.

    Why:
        Without a mode each rank would hold the whole layer: ColossalAI replicates it in silence.

    Example:
        parallel = dict(tensor=4)

    Use instead:
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    tensor = cx.tensor
    if tensor is not None and tensor.mode is None and tensor.size > 1:
        message = f"tensor parallelism of size {tensor.size} has no mode"
        yield cx.problem("parallel.tensor.size", message, f"tensor=dict(size={tensor.size}, mode='1d')")


@rule("TEN102", "unknown-mode")
def unknown_mode(cx: Context) -> Iterator[Problem]:
    """The mode is none that dslpar knows.

    What it does:
        Compares parallel.tensor.mode with the list of modes.

    Why:
        A layer is cut by its mode; there is no default that could be meant.

    Example:
        parallel = dict(tensor=dict(size=4, mode='1D'))

    Use instead:
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    tensor = cx.tensor
    if tensor is not None and tensor.mode is not None and tensor.mode not in MODES:
        close = did_you_mean(tensor.mode, MODES) or "the modes are " + ", ".join(map(repr, MODES))
        problem = cx.problem("parallel.tensor.mode", f"unknown mode {tensor.mode!r}", close)
        yield problem._replace(fix=recase_fix(cx.config, problem.location, tensor.mode, MODES))


@rule("TEN103", "not-a-cube")
def not_a_cube(cx: Context) -> Iterator[Problem]:
    """Mode '3d' with a size that is no cube.

    What it does:
        Checks that the size is q * q * q.

    Why:
        A 3D layer lies on a cube of ranks; mode 'cuboid' takes any shape.

    Example:
        parallel = dict(tensor=dict(size=4, mode='3d'))

    Use instead:
        parallel = dict(tensor=dict(size=8, mode='3d'))
    """
    yield from _no_power(cx, "3d", 3, "q*q*q")


@rule("TEN104", "not-a-square")
def not_a_square(cx: Context) -> Iterator[Problem]:
    """Mode '2d' with a size that is no square.

    What it does:
        Checks that the size is q * q.

    Why:
        A 2D layer lies on a square of ranks; mode 'cuboid' takes any shape.

    Example:
        parallel = dict(tensor=dict(size=2, mode='2d'))

    Use instead:
        parallel = dict(tensor=dict(size=4, mode='2d'))
    """
    yield from _no_power(cx, "2d", 2, "q*q")


@rule("TEN105", "no-depth")
def no_depth(cx: Context) -> Iterator[Problem]:
    """Mode '2.5d' without a depth.

    What it does:
        Asks for depth in mode '2.5d'.

    Why:
        size = depth * q * q has more than one solution.

    Example:
        parallel = dict(tensor=dict(size=8, mode='2.5d'))

    Use instead:
        parallel = dict(tensor=dict(size=8, mode='2.5d', depth=2))
    """
    tensor = cx.tensor
    if tensor is not None and tensor.mode == "2.5d" and tensor.depth is None and tensor.size > 1:
        depths = [str(depth) for depth in _depths(tensor.size)]
        fix = f"depth={depths[0]}" if len(depths) == 1 else f"depth is one of {', '.join(depths)}"
        yield cx.problem("parallel.tensor.mode", "mode '2.5d' needs a depth", f"{fix} for size {tensor.size}")


@rule("TEN106", "not-depth-times-square")
def not_depth_times_square(cx: Context) -> Iterator[Problem]:
    """Mode '2.5d' with a size that is not depth * q * q.

    What it does:
        Checks that size / depth is a square.

    Why:
        A 2.5D layer lies on depth squares of ranks.

    Example:
        parallel = dict(tensor=dict(size=8, mode='2.5d', depth=3))

    Use instead:
        parallel = dict(tensor=dict(size=8, mode='2.5d', depth=2))
    """
    tensor = cx.tensor
    if tensor is not None and tensor.mode == "2.5d" and tensor.depth and MODES["2.5d"].axes(tensor) is None:
        message = f"size {tensor.size} is not depth {tensor.depth} times a square"
        depths = ", ".join(map(str, _depths(tensor.size)))
        sizes = " or ".join(str(tensor.depth * side**2) for side in _roots(tensor.size / tensor.depth, 2))
        fix = f"for size {tensor.size} depth is one of {depths}; with depth {tensor.depth}, sizes of {sizes} fit"
        yield cx.problem("parallel.tensor.depth", message, fix)


@rule("TEN107", "shape-is-not-the-size")
def shape_is_not_the_size(cx: Context) -> Iterator[Problem]:
    """Mode 'cuboid' without a shape, or with one that is not size ranks.

    What it does:
        Checks that shape=(x, y, z) is given and that x * y * z = size.

    Why:
        The size says how many ranks a tensor group takes from the mesh, the shape how they lie.

    Example:
        parallel = dict(tensor=dict(size=4, mode='cuboid', shape=(2, 3, 1)))

    Use instead:
        parallel = dict(tensor=dict(size=4, mode='cuboid', shape=(2, 2, 1)))
    """
    tensor = cx.tensor
    if tensor is None or tensor.mode != "cuboid" or MODES["cuboid"].axes(tensor) is not None:
        return
    if tensor.shape is None:
        message, fix = "mode 'cuboid' needs a shape", f"shape=(x, y, z) with x*y*z = {tensor.size}"
        yield cx.problem("parallel.tensor.mode", message, fix)
    else:
        ranks = math.prod(tensor.shape)
        message = f"shape {'*'.join(map(str, tensor.shape))} is {ranks} ranks, and size is {tensor.size}"
        yield cx.problem("parallel.tensor.shape", message, f"size={ranks}, or a shape of {tensor.size} ranks")


@rule("TEN108", "option-of-another-mode")
def option_of_another_mode(cx: Context) -> Iterator[Problem]:
    """A key of parallel.tensor that has no meaning in its mode.

    What it does:
        Finds depth outside '2.5d', shape outside 'cuboid', sequence outside '1d', impl outside 'sequence', residual and
        inner outside '3d' and 'cuboid'.

    Why:
        The author expects an effect that will not come.

    Example:
        parallel = dict(tensor=dict(size=4, mode='1d', depth=2))

    Use instead:
        parallel = dict(tensor=dict(size=8, mode='2.5d', depth=2))
    """
    tensor = cx.spec.parallel.tensor
    if tensor is None or (tensor.mode is None and tensor.size > 1) or tensor.mode not in (None, *MODES):
        return
    meant = MODES[tensor.mode].options if tensor.mode else ()
    for option in _OPTIONS:
        if option not in meant and getattr(tensor, option) is not None:
            modes = " or ".join(repr(mode) for mode, row in MODES.items() if option in row.options)
            message = f"{option} has no meaning " + (f"in mode {tensor.mode!r}" if tensor.mode else "without a mode")
            yield cx.problem(f"parallel.tensor.{option}", message, f"leave it out; {option} belongs to mode {modes}")


@rule("DEAD109", "keep-without-effect", "warning")
def keep_without_effect(cx: Context) -> Iterator[Problem]:
    """keep names panels that are not gathered.

    What it does:
        Compares keep with the panels that the layers gather on this cuboid: of activations where z is over 1, or y is
        and the residual is not replicated; of weights where q is over 1.

    Why:
        What is not gathered cannot be kept or let go. In modes '1d' (without sequence) and 'sequence' nothing is, and
        keep has no effect; elsewhere 'w' may mean 'none', and 'both' may mean 'x' or 'w'.

    Example:
        parallel = dict(tensor=dict(size=2, mode='1d', keep='none'))

    Use instead:
        parallel = dict(tensor=dict(size=2, mode='1d', sequence=True, keep='none'))
    """
    tensor, cuboid = cx.tensor, cx.cuboid
    if tensor is None or tensor.keep is None or (tensor.size == 1 and tensor.mode):
        return  # of one rank DEAD110 says more
    asked = {"x": {"x"}, "w": {"w"}, "both": {"x", "w"}, "none": set()}[tensor.keep]
    gathered = gathered_panels(cuboid)
    named = f"in mode {cuboid.mode!r} of shape {'*'.join(map(str, cuboid.shape))}" if cuboid.mode else "without a mode"
    if not gathered:
        message = f"keep={tensor.keep!r} has no effect: no panels are gathered {named}"
        yield cx.problem("parallel.tensor.keep", message, "leave it out")
    elif not asked <= gathered:
        (panel,) = asked - gathered
        same = "".join(asked & gathered) or "none"
        message = f"keep={tensor.keep!r}, and no {panel} panels are gathered {named}"
        yield cx.problem("parallel.tensor.keep", message, f"keep={same!r} means the same")


@rule("TEN130", "layers-not-parallel")
def layers_not_parallel(cx: Context) -> Iterator[Problem]:
    """Tensor parallelism over a layers_cfg of torch.nn's layers.

    What it does:
        Finds layers of torch.nn that have parameters where the tensor size is over 1.

    Why:
        They know nothing of tensor groups: each rank would hold the whole layer, and train it on the same samples.

    Example:
        model = dict(type='Sequential', layers_cfg=[dict(type='Linear', in_features=8, out_features=8)])
        parallel = dict(tensor=dict(size=2, mode='1d'))

    Use instead:
        model = dict(type='Sequential', layers_cfg=[dict(type='Linear', in_features=8, out_features=8)])
        parallel = dict(tensor=1)
    """
    size, model = cx.cuboid.size, cx.reading.spec.model
    if size == 1 or not isinstance(model, sections.OtherModel) or cx.unlisted:
        return
    from dslpar.schema.torch_layers import LAYERS

    for index, layer in enumerate(model.layers or ()):
        name = str(layer.get("type", "")).removeprefix("torch.nn.")
        if name in LAYERS and LAYERS[name].parameters:
            message = f"{name} is a plain layer: {size} tensor ranks would each hold all of it"
            key = f"model.layers_cfg.{index}"
            yield Problem(cx.config.at(key), message, "tensor=1, or layers of dslpar.layers by their full names", key)
            return


@rule("TEN204", "sequence-does-not-divide")
def sequence_does_not_divide(cx: Context) -> Iterator[Problem]:
    """The sequence does not divide over the ranks that split it.

    What it does:
        Checks the tokens of a sample against y where the residual is kept by sequence, and against x in mode
        'sequence'.

    Why:
        Every rank holds the same number of tokens.

    Example:
        parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))
        data = dict(seq_len=30)

    Use instead:
        parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))
        data = dict(seq_len=32)
    """
    longest = cx.model_of(sections.Model).max_seq_len
    length = cx.spec.data.seq_len or longest
    for condition in divisors.sequence(length, cx.cuboid):
        if condition.holds:
            continue
        from dslpar.layout.nearest import multiples  # here: only a mistake needs it

        by = condition.by
        legal = [str(size) for size in multiples(length, by) if not cx.spec.data.seq_len or size <= longest]
        fix = " or ".join(legal) or f"seq_len={by} with max_seq_len={by}"
        message = f"sequences of {length} tokens do not divide over {by} ranks"
        yield cx.problem(("data.seq_len", "model.max_seq_len"), message, f"nearest legal: {fix}")


def gathered_panels(cuboid: mesh.Tensor) -> set[str]:
    """The panels that a linear gathers: "x", of activations, and "w", of weights."""
    x = cuboid.z > 1 or (cuboid.y > 1 and cuboid.residual != "replicated")
    return {name for name, there in (("x", x), ("w", cuboid.q > 1)) if there}


def _roots(value: float, power: int) -> tuple[int, int]:
    root = max(1, math.floor(value ** (1 / power) + 1e-9))
    return root, root + 1


def _depths(size: int) -> list[int]:
    return [size // side**2 for side in range(math.isqrt(size), 0, -1) if size % side**2 == 0]


def _no_power(cx: Context, mode: str, power: int, words: str) -> Iterator[Problem]:
    tensor = cx.tensor
    if tensor is None or tensor.mode != mode or MODES[mode].axes(tensor) is not None:
        return
    below, above = (root**power for root in _roots(tensor.size, power))
    message = f"size {tensor.size}, and mode {mode!r} needs {words} ranks"
    yield cx.problem(
        "parallel.tensor.size", message, f"nearest legal: {below} or {above}; or mode 'cuboid' with a shape"
    )


RULES = (
    no_mode,
    unknown_mode,
    not_a_cube,
    not_a_square,
    no_depth,
    not_depth_times_square,
    shape_is_not_the_size,
    option_of_another_mode,
    keep_without_effect,
    layers_not_parallel,
    sequence_does_not_divide,
)
