"""Gradient accumulation fusion: the weight-gradient GEMM accumulates into the fp32 main gradient.

    enable_accumulation_fusion(module)     # an engine's, once
    y = linear(x)
    with fused_accumulation():             # and around each backward
        y.backward(y_grad)                 # weight.grad_accum += dY^T X: one kernel, and no rounding to bf16

In half precision at ZeRO 1 the gradients of micro-batches add up in fp32, in DeepSpeed's `weight.grad_accum`. A
separate addition writes the gradient in bf16, reads it, and updates the sum: 12 bytes per parameter. Within the product
the addition moves 8: it only reads and writes the sum. Megatron-LM has its own kernels for this
(`gradient_accumulation_fusion`, `main_grad`). torch has products with a wider output for CUDA (`addmm` with
`out_dtype`, from 2.8 on). On a CPU it has none, and gradients are accumulated as usual.

The graph keeps its edge to the weight, along which no gradient flows. So the hooks of the weight's gradient
accumulation run, and find the sum complete.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

_adding = False
"""Whether `fused_accumulation` is active. A module variable, as autograd's threads do not see context variables."""


@contextmanager
def fused_accumulation() -> Iterator[None]:
    """Let products add to `grad_accum` within the context. Use it only around a backward that just accumulates.

    Other backwards need the gradient itself, such as that of torch.autograd.grad, also within a model's forward.
    """
    global _adding
    before, _adding = _adding, True
    try:
        yield
    finally:
        _adding = before


def enable_accumulation_fusion(module: nn.Module) -> None:
    """Allow products to add to the gradient sums of the weights in `module`, if their device has such products."""
    for p in module.parameters():
        p.fuses_accumulation = has_wide_products(p)  # type: ignore[attr-defined]


def fuses_accumulation(weight: Tensor) -> bool:
    """Return whether a linear's backward may add this weight's gradient to its sum, once the sum exists.

    It may not if a hook of the program needs the gradient, nor in a graph that torch compiles.
    """
    may = getattr(weight, "fuses_accumulation", False) and weight.requires_grad and weight.is_leaf
    return may and not weight._backward_hooks and not torch.compiler.is_compiling()


def has_wide_products(weight: Tensor) -> bool:
    """Return whether the weight's device has products of its dtype that add to fp32."""
    return weight.dtype in (torch.bfloat16, torch.float16) and _tried(weight.device, weight.dtype)


def accumulator_of(weight: Tensor | None) -> Tensor | None:
    """Return the fp32 main gradient to add to; None: the backward returns the gradient itself."""
    # `weight is None` first: it is None in a compiled layer, whose graph then does not depend on `_adding`.
    if weight is None or not _adding:
        return None
    total: Tensor | None = getattr(weight, "grad_accum", None)
    return total if total is not None and total.dtype is torch.float32 else None


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x W^T + b without communication; within `fused_accumulation` the backward adds dW to `grad_accum`."""
    y: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return y


class _Linear(torch.autograd.Function):
    """The product of layers.linear without code for collectives, whose Python would dominate a small layer's time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        # The Parameter itself: saved tensors that are recomputed or offloaded come back as others, without the sum.
        ctx.weight = weight
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_w, needs_b = ctx.needs_input_grad
        y_grad = grads[0].flatten(0, -2)
        x_grad = torch.mm(y_grad, weight).view(x.shape) if needs_x else None
        w_grad = None
        if needs_w:
            total = accumulator_of(ctx.weight)
            if total is None:
                w_grad = torch.mm(y_grad.t(), x.flatten(0, -2))
            else:
                add_product_(total, y_grad.t(), x.flatten(0, -2))
        return x_grad, w_grad, y_grad.sum(0) if needs_b else None


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a b in fp32, for a [N, M] and b [M, K] in half precision."""
    torch.addmm(total, a, b, out_dtype=total.dtype, out=total)


@lru_cache
def _tried(device: torch.device, dtype: torch.dtype) -> bool:
    """Try a product once. Some torch versions, builds and devices do not have it, and raise an error."""
    total, ones = (torch.ones(16, 16, device=device, dtype=each) for each in (torch.float32, dtype))
    try:
        add_product_(total, ones, ones)
    except (RuntimeError, TypeError):  # no such operation here; a torch before 2.8 has no such argument
        return False
    return bool((total == 17).all())
