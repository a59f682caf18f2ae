"""Attention over a sequence that is sharded over ranks: `ring` and `ulysses`.

Letters: B samples, S tokens in n pieces, A heads of queries and G of keys and values, each of D features. Both take q
[B, A, S/n, D] and k, v [B, G, S/n, D], and give [B, A, S/n, D]. Each rank's mask is of whole sequences, [B, S].

`ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509) exchanges pieces of the sequence for pieces of the heads, q, k and v in
one message, attends, and exchanges back; A and G must divide by n. Traffic forward and backward:
4 (n-1)/n times B S/n (A + G) D elements.

`ring` (2105.13120; that blocks are merged by running maxima and sums is Ring Attention's, 2310.01889, after
FlashAttention) sends keys and values around, n - 1 times forward; backward once more, with their gradients, which come
home after n. Traffic: (6n - 4) times B S/n G D: G/A of what it is without groups. Products are plain matrix products,
in float32 or wider, so the scores of one block [B, A, S/n, S/n] are in memory while it is worked on. The queries of a
group are rows of one matrix [A/G * S/n, D], so keys are never repeated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers.dropout import seeded_generator
from dslpar.layers.parameter import stable_hash
from dslpar.layers.upcast import upcast

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Exchange sequence pieces for heads, `attend` over whole sequences, exchange back: [B, A, S/n, D] to the same."""
    shards = [torch.unflatten(part, 1, (axis.size, -1)).movedim(1, 0) for part in (q, k, v)]  # [n, B, heads/n, S/n, D]
    qkv = collectives.all_to_all_autograd(torch.cat(shards, dim=2), axis, split_dim=0, concat_dim=3).squeeze(0)
    y = attend(*torch.split(qkv, [shard.shape[2] for shard in shards], dim=1))
    return collectives.all_to_all_autograd(y, axis, split_dim=2, concat_dim=1)


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities: with `p`, by masks that follow from `seed`, one a block."""

    p: float = 0.0
    seed: int = 0

    def mask(self, scores: Tensor, step: int) -> Tensor | float:
        """Return the factor of the probabilities of the ring's `step`-th block; the backward gets the same one."""
        if self.p == 0:
            return 1.0
        generator = seeded_generator(stable_hash(self.seed, step), scores.device)
        kept = torch.rand(scores.shape, generator=generator, device=scores.device) >= self.p
        return kept / (1 - self.p)


class RingOptions(NamedTuple):
    """Which keys a query attends to, and dropout, around the ring."""

    axis: Axis
    causal: bool = True
    mask: Tensor | None = None
    """[B, S], bool, of keys; True: attended to. Or int32: each token's document, from 1; 0 is attended to by none."""
    dropout: AttentionDropout = AttentionDropout()

    def attends(self, step: int) -> bool:
        """Whether this rank's queries attend to any key of the rank `step` places before."""
        return not self.causal or step <= self.axis.index

    def scores(self, q: Tensor, k: Tensor, step: int) -> Tensor:
        """Return [B, G, A/G * S/n, S/n]: this rank's queries times the keys of the rank `step` before it, masked."""
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        length = k.shape[2]
        if self.causal and step == 0:
            future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
            scores.view(*scores.shape[:2], -1, length, length).masked_fill_(future, -torch.inf)
        if self.mask is not None:
            pieces = self.mask.chunk(self.axis.size, 1)
            keys = pieces[(self.axis.index - step) % self.axis.size]
            scores.masked_fill_(~keys.bool()[:, None, None, :], -torch.inf)
            if keys.dtype != torch.bool:
                others = pieces[self.axis.index][:, :, None] != keys[:, None, :]
                scores.view(*scores.shape[:2], -1, length, length).masked_fill_(others[:, None, None], -torch.inf)
        return scores


def ring(q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks, [B, A, S/n, D]; zeros where a query has no key."""
    rows = torch.unflatten(q, 1, (k.shape[1], -1)).flatten(2, 3)
    y: Tensor = _Ring.apply(rows, k, v, options)  # type: ignore[no-untyped-call]
    return y.view(q.shape)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> Tensor:
        wide = upcast(q)
        y, total = wide.new_zeros(q.shape), wide.new_zeros((*q.shape[:-1], 1))
        peak = torch.full_like(total, -torch.inf)
        for step, (keys, values) in _circulate(torch.stack([k, v]), options.axis):
            if not options.attends(step):
                continue  # keys of the future
            scores = options.scores(wide, upcast(keys), step)
            # FlashAttention's merge: what was summed with the old maximum is scaled to the new one.
            before, peak = peak, torch.maximum(peak, scores.amax(-1, keepdim=True))
            weights = scores.sub_(_finite(peak)).exp_()
            rescale = (before - _finite(peak)).exp_()
            total = total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
            y = y.mul_(rescale).add_((weights * options.dropout.mask(weights, step)) @ upcast(values))
        # A query without any key: 0 / 1 instead of 0 / 0.
        total.masked_fill_(total == 0, 1)
        y = y.div_(total).to(q.dtype)
        # One number a query, from which the backward makes its probabilities again: scores are never kept.
        ctx.save_for_backward(q, k, v, y, _finite(peak) + total.log())
        ctx.options = options
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, lse = ctx.saved_tensors
        options: RingOptions = ctx.options
        wide, y_grad, scale = upcast(q), upcast(grads[0]), 1 / math.sqrt(q.shape[-1])
        # The softmax's sum over all keys, which no rank has together: FlashAttention reads it off the output.
        delta = (y_grad * upcast(y)).sum(-1, keepdim=True)
        kv = torch.stack([k, v])
        q_grad, kv_grad = torch.zeros_like(wide), torch.zeros_like(upcast(kv))
        for step, (keys, values) in _circulate(kv, options.axis):
            if options.attends(step):
                keys, values = upcast(keys), upcast(values)
                probabilities = (options.scores(wide, keys, step) - lse).exp()
                mask = options.dropout.mask(probabilities, step)
                scores_grad = probabilities * ((y_grad @ values.transpose(-1, -2)) * mask - delta) * scale
                q_grad += scores_grad @ keys
                kv_grad[0] += scores_grad.transpose(-1, -2) @ wide
                kv_grad[1] += (probabilities * mask).transpose(-1, -2) @ y_grad
            # The gradients travel on with the keys that they belong to, and once more than these: home.
            kv_grad = collectives.start_ring_shift(kv_grad, options.axis).wait()
        return q_grad.to(q.dtype), kv_grad[0].to(q.dtype), kv_grad[1].to(q.dtype), None


def _circulate(kv: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor]]:
    """Yield (step, keys and values of the rank that many places before), each sent on while it is worked on."""
    for step in range(axis.size):
        following = collectives.start_ring_shift(kv, axis) if step + 1 < axis.size else Pending(kv)
        yield step, kv
        kv = following.wait()


def _finite(peak: Tensor) -> Tensor:
    """Replace -inf, the highest score of a query that has seen no key, by 0: exp(-inf - -inf) would be NaN."""
    return peak.masked_fill(peak == -torch.inf, 0)
