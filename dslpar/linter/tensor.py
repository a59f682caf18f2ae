"""TEN: the mode of tensor parallelism against its size, and the model's dims against the cuboid (DESIGN, section 5)."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from dslpar.job import MODES
from dslpar.linter.context import Context
from dslpar.linter.rule import Problem, rule
from dslpar.read import did_you_mean

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
        said = f"tensor parallelism of size {tensor.size} has no mode"
        yield cx.problem("parallel.tensor.size", said, f"tensor=dict(size={tensor.size}, mode='1d')")


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
        yield cx.problem("parallel.tensor.mode", f"unknown mode {tensor.mode!r}", close)


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
        said = f"size {tensor.size} is not depth {tensor.depth} times a square"
        depths = ", ".join(map(str, _depths(tensor.size)))
        sizes = " or ".join(str(tensor.depth * side**2) for side in _roots(tensor.size / tensor.depth, 2))
        fix = f"for size {tensor.size} depth is one of {depths}; with depth {tensor.depth}, sizes of {sizes} fit"
        yield cx.problem("parallel.tensor.depth", said, fix)


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
        said, fix = "mode 'cuboid' needs a shape", f"shape=(x, y, z) with x*y*z = {tensor.size}"
        yield cx.problem("parallel.tensor.mode", said, fix)
    else:
        ranks = math.prod(tensor.shape)
        said = f"shape {'*'.join(map(str, tensor.shape))} is {ranks} ranks, and size is {tensor.size}"
        yield cx.problem("parallel.tensor.shape", said, f"size={ranks}, or a shape of {tensor.size} ranks")


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
            said = f"{option} has no meaning " + (f"in mode {tensor.mode!r}" if tensor.mode else "without a mode")
            yield cx.problem(f"parallel.tensor.{option}", said, f"leave it out; {option} belongs to mode {modes}")


@rule("TEN201", "heads-do-not-divide")
def heads_do_not_divide(cx: Context) -> Iterator[Problem]:
    """The attention heads do not divide over the ranks that share them.

    What it does:
        Checks num_heads against y (against y * z if inner activations are kept by heads), and for Ulysses num_heads / y
        against x.

    Why:
        A rank computes whole heads.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=6, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=4, mode='1d'))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=8, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    cuboid = cx.cuboid
    by, words = cuboid.y, f"y = {cuboid.y}"
    if cuboid.inner == "heads" and cuboid.z > 1:
        by, words = cuboid.y * cuboid.z, f"y * z = {cuboid.y * cuboid.z}"
    if cuboid.split == "sequence" and cuboid.impl == "ulysses":
        by, words = cuboid.y * cuboid.x, f"x = {cuboid.x} (Ulysses)"
    heads, hidden = cx.gpt.num_heads, cx.gpt.hidden_size
    if heads % by:
        said = f"num_heads {heads} does not divide by {words} of mode {cx.cuboid.mode!r}"
        legal = [count for count in divisors(hidden) if count % by == 0]
        fix = (
            _two_nearest(heads, legal)
            if legal
            else f"a hidden_size that is a multiple of {by}, or a smaller tensor size"
        )
        yield cx.problem("model.num_heads", said, fix)


@rule("TEN202", "hidden-does-not-divide")
def hidden_does_not_divide(cx: Context) -> Iterator[Problem]:
    """hidden_size does not divide over the ranks that cut it.

    What it does:
        Checks hidden_size against z * q and y * q, against z * y if the residual is kept by hidden, and against y * z
        if inner activations are kept by heads.

    Why:
        Every piece of a weight and of the residual stream has the same size.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=38, num_heads=2, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=8, mode='3d'))
        batch = dict(micro_size=4)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=40, num_heads=2, vocab_size=256, max_seq_len=64)
        parallel = dict(tensor=dict(size=8, mode='3d'))
        batch = dict(micro_size=4)
    """
    hidden, heads = cx.gpt.hidden_size, cx.gpt.num_heads
    cuts = {name: size for name, size in _hidden_cuts(cx).items() if hidden % size}
    if cuts:
        words = " and by ".join(f"{name} = {size}" for name, size in cuts.items())
        said = f"hidden_size {hidden} does not divide by {words} of mode {cx.cuboid.mode!r}"
        yield cx.problem("model.hidden_size", said, _nearest(hidden, math.lcm(heads, *_hidden_cuts(cx).values())))


