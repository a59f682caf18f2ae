"""Memory of long sequences: each rank takes a share of one process's memory, and nothing grows quadratically.

The tests run one fake rank: shapes and saved tensors are right, and kernels compute.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.costs.model_costs import costs_of
from dslpar.distributed.groups import Groups
from dslpar.forecast.activations import activations
from dslpar.forecast.workload import Framework, Workload
from dslpar.layers import Attention, Block, Form, Rotary, cross_entropy, initialize
from dslpar.layers.loss import cross_entropy_by_chunks
from dslpar.layout.attention_blocks import TILE
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.models.gpt import costs, section
from tests.support.fake_world import on_last_ranks
from tests.support.live_storages import LiveStorages

TOKENS, HIDDEN, HEADS, FFN = 32_768, 32, 2, 96
RING = mesh.TensorMesh(d=4, mode="sequence", split="sequence", zigzag=True)
LAYOUTS = {
    "ring": RING,
    "ulysses": mesh.TensorMesh(d=2, mode="sequence", split="sequence", impl="ulysses"),
    "hybrid": replace(RING, impl="hybrid", ulysses_size=2),
}
MODEL = section.GPT(
    num_layers=1,
    hidden_size=HIDDEN,
    num_heads=HEADS,
    ffn_hidden_size=FFN,
    vocab_size=256,
    max_seq_len=TOKENS,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)


class Held(NamedTuple):
    """Numbers of float32 elements."""

    saved: float
    """Tensors alive between forward and backward, with the input and the output."""
    peak: float
    largest: float
    """The largest tensor."""


def held_by(layer: torch.nn.Module, forward: Callable[[Tensor], Tensor], x: Tensor) -> Held:
    live = LiveStorages()
    live.watch([x, *layer.parameters()])
    own = live.bytes()
    with live:
        y = forward(x.requires_grad_())
        saved = live.bytes() - own
        y.backward(torch.ones_like(y))
    size = x.element_size()
    return Held((saved + x.nbytes) / size, (live.peak - own + x.nbytes) / size, live.largest / size)


def of_block(tensor: mesh.TensorMesh) -> Held:
    form = Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), bias=False)
    block = Block(Groups(Mesh(tensor=tensor)), HIDDEN, HEADS, ffn_hidden_size=FFN, form=form)
    initialize(block, block.groups, seed=1)
    return held_by(block, block, torch.randn(1, TOKENS // tensor.context, HIDDEN))


@pytest.mark.prove
def test_a_rank_of_n_takes_an_nth_of_the_memory() -> None:
    """The limit is 1.1 of it. The forecast covers all saved tensors but the output, which the next layer saves."""
    tensors = [mesh.TensorMesh(), *LAYOUTS.values()]
    one, *cut = on_last_ranks(of_block, tensors)
    for tensor, found in zip(tensors, [one, *cut], strict=True):
        assert found.saved / one.saved <= 1.1 / tensor.context
        assert found.peak / one.peak <= 1.1 / tensor.context
        layer = costs_of(costs.layers(MODEL, TOKENS).layer, tensor, TOKENS)
        saved = float(layer.memory.saved.elements + layer.memory.saved.wide)
        y = TOKENS * HIDDEN / tensor.context
        assert found.saved - y == pytest.approx(saved, rel=0.03)
        # the forecast's peak of a running layer: around its widest product, here the MLP's
        widest = max(2 * rows * (depth + columns) for rows, depth, columns in layer.work.products)
        assert found.peak == pytest.approx(saved + widest, rel=0.03)


def of_block_by_parts(tensor: mesh.TensorMesh) -> Held:
    """Recompute the block in the backward, with its MLP for a 16th of the tokens at a time."""
    form = Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), bias=False)
    block = Block(Groups(Mesh(tensor=tensor)), HIDDEN, HEADS, ffn_hidden_size=FFN, form=form)
    block.mlp_chunks = CHUNKS
    initialize(block, block.groups, seed=1)
    x = torch.randn(1, CORE_TOKENS // tensor.context, HIDDEN)
    return held_by(block, lambda x: checkpoint(block, x, use_reentrant=False), x)


@pytest.mark.prove
def test_the_peak_of_an_mlp_by_parts_is_forecast() -> None:
    """The forecast is within 6 %: attention dominates then, and only its moments are counted one by one."""
    tensors = {"one process": mesh.TensorMesh(), **LAYOUTS}
    model = replace(MODEL, max_seq_len=CORE_TOKENS)
    for (name, tensor), found in zip(
        tensors.items(), on_last_ranks(of_block_by_parts, list(tensors.values())), strict=True
    ):
        made = Workload(
            model=model,
            mesh=Mesh(tensor=tensor),
            counts=(1,),
            schedule=Schedule(Chunks(1), 1),
            micro_size=1,
            seq_len=CORE_TOKENS,
            dtype="fp32",
            recompute="full",
            mlp_chunks=CHUNKS,
            framework=Framework(fused_norms=False),
        )
        needed, whole = (activations(each, 0).working / 4 for each in (made, replace(made, mlp_chunks=1)))
        x = y = CORE_TOKENS * HIDDEN / tensor.context
        assert needed < 0.7 * whole
        assert found.peak - y == pytest.approx(x + needed, rel=0.06), name


CORE_TOKENS, HEAD_DIM, CHUNKS = 8192, 16, 16


def of_ring(tensor: mesh.TensorMesh) -> list[tuple[int, int, float]]:
    """Return query heads, key heads, and the peak of attention alone, in heads of this rank's tokens."""
    found = []
    for heads, kv_heads in ((8, 8), (8, 4), (8, 1)):
        attention = Attention(Groups(Mesh(tensor=tensor)), heads * HEAD_DIM, heads, num_kv_heads=kv_heads, bias=False)
        length = CORE_TOKENS // tensor.context
        q, k, v = (torch.randn(1, length, each, HEAD_DIM).transpose(1, 2) for each in (heads, kv_heads, kv_heads))
        parts = [part.requires_grad_() for part in (q, k, v)]
        live = LiveStorages()
        live.watch(parts)
        with live:
            y = attention._attend(*parts, None)
            y.backward(torch.ones_like(y))
        found.append((heads, kv_heads, live.peak / (length * HEAD_DIM * q.element_size())))
    return found


