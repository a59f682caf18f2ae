"""Which size must divide by what, on which cuboid of ranks; and the nearest sizes that do.

Every rank holds pieces of the same size, so each size that is cut divides by the ranks that cut it. This one table is
what the linter checks, what `dslpar show` prints, and what the placements of the layers need, no more and no less.

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

The vocabulary is padded instead. A, G and H hang together: `nearest` gives sizes that are legal together.

    >>> model = GPT(num_layers=2, hidden_size=50, num_heads=6, vocab_size=256, max_seq_len=64)
    >>> cuboid = Tensor(y=4, mode="1d")
    >>> [(each.key, each.value, each.why) for each in conditions(model, cuboid) if not each.holds]
    [('num_heads', 6, 'y = 4'), ('hidden_size', 50, 'y * q = 4'), ('hidden_size', 50, 'num_heads = 6')]
    >>> nearest(model, cuboid)
    [{'num_heads': 4, 'hidden_size': 48}]
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from typing import Any

from dslpar.core.mesh import Tensor
from dslpar.core.named_tuple import NamedTuple
from dslpar.schema.sections import GPT

LARGEST = 2**31 - 1
"""No size may be larger."""
_MOST_TRIED = 64


class Condition(NamedTuple):
    """One size that must divide by another."""

    key: str
    """The model's field, or the whole key of another section."""
    value: int
    by: int
    why: str
    """What `by` is: "y * q = 4"."""
    code: str
    """The rule that says so."""

    @property
    def holds(self) -> bool:
        """Whether it divides."""
        return self.value % self.by == 0


# The table --------------------------------------------------------------------------------------------------------


def least_micro_size(cuboid: Tensor) -> int:
    """The least legal micro_size, of which every legal one is a multiple."""
    return math.lcm(*(by for _, by in _micro_cuts(cuboid)))


def batch(micro_size: int, cuboid: Tensor) -> Iterator[Condition]:
    """Of the samples of a micro-batch."""
    for why, by in _micro_cuts(cuboid):
        yield Condition("batch.micro_size", micro_size, by, f"{why} = {by}", "BAT102")


def heads(model: Any, cuboid: Tensor) -> Iterator[Condition]:
    """Of attention's heads; `model` is a spec.GPT, or reads as one."""
    why, by = _heads_cut(cuboid)
    yield Condition("num_heads", model.num_heads, by, f"{why} = {by}", "TEN201")
    if model.num_kv_heads is not None:
        yield Condition("num_kv_heads", model.num_kv_heads, by, f"{why} = {by}", "TEN206")
        message = f"num_kv_heads = {model.num_kv_heads}"
        yield Condition("num_heads", model.num_heads, model.num_kv_heads, message, "TEN207")


def hidden(model: Any, cuboid: Tensor) -> Iterator[Condition]:
    """Of the residual's features, which are those of all heads together."""
    size, all_heads, kv_heads = model.hidden_size, model.num_heads, model.num_kv_heads
    for why, by in _hidden_cuts(cuboid).items():
        yield Condition("hidden_size", size, by, f"{why} = {by}", "TEN202")
    yield Condition("hidden_size", size, all_heads, f"num_heads = {all_heads}", "TEN205")
    if kv_heads is not None:
        cut = cuboid.y * cuboid.q
        times = cut // math.gcd(cut, kv_heads)
        message = f"num_heads * {times} = {times * all_heads} (features of num_kv_heads by y * q)"
        yield Condition("hidden_size", size, times * all_heads if times > 1 else 1, message, "TEN208")
    if model.positions == "rotary":
        message = f"num_heads * 2 = {2 * all_heads} (pairs of features for rotary positions)"
        yield Condition("hidden_size", size, 2 * all_heads, message, "TEN209")


def ffn(model: Any, cuboid: Tensor) -> Iterator[Condition]:
    """Of the MLP's features."""
    for why, by in _inner_cuts(cuboid).items():
        yield Condition("ffn_hidden_size", model.ffn_size, by, f"{why} = {by}", "TEN203")


def sequence(seq_len: int, cuboid: Tensor) -> Iterator[Condition]:
    """Of the tokens of a sample."""
    if cuboid.residual == "sequence":
        yield Condition("data.seq_len", seq_len, cuboid.y, f"y = {cuboid.y}", "TEN204")
    if cuboid.split == "sequence":
        yield Condition("data.seq_len", seq_len, cuboid.x, f"x = {cuboid.x}", "TEN204")


