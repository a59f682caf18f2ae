"""Context-parallel attention over sequences sharded across ranks: `ring`, `ulysses`, and `hybrid`, which combines them.

Letters: B samples, S tokens over n ranks, A query heads, G key and value heads, D features per head. All three take q
[B, A, S/n, D] and k, v [B, G, S/n, D], and return [B, A, S/n, D]. Each rank's mask covers whole sequences, [B, S].

`ulysses` (DeepSpeed-Ulysses, arXiv 2309.14509) exchanges pieces of the sequence for pieces of the heads, with q, k and
v in one message. Then it attends and exchanges back. A and G must divide by n. Traffic forward and backward:
4 (n-1)/n times B S/n (A + G) D elements.

`ring` (2105.13120) sends keys and values around the ring while each rank attends to the keys that it holds. The results
for the ranks' keys are merged by their sums of exponents as in Ring Attention (2310.01889), after FlashAttention. The
forward sends keys and values n - 1 times. The backward does so too, and sends their gradients n times, until these are
back on the rank that stores the keys. Traffic: (6n - 4) times B S/n G D, which is G/A of the traffic without grouped
queries. torch's fused kernels compute the attention of blocks of queries to blocks of keys (fused_attention.py), so no
scores are in memory. The tokens that ranks store determine the blocks (layout/attention_blocks.py). In zigzag order
each rank stores a piece from both halves of the sequence, so that every rank has the same causal work.

Peak memory of a ring's backward, besides saved tensors and the incoming gradient, for n > 2 ranks in zigzag order:
2 A for the queries' gradient and a block's part of it; 8 G for keys, values and their gradients, each both sent and
arriving; G for a block's part of these. The sum is 2 A + 9 G times B S/n D elements, or 1.5 A + 10 G if that is more
on the first ranks. With one piece per rank it is 2 A + 10 G. Gradients add up in float32.

`hybrid` (USP, 2405.07719; Megatron-LM's a2a+p2p) runs ulysses over neighbouring ranks, such as those of a host, and a
ring over these groups. It allows more ranks than there are key heads, and shortens the ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers import fused_attention
from dslpar.layers.dropout import seeded_generator
from dslpar.layers.parameter import stable_hash
from dslpar.layers.upcast import upcast
from dslpar.layout.attention_blocks import Block, Pattern, blocks
from dslpar.layout.token_order import Runs, runs

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def ulysses(q: Tensor, k: Tensor, v: Tensor, axis: Axis, attend: Attend) -> Tensor:
    """Exchange sequence pieces for heads, `attend` over whole sequences, exchange back; return [B, A, S/n, D].

    v may have other features per head than q and k, as with latent attention; it then has an exchange of its own.
    """
    if axis.size == 1:
        return attend(q, k, v)
    together = [(q, k, v)] if v.shape[-1] == q.shape[-1] else [(q, k), (v,)]
    y = attend(*(part for parts in together for part in _whole_sequences(parts, axis)))
    return collectives.all_to_all_autograd(y, axis, split_dim=2, concat_dim=1)


def _whole_sequences(parts: Sequence[Tensor], axis: Axis) -> Sequence[Tensor]:
    """Exchange pieces [B, heads, S/n, D], all with the same D, for whole sequences of this rank's heads, at once."""
    shards = [torch.unflatten(part, 1, (axis.size, -1)).movedim(1, 0) for part in parts]  # [n, B, heads/n, S/n, D]
    whole = collectives.all_to_all_autograd(torch.cat(shards, dim=2), axis, split_dim=0, concat_dim=3).squeeze(0)
    return torch.split(whole, [shard.shape[2] for shard in shards], dim=1)


class AttentionDropout(NamedTuple):
    """Dropout of attention probabilities with probability `p`; `seed` determines the mask of each block."""

    p: float = 0.0
    seed: int = 0

    def of_block(self, step: int, number: int) -> Callable[[Tensor], Tensor] | None:
        """Return the function that makes a block's dropout factors, equal in the backward; None without dropout."""
        if self.p == 0:
            return None

        def factors(probabilities: Tensor) -> Tensor:
            generator = seeded_generator(stable_hash(self.seed, step, number), probabilities.device)
            kept = torch.rand(probabilities.shape, generator=generator, device=probabilities.device) >= self.p
            return kept / (1 - self.p)

        return factors


