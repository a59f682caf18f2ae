"""Attention cases compared under context parallelism, as data.

CASES          # name -> Case: what attends how, and which tokens
worlds()       # name -> (cuboid, cases that go with it): what one set of ranks runs
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import NamedTuple

from dslpar.core.mesh import TensorMesh

SAMPLES, TOKENS, HIDDEN, HEADS = 4, 48, 128, 32
"""32 heads divide by 8 ranks of Ulysses beside 4 of tensor parallelism. 48 tokens divide into 8 pieces of 2 halves,
sharded again over y, and into three.
"""


class Case(NamedTuple):
    """Attention over whole sequences, and its form on ranks that shard them."""

    impl: str
    mask: str
    """'causal', 'full', 'window', 'packed' or 'padded'."""
    kv_groups: int
    """Query heads per key head."""

    @property
    def name(self) -> str:
        return f"{self.impl}, {self.mask}, {self.kv_groups} to a head of keys"


IMPLS = ("ring", "ulysses", "hybrid")
MASKS = ("causal", "full", "window", "packed", "padded")
CASES: Mapping[str, Case] = {case.name: case for case in (Case(*each) for each in product(IMPLS, MASKS, (1, 2, 4)))}

SIZES = (2, 3, 4, 8)
BESIDE: Mapping[str, TensorMesh] = {
    "alone": TensorMesh(mode="sequence"),
    "1d 2": TensorMesh(y=2, mode="1d"),
    "1d 2 sequence": TensorMesh(y=2, mode="1d", residual="sequence"),
    "2d 4": TensorMesh(q=2, y=2, mode="2d", residual="hidden"),
    "3d 8": TensorMesh(q=2, y=2, z=2, mode="3d", residual="batch", inner="batch", keep="none"),
}


def cuboid(beside: str, size: int, impl: str) -> TensorMesh:
    """Return the cuboid of a context of that many ranks beside a tensor mode; a hybrid of an odd number is a ring."""
    made = replace(BESIDE[beside], d=size, split="sequence", impl=impl, ulysses_size=math.gcd(size, 2))
    return replace(made, zigzag=made.ring > 1)


def worlds() -> dict[str, tuple[str, int]]:
    """Return name -> (tensor mode beside the context, ranks of the context)."""
    return {f"context {size}, {beside}": (beside, size) for size, beside in product(SIZES, BESIDE)}