def conditions(model: Any, cuboid: Tensor, seq_len: int = 0, micro_size: int = 0) -> list[Condition]:
    """All of them, without those that ask for nothing; 0: not known."""
    found = [*batch(micro_size, cuboid)]
    if isinstance(model, GPT):
        found += [*heads(model, cuboid), *hidden(model, cuboid), *ffn(model, cuboid), *sequence(seq_len, cuboid)]
    return [each for each in found if each.by > 1]


def common(found: Iterable[Condition]) -> int:
    """The least size for which all of them hold."""
    return math.lcm(*(each.by for each in found))


def vocabulary(vocab_size: int, cuboid: Tensor) -> Condition:
    """Of the rows of the token table, after padding: y pieces, each of them in q for the table and z for the logits."""
    by_z = cuboid.z if cuboid.inner == "heads" else 1
    by = cuboid.y * math.lcm(cuboid.q, by_z)
    padded = -(-vocab_size // by) * by
    words = f"y * lcm(q, z) = {by}" if by_z > 1 else f"y * q = {by}"
    message = f"{words}; {vocab_size} padded to {padded}" if padded != vocab_size else f"{words}; no padding"
    return Condition("vocab_size", padded, by, message, "")


def _micro_cuts(cuboid: Tensor) -> list[tuple[str, int]]:
    if cuboid.split == "sequence":
        return [("1", 1)]
    cuts = [("x", cuboid.x)]
    cuts += [("x * y", cuboid.x * cuboid.y)] if cuboid.residual == "batch" else []
    return cuts + ([("x * z", cuboid.x * cuboid.z)] if cuboid.inner == "batch" else [])


def _heads_cut(cuboid: Tensor) -> tuple[str, int]:
    if cuboid.split == "sequence" and cuboid.impl == "ulysses":
        return "y * x", cuboid.y * cuboid.x
    if cuboid.inner == "heads" and cuboid.z > 1:
        return "y * z", cuboid.y * cuboid.z
    return "y", cuboid.y


def _inner_cuts(cuboid: Tensor) -> dict[str, int]:
    """What inner features are cut by."""
    cuts = {"y * q": cuboid.y * cuboid.q}
    return cuts | {"y * z": cuboid.y * cuboid.z} if cuboid.inner == "heads" and cuboid.z > 1 else cuts


def _hidden_cuts(cuboid: Tensor) -> dict[str, int]:
    """What hidden_size is cut by: the features of the residual stream, and those of attention."""
    cuts = {"z * q": cuboid.z * cuboid.q} | _inner_cuts(cuboid)
    return cuts | {"y * z": cuboid.y * cuboid.z} if cuboid.residual == "hidden" and cuboid.z > 1 else cuts


# The nearest sizes that divide ------------------------------------------------------------------------------------

_KEYS = ("num_heads", "num_kv_heads", "hidden_size")
_OF_KV_HEADS = dict.fromkeys(("TEN207", "TEN208"), "num_kv_heads")
"""Rules about two sizes, by the one that is rather changed."""


class _Sizes(NamedTuple):
    num_heads: int
    num_kv_heads: int
    hidden_size: int


class _Demand(NamedTuple):
    """What A, G and H must divide by."""

    heads_by: int
    hidden_by: int
    kv_features_by: int
    head_dim_by: int

    def head_dim(self, num_heads: int, num_kv_heads: int) -> int:
        """What a head's features must be a multiple of."""
        parts = (self.hidden_by, num_heads), (self.kv_features_by, num_kv_heads)
        return math.lcm(self.head_dim_by, *(by // math.gcd(by, count) for by, count in parts))

    def met(self, sizes: _Sizes) -> bool:
        """Whether all divide."""
        num_heads, num_kv_heads, hidden_size = sizes
        return (
            num_heads % self.heads_by == num_kv_heads % self.heads_by == num_heads % num_kv_heads == 0
            and hidden_size % (num_heads * self.head_dim(num_heads, num_kv_heads)) == 0
        )


def nearest(model: Any, cuboid: Tensor) -> list[dict[str, int]]:
    """Choices of num_heads, num_kv_heads and hidden_size that are legal together; each names what it changes.

    As few of them change as can be, where there is a choice those that are wrong. One that changes alone has up to two
    choices, below and above; several have one: the nearest heads first, then kv heads, then hidden_size. Empty: no
    sizes are legal.
    """
    own_kv = model.num_kv_heads is not None
    asked = _Sizes(model.num_heads, model.num_kv_heads if own_kv else model.num_heads, model.hidden_size)
    demand = _demand(model, cuboid)
    all_of_them = (*heads(model, cuboid), *hidden(model, cuboid))
    wrong = {_OF_KV_HEADS.get(each.code, each.key) for each in all_of_them if not each.holds}
    keys = [key for key in _KEYS if own_kv or key != "num_kv_heads"]
    free_sets = [free for count in range(1, len(keys) + 1) for free in combinations(keys, count)]
    for free in sorted(free_sets, key=lambda free: (len(free), len(set(free) - wrong))):
        found = _choices(asked, demand, free, own_kv)
        if found:
            return [{key: getattr(sizes, key) for key in free} for sizes in found]
    return []


def neighbours(value: int, legal: Sequence[int]) -> list[int]:
    """The legal sizes next to `value`, below and above; `legal` is in order."""
    at = bisect_left(legal, value)
    return list(legal[max(0, at - 1) : at + 1])


def multiples(value: int, by: int) -> list[int]:
    """The multiples of `by` next to `value`, at least `by` and none too large."""
    return [size for size in neighbours(value, range(by, value + by + 1, by)) if size <= LARGEST]


def divisors(number: int) -> list[int]:
    """All divisors, in order."""
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _demand(model: Any, cuboid: Tensor) -> _Demand:
    return _Demand(
        heads_by=_heads_cut(cuboid)[1],
        hidden_by=math.lcm(*_hidden_cuts(cuboid).values()),
        kv_features_by=cuboid.y * cuboid.q,
        head_dim_by=2 if model.positions == "rotary" else 1,
    )


def _choices(asked: _Sizes, demand: _Demand, free: tuple[str, ...], own_kv: bool) -> list[_Sizes]:
    """Sizes that are legal and differ in `free` alone."""
    legal = (sizes for sizes in _candidates(asked, demand, free, own_kv) if demand.met(sizes))
    if len(free) > 1:
        first = next(legal, None)
        return [] if first is None else [first]
    (key,) = free
    by_value = {getattr(sizes, key): sizes for sizes in legal}
    return [by_value[value] for value in neighbours(getattr(asked, key), sorted(by_value))]


def _candidates(asked: _Sizes, demand: _Demand, free: tuple[str, ...], own_kv: bool) -> Iterator[_Sizes]:
    """Sizes that may do, the nearest heads first."""
    for num_heads in _nearest_first(asked.num_heads, _possible_heads(asked, demand, free, own_kv)):
        for num_kv_heads in _nearest_first(asked.num_kv_heads, _possible_kv_heads(asked, num_heads, free, own_kv)):
            sizes = [asked.hidden_size]
            if "hidden_size" in free:
                sizes = multiples(asked.hidden_size, num_heads * demand.head_dim(num_heads, num_kv_heads))
            for size in _nearest_first(asked.hidden_size, sizes):
                yield _Sizes(num_heads, num_kv_heads, size)


def _possible_heads(asked: _Sizes, demand: _Demand, free: tuple[str, ...], own_kv: bool) -> list[int]:
    if "num_heads" not in free:
        return [asked.num_heads]
    if "hidden_size" not in free:
        return [size for size in divisors(asked.hidden_size) if size % demand.heads_by == 0]
    fixed_kv = asked.num_kv_heads if own_kv and "num_kv_heads" not in free else 1
    return multiples(asked.num_heads, math.lcm(demand.heads_by, fixed_kv))


def _possible_kv_heads(asked: _Sizes, num_heads: int, free: tuple[str, ...], own_kv: bool) -> list[int]:
    if not own_kv:
        return [num_heads]
    return divisors(num_heads) if "num_kv_heads" in free else [asked.num_kv_heads]


def _nearest_first(value: int, sizes: Iterable[int]) -> list[int]:
    """The nearest so many; where sizes are that many, one of these does, or hidden_size changes too."""
    return sorted(sizes, key=lambda size: abs(size - value))[:_MOST_TRIED]
