"""Attention to one block of keys: torch's fused kernels with their log-sum-exp, forward and backward.

    y, lse = forward((q, k, v), "full", scale)      # q [B, A, M, D], k and v [B, G, N, D] to [B, A, M, D], [B, A, M]
    q_grad, k_grad, v_grad = backward((q, k, v), y_grad, y, lse, "full", scale)

`lse` is the logarithm of the sum of exp(score) over a query's keys, float32 or wider. For a query without keys it is
-inf, and `y` is 0. Given y and lse over all keys, `backward` returns a block's part of the gradients (FlashAttention,
2205.14135).

`torch.nn.functional.scaled_dot_product_attention` does not return lse, so this module calls the operators beneath it,
as torch's own context parallelism does. On a CPU one operator takes every dtype, masks and grouped queries. On CUDA
there are FlashAttention (half precision, no masks) and the memory-efficient kernel. It takes no grouped queries, and so
is called once for each of a group's A/G query heads. Cases without a kernel (dropout, values of another width than
keys, float64 on CUDA) are plain products in float32 or wider. Their blocks must be small (layout/attention_blocks.py,
`TILE`). `has_kernel` reports beforehand which case applies.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from dslpar.layers.upcast import upcast
from dslpar.layout.attention_blocks import Kind

Qkv = tuple[Tensor, Tensor, Tensor]

aten = torch.ops.aten

_ALIGNED_BYTES = 16
"""Bytes that CUDA's kernels read at once; rows of heads and of masks must be multiples of it."""
_LSE_MULTIPLE = 32
"""The memory-efficient kernel pads its log-sum-exp to a multiple of this number of queries."""


def has_kernel(q: Tensor, v: Tensor, *, dropout: bool = False) -> bool:
    """Return whether a fused kernel supports these queries and values; without one, blocks must be small tiles."""
    if dropout or q.shape[-1] != v.shape[-1]:
        return False
    if q.device.type in ("cpu", "meta"):
        return True
    half_or_single = q.dtype in (torch.float16, torch.bfloat16, torch.float32)
    return q.device.type == "cuda" and half_or_single and q.shape[-1] * q.element_size() % _ALIGNED_BYTES == 0


def forward(
    qkv: Qkv,
    kind: Kind,
    scale: float,
    allowed: Tensor | None = None,
    kept: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend: q [B, A, M, D], k and v [B, G, N, D] to y [B, A, M, D] and lse [B, A, M].

    `allowed` [B or 1, 1, M, N] is the mask of a masked block. `kept` returns the dropout factors for the attention
    weights, and must return the same ones in the backward.
    """
    q, k, v = qkv
    if not has_kernel(q, v, dropout=kept is not None):
        return _plain_forward(qkv, kind, scale, allowed, kept)
    bias = None if allowed is None else _bias(allowed, q)
    if q.device.type == "cuda":
        y, lse = _forward_on_cuda(q, k, v, kind == "causal", scale, bias)
    else:
        y, lse = aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, is_causal=kind == "causal", attn_mask=bias, scale=scale
        )
    if allowed is not None:  # kernels do not agree on the result of a row without keys
        no_keys = ~allowed.any(-1)
        y, lse = y.masked_fill(no_keys.unsqueeze(-1), 0), lse.masked_fill(no_keys, -torch.inf)
    return y, lse


def backward(
    qkv: Qkv,
    y_grad: Tensor,
    y: Tensor,
    lse: Tensor,
    kind: Kind,
    scale: float,
    allowed: Tensor | None = None,
    kept: Callable[[Tensor], Tensor] | None = None,
) -> Qkv:
    """Return a block's gradients of q, k and v; `y` and `lse` are over all keys, and lse is finite without keys too."""
    q, k, v = qkv
    if not has_kernel(q, v, dropout=kept is not None):
        return _plain_backward(qkv, y_grad, y, lse, kind, scale, allowed, kept)
    bias = None if allowed is None else _bias(allowed, q)
    if q.device.type == "cuda":
        return _backward_on_cuda(qkv, y_grad, y, lse, kind == "causal", scale, bias)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(  # type: ignore[no-any-return]
        y_grad, q, k, v, y, lse, 0.0, kind == "causal", attn_mask=bias, scale=scale
    )


def _bias(allowed: Tensor, q: Tensor) -> Tensor:
    """Return the additive mask of scores: 0, or -inf for keys to which a query does not attend."""
    return torch.zeros_like(allowed, dtype=q.dtype).masked_fill_(~allowed, -torch.inf)


# ---- CUDA ----


def _is_flash(q: Tensor, bias: Tensor | None) -> bool:
    if bias is not None or q.dtype == torch.float32 or q.shape[-1] > 256:
        return False
    return torch.cuda.get_device_capability(q.device) >= (8, 0)  # older GPUs have only the memory-efficient kernel


def _forward_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    if _is_flash(q, bias):
        y, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=scale)[:2]
        return y, lse
    bias = _aligned(bias, k)
    parts = [
        aten._scaled_dot_product_efficient_attention(rows, k, v, bias, True, 0.0, causal, scale=scale)[:2]
        for rows in _members(q, k)
    ]
    y = torch.stack([part for part, _ in parts], 2).flatten(1, 2)
    lse = torch.stack([part[..., : q.shape[2]] for _, part in parts], 2).flatten(1, 2)
    return y, lse


