"""What layers send is what DESIGN, section 5, says they send: counted, and equal to the closed forms.

In elements a rank, ring counts: a collective of n ranks that makes or takes a tensor of E elements sends (n-1)/n E, an
all-reduce twice that. Counts are whole numbers: no tolerance but that of a float sum.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dslpar import comm, mesh
from dslpar.groups import Groups
from dslpar.layers import Attention, Block, Linear, initialize, placement
from dslpar.mesh import Mesh
from tests.layouts import LAYOUTS, kept
from tests.ranks import on_ranks

BATCH, SEQUENCE, HIDDEN, FFN = 12, 12, 24, 48
TOKENS = BATCH * SEQUENCE

Sent = Counter[str]


def counting() -> Sent:
    """From here on, what this rank sends by each collective, and how many of them it calls."""
    sent: Sent = Counter()

    def counted(name: str, rightly: Any, times: int, whole: int) -> Any:
        def collective(*args: Any, group: Any = None, **kwargs: Any) -> Any:
            n = dist.get_world_size(group)
            sent["elements"] += times * (n - 1) * args[whole].numel() // n
            sent[name] += 1
            return rightly(*args, group=group, **kwargs)

        return collective

    comm._all_gather = counted("all_gather", comm._all_gather, 1, 0)
    comm._reduce_scatter = counted("reduce_scatter", comm._reduce_scatter, 1, 1)
    for name, times in (("all_reduce", 2), ("all_to_all_single", 1)):
        setattr(dist, name, counted(name, getattr(dist, name), times, 0))

    def shifted(x: torch.Tensor, axis: comm.Axis) -> Any:
        sent["shifted"] += x.numel()
        return shift_rightly(x, axis)

    shift_rightly, comm.start_shift = comm.start_shift, shifted
    return sent


def f(n: int) -> float:
    return (n - 1) / n


def of_linears(tensor: mesh.Tensor) -> int:
    """An inward and an outward linear without bias, forward and backward."""
    groups = Groups(Mesh(tensor=tensor))
    up = Linear(groups, HIDDEN, FFN, role="inward", bias=False)
    down = Linear(groups, FFN, HIDDEN, role="outward", bias=False)
    for layer in (up, down):
        initialize(layer, groups, seed=1)
    x = torch.zeros(placement.residual(tensor, BATCH, SEQUENCE, HIDDEN).local_shape, requires_grad=True)
    sent = counting()
    down(up(x)).sum().backward()
    return sent["elements"]


def said_of_linears(tensor: mesh.Tensor) -> float:
    """The closed forms, with the panels that `keep` gathers again."""
    x, y, z, q, d = tensor.x, tensor.y, tensor.z, tensor.q, tensor.d
    residual = f(y) * TOKENS * HIDDEN / (x * z)
    weight = f(q) * HIDDEN * FFN / (y * z)
    inner = f(z) * TOKENS * FFN / (x * y)
    depth = 2 * f(d) * HIDDEN * FFN / (q * y * z)
    again_x = 0 if tensor.keep in ("x", "both") else (residual if tensor.residual != "replicated" else 0) + inner
    again_w = 0 if tensor.keep in ("w", "both") else 2 * weight
    return 2 * 2 * (residual + weight + inner) + 2 * depth + again_x + again_w


TRAFFIC = LAYOUTS | kept(["2d-4", "3d-8", "1d-sequence-2", "cuboid-1-2-2-sequence-batch"])


@pytest.mark.parametrize("name", TRAFFIC)
def test_linears_send_what_is_said(name: str) -> None:
    tensor = TRAFFIC[name]
    assert set(on_ranks(tensor.size, of_linears, tensor)) == {round(said_of_linears(tensor))}


def of_a_block(tensor: mesh.Tensor) -> Sent:
    groups = Groups(Mesh(tensor=tensor))
    block = Block(groups, HIDDEN, 12, ffn_hidden_size=FFN)
    initialize(block, groups, seed=1)
    x = torch.zeros(placement.residual(tensor, BATCH, SEQUENCE, HIDDEN).local_shape, requires_grad=True)
    sent = counting()
    block(x).sum().backward()
    del sent["elements"]
    return sent


@pytest.mark.parametrize(
    ("name", "calls"),
    [
        ("1d-2", {"all_reduce": 4}),  # Megatron's two forward and two backward; vectors need none
        ("1d-sequence-2", {"all_gather": 4, "reduce_scatter": 4, "all_reduce": 1}),  # one for all residual vectors
        ("2.5d-3-depth-3", {"all_reduce": 4 + 1}),  # one a weight; all vectors, residual and inner, are summed over d
        ("ulysses-2", {"all_reduce": 4 + 1, "all_to_all_single": 4}),
    ],
)
def test_a_block_calls_no_more_collectives_than_it_must(name: str, calls: dict[str, int]) -> None:
    tensor = LAYOUTS[name]
    assert on_ranks(tensor.size, of_a_block, tensor) == [calls] * tensor.size


def of_attention(tensor: mesh.Tensor) -> Sent:
    groups = Groups(Mesh(tensor=tensor))
    attention = Attention(groups, HIDDEN, 12)
    initialize(attention, groups, seed=1)
    x = torch.zeros(placement.residual(tensor, BATCH, SEQUENCE, HIDDEN).local_shape, requires_grad=True)
    sent = counting()
    attention(x).sum().backward()
    return sent


@pytest.mark.parametrize("size", [2, 3])
def test_a_ring_sends_what_is_said(size: int) -> None:
    """Keys and values n - 1 times, forward and backward; their gradients n times, home."""
    said = (6 * size - 4) * TOKENS * HIDDEN // size
    assert [sent["shifted"] for sent in on_ranks(size, of_attention, LAYOUTS[f"ring-{size}"])] == [said] * size


def test_ulysses_sends_what_is_said() -> None:
    """q, k, v and the output, forward and backward; the rest is the all-reduce of gradients."""
    tensor = LAYOUTS["ulysses-2"]
    gradients = 2 * f(2) * (4 * HIDDEN * HIDDEN + 4 * HIDDEN)
    said = round(8 * f(2) * TOKENS * HIDDEN / 2 + gradients)
    assert [sent["elements"] for sent in on_ranks(2, of_attention, tensor)] == [said] * 2
