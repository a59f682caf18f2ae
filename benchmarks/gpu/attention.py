"""Blockwise attention, as in context parallelism, against plain products in float64 on the CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.gpu.rows import Row, at_most, holds
from dslpar.distributed.collectives import Axis
from dslpar.layers import fused_attention
from dslpar.layers.context_attention import RingOptions, ring

HEADS, LENGTH = 8, 1000
"""A length that is no multiple of kernels' block sizes."""
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Relative to the largest element, as for layers."""


class _Case(NamedTuple):
    groups: int = HEADS
    features: int = 64
    options: Mapping[str, Any] = MappingProxyType({})
    """Options of the ring."""
    mask: str = ""
    """"padded": the second sample is shorter; "packed": several documents."""


CASES = {
    "causal": _Case(),
    "causal, 2 groups": _Case(groups=2),
    "causal, heads of 80": _Case(features=80),
    "full, 1 group": _Case(groups=1, options={"causal": False}),
    "window": _Case(groups=2, options={"window": 300}),
    "padded": _Case(options={"causal": False}, mask="padded"),
    "packed, 2 groups": _Case(groups=2, mask="packed"),
    "packed, window": _Case(options={"window": 100}, mask="packed"),
}


def _mask(kind: str) -> Tensor | None:
    if kind == "padded":
        return torch.arange(LENGTH) < torch.tensor([[LENGTH], [LENGTH - 350]])
    if kind == "packed":
        ends = torch.tensor([[130, 131, 600, LENGTH], [500, 900, 901, LENGTH]])
        return (torch.arange(LENGTH)[None, :, None] >= ends[:, None, :-1]).sum(-1).int() + 1
    return None


def _inputs(case: _Case) -> list[Tensor]:
    """Return q, k, v and the gradient of the result, in float64."""
    generator = torch.Generator().manual_seed(1)
    heads = (HEADS, case.groups, case.groups, HEADS)
    return [torch.randn(2, num, LENGTH, case.features, generator=generator, dtype=torch.float64) for num in heads]


def _exact(case: _Case, qkv: list[Tensor], y_grad: Tensor, valid: Tensor | None) -> list[Tensor]:
    """Compute attention by plain products."""
    q, k, v = (part.clone().requires_grad_() for part in qkv)
    times = HEADS // case.groups
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    allowed = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool)
    if case.options.get("causal", True):
        allowed = allowed & (distance >= 0)
    if "window" in case.options:
        allowed = allowed & (distance.abs() < case.options["window"])
    if valid is not None:
        same = valid.bool() if valid.dtype == torch.bool else None
        pairs = valid[:, None, :].expand(-1, LENGTH, -1) if same is not None else valid[:, :, None] == valid[:, None, :]
        allowed = allowed & pairs.bool()[:, None]
    scores = q @ k.repeat_interleave(times, 1).transpose(-1, -2) / math.sqrt(case.features)
    y = scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ v.repeat_interleave(times, 1)
    y.backward(y_grad)
    return [y.detach(), *(part.grad for part in (q, k, v) if part.grad is not None)]


def blocks(device: torch.device) -> Iterator[Row]:
    """Check a ring of one rank, which attends block by block, in each dtype: the result and the gradients of q, k and
    v.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    for name, case in CASES.items():
        *qkv, y_grad = _inputs(case)
        valid = _mask(case.mask)
        exact = _exact(case, qkv, y_grad, valid)
        for dtype, tolerance in TOLERANCE.items():
            q, k, v = (part.to(device, dtype).requires_grad_() for part in qkv)
            mask = None if valid is None else valid.to(device)
            y = ring(q, k, v, RingOptions(Axis(), mask=mask, **case.options))
            y.backward(y_grad.to(device, dtype))
            found = [y.detach(), q.grad, k.grad, v.grad]
            off = max(
                float((own.double().cpu() - other).abs().max() / other.abs().max())  # type: ignore[union-attr]
                for own, other in zip(found, exact, strict=True)
            )
            yield at_most(f"attention, {name}, {str(dtype).removeprefix('torch.')}, against float64", off, tolerance)
    if device.type == "cuda":
        q = torch.empty(1, HEADS, 64, 64, device=device, dtype=torch.bfloat16)
        fused = fused_attention.has_kernel(q, q)
        yield holds("attention by blocks: torch's kernels", "used" if fused else "none", "used", fused)