class RingOptions(NamedTuple):
    """Options of a ring: the tokens that ranks store, the keys that a query attends to, and dropout."""

    axis: Axis
    """The ranks of the ring."""
    causal: bool = True
    mask: Tensor | None = None
    """[B, S]. bool: True for keys that queries attend to. int32: each token's document, from 1; 0 masks the key."""
    dropout: AttentionDropout = AttentionDropout()
    window: int | None = None
    """Queries attend to keys less than this many tokens away; None: at any distance."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    zigzag: bool = False
    """Whether each rank stores one piece from each half of the sequence (zigzag order), not one contiguous piece."""

    def stored_by(self, index: int, length: int) -> Runs:
        """Return the runs of the sequence that the rank `index` stores, `length` tokens in all."""
        ranks = self.axis.size
        return runs(length * ranks, ranks if self.zigzag else 1, index, ranks)

    def blocks(self, step: int, length: int, *, tiled: bool) -> list[Block]:
        """Return the blocks of this rank's queries with the keys of the rank `step` places before it."""
        pattern = Pattern(self.causal, self.window, by_token=self.mask is not None)
        queries = self.stored_by(self.axis.index, length)
        keys = self.stored_by((self.axis.index - step) % self.axis.size, length)
        return blocks(queries, keys, pattern, tiled=tiled)

    def allowed(self, block: Block, device: torch.device) -> Tensor | None:
        """Return the mask [B or 1, 1, queries, keys] of a masked block; None for other blocks."""
        if block.kind != "masked":
            return None
        queries, keys = (torch.arange(run.first, run.end, device=device) for run in (block.queries, block.keys))
        distance = queries.unsqueeze(1) - keys
        allowed = torch.ones_like(distance, dtype=torch.bool)
        if self.causal:
            allowed &= distance >= 0
        if self.window is not None:
            allowed &= distance.abs() < self.window
        allowed = allowed[None, None]
        if self.mask is not None:
            of_keys = self.mask[:, block.keys.first : block.keys.end]
            allowed = allowed & of_keys.bool()[:, None, None, :]
            if self.mask.dtype != torch.bool:
                of_queries = self.mask[:, block.queries.first : block.queries.end]
                allowed = allowed & (of_queries[:, :, None] == of_keys[:, None, :]).unsqueeze(1)
        return allowed


def ring(q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> Tensor:
    """Attend with this rank's queries to the keys of all ranks; return [B, A, S/n, D], zeros if a query has no key.

    A ring of one rank attends to whole sequences, and makes masks tile by tile.
    """
    y: Tensor = _Ring.apply(q, k, v, options)  # type: ignore[no-untyped-call]
    return y


def hybrid(q: Tensor, k: Tensor, v: Tensor, inner: Axis, options: RingOptions) -> Tensor:
    """Attend with `ulysses` over `inner`, whose ranks hold neighbouring pieces, and a ring over `options.axis`."""
    return ulysses(q, k, v, inner, lambda q, k, v: ring(q, k, v, options))


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, options: RingOptions) -> Tensor:
        scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else options.scale
        tiled = not fused_attention.has_kernel(q, v, dropout=options.dropout.p > 0)
        merged = _Merged(q, v)
        for step, keys, values in _circulate(k, v, options.axis):
            for number, block in enumerate(options.blocks(step, q.shape[2], tiled=tiled)):
                allowed = options.allowed(block, q.device)
                if not _is_empty(allowed):
                    rows, columns = slice(*block.rows), slice(*block.columns)
                    part = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                    kept = options.dropout.of_block(step, number)
                    merged.add(rows, *fused_attention.forward(part, block.kind, scale, allowed, kept))
                    del part
            del keys, values  # else three pairs would be in memory: these, the next ones, and those on their way
        y, lse = merged.result()
        # lse is one number per query. The backward recomputes the probabilities from it, so scores are never kept.
        ctx.save_for_backward(q, k, v, y, lse)
        ctx.options, ctx.scale, ctx.tiled = options, scale, tiled
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, y, lse = ctx.saved_tensors
        options: RingOptions = ctx.options
        y_grad, q_grad = grads[0], _Sum(q)
        # Gradients travel along with their keys, and one step further: home to the rank that stores the keys.
        travelling: Pending | None = None
        for step, keys, values in _circulate(k, v, options.axis):
            k_grad, v_grad = _Sum(k), _Sum(v)
            message: Tensor | None = None
            for number, block in enumerate(options.blocks(step, q.shape[2], tiled=ctx.tiled)):
                allowed = options.allowed(block, q.device)
                if _is_empty(allowed):
                    continue
                rows, columns = slice(*block.rows), slice(*block.columns)
                part = q[:, :, rows], keys[:, :, columns], values[:, :, columns]
                of_rows = y_grad[:, :, rows], y[:, :, rows], lse[:, :, rows]
                kept = options.dropout.of_block(step, number)
                q_part, k_part, v_part = fused_attention.backward(part, *of_rows, block.kind, ctx.scale, allowed, kept)
                if travelling is not None and message is None:
                    # Wait only after the first block, so that the gradients travel while it is computed.
                    message = travelling.wait()
                    k_grad.total, v_grad.total = _split(message, k, v)
                q_grad.add(rows, q_part)
                k_grad.add(columns, k_part)
                v_grad.add(columns, v_part)
                del part, q_part, k_part, v_part
            del keys, values  # as in the forward
            if options.axis.size == 1:
                return q_grad.result(), k_grad.result(), v_grad.result(), None
            if message is None:
                message = _joined(k_grad.wide(), v_grad.wide()) if travelling is None else travelling.wait()
            del k_grad, v_grad
            travelling = collectives.start_ring_shift(message, options.axis)
        assert travelling is not None
        k_home, v_home = _split(travelling.wait(), k, v)
        return q_grad.result(), k_home.to(k.dtype), v_home.to(v.dtype), None


