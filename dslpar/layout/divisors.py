"""Divisibility conditions of sizes on a cuboid of ranks.

All ranks hold pieces of the same size, so a sharded size must be divisible by the number of ranks that shard it. The
linter, `dslpar show` and the layers, when they are built, all use exactly this table. `dslpar.layout.sharding` has the
axes that shard each activation. A model family combines its conditions from these.

Letters: A heads, G heads of keys and values, H residual features (H / A per head), F features of the MLP. x = d * q, y
and z are the axes of the cuboid (docs/architecture.md, The cuboid). Under context parallelism d splits sequences, and
the first row has q in place of x. "residual=batch" means that ranks along y store different samples of the residual,
and "inner=heads" that ranks along z store different heads of inner activations.

=================  =====================================================================  ======
size               must be divisible by                                                   rule
=================  =====================================================================  ======
batch.micro_size   x; x * y if residual=batch; x * z if inner=batch                       BAT102
num_heads A        y; y * z if inner=heads; y * x for Ulysses                             TEN201
..                 G                                                                      TEN207
num_kv_heads G     as num_heads                                                           TEN206
hidden_size H      z * q, y * q; y * z if residual=hidden or inner=heads                  TEN202
..                 A                                                                      TEN205
..                 A * y * q / gcd(y * q, G): y * q must divide the features of G heads   TEN208
..                 2 * A for rotary positions                                             TEN209
ffn_hidden_size F  y * q; y * z if inner=heads                                            TEN203
seq_len            d under context parallelism; times y if residual=sequence              TEN204
=================  =====================================================================  ======

The vocabulary is padded instead. A, G and H depend on each other: `dslpar.layout.nearest` finds legal combinations.

    >>> sizes = Attention(hidden_size=50, num_heads=6)
    >>> cuboid = TensorMesh(y=4, mode="1d")
    >>> [(each.key, each.value, each.why) for each in attention(sizes, cuboid) if not each.holds]
    [('num_heads', 6, 'y = 4'), ('hidden_size', 50, 'y * q = 4'), ('hidden_size', 50, 'num_heads = 6')]
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from dslpar.core.mesh import TensorMesh
from dslpar.layout.sharding import INWARD_WEIGHT, OUTWARD_WEIGHT, inner_cuts, residual_cuts


class Condition(NamedTuple):
    """Condition that a size is divisible by a number."""

    key: str
    """The model's field, or the full key of another section."""
    value: int
    """The size."""
    by: int
    """The number that must divide the size."""
    why: str
    """Explanation of `by`, such as "y * q = 4"."""
    code: str
    """The rule that reports it."""

    @property
    def holds(self) -> bool:
        """Return whether `value` is divisible by `by`."""
        return self.value % self.by == 0


class Attention(NamedTuple):
    """Sizes of a transformer's attention, which depend on each other."""

    hidden_size: int
    """Features of the residual stream, which equal the features of all heads together."""
    num_heads: int
    num_kv_heads: int | None = None
    """None means num_heads."""
    rotary: bool = False
    """Whether positions are rotary, which needs pairs of features per head."""


# The table --------------------------------------------------------------------------------------------------------


def least_micro_size(cuboid: TensorMesh) -> int:
    """Return the least legal micro_size; every legal micro_size is a multiple of it."""
    return common(batch(0, cuboid))