@pytest.mark.parametrize(
    ("ranks", "zigzag", "beside"),
    [
        (4, True, (2, 9)),
        *(pytest.param(*row, marks=pytest.mark.prove) for row in ((8, True, (2, 9)), (4, False, (2, 10)))),
        pytest.param(2, True, (2, 7), marks=pytest.mark.prove),
    ],
)
def test_the_peak_of_a_ring_s_backward_is_the_one_that_is_told(
    ranks: int, zigzag: bool, beside: tuple[int, int]
) -> None:
    """The peak is on the last rank, whose queries attend to half of each other rank's keys."""
    tensor = mesh.TensorMesh(d=ranks, mode="sequence", split="sequence", zigzag=zigzag)
    (peaks,) = on_last_ranks(of_ring, [tensor])
    for heads, kv_heads, peak in peaks:
        given = heads + 2 * kv_heads + 2 * heads + heads / HEAD_DIM  # q, k, v, y, its gradient, and log-sum-exp
        working = beside[0] * heads + beside[1] * kv_heads
        first = heads + 8 * kv_heads  # on two ranks, the first block's gradients while they become a message
        assert peak == pytest.approx(given + max(working, first), rel=0.03)


def packed(tensor: mesh.TensorMesh) -> Held:
    """Attention with documents, which makes masks for blocks on an edge."""
    layer = Attention(Groups(Mesh(tensor=tensor)), HIDDEN, HEADS, causal=True)
    initialize(layer, layer.groups, seed=1)
    length = TOKENS // 2
    documents = (1 + torch.arange(length) // 5000).int()[None]
    x = torch.randn(1, length // tensor.context, HIDDEN)
    return held_by(layer, lambda x: layer(x, mask=documents), x)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["one process", *LAYOUTS])
def test_nothing_of_the_square_of_a_piece_is_made(name: str) -> None:
    tensor = LAYOUTS.get(name, mesh.TensorMesh())
    (found,) = on_last_ranks(packed, [tensor])
    length = TOKENS // 2 // tensor.context
    assert found.largest <= max(TILE**2, 4 * HIDDEN * length)
    assert found.largest < length**2 / 8


def of_loss(tensor: mesh.TensorMesh) -> tuple[Held, Held]:
    """Measure a head with its loss over a vocabulary of 4,096: whole, and in 16 parts."""
    from dslpar.layers import Head

    groups, vocab, length = Groups(Mesh(tensor=tensor)), 4096, 4096
    head = Head(groups, HIDDEN, vocab)
    initialize(head, groups, seed=1)
    labels = torch.arange(length)[None] % vocab
    x = torch.randn(1, length // tensor.context // max(tensor.y, 1), HIDDEN)

    def by_chunks(x: Tensor) -> Tensor:
        return cross_entropy_by_chunks(groups, head, x, labels, vocab, num_chunks=16)

    whole = held_by(head, lambda x: cross_entropy(groups, head(x), labels, vocab), x.clone())
    return whole, held_by(head, by_chunks, x.clone())


def test_logits_are_never_whole() -> None:
    for whole, parts in on_last_ranks(
        of_loss, [mesh.TensorMesh(), mesh.TensorMesh(y=2, mode="1d", residual="sequence")]
    ):
        assert parts.saved < whole.saved / 50
        assert parts.peak < whole.peak / 8
