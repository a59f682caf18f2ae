"""Sum gradients of vectors (biases, gains, position tables) over tensor ranks, once per step.

    late = defer_vectors(module, groups, spec)         # before DeepSpeed's engine reduces anything
    deepspeed_patches.call_before_reduction(ds_engine, VectorReduction(ds_engine, groups).reduce)

A vector is applied to this rank's tokens only, so each rank has a partial gradient. A layer alone does not know when a
step ends, and must sum partial gradients in each backward. An engine knows which backward is the last. Until then
partial gradients accumulate over micro-batches. Then one all-reduce sums the gradients of all vectors that are summed
over the same axes and have the same dtype. The reduction over replicas follows. Megatron-LM does the same for norms
under sequence parallelism when it finalizes a step's gradients.

This requires that a rank keeps its accumulated gradients until the step. With ZeRO 2 and 3, and with an optimizer on
the CPU, each micro-batch's gradients are reduced over replicas as soon as they are computed. Layers then still sum in
each backward.
"""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers.parameter import defer_sums, deferred_vectors
from dslpar.layout.deepspeed_config import keeps_gradients
from dslpar.schema.sections import Spec


def defer_vectors(module: nn.Module, groups: Groups, spec: Spec) -> list[int]:
    """Let a `VectorReduction` sum the gradients of a model's vectors, if possible; return the ids of these vectors.

    After the last backward, the gradients of these vectors are still partial.
    """
    # Set to either value: a program may have run the same modules with another ZeRO stage before.
    defer_sums(module, groups.axis("tensor").size > 1 and keeps_gradients(spec))
    return deferred_ids(module)


def deferred_ids(module: nn.Module) -> list[int]:
    """Return the ids of the parameters that a `VectorReduction` sums."""
    return [id(p) for vectors in deferred_vectors(module).values() for p in vectors]


class VectorReduction:
    """Sums the gradients of an engine's deferred vectors; all ranks of a tensor group call it together."""

    def __init__(self, ds_engine: Any, groups: Groups) -> None:
        self._engine, self._groups = ds_engine, groups
        self._vectors = deferred_vectors(ds_engine.module)

    def reduce(self) -> None:
        """Sum the step's accumulated gradients. Call it once per step: a second sum would count each rank again."""
        finishes = []
        for letters, vectors in self._vectors.items():
            by_dtype: dict[torch.dtype, list[Tensor]] = {}
            for gradient in (self._gradient(p) for p in vectors if p.requires_grad):
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
            axis = self._groups.axis(*letters)
            finishes += [collectives.start_all_reduce_coalesced_(each, axis) for each in by_dtype.values()]
        for finish in finishes:
            finish()

    def _gradient(self, p: Any) -> Tensor:
        """Return the tensor in which DeepSpeed accumulates a parameter's gradient.

        The tensor is zero if this rank did not use the parameter. A tensor rank with other samples may have used it,
        and all ranks must send tensors of the same size.
        """
        zero = self._engine.optimizer
        if isinstance(zero, BF16_Optimizer) and getattr(p, "_hp_grad", None) is not None:
            return p._hp_grad  # type: ignore[no-any-return]
        if getattr(zero, "use_grad_accum_attribute", False):  # ZeRO 1 in half precision
            if p.grad_accum is None:
                p.grad = torch.zeros_like(p)
                zero._fill_param_grad_accum_attribute(p)
            return p.grad_accum  # type: ignore[no-any-return]
        if p.grad is None:
            p.grad = torch.zeros_like(p)
        return p.grad  # type: ignore[no-any-return]
