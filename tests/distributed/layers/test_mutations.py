"""The proof can fail: leaving out a reduction or reversing a partition order shows by a wide margin.

Thresholds are far above TOLERANCE (1e-12) and below the measured values (0.1 to 1), so no test depends on the exact
number. A mutation is made inside the ranks, which are separate processes, so nothing has to be undone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from dslpar.core import mesh
from dslpar.core.mesh import TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.layers import attention, context_attention, embedding, gather_reduce, linear, loss, norm, placement, rotary
from dslpar.layout.attention_blocks import Block
from tests.distributed.layers.cases import errors
from tests.support.compare_dense import TOLERANCE
from tests.support.layouts import LAYOUTS, kept
from tests.support.ranks import on_ranks

Mutation = Callable[[], None]


def vectors_not_summed() -> None:
    collectives.copy_to_group_coalesced = lambda tensors, axis: tuple(tensors)


def depth_not_summed() -> None:
    _change_sharding(lambda how: replace(how, depth=Axis()))


def weight_rows_not_summed() -> None:
    """dW: keep this rank's rows of its own partial product instead of the sum over q."""

    def start_reduce(self: gather_reduce.Sharding, partial: Any) -> Pending:
        if self.dim == 0 and partial.dim() == 2:
            return Pending(partial.chunk(self.axis.size, 0)[self.axis.index].clone())
        return original_start_reduce(self, partial)

    original_start_reduce = gather_reduce.Sharding.start_reduce
    gather_reduce.Sharding.start_reduce = start_reduce


def input_gradient_not_summed() -> None:
    """1d: omit the all-reduce of Megatron's f; the forward reduction of an outward linear stays."""

    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.sharding = replace(ctx.sharding, x=gather_reduce.Sharding(Axis(), None))
        return original_backward(ctx, *grads)

    original_backward = linear._ShardedMatmul.backward
    linear._ShardedMatmul.backward = backward


def residual_cut_y_then_z() -> None:
    _change_cuts("residual_cuts")


def inner_cut_z_then_y() -> None:
    _change_cuts("inner_cuts")


def weight_cut_q_then_y() -> None:
    _change_placement("inward_weight", lambda right: replace(right, cuts=(right.cuts[0][::-1], *right.cuts[1:])))


def x_gathered_again_in_another_order() -> None:
    _roll_what_the_backward_gathers("x")


def w_gathered_again_in_another_order() -> None:
    _roll_what_the_backward_gathers("w")


def _roll_what_the_backward_gathers(operand: str) -> None:
    """`keep`: the backward's second gather begins with the next rank's piece, while the forward is right."""

    class Rolled(gather_reduce.Sharding):
        def gather(self, stored: Any, **kwargs: Any) -> Any:
            panel = super().gather(stored, **kwargs)
            dim = self.dim or 0
            return panel.roll(stored.shape[dim], dim) if self.axis.size > 1 else panel

        def start_gather(self, stored: Any, **kwargs: Any) -> collectives.Pending:
            return collectives.Pending(self.gather(stored, **kwargs))

    def backward(ctx: Any, *grads: Any) -> Any:
        kept = getattr(ctx.sharding, operand)
        ctx.sharding = replace(ctx.sharding, **{operand: Rolled(kept.axis, kept.dim, kept.blocks)})
        return original_backward(ctx, *grads)

    original_backward = linear._ShardedMatmul.backward
    linear._ShardedMatmul.backward = backward


def gradient_of_joined_output_summed() -> None:
    """`gather_output`: use the backward of a gather whose ranks would continue differently."""
    gather_reduce.collectives.gather_from_group = collectives.all_gather_autograd


def output_joined_slowest_first() -> None:
    original_features = linear.features_over
    linear.features_over = lambda *args: original_features(*args)[::-1]


def blocks_cut_as_one() -> None:
    """q, k and v: shard the rows of all three as one, and the vector's too, so that it fits."""
    for name in ("inward_weight", "inner_vector"):
        _change_placement(name, lambda right: replace(right, blocks=()))


