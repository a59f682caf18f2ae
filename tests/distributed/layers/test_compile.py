"""torch.compile over layers and loss: one shared graph per block in every tensor mode, with equal results.

The backend is `aot_eager`, which runs the traced graphs of forward and backward with the uncompiled kernels.
Collectives in the graph are torch's functional ones, over gloo.
"""

from __future__ import annotations

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Form, Head, Rotary, cross_entropy, initialize, mark_owners, placement
from dslpar.layers.loss import compiled_losses, cross_entropy_by_chunks
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

pytestmark = [*TORCH_S_OWN_WARNINGS, pytest.mark.prove]  # `make test` has tests/properties/invariance/compiled

CLOSE = 1e-13
"""Relative, in float64: gloo's reduce-scatter sums in another order than its usual substitute."""
BATCH, SEQUENCE, HIDDEN, HEADS = 8, 24, 48, 12
FORMS = {
    "gpt2": Form(),
    "llama": Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=6, bias=False),
}
NAMES = (
    "1d-2",
    "1d-sequence-2",
    "2d-4",
    "2.5d-8-depth-2",
    "3d-8",
    "cuboid-1-2-2-sequence-batch",
    "ring-2",
    "ulysses-2",
)
CELLS = [*(("gpt2", name) for name in NAMES), *(("llama", name) for name in ("1d-sequence-2", "2d-4", "ring-2"))]


def _results(form: str, layout: str) -> list[list[torch.Tensor]]:
    """Return output and gradients of two consecutive blocks, uncompiled and compiled."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=LAYOUTS[layout]))
    results = []
    for compiled in (False, True):
        blocks = torch.nn.Sequential(*(Block(groups, HIDDEN, HEADS, form=FORMS[form]) for _ in range(2)))
        initialize(blocks, groups, seed=1)
        mark_owners(blocks, groups)
        for block in blocks if compiled else ():
            block.compile(backend="aot_eager", fullgraph=True)
        torch.manual_seed(7)
        shape = placement.residual(LAYOUTS[layout], BATCH, SEQUENCE, HIDDEN).local_shape
        x = torch.randn(shape).requires_grad_()
        with torch._dynamo.config.patch(error_on_recompile=True):
            y = blocks(x)
            y.square().sum().backward()
        results.append([y.detach(), x.grad, *(p.grad for p in blocks.parameters())])
    return results


@pytest.mark.parametrize(("form", "layout"), CELLS)
def test_a_compiled_block_is_one_graph_and_computes_the_same(form: str, layout: str) -> None:
    for plain, compiled in on_ranks(LAYOUTS[layout].size, _results, form, layout):
        for own, other in zip(plain, compiled, strict=True):
            assert own.abs().max() > 0
            assert (own - other).abs().max() <= CLOSE * own.abs().max()


VOCAB = 35
"""Every partition of this vocabulary needs padding."""


def _losses(layout: str) -> list[list[torch.Tensor]]:
    """Return losses of a head's logits, and their gradient: plain, smoothed, and in chunks; uncompiled and compiled."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=LAYOUTS[layout]))
    head = Head(groups, HIDDEN, VOCAB)
    initialize(head, groups, seed=1)
    mark_owners(head, groups)
    torch.manual_seed(7)
    x = torch.randn(placement.residual(LAYOUTS[layout], BATCH, SEQUENCE, HIDDEN).local_shape)
    labels = torch.randint(0, VOCAB, (BATCH, SEQUENCE)).masked_fill(torch.rand(BATCH, SEQUENCE) < 0.3, -100)
    results = []
    for backend in (None, "aot_eager"):
        stored = x.clone().requires_grad_()
        head.zero_grad()
        with compiled_losses(backend):
            losses = [
                cross_entropy(groups, head(stored), labels, VOCAB),
                cross_entropy(groups, head(stored), labels, VOCAB, label_smoothing=0.1),
                cross_entropy_by_chunks(groups, head, stored, labels, VOCAB, num_chunks=2),
            ]
            with pytest.raises(DslparError, match="among the labels"):
                cross_entropy(groups, head(stored), torch.full_like(labels, VOCAB), VOCAB)
        sum(losses).backward()  # type: ignore[union-attr]  # outside: what was compiled stays so
        gradients = [tensor.grad for tensor in (stored, *head.parameters()) if tensor.grad is not None]
        results.append([*(loss.detach() for loss in losses), *gradients])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    return results


@pytest.mark.parametrize("layout", NAMES)
def test_a_compiled_loss_is_the_loss(layout: str) -> None:
    for plain, compiled in on_ranks(LAYOUTS[layout].size, _losses, layout):
        for own, other in zip(plain, compiled, strict=True):
            assert own.abs().max() > 0
            assert (own - other).abs().max() <= CLOSE * own.abs().max()
