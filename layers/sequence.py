"""Causal attention over a sequence that is cut over ranks: `ring` and `ulysses`.

Letters: B samples, A heads of D features, S tokens in n pieces. Both take and give [B, A, S/n, D].

`ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509) exchanges pieces of the sequence for pieces of the heads, attends, and
exchanges back; A must divide by n. Traffic forward and backward: 8 (n-1)/n times B S/n A D elements.

`ring` (2105.13120; that blocks are merged by their log-sum-exp is Ring Attention's, 2310.01889, after FlashAttention)
sends keys and values around, n - 1 times forward; backward once more, with their gradients, which come home after n.
Traffic: (6n - 4) times B S/n A D. Products are plain matrix products, in float32 or wider, so the scores of one block
[B, A, S/n, S/n] are held while it is worked on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar import comm
from dslpar.comm import Axis
from dslpar.layers.parameter import stable_hash

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """`attend`, over whole sequences, for this rank's share of the heads."""
    qkv = comm.exchanged(torch.stack([q, k, v]), axis, split_dim=2, join_dim=3)
    return comm.exchanged(attend(*qkv.unbind(0)), axis, split_dim=2, join_dim=1)


class Drop(NamedTuple):
    """Dropout of attention probabilities: with `p`, by masks that follow from `seed`, one a block."""

    p: float
    seed: int

    def mask(self, scores: Tensor, step: int) -> Tensor | float:
        """What the probabilities of the ring's `step`-th block are multiplied by; equal each time it is asked."""
        if self.p == 0:
            return 1.0
        generator = torch.Generator(scores.device).manual_seed(stable_hash(self.seed, step))
        kept = torch.rand(scores.shape, generator=generator, device=scores.device) >= self.p
        return kept / (1 - self.p)


def ring(q: Tensor, k: Tensor, v: Tensor, axis: Axis, drop: Drop) -> Tensor:
    """Causal attention of this rank's queries to all keys up to each."""
    y: Tensor = _Ring.apply(q, k, v, axis, drop)  # type: ignore[no-untyped-call]
    return y


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, axis: Axis, drop: Drop) -> Tensor:
        wide = _wide(q)
        y, lse = torch.zeros_like(wide), wide.new_full((*q.shape[:-1], 1), -torch.inf)
        for step, (keys, values) in _around(torch.stack([k, v]), axis):
            if step > axis.index:
                continue  # keys of the future
            scores = _scores(wide, _wide(keys), causal=step == 0)
            merged = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
            probabilities = (scores - merged).exp() * drop.mask(scores, step)
            y = y * (lse - merged).exp() + probabilities @ _wide(values)
            lse = merged
        y = y.to(q.dtype)
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.axis, ctx.drop = axis, drop
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, y, lse = ctx.saved_tensors
        axis: Axis = ctx.axis
        wide, y_grad, scale = _wide(q), _wide(grads[0]), 1 / math.sqrt(q.shape[-1])
        delta = (y_grad * _wide(y)).sum(-1, keepdim=True)
        q_grad, kv_grad = torch.zeros_like(wide), torch.zeros_like(torch.stack([wide, wide]))
        for step, (keys, values) in _around(torch.stack([k, v]), axis):
            if step <= axis.index:
                keys, values = _wide(keys), _wide(values)
                probabilities = (_scores(wide, keys, causal=step == 0) - lse).exp()
                mask = ctx.drop.mask(probabilities, step)
                scores_grad = probabilities * ((y_grad @ values.transpose(-1, -2)) * mask - delta) * scale
                q_grad += scores_grad @ keys
                kv_grad[0] += scores_grad.transpose(-1, -2) @ wide
                kv_grad[1] += (probabilities * mask).transpose(-1, -2) @ y_grad
            kv_grad, works = comm.start_shift(kv_grad, axis)  # they travel on with the keys that they belong to
            comm.finish(works)
        return q_grad.to(q.dtype), kv_grad[0].to(q.dtype), kv_grad[1].to(q.dtype), None, None


def _around(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """(step, the keys and values of the rank that many places before), each sent on while it is worked on."""
    for step in range(axis.size):
        following, works = comm.start_shift(kv, axis) if step + 1 < axis.size else (kv, [])
        yield step, kv
        comm.finish(works)
        kv = following


def _scores(q: Tensor, k: Tensor, *, causal: bool) -> Tensor:
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if not causal:
        return scores
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return scores.masked_fill(future, -torch.inf)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