def heads_exchanged_as_one() -> None:
    """Ulysses: shard the heads of q, k and v as one."""

    def ulysses(q: Any, k: Any, v: Any, axis: Axis, attend: context_attention.Attend) -> Any:
        qkv = collectives.all_to_all_autograd(torch.cat([q, k, v], dim=1), axis, split_dim=1, concat_dim=2)
        heads = [part.shape[1] // axis.size for part in (q, k, v)]
        return collectives.all_to_all_autograd(attend(*torch.split(qkv, heads, dim=1)), axis, split_dim=2, concat_dim=1)

    attention.ulysses = ulysses


def ring_never_sees_the_future() -> None:
    original = context_attention.RingOptions.blocks
    context_attention.RingOptions.blocks = lambda self, step, length, tiled: (
        original(self, step, length, tiled=tiled) if step <= self.axis.index else []
    )


def ring_sees_the_future() -> None:
    original = context_attention.RingOptions.blocks
    context_attention.RingOptions.blocks = lambda self, step, length, tiled: original(
        self._replace(causal=False), step, length, tiled=tiled
    )


def zigzag_taken_for_pieces() -> None:
    """Choose blocks as if each rank stored neighbouring tokens."""
    original = context_attention.RingOptions.stored_by
    context_attention.RingOptions.stored_by = lambda self, index, length: original(
        self._replace(zigzag=False), index, length
    )


def ring_masks_its_own_keys_alone() -> None:
    """Use the padding of this rank's tokens for the keys of every other rank."""
    _change_masks(
        lambda how, block: how._replace(mask=how.mask.roll(block.keys.first - how.axis.index * block.keys.length, 1))
    )


def ring_forgets_documents() -> None:
    """Treat documents like padding."""
    _change_masks(lambda how, block: how._replace(mask=how.mask.bool().int()))


def _change_masks(change: Callable[[context_attention.RingOptions, Block], context_attention.RingOptions]) -> None:
    original = context_attention.RingOptions.allowed
    context_attention.RingOptions.allowed = lambda self, block, device: original(change(self, block), block, device)


def groups_of_distant_heads() -> None:
    """Pair query i with key i % G instead of i // (A / G)."""

    def fused(q: Any, k: Any, v: Any, *how: Any) -> Any:
        repeats = q.shape[1] // k.shape[1]
        return original_fused(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1), *how)

    original_fused = attention._fused
    attention._fused = fused


