"""TEN201 and on: the model's dims against what the cuboid cuts them by (DESIGN, section 5, "Divisors")."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence

from dslpar.linter.context import Context
from dslpar.linter.rule import Problem, rule


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


RULES = (
    heads_do_not_divide,
    hidden_does_not_divide,
    ffn_does_not_divide,
    sequence_does_not_divide,
    heads_do_not_divide_hidden,
)
