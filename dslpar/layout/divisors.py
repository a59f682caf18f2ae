"""Which size must divide by what, on which cuboid of ranks.

Every rank holds pieces of the same size, so each size that is cut divides by the ranks that cut it. This one table is
what the linter checks, what `dslpar show` prints, and what the layers demand when they are built, no more and no less;
which activations are cut by what stands in `dslpar.layout.sharding`. A model family composes its own from these.

Letters: A heads, G heads of keys and values, H residual features, F features of the MLP, a head has H / A of them.

=================  ============================================================================  ======
size               divides by                                                                    rule
=================  ============================================================================  ======
batch.micro_size   x; x * y if the residual is kept by batch; x * z if the inner is              BAT102
num_heads A        y; y * z if the inner is kept by heads; y * x for Ulysses                     TEN201
..                 G                                                                             TEN207
num_kv_heads G     as num_heads                                                                  TEN206
hidden_size H      z * q, y * q; y * z if the residual is kept by hidden, or the inner by heads  TEN202
..                 A                                                                             TEN205
..                 so much that the features of G heads divide by y * q, as those of A do        TEN208
..                 2 * A for rotary positions                                                    TEN209
ffn_hidden_size F  y * q; y * z if the inner is kept by heads                                    TEN203
seq_len            y if the residual is kept by sequence; x in mode 'sequence'                   TEN204
=================  ============================================================================  ======

The vocabulary is padded instead. A, G and H hang together: `dslpar.layout.nearest` gives sizes that are legal together.

    >>> sizes = Attention(hidden_size=50, num_heads=6)
    >>> cuboid = Tensor(y=4, mode="1d")
    >>> [(each.key, each.value, each.why) for each in attention(sizes, cuboid) if not each.holds]
    [('num_heads', 6, 'y = 4'), ('hidden_size', 50, 'y * q = 4'), ('hidden_size', 50, 'num_heads = 6')]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from dslpar.core.mesh import Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.layout.sharding import INWARD_WEIGHT, OUTWARD_WEIGHT, inner_cuts, residual_cuts


class Condition(NamedTuple):
    """One size that must divide by another."""

    key: str
    """The model's field, or the whole key of another section."""
    value: int
    by: int
    why: str
    """What `by` is: "y * q = 4"."""
    code: str
    """The rule that reports it."""

    @property
    def holds(self) -> bool:
        """Whether it divides."""
        return self.value % self.by == 0


class Attention(NamedTuple):
    """Sizes of a transformer's attention; all of them hang together."""

    hidden_size: int
    """Features of the residual stream, which are those of all heads together."""
    num_heads: int
    num_kv_heads: int | None = None
    """None: as many as num_heads."""
    rotary: bool = False
    """Whether positions turn pairs of a head's features."""


# The table --------------------------------------------------------------------------------------------------------


def least_micro_size(cuboid: Tensor) -> int:
    """Return the least legal micro_size, of which every legal one is a multiple."""
    return common(batch(0, cuboid))


def batch(micro_size: int, cuboid: Tensor) -> Iterator[Condition]:
    """What the samples of a micro-batch divide by."""
    cuts = [
        ("d", "q") if cuboid.split == "batch" else ("q",) if cuboid.q > 1 else (),
        residual_cuts(cuboid).batch,
        inner_cuts(cuboid).batch,
    ]
    for axes in dict.fromkeys(cuts):
        yield cut("batch.micro_size", micro_size, cuboid, axes, "BAT102")


def attention(sizes: Attention, cuboid: Tensor) -> Iterator[Condition]:
    """What heads and residual features divide by."""
    yield from heads(sizes, cuboid)
    yield from hidden(sizes, cuboid)


def heads(sizes: Attention, cuboid: Tensor) -> Iterator[Condition]:
    """What attention's heads divide by."""
    yield head_cut("num_heads", sizes.num_heads, cuboid, "TEN201")
    if sizes.num_kv_heads is not None:
        yield head_cut("num_kv_heads", sizes.num_kv_heads, cuboid, "TEN206")
        why = f"num_kv_heads = {sizes.num_kv_heads}"
        yield Condition("num_heads", sizes.num_heads, sizes.num_kv_heads, why, "TEN207")


def head_cut(key: str, count: int, cuboid: Tensor, code: str) -> Condition:
    """A number of heads; those of a tensor rank are shared out once more where ranks exchange tokens for heads."""
    each = cut(key, count, cuboid, head_axes(cuboid), code)
    if cuboid.ulysses == 1:
        return each
    axes = " * ".join([*(axis for axis in head_axes(cuboid) if getattr(cuboid, axis) > 1), "ulysses"])
    by = head_ranks(cuboid)
    return each._replace(by=by, why=f"{axes} = {by}")


def residual_features(size: int, cuboid: Tensor, key: str = "hidden_size") -> Iterator[Condition]:
    """What the features of the residual stream divide by, where attention cuts as many as inner ones."""
    for axes in residual_axes(cuboid):
        yield cut(key, size, cuboid, axes, "TEN202")


def inner_features(size: int, cuboid: Tensor, key: str = "ffn_hidden_size") -> Iterator[Condition]:
    """What the features between an inward and an outward layer divide by."""
    for axes in inner_axes(cuboid):
        yield cut(key, size, cuboid, axes, "TEN203")