def _backward_on_cuda(
    qkv: Qkv, y_grad: Tensor, y: Tensor, lse: Tensor, causal: bool, scale: float, bias: Tensor | None
) -> Qkv:
    q, k, v = qkv
    if _is_flash(q, bias):
        # The kernel also takes random seeds and cumulative document lengths; neither is used here.
        none = torch.empty(0, dtype=torch.int64, device=q.device)
        lengths = q.shape[2], k.shape[2]
        seeds = torch.zeros(2, dtype=torch.uint64, device=q.device), none
        return aten._scaled_dot_product_flash_attention_backward(  # type: ignore[no-any-return]
            y_grad, q, k, v, y, lse.contiguous(), None, None, *lengths, 0.0, causal, *seeds, scale=scale
        )
    bias, seed = _aligned(bias, k), torch.zeros((), dtype=torch.int64, device=q.device)
    lse = functional.pad(lse, (0, -lse.shape[-1] % _LSE_MULTIPLE))
    q_grads, k_grad, v_grad = [], torch.zeros_like(k), torch.zeros_like(v)
    members = (_members(part, k) for part in (y_grad, q, y, lse))
    for y_grad_part, rows, y_part, lse_part in zip(*members, strict=True):
        q_part, k_part, v_part, _ = aten._scaled_dot_product_efficient_attention_backward(
            *(y_grad_part, rows, k, v, bias, _tokens_first(y_part), lse_part.contiguous(), seed, seed, 0.0),
            [True, True, True, False],
            causal,
            scale=scale,
        )
        q_grads.append(q_part)
        k_grad += k_part
        v_grad += v_part
    return torch.stack(q_grads, 2).flatten(1, 2), k_grad, v_grad


def _tokens_first(y: Tensor) -> Tensor:
    """Return y [B, G, M, D] with a token's heads adjacent in memory, which the kernel assumes without a check."""
    return y.transpose(1, 2).contiguous().transpose(1, 2)


def _members(x: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    """Split x [B, A, ...] by member of its groups, into A/G tensors [B, G, ...]; one tensor if heads are ungrouped."""
    return _grouped(x, k).unbind(2)


def _aligned(bias: Tensor | None, k: Tensor) -> Tensor | None:
    """Expand a bias [B or 1, 1, M, N] to all heads of k, with rows aligned to the kernel's reads."""
    if bias is None:
        return None
    length = bias.shape[-1]
    bias = functional.pad(bias, (0, -length % (_ALIGNED_BYTES // bias.element_size())))[..., :length]
    return bias.expand(*k.shape[:2], -1, -1)


# ---- plain products ----


def _plain_forward(
    qkv: Qkv,
    kind: Kind,
    scale: float,
    allowed: Tensor | None,
    kept: Callable[[Tensor], Tensor] | None,
) -> tuple[Tensor, Tensor]:
    q, k, v = qkv
    scores = _scores(q, k, kind, scale, allowed)
    lse = torch.logsumexp(scores, -1)
    weights = scores.sub_(lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp_()
    weights = weights if kept is None else weights * kept(weights)
    y = weights.flatten(2, 3) @ upcast(v)
    return torch.unflatten(y, 2, (-1, q.shape[2])).flatten(1, 2).to(q.dtype), lse.flatten(1, 2)


def _plain_backward(
    qkv: Qkv,
    y_grad: Tensor,
    y: Tensor,
    lse: Tensor,
    kind: Kind,
    scale: float,
    allowed: Tensor | None,
    kept: Callable[[Tensor], Tensor] | None,
) -> Qkv:
    q, k, v = qkv
    weights = _scores(q, k, kind, scale, allowed).sub_(_grouped(lse, k).unsqueeze(-1)).exp_()
    wide_grad = upcast(y_grad)
    # The softmax's backward needs a sum over all keys. A block has only some, so it comes from the output, as in
    # FlashAttention.
    delta = _grouped((wide_grad * upcast(y)).sum(-1), k).unsqueeze(-1)
    rows = _grouped(wide_grad, k).flatten(2, 3)
    weights_grad = (rows @ upcast(v).transpose(-1, -2)).view(weights.shape)
    dropped = weights
    if kept is not None:
        factor = kept(weights)
        weights_grad, dropped = weights_grad * factor, weights * factor
    v_grad = dropped.flatten(2, 3).transpose(-1, -2) @ rows
    scores_grad = (weights * (weights_grad - delta) * scale).flatten(2, 3)
    q_grad = torch.unflatten(scores_grad @ upcast(k), 2, (-1, q.shape[2])).flatten(1, 2)
    k_grad = scores_grad.transpose(-1, -2) @ upcast(_grouped(q, k)).flatten(2, 3)
    return q_grad.to(q.dtype), k_grad.to(k.dtype), v_grad.to(v.dtype)


def _scores(q: Tensor, k: Tensor, kind: Kind, scale: float, allowed: Tensor | None) -> Tensor:
    """Return masked scores [B, G, A/G, M, N]. A group's queries are rows of one matrix, so keys are not repeated."""
    rows = upcast(_grouped(q, k)).flatten(2, 3) * scale
    scores = torch.unflatten(rows @ upcast(k).transpose(-1, -2), 2, (-1, q.shape[2]))
    if kind == "causal":
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores.masked_fill_(future, -torch.inf)
    if allowed is not None:
        scores.masked_fill_(~allowed.unsqueeze(2), -torch.inf)
    return scores


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Reshape [B, A, ...] to [B, G, A/G, ...]."""
    return torch.unflatten(x, 1, (k.shape[1], -1))