class _Sum:
    """Accumulator of the gradient of `like`. If the first part covers all tokens, it becomes the sum without zeros."""

    def __init__(self, like: Tensor) -> None:
        self.like = like
        self.total: Tensor | None = None

    def add(self, tokens: slice, part: Tensor) -> None:
        """Add the gradient of some tokens; may later write into `part`."""
        if self.total is None and part.shape == self.like.shape:
            self.total = upcast(part)
        else:
            self.wide()[:, :, tokens] += part

    def wide(self) -> Tensor:
        """Return the sum in float32 or wider; zeros for tokens without any part."""
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=_wide(self.like))
        return self.total

    def result(self) -> Tensor:
        """Return the sum in the type of `like`."""
        return self.wide().to(self.like.dtype)


class _Merged:
    """Accumulator of attention over blocks: the result so far, and the log-sum-exp by which it is weighed."""

    def __init__(self, q: Tensor, v: Tensor) -> None:
        self.q, self.v = q, v
        self.y: Tensor | None = None
        self.lse = q.new_empty(0)

    def add(self, rows: slice, y: Tensor, lse: Tensor) -> None:
        """Merge the attention [B, A, rows, D] of some queries to a block's keys; may write into `y`."""
        if self.y is None:
            if y.shape[2] == self.q.shape[2]:
                self.y, self.lse = y, lse
                return
            self._begin()
        assert self.y is not None
        self.y = upcast(self.y)
        # FlashAttention's merge: each part weighs as much as its share of the sum of all exponents.
        before = self.lse[:, :, rows]
        after = torch.logaddexp(before, lse)
        total = _finite(after)
        share, share_before = (lse - total).exp_().unsqueeze(-1), (before - total).exp_().unsqueeze(-1)
        own = self.y[:, :, rows].mul_(share_before)
        own.add_(y.mul_(share) if y.dtype == own.dtype else y * share)
        self.lse[:, :, rows] = after

    def result(self) -> tuple[Tensor, Tensor]:
        """Return y [B, A, S/n, D] in the queries' dtype and lse [B, A, S/n], finite even for queries without keys."""
        if self.y is None:
            self._begin()
        assert self.y is not None
        return self.y.to(self.q.dtype), _finite(self.lse)

    def _begin(self) -> None:
        batch, heads, length, _ = self.q.shape
        # The memory order that kernels return and the output projection reads: a token's heads are adjacent.
        self.y = self.q.new_zeros((batch, length, heads, self.v.shape[-1]), dtype=_wide(self.q)).transpose(1, 2)
        self.lse = self.y.new_full((batch, heads, length), -torch.inf)


def _circulate(k: Tensor, v: Tensor, axis: Axis) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield (step, k, v of the rank `step` places before this rank), and send k and v on while the caller computes."""
    if axis.size == 1:
        yield 0, k, v
        return
    travelling = _joined(k, v)
    for step in range(axis.size):
        following = collectives.start_ring_shift(travelling, axis) if step + 1 < axis.size else Pending(travelling)
        yield step, *_split(travelling, k, v)
        travelling = following.wait()
        del following


def _joined(k: Tensor, v: Tensor) -> Tensor:
    """Copy keys and values, or their gradients, into one message, whatever their strides are."""
    message = k.new_empty(k.numel() + v.numel())
    for part, whole in zip(_split(message, k, v), (k, v), strict=True):
        part.copy_(whole)
    return message


def _split(kv: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Split a message into keys and values, or their gradients: views with the shapes of k and v."""
    of_k, of_v = torch.split(kv, [k.numel(), v.numel()])
    return of_k.view(k.shape), of_v.view(v.shape)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _is_empty(allowed: Tensor | None) -> bool:
    """Return whether a mask allows nothing. False on an accelerator, since the check would wait for the device."""
    is_known = allowed is not None and allowed.device.type == "cpu" and not torch.compiler.is_compiling()
    return is_known and not bool(allowed.any())  # type: ignore[union-attr]


def _finite(lse: Tensor) -> Tensor:
    """Replace the -inf of queries without keys by 0, since exp(-inf - -inf) would be NaN."""
    return lse.masked_fill(lse == -torch.inf, 0)