def hidden(sizes: Attention, cuboid: Tensor) -> Iterator[Condition]:
    """What the residual's features divide by, as those of heads."""
    size, num_heads, num_kv_heads, rotary = sizes
    yield from residual_features(size, cuboid)
    yield Condition("hidden_size", size, num_heads, f"num_heads = {num_heads}", "TEN205")
    if num_kv_heads is not None:
        # The weights of q, k and v are blocks of one weight, each cut by itself: H * G / A features divide by y * q.
        cut = cuboid.y * cuboid.q
        times = cut // math.gcd(cut, num_kv_heads)
        why = f"num_heads * {times} = {times * num_heads} (features of num_kv_heads by y * q)"
        yield Condition("hidden_size", size, times * num_heads if times > 1 else 1, why, "TEN208")
    if rotary:
        why = f"num_heads * 2 = {2 * num_heads} (pairs of features for rotary positions)"
        yield Condition("hidden_size", size, 2 * num_heads, why, "TEN209")


def sequence(seq_len: int, cuboid: Tensor) -> Iterator[Condition]:
    """What the tokens of a sample divide by."""
    if axes := residual_cuts(cuboid).sequence:
        yield cut("data.seq_len", seq_len, cuboid, axes, "TEN204")


def token_mixing(size: int, cuboid: Tensor, key: str = "hidden_size") -> Iterator[Condition]:
    """What the residual's features divide by where ranks that cut the sequence share them out, to mix its tokens."""
    cuts = residual_cuts(cuboid)
    if cuts.sequence:
        yield cut(key, size, cuboid, _cutting(cuboid, cuts.sequence + cuts.features), "TEN140")


def patches(num_tokens: int, features: int, cuboid: Tensor) -> Iterator[Condition]:
    """What the tokens of an image divide by, and the numbers of a patch, which enter as inner activations."""
    for axes in dict.fromkeys((residual_cuts(cuboid).sequence, inner_cuts(cuboid).sequence)):
        if axes:
            each = cut("image_size", num_tokens, cuboid, axes, "TEN140")
            yield each._replace(why=f"{each.why} (tokens of an image)")
    each = cut("patch_size", features, cuboid, _cutting(cuboid, inner_cuts(cuboid).features), "TEN140")
    yield each._replace(why=f"{each.why} (numbers of a patch)")


def vocabulary(vocab_size: int, cuboid: Tensor) -> Condition:
    """What the rows of the token table divide by, after padding: y pieces, each in q for the table and z for logits."""
    by_z = cuboid.z if "z" in inner_cuts(cuboid).features else 1
    by = cuboid.y * math.lcm(cuboid.q, by_z)
    padded = -(-vocab_size // by) * by
    why = f"y * lcm(q, z) = {by}" if by_z > 1 else f"y * q = {by}"
    why += f"; {vocab_size} padded to {padded}" if padded != vocab_size else "; no padding"
    return Condition("vocab_size", padded, by, why, "")


def common(conditions: Iterable[Condition]) -> int:
    """Return the least size for which all of them hold."""
    return math.lcm(*(each.by for each in conditions))


# What cuts what, by axes ------------------------------------------------------------------------------------------

Axes = tuple[str, ...]


def cut(key: str, value: int, cuboid: Tensor, axes: Axes, code: str) -> Condition:
    """A size that is cut over these axes; d and q together are called x."""
    named = ("x", *axes[2:]) if axes[:2] == ("d", "q") else axes
    by = ranks(cuboid, axes)
    return Condition(key, value, by, f"{' * '.join(named) or '1'} = {by}", code)


def ranks(cuboid: Tensor, axes: Axes) -> int:
    """Return the ranks of a group over these axes."""
    count = 1
    for axis in axes:
        count *= getattr(cuboid, axis)
    return count


def head_axes(cuboid: Tensor) -> Axes:
    """What attention's heads are cut over, as inner features."""
    return _cutting(cuboid, inner_cuts(cuboid).features)


def inner_axes(cuboid: Tensor) -> list[Axes]:
    """What inner features are cut over: in weights, and in activations."""
    activations = _cutting(cuboid, inner_cuts(cuboid).features)
    return [INWARD_WEIGHT[0]] + ([activations] if "z" in activations else [])


def residual_axes(cuboid: Tensor) -> list[Axes]:
    """What residual features are cut over: in weights, as features of attention, and in activations."""
    kept = [("y", "z")] if "y" in residual_cuts(cuboid).features and cuboid.z > 1 else []
    return list(dict.fromkeys([OUTWARD_WEIGHT[0], *inner_axes(cuboid), *kept]))


def residual_only_axes(cuboid: Tensor) -> list[Axes]:
    """What residual features are cut over, whatever attention makes of them: in weights, and in activations."""
    kept = [residual_cuts(cuboid).features] if residual_cuts(cuboid).features else []
    return list(dict.fromkeys([OUTWARD_WEIGHT[0], *kept]))


def _cutting(cuboid: Tensor, axes: Axes) -> Axes:
    """Without axis z where it has one rank: modes without it need not hear of it."""
    return tuple(axis for axis in axes if axis != "z" or cuboid.z > 1)


def head_ranks(cuboid: Tensor) -> int:
    """Return the ranks that share attention's heads."""
    return ranks(cuboid, head_axes(cuboid)) * cuboid.ulysses


# Numbers ----------------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """Return all divisors, in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
