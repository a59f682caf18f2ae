"""Find the first value that is not finite: a weight, a layer's output, or a parameter's gradient.

    description = find_first_nonfinite(engine, batches)   # all ranks together, after a skipped step; no step may follow

It is looked for once, when a run ends because of it: in the weights as they are, then in one more forward and backward
over the same micro-batches with a hook on every layer and parameter. TorchTitan and Megatron look in every step or not
at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.engine.micro_batches import MicroBatch


class NonFinite(NamedTuple):
    """A value that is not finite; fields are ordered so that the least of all ranks' is the first that was computed."""

    phase: int
    """0: before the forward, 1: in the forward, 2: in the backward."""
    stage: int
    """Position of the rank's stage in the order of that phase: a backward begins at the last stage."""
    rank: int
    value: str
    rank_description: str


def find_first_nonfinite(engine: Engine, batches: Iterable[MicroBatch]) -> str:
    """Describe the value that was the first not to be finite, in the same text on every rank. All ranks together."""
    groups, rank = engine.groups, engine.rank_description
    stage, last_stage = groups.coord["pipe"], groups.mesh.pipe - 1
    # Under ZeRO 3 a rank looks at its own shard, `ds_tensor`: the parameter itself is empty between forwards.
    weights = [name for name, p in engine.named_parameters() if not _is_finite(getattr(p, "ds_tensor", p).detach())]
    outputs, gradients = _run_with_hooks(engine, batches)
    found = [NonFinite(0, stage, groups.rank, f"the weight {name}", rank) for name in weights]
    found += [NonFinite(1, stage, groups.rank, f"the output of {name}", rank) for name in outputs]
    found += [NonFinite(2, last_stage - stage, groups.rank, f"the gradient of {name}", rank) for name in gradients]
    # In the order of phases, and within each as it came: the first of each rank is enough.
    by_rank = collectives.gather_objects(found[:1], groups.axis("pipe", "data", "tensor"))
    firsts = [first for found_there in by_rank for first in found_there]
    if not firsts:
        return f"the loss, or a sum of finite numbers: no weight, layer or gradient by itself, says {rank}"
    first = min(firsts)
    return f"{first.value}, on {first.rank_description}"


def _run_with_hooks(engine: Engine, batches: Iterable[MicroBatch]) -> tuple[list[str], list[str]]:
    """Return the layers whose output, and the parameters whose gradient was not finite, in the order they came."""
    outputs: list[str] = []
    gradients: list[str] = []

    def check_output(name: str, module: nn.Module, inputs: object, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not all(_is_finite(each) for each in tensors if isinstance(each, Tensor)):
            outputs.append(name)

    def check_gradient(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            gradients.append(name)

    with ExitStack() as stack:
        for name, module in engine.module.named_modules():
            if not any(True for _ in module.children()):  # a container's output is its last layer's, found there
                hook = module.register_forward_hook(partial(check_output, f"{name} ({type(module).__name__})"))
                stack.callback(hook.remove)
        for name, p in engine.named_parameters():
            if p.requires_grad:
                hook = p.register_hook(partial(check_gradient, name))  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        engine.forward_backward(batches)
    return outputs, gradients


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())
