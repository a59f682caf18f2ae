"""torch.compile over the layers: a block is one graph in every tensor mode, all blocks share it, and computes the same.

By `aot_eager`, which runs the traced graphs of forward and backward with the kernels that they had: collectives in the
graph are torch's functional ones, over gloo.
"""

from __future__ import annotations

import pytest
import torch

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Form, Rotary, initialize, mark_owners, placement
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

pytestmark = TORCH_S_OWN_WARNINGS

CLOSE = 1e-13
"""Relative, in float64: gloo's reduce-scatter sums in another order than what stands in for it otherwise."""
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


def _results(form: str, layout: str) -> list[list[torch.Tensor]]:
    """Output and gradients of two blocks in a row, as they are and compiled."""
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


@pytest.mark.parametrize(
    ("form", "layout"),
    sampled(((form, name) for form in FORMS for name in NAMES), {("llama", "1d-sequence-2"), ("gpt2", "2d-4")}),
)
def test_a_compiled_block_is_one_graph_and_computes_the_same(form: str, layout: str) -> None:
    for plain, compiled in on_ranks(LAYOUTS[layout].size, _results, form, layout, timeout=200):
        for own, other in zip(plain, compiled, strict=True):
            assert own.abs().max() > 0
            assert (own - other).abs().max() <= CLOSE * own.abs().max()
