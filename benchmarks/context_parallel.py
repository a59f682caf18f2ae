"""Cost of attention over a sharded sequence: CPU time of dslpar's ring, forward and backward, against torch's ring.

Four ranks over gloo, one sample of 8,192 tokens, fp32, a causal mask. torch's ring is its experimental context
parallelism (`torch.distributed.tensor.experimental`, with its balanced order, which is on by default). It has operators
for CUDA alone, so here it calls the CPU operator that dslpar calls, too. Both must give equal results before anything
is timed.

A second line compares dslpar's attention in one process with torch's scaled_dot_product_attention, which it calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.experimental._context_parallel import _attention as torchs
from torch.nn import functional

from benchmarks.measure import Ratio, in_turns, ratio
from benchmarks.sides import side
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers.attention import attend
from dslpar.layers.context_attention import RingOptions, ring

RANKS, TOKENS, HEADS, HEAD_DIM = 4, 8192, 4, 64
CONTEXT = mesh.TensorMesh(d=RANKS, mode="sequence", split="sequence", zigzag=True)
ALONE_TOKENS = 1024
STEPS = 2

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ratios() -> Iterator[Ratio]:
    """Measure the ring, and one process."""
    torch.set_num_threads(1)
    with side(check_same, RANKS):
        pass
    ours, theirs = partial(step_of, our_ring, TOKENS // RANKS), partial(step_of, torch_s_ring, TOKENS // RANKS)
    with side(ours, RANKS, STEPS) as own, side(theirs, RANKS, STEPS) as reference:
        yield ratio("ring over torch's, context 4, 8,192 tokens", [cpu for (cpu,) in in_turns(own, reference)], 1.0)
    ours, theirs = partial(step_of, our_own, ALONE_TOKENS), partial(step_of, torch_s_own, ALONE_TOKENS)
    with side(ours, 1, 10) as own, side(theirs, 1, 10) as reference:
        yield ratio("one process over torch's sdpa", [cpu for (cpu,) in in_turns(own, reference)], 1.02)


def step_of(make: Callable[[], Attend], length: int) -> Callable[[], Tensor]:
    """Return attention's forward and backward on this rank's tokens as a function that gives the queries' gradient."""
    attend, parts = make(), numbers(length)
    y_grad = numbers(length)[0].detach()

    def step() -> Tensor:
        for part in parts:
            part.grad = None
        attend(*parts).backward(y_grad)
        assert parts[0].grad is not None
        return parts[0].grad

    return step


def numbers(length: int) -> list[Tensor]:
    """Return this rank's queries, keys and values."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    generator = torch.Generator().manual_seed(rank)
    shape = 1, HEADS, length, HEAD_DIM
    return [torch.randn(shape, generator=generator).requires_grad_() for _ in range(3)]


def our_ring() -> Attend:
    options = RingOptions(Groups(Mesh(tensor=CONTEXT)).axis("ring"), zigzag=True)
    return lambda q, k, v: ring(q, k, v, options)


def torch_s_ring() -> Attend:
    group = dist.group.WORLD
    return lambda q, k, v: _TorchsRing.apply(q, k, v, group)


def our_own() -> Attend:
    return partial(attend, causal=True)


def torch_s_own() -> Attend:
    return partial(functional.scaled_dot_product_attention, is_causal=True)


class _TorchsRing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
        op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        y, lse = torchs._templated_ring_attention(group, 2, op, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.group = group
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        op = partial(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, dropout_p=0.0)
        q, k, v, y, lse = ctx.saved_tensors
        found = torchs._templated_ring_attention_backward(
            ctx.group, 2, op, grads[0], "grad_out", q, k, v, y, lse, is_causal=True
        )
        return *found[:3], None


def check_same() -> Callable[[], None]:
    """Compare both rings' gradients of the queries: fp32 sums in other orders differ by some 1e-6."""
    own, others = (step_of(make, TOKENS // RANKS)() for make in (our_ring, torch_s_ring))
    torch.testing.assert_close(own, others, rtol=1e-4, atol=1e-6)
    return lambda: None
