"""Gradients of vectors (biases, gains, position tables), summed over tensor ranks once a step.

    late = defer_vectors(module, groups, spec)         # before DeepSpeed's engine reduces anything
    deepspeed_patches.call_before_reduction(ds_engine, VectorReduction(ds_engine, groups).reduce)

A vector meets this rank's tokens only, so its gradient comes in parts. A layer by itself knows no step, and sums them
in each backward. An engine knows when the last one is over: until then parts add up over micro-batches, and then one
all-reduce sums them, for all vectors that need the same axes, before replicas reduce theirs. Megatron-LM too reduces
gradients of norms under sequence parallelism once, when it finalizes those of a step.

That needs a rank to keep whole gradients until the step. At ZeRO 2 and 3, and where the optimizer is on the CPU, each
micro-batch's are reduced over replicas as they are made, and layers sum in each backward as before.
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
    """Leave the sums of a model's vectors to a `VectorReduction`, where there can be one; return the vectors' ids.

    Their gradients are not complete when the last backward is over.
    """
    # Said either way: a program may have run the same modules at another stage of ZeRO before.
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
        """Sum what the step's backwards have added up; once, since a second sum would count ranks twice."""
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
        """Return where DeepSpeed adds up a parameter's gradient.

        Zeros, where it was not used: where tensor ranks have other samples, another one may have used it, and all must
        send as much.
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