def batch(micro_size: int, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of micro_size, the samples per micro-batch."""
    cuts = [
        ("d", "q") if cuboid.split == "batch" else ("q",) if cuboid.q > 1 else (),
        residual_cuts(cuboid).batch,
        inner_cuts(cuboid).batch,
    ]
    for axes in dict.fromkeys(cuts):
        yield cut("batch.micro_size", micro_size, cuboid, axes, "BAT102")


def attention(sizes: Attention, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of attention's heads and residual features."""
    yield from heads(sizes, cuboid)
    yield from hidden(sizes, cuboid)


def heads(sizes: Attention, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of attention's heads."""
    yield head_cut("num_heads", sizes.num_heads, cuboid, "TEN201")
    if sizes.num_kv_heads is not None:
        yield head_cut("num_kv_heads", sizes.num_kv_heads, cuboid, "TEN206")
        why = f"num_kv_heads = {sizes.num_kv_heads}"
        yield Condition("num_heads", sizes.num_heads, sizes.num_kv_heads, why, "TEN207")


def head_cut(key: str, count: int, cuboid: TensorMesh, code: str) -> Condition:
    """Return the condition of a number of heads; Ulysses also divides each tensor rank's heads among its ranks."""
    each = cut(key, count, cuboid, head_axes(cuboid), code)
    if cuboid.ulysses == 1:
        return each
    axes = " * ".join([*(axis for axis in head_axes(cuboid) if getattr(cuboid, axis) > 1), "ulysses"])
    by = head_ranks(cuboid)
    return each._replace(by=by, why=f"{axes} = {by}")


def residual_features(size: int, cuboid: TensorMesh, key: str = "hidden_size") -> Iterator[Condition]:
    """Yield the conditions of residual features, in a model whose attention has equally many inner features."""
    for axes in residual_axes(cuboid):
        yield cut(key, size, cuboid, axes, "TEN202")


def inner_features(size: int, cuboid: TensorMesh, key: str = "ffn_hidden_size") -> Iterator[Condition]:
    """Yield the conditions of the features between an inward and an outward layer."""
    for axes in inner_axes(cuboid):
        yield cut(key, size, cuboid, axes, "TEN203")


def hidden(sizes: Attention, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of hidden_size, which also counts the features of all heads."""
    size, num_heads, num_kv_heads, rotary = sizes
    yield from residual_features(size, cuboid)
    yield Condition("hidden_size", size, num_heads, f"num_heads = {num_heads}", "TEN205")
    if num_kv_heads is not None:
        # The weights of q, k and v are blocks of one weight, each sharded by itself. So y * q must divide the
        # H * G / A features of keys.
        cut = cuboid.y * cuboid.q
        times = cut // math.gcd(cut, num_kv_heads)
        why = f"num_heads * {times} = {times * num_heads} (features of num_kv_heads by y * q)"
        yield Condition("hidden_size", size, times * num_heads if times > 1 else 1, why, "TEN208")
    if rotary:
        why = f"num_heads * 2 = {2 * num_heads} (pairs of features for rotary positions)"
        yield Condition("hidden_size", size, 2 * num_heads, why, "TEN209")


def sequence(seq_len: int, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the condition of seq_len, the tokens per sample."""
    if axes := residual_cuts(cuboid).sequence:
        yield cut("data.seq_len", seq_len, cuboid, axes, "TEN204")


def token_mixing(size: int, cuboid: TensorMesh, key: str = "hidden_size") -> Iterator[Condition]:
    """Yield the condition of residual features for layers that mix tokens (MLP-Mixer) of a split sequence.

    The ranks exchange pieces of the sequence for pieces of the features.
    """
    cuts = residual_cuts(cuboid)
    if cuts.sequence:
        yield cut(key, size, cuboid, _cutting(cuboid, cuts.sequence + cuts.features), "TEN140")


def patches(num_tokens: int, features: int, cuboid: TensorMesh) -> Iterator[Condition]:
    """Yield the conditions of an image's tokens and of a patch's numbers, which are sharded as inner activations."""
    for axes in dict.fromkeys((residual_cuts(cuboid).sequence, inner_cuts(cuboid).sequence)):
        if axes:
            each = cut("image_size", num_tokens, cuboid, axes, "TEN140")
            yield each._replace(why=f"{each.why} (tokens of an image)")
    each = cut("patch_size", features, cuboid, _cutting(cuboid, inner_cuts(cuboid).features), "TEN140")
    yield each._replace(why=f"{each.why} (numbers of a patch)")


def vocabulary(vocab_size: int, cuboid: TensorMesh) -> Condition:
    """Return the condition of the padded vocabulary: y pieces, each split into q for the table and z for the logits."""
    by_z = cuboid.z if "z" in inner_cuts(cuboid).features else 1
    by = cuboid.y * math.lcm(cuboid.q, by_z)
    padded = -(-vocab_size // by) * by
    why = f"y * lcm(q, z) = {by}" if by_z > 1 else f"y * q = {by}"
    why += f"; {vocab_size} padded to {padded}" if padded != vocab_size else "; no padding"
    return Condition("vocab_size", padded, by, why, "")


def common(conditions: Iterable[Condition]) -> int:
    """Return the least size for which all conditions hold."""
    return math.lcm(*(each.by for each in conditions))


# Sharding axes ----------------------------------------------------------------------------------------------------

Axes = tuple[str, ...]


def cut(key: str, value: int, cuboid: TensorMesh, axes: Axes, code: str) -> Condition:
    """Return the divisibility condition of a size sharded over these axes. Its text calls axes d and q together x."""
    named = ("x", *axes[2:]) if axes[:2] == ("d", "q") else axes
    by = ranks(cuboid, axes)
    return Condition(key, value, by, f"{' * '.join(named) or '1'} = {by}", code)


def ranks(cuboid: TensorMesh, axes: Axes) -> int:
    """Return the number of ranks in a group over these axes."""
    count = 1
    for axis in axes:
        count *= getattr(cuboid, axis)
    return count


def head_axes(cuboid: TensorMesh) -> Axes:
    """Return the axes that shard attention's heads, which are inner features."""
    return _cutting(cuboid, inner_cuts(cuboid).features)


def inner_axes(cuboid: TensorMesh) -> list[Axes]:
    """Return the axes that shard inner features: in weights, and in activations if they differ."""
    activations = _cutting(cuboid, inner_cuts(cuboid).features)
    return [INWARD_WEIGHT[0]] + ([activations] if "z" in activations else [])


def residual_axes(cuboid: TensorMesh) -> list[Axes]:
    """Return the axes that shard residual features: in weights, as attention's inner features, and in activations."""
    kept = [("y", "z")] if "y" in residual_cuts(cuboid).features and cuboid.z > 1 else []
    return list(dict.fromkeys([OUTWARD_WEIGHT[0], *inner_axes(cuboid), *kept]))


def residual_only_axes(cuboid: TensorMesh) -> list[Axes]:
    """Return the axes that shard residual features apart from attention: in weights, and in activations."""
    kept = [residual_cuts(cuboid).features] if residual_cuts(cuboid).features else []
    return list(dict.fromkeys([OUTWARD_WEIGHT[0], *kept]))


def _cutting(cuboid: TensorMesh, axes: Axes) -> Axes:
    """Drop axis z if it has one rank, so that messages in modes without z do not mention it."""
    return tuple(axis for axis in axes if axis != "z" or cuboid.z > 1)


def head_ranks(cuboid: TensorMesh) -> int:
    """Return the number of ranks that share attention's heads."""
    return ranks(cuboid, head_axes(cuboid)) * cuboid.ulysses


# Numbers ----------------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    """Return all divisors in ascending order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})