def mask_of_the_first_samples() -> None:
    attention.local_samples = lambda groups, mask, x: mask[: len(mask) // groups.tensor.x]


def positions_counted_from_each_piece() -> None:
    original = rotary.Rotary.__call__
    rotary.Rotary.__call__ = lambda self, x, first, num_heads, sequence_dim, tokens: original(
        self, x, first, num_heads, sequence_dim
    )


def positions_of_the_first_piece() -> None:
    """Position table: every rank takes the first rank's rows."""

    def take_tokens(full: Any, dim: int, tensor: Any, coord: Mapping[str, int], letters: placement.Letters) -> Any:
        return placement.take_tokens(full, dim, tensor, dict.fromkeys(coord, 0), letters)

    embedding.placement = _Changed(placement, take_tokens=take_tokens)


def smoothing_left_out_of_the_gradient() -> None:
    def backward(ctx: Any, *grads: Any) -> Any:
        ctx.even = 0.0
        return original_backward(ctx, *grads)

    original_backward = loss._TokenLosses.backward
    loss._TokenLosses.backward = backward


def norm_s_gradient_of_its_own_features() -> None:
    """Take the two sums of a sharded norm's backward over this rank's features alone."""

    def backward(ctx: Any, *grads: Any) -> Any:
        norm.collectives = _Changed(collectives, start_all_reduce_=lambda x, axis: Pending(x))
        return original_backward(ctx, *grads)

    original_backward = norm._ShardedNorm.backward
    norm._ShardedNorm.backward = backward


class _Changed:
    """A module with some names changed, for a single module that uses it."""

    def __init__(self, module: Any, **names: Any) -> None:
        self.__dict__.update(vars(module) | names)


def _change_placement(name: str, change: Callable[[placement.Placement], placement.Placement]) -> None:
    rightly = getattr(placement, name)
    setattr(placement, name, lambda *args: change(rightly(*args)))


def _change_sharding(change: Callable[[linear.MatmulSharding], linear.MatmulSharding]) -> None:
    original_sharding = linear.matmul_sharding
    linear.matmul_sharding = lambda *args: change(original_sharding(*args))


def _change_cuts(name: str) -> None:
    rightly = getattr(placement, name)

    def cuts(tensor: mesh.TensorMesh) -> placement.ActivationSharding:
        right = rightly(tensor)
        return right._replace(features=right.features[::-1])

    setattr(placement, name, cuts)


MUTATIONS = (
    (vectors_not_summed, "1d-sequence-2", "block"),
    (vectors_not_summed, "2.5d-8-depth-2", "positions"),
    (depth_not_summed, "2.5d-8-depth-2", "mlp"),
    (weight_rows_not_summed, "2d-4", "mlp"),
    (input_gradient_not_summed, "1d-2", "inward"),
    (residual_cut_y_then_z, "cuboid-2-3-2", "inward"),
    (inner_cut_z_then_y, "cuboid-2-3-2", "outward"),
    (weight_cut_q_then_y, "2d-4", "inward"),
    (x_gathered_again_in_another_order, "2d-4-keep-none", "mlp"),
    (x_gathered_again_in_another_order, "1d-sequence-2-keep-w", "inward"),
    (w_gathered_again_in_another_order, "2d-4-keep-x", "inward"),
    (gradient_of_joined_output_summed, "1d-2", "gathered_inward"),
    (output_joined_slowest_first, "cuboid-1-2-2-hidden", "gathered_outward"),
    (blocks_cut_as_one, "1d-2", "attention_grouped"),
    (blocks_cut_as_one, "2d-4-keep-none", "mlp_swiglu"),
    (heads_exchanged_as_one, "ulysses-2", "attention_grouped"),
    (ring_never_sees_the_future, "ring-2", "attention_not_causal"),
    (ring_sees_the_future, "ring-2", "attention"),
    (zigzag_taken_for_pieces, "ring-2-zigzag", "attention"),
    (ring_masks_its_own_keys_alone, "ring-2", "attention_padded_grouped"),
    (ring_forgets_documents, "ring-2", "attention_documents_not_causal"),
    (groups_of_distant_heads, "1d-2", "attention_grouped"),
    (mask_of_the_first_samples, "2d-4-keep-x", "attention_padded"),
    (positions_counted_from_each_piece, "ring-2", "attention_rotary"),
    (positions_counted_from_each_piece, "ring-2", "gpt_llama"),
    (positions_of_the_first_piece, "1d-sequence-2-keep-x", "positions"),
    (smoothing_left_out_of_the_gradient, "1d-2", "losses_smoothed"),
    (norm_s_gradient_of_its_own_features, "2d-4-keep-x", "norm"),
    (norm_s_gradient_of_its_own_features, "2d-4-keep-x", "rms_norm"),
)
"""Mutations, each with the smallest layout and case in which it matters."""
LAID_OUT = LAYOUTS | kept(["2d-4", "1d-sequence-2"]) | {"cuboid-1-2-2-hidden": TensorMesh(y=2, z=2, residual="hidden")}


def mutated(mutate: Mutation, tensor: mesh.TensorMesh, case: str) -> dict[str, float]:
    mutate()
    try:
        return errors(tensor, case)
    except AssertionError as error:  # different copies are a detection, too
        return {str(error): float("inf")}


@pytest.mark.parametrize(("mutate", "layout", "case"), MUTATIONS)
def test_a_mutation_is_detected(mutate: Mutation, layout: str, case: str) -> None:
    tensor = LAID_OUT[layout]
    worst = max(max(found.values()) for found in on_ranks(tensor.size, mutated, mutate, tensor, case))
    assert worst > 1e-2


def test_without_the_reduction_the_loss_of_the_first_step_is_still_exact() -> None:
    """This is why gradients are compared, and not losses."""
    found = on_ranks(2, mutated, vectors_not_summed_quietly, LAYOUTS["1d-sequence-2"], "gpt_tied")[0]
    assert found["gpt_tied: loss"] <= TOLERANCE
    assert max(found.values()) > 1e-2


def vectors_not_summed_quietly() -> None:
    """Like `vectors_not_summed`, but without the check that copies are equal."""
    from tests.distributed.layers import cases

    vectors_not_summed()
    cases.assert_copies_equal = lambda *_: None
