"""Accelerator work of a block and the loss, forward and backward, counted on a fake rank.

`plain_counts` counts the same block in torch.nn: GPT's from benchmarks.one_device, Llama's from benchmarks.plain_torch.
Each function with a mode makes this process a rank of torch's fake group, so call it in a separate process.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from benchmarks.device_counter import Kernels, count_kernels
from benchmarks.one_device import Plain
from benchmarks.plain_torch import LlamaBlock
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Form, Rotary, cross_entropy, initialize, mark_owners, placement
from dslpar.layers.loss import compiled_losses
from dslpar.layers.operand_shardings import prefetch_weights
from tests.support.fake_world import fake_world
from tests.support.layouts import LAYOUTS

MICRO, SEQUENCE, HIDDEN, HEADS, KV_HEADS = 4, 32, 64, 8, 4
FORMS: Mapping[str, Form] = {
    "GPT": Form(),
    "Llama": Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=KV_HEADS, bias=False),
}
TENSORS: Mapping[str, mesh.TensorMesh] = {
    "one process": mesh.TensorMesh(),
    "1d": LAYOUTS["1d-2"],
    "1d, sequence": LAYOUTS["1d-sequence-2"],
    "1d, sequence, overlap": replace(LAYOUTS["1d-sequence-2"], comm_overlap=True),
    "2d": LAYOUTS["2d-4"],
    "2d, overlap": replace(LAYOUTS["2d-4"], comm_overlap=True),
    "3d": LAYOUTS["3d-8"],
    "3d, overlap": replace(LAYOUTS["3d-8"], comm_overlap=True),
}
PLAIN: Mapping[str, Callable[[], nn.Module]] = {
    "GPT": partial(Plain, HIDDEN, HEADS),
    "Llama": partial(LlamaBlock, HIDDEN, HEADS, KV_HEADS),
}


class BlockCounts(NamedTuple):
    """Counts of one block."""

    forward: Kernels
    backward: Kernels
    graph_breaks: int
    exposed_share: float | None = None
    """`exposed_share`'s value with `comm_overlap`."""


def block_counts(form: str, tensor: str) -> BlockCounts:
    """Count a block of this form on a rank of this mode."""
    warnings.simplefilter("ignore")
    cuboid = TENSORS[tensor]
    with fake_world(cuboid.size - 1, cuboid.size):
        groups = Groups(Mesh(tensor=cuboid))
        shape = placement.residual(cuboid, MICRO, SEQUENCE, HIDDEN).local_shape
        counts = _counts(_blocks(groups, form, 1), shape)
        return counts._replace(exposed_share=exposed_share(groups, form, shape)) if cuboid.comm_overlap else counts


def exposed_share(groups: Groups, form: str, shape: tuple[int, ...]) -> float:
    """Return the share of exposed collectives of a block in the middle of a model, relative to those without overlap.

    `comm_overlap` splits collectives into more, so the denominator is counted without it. The exposed ones are those of
    two blocks minus those of one block, since the model's first gather and last reduction of weights belong to no
    layer.
    """
    one, two = (_both(_blocks(groups, form, count), shape) for count in (1, 2))
    tensor = replace(groups.tensor, comm_overlap=False)
    whole = _both(_blocks(Groups(Mesh(tensor=tensor)), form, 1), shape)
    return (two.exposed - one.exposed) / whole.collectives


def _both(blocks: nn.Module, shape: tuple[int, ...]) -> Kernels:
    forward, backward = _run(blocks.to(torch.bfloat16), shape)
    return forward + backward


def _blocks(groups: Groups, form: str, count: int) -> nn.Module:
    blocks = nn.Sequential(*(Block(groups, HIDDEN, HEADS, form=FORMS[form]) for _ in range(count)))
    initialize(blocks, groups, seed=1)
    mark_owners(blocks, groups)
    prefetch_weights(blocks)
    return blocks


def plain_counts(form: str) -> BlockCounts:
    """Count the plain torch.nn block of this form."""
    warnings.simplefilter("ignore")
    return _counts(PLAIN[form](), (MICRO, SEQUENCE, HIDDEN))


def _counts(block: nn.Module, shape: tuple[int, ...]) -> BlockCounts:
    return BlockCounts(*_run(block.to(torch.bfloat16), shape), graph_breaks(block, shape))


def _run(block: nn.Module, shape: tuple[int, ...]) -> tuple[Kernels, Kernels]:
    """Count a second forward and backward; the first one makes tables and learns the order of weights."""
    for _ in range(2):
        x = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        with count_kernels() as forward:
            y = block(x)
        gradient = torch.ones_like(y)
        with count_kernels() as backward:
            y.backward(gradient)
    return forward, backward


def graph_breaks(block: nn.Module, shape: tuple[int, ...]) -> int:
    """Count the graph breaks of torch.compile in a block's forward and the traced part of its backward."""
    torch._dynamo.reset()
    explained = torch._dynamo.explain(block)(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True))
    return int(explained.graph_break_count)


TOKENS, VOCAB_SIZE = 64, 4096
"""Sizes of the loss."""


def loss_bytes() -> tuple[float, float]:
    """Return the bytes that the loss and its backward move per bfloat16 logit: torch's with upcast logits, and
    dslpar's.
    """
    found = []
    labels = torch.zeros(TOKENS, dtype=torch.int64, device="meta")
    ours = partial(cross_entropy, Groups(Mesh()), vocab_size=VOCAB_SIZE)
    for loss in (lambda logits, labels: functional.cross_entropy(logits.float(), labels), ours):
        logits = torch.empty(TOKENS, VOCAB_SIZE, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with count_kernels() as counts:
            loss(logits, labels).backward()
        found.append(counts.num_bytes / logits.numel())
    return found[0], found[1]


def compiled_loss_bytes(tensor: str, tokens: int = TOKENS, vocab_size: int = VOCAB_SIZE) -> float:
    """Return the bytes per logit of dslpar's compiled loss in a mode, as torch's inductor counts them.

    The count is of CPU kernels, since those can run here. An accelerator's kernels are fused alike.
    """
    from torch._inductor import compile_fx, config, metrics  # here: it takes a second, for this function alone

    cuboid = TENSORS[tensor]
    labels = torch.zeros(1, tokens, dtype=torch.int64)
    metrics.reset()
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # otherwise it counts nothing
    with fake_world(cuboid.size - 1, cuboid.size), config.patch(force_disable_caches=True), compiled_losses("inductor"):
        logits = torch.zeros(1, tokens, vocab_size // cuboid.size, dtype=torch.bfloat16, requires_grad=True)
        cross_entropy(Groups(Mesh(tensor=cuboid)), logits, labels, vocab_size).backward()
    return metrics.num_bytes_accessed / logits.numel()