@rule("TEN203", "ffn-does-not-divide")
def ffn_does_not_divide(cx: Context) -> Iterator[Problem]:
    """The MLP's hidden size does not divide over the ranks that cut it.

    What it does:
        Checks ffn_hidden_size against y * q, and against y * z if inner activations are kept by heads.

    Why:
        Every piece of a weight has the same size.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64,
                     ffn_hidden_size=90)
        parallel = dict(tensor=dict(size=4, mode='1d'))

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=256, max_seq_len=64,
                     ffn_hidden_size=96)
        parallel = dict(tensor=dict(size=4, mode='1d'))
    """
    ffn, by = cx.gpt.ffn_hidden_size, math.lcm(*_inner_cuts(cx).values())
    if ffn is not None and ffn % by:
        words = " and by ".join(f"{name} = {size}" for name, size in _inner_cuts(cx).items() if ffn % size)
        said = f"ffn_hidden_size {ffn} does not divide by {words} of mode {cx.cuboid.mode!r}"
        yield cx.problem("model.ffn_hidden_size", said, _nearest(ffn, by))


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
    cuboid = cx.cuboid
    by = cuboid.y if cuboid.residual == "sequence" else 1
    if cuboid.split == "sequence":
        by *= cuboid.x
    keys = ("data.seq_len", "model.max_seq_len")
    length = cx.spec.data.seq_len or cx.gpt.max_seq_len
    if length % by:
        said = f"sequences of {length} tokens do not divide over {by} ranks"
        longest = cx.gpt.max_seq_len if cx.spec.data.seq_len else length + by
        yield cx.problem(keys, said, _two_nearest(length, range(by, max(longest, by) + 1, by)))


@rule("TEN205", "heads-do-not-divide-hidden")
def heads_do_not_divide_hidden(cx: Context) -> Iterator[Problem]:
    """hidden_size is no multiple of num_heads.

    What it does:
        Checks that a head has a whole number of features.

    Why:
        Attention cuts hidden_size into num_heads equal heads.

    Example:
        model = dict(type='GPT', num_layers=2, hidden_size=50, num_heads=4, vocab_size=256, max_seq_len=64)

    Use instead:
        model = dict(type='GPT', num_layers=2, hidden_size=52, num_heads=4, vocab_size=256, max_seq_len=64)
    """
    heads, hidden = cx.gpt.num_heads, cx.gpt.hidden_size
    if hidden % heads:
        said = f"hidden_size {hidden} is not a multiple of num_heads {heads}"
        yield cx.problem("model.hidden_size", said, _nearest(hidden, heads))


def _inner_cuts(cx: Context) -> dict[str, int]:
    """What inner features are cut by."""
    cuboid = cx.cuboid
    cuts = {"y * q": cuboid.y * cuboid.q}
    return cuts | {"y * z": cuboid.y * cuboid.z} if cuboid.inner == "heads" else cuts


def _hidden_cuts(cx: Context) -> dict[str, int]:
    """What hidden_size is cut by: the features of the residual stream, and those of attention."""
    cuboid = cx.cuboid
    cuts = {"z * q": cuboid.z * cuboid.q} | _inner_cuts(cx)
    return cuts | {"z * y": cuboid.z * cuboid.y} if cuboid.residual == "hidden" else cuts


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _two_nearest(value: int, legal: Sequence[int]) -> str:
    """The legal sizes next to `value`; `legal` is in order and not empty."""
    at = bisect_left(legal, value)
    return "nearest legal: " + " or ".join(map(str, legal[max(0, at - 1) : at + 1]))


def _nearest(value: int, by: int) -> str:
    return _two_nearest(value, range(by, value + by + 1, by))


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
    said = f"size {tensor.size}, and mode {mode!r} needs {words} ranks"
    yield cx.problem("parallel.tensor.size", said, f"nearest legal: {below} or {above}; or mode 'cuboid' with a shape")


RULES = (
    no_mode,
    unknown_mode,
    not_a_cube,
    not_a_square,
    no_depth,
    not_depth_times_square,
    shape_is_not_the_size,
    option_of_another_mode,
    heads_do_not_divide,
    hidden_does_not_divide,
    ffn_does_not_divide,
    sequence_does_not_divide,
    heads_do_not_divide_hidden,
)
