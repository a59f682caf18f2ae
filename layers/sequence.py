"""Attention over a sequence that is cut over ranks: `ring` and `ulysses`.

Letters: B samples, S tokens in n pieces, A heads of queries and G of keys and values, each of D features. Both take q
[B, A, S/n, D] and k, v [B, G, S/n, D], and give [B, A, S/n, D]. Each rank's mask is of whole sequences, [B, S].

`ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509) exchanges pieces of the sequence for pieces of the heads, q, k and v in
one message, attends, and exchanges back; A and G must divide by n. Traffic forward and backward:
4 (n-1)/n times B S/n (A + G) D elements.

`ring` (2105.13120; that blocks are merged by running maxima and sums is Ring Attention's, 2310.01889, after
FlashAttention) sends keys and values around, n - 1 times forward; backward once more, with their gradients, which come
home after n. Traffic: (6n - 4) times B S/n G D: G/A of what it is without groups. Products are plain matrix products,
in float32 or wider, so the scores of one block [B, A, S/n, S/n] are held while it is worked on. The queries of a group
are rows of one matrix [A/G * S/n, D], so keys are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers.parameter import stable_hash
from dslpar.layers.precision import widened

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """`attend`, over whole sequences, for this rank's share of the heads."""
    shares = [torch.unflatten(part, 1, (axis.size, -1)).movedim(1, 0) for part in (q, k, v)]  # [n, B, heads/n, S/n, D]
    qkv = collectives.all_to_all_autograd(torch.cat(shares, dim=2), axis, split_dim=0, concat_dim=3).squeeze(0)
    y = attend(*torch.split(qkv, [share.shape[2] for share in shares], dim=1))
    return collectives.all_to_all_autograd(y, axis, split_dim=2, concat_dim=1)


class Drop(NamedTuple):
    """Dropout of attention probabilities: with `p`, by masks that follow from `seed`, one a block."""

    p: float = 0.0
    seed: int = 0

    def mask(self, scores: Tensor, step: int) -> Tensor | float:
        """What the probabilities of the ring's `step`-th block are multiplied by; equal each time it is asked."""
        if self.p == 0:
            return 1.0
        generator = torch.Generator(scores.device).manual_seed(stable_hash(self.seed, step))
        kept = torch.rand(scores.shape, generator=generator, device=scores.device) >= self.p
        return kept / (1 - self.p)


class Ring(NamedTuple):
    """Who attends to what, around the ring."""

    axis: Axis
    causal: bool = True
    mask: Tensor | None = None
    """[B, S], of keys; True: attended to."""
    drop: Drop = Drop()

    def attends(self, step: int) -> bool:
        """Whether this rank's queries see any key of the rank `step` places before."""
        return not self.causal or step <= self.axis.index

    def scores(self, q: Tensor, k: Tensor, step: int) -> Tensor:
        """[B, G, A/G * S/n, S/n] of the rank's queries with the keys of the rank `step` places before."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = k.shape[2]
        if self.causal and step == 0:
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores.view(*scores.shape[:2], -1, length, length).masked_fill_(future, -torch.inf)
        if self.mask is not None:
            keys = self.mask.chunk(self.axis.size, 1)[(self.axis.index - step) % self.axis.size]
            scores.masked_fill_(~keys[:, None, None, :], -torch.inf)
        return scores


def ring(q: Tensor, k: Tensor, v: Tensor, how: Ring) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks, as `how` allows; zeros where it allows none."""
    rows = torch.unflatten(q, 1, (k.shape[1], -1)).flatten(2, 3)
    y: Tensor = _Ring.apply(rows, k, v, how)  # type: ignore[no-untyped-call]
    return y.view(q.shape)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, how: Ring) -> Tensor:
        wide = widened(q)
        y, total = wide.new_zeros(q.shape), wide.new_zeros((*q.shape[:-1], 1))
        peak = torch.full_like(total, -torch.inf)
        for step, (keys, values) in _around(torch.stack([k, v]), how.axis):
            if not how.attends(step):
                continue  # keys of the future
            scores = how.scores(wide, widened(keys), step)
            before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights = scores.sub_(_finite(peak)).exp_()
            shrunk = (before - _finite(peak)).exp_()
            total = total.mul_(shrunk).add_(weights.sum(-1, keepdim=True))
            y = y.mul_(shrunk).add_((weights * how.drop.mask(weights, step)) @ widened(values))
        total.masked_fill_(total == 0, 1)
        y = y.div_(total).to(q.dtype)
        ctx.save_for_backward(q, k, v, y, _finite(peak) + total.log())
        ctx.how = how
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, lse = ctx.saved_tensors
        how: Ring = ctx.how
        wide, y_grad, scale = widened(q), widened(grads[0]), 1 / math.sqrt(q.shape[-1])
        delta = (y_grad * widened(y)).sum(-1, keepdim=True)
        kv = torch.stack([k, v])
        q_grad, kv_grad = torch.zeros_like(wide), torch.zeros_like(widened(kv))
        for step, (keys, values) in _around(kv, how.axis):
            if how.attends(step):
                keys, values = widened(keys), widened(values)
                probabilities = (how.scores(wide, keys, step) - lse).exp()
                mask = how.drop.mask(probabilities, step)
                scores_grad = probabilities * ((y_grad @ values.transpose(-1, -2)) * mask - delta) * scale
                q_grad += scores_grad @ keys
                kv_grad[0] += scores_grad.transpose(-1, -2) @ wide
                kv_grad[1] += (probabilities * mask).transpose(-1, -2) @ y_grad
            kv_grad = collectives.start_ring_shift(kv_grad, how.axis).wait()  # with the keys that they belong to
        return q_grad.to(q.dtype), kv_grad[0].to(q.dtype), kv_grad[1].to(q.dtype), None


def _around(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """(step, the keys and values of the rank that many places before), each sent on while it is worked on."""
    for step in range(axis.size):
        following = collectives.start_ring_shift(kv, axis) if step + 1 < axis.size else Pending(kv)
        yield step, kv
        kv = following.wait()


def _finite(peak: Tensor) -> Tensor:
    """The highest score; 0 of a query that has seen no key: exp(-inf - 0) is 0, and exp(-inf - -inf) no number."""
    return peak.masked_fill(peak == -torch.inf, 0)
