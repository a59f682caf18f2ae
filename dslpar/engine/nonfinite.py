"""Find the first value that is not finite: a weight, a layer's output, or a parameter's gradient.

    description = find_first_nonfinite(engine, batches)   # all ranks together, as the run ends

The search runs once, when a run ends because of the value. It checks the weights, then runs one more forward and
backward over the same micro-batches with a hook on every layer and parameter. TorchTitan and Megatron check in every
step or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.engine.engine import Engine
from dslpar.engine.micro_batches import MicroBatch
from dslpar.engine.pipeline_module import Pipeline, global_name


class NonFinite(NamedTuple):
    """A value that is not finite. The field order makes the minimum over ranks the value that was computed first."""

    phase: int
    """0: before the forward, 1: in the forward, 2: in the backward."""
    stage: int
    """Position of its stage in the order of the phase; a backward begins at the last stage."""
    rank: int
    value: str
    """The value in words, such as 'the gradient of' and a parameter's name."""
    rank_description: str


class _Seen(NamedTuple):
    """A non-finite value that a hook found."""

    stage: int
    """The stage that ran when the hook was called. Calls are not in stage order if a rank has several stages: an early
    micro-batch's last stage runs before a late micro-batch's first one.
    """
    name: str
    position: int = 0
    """Position of a parameter within its stage."""


def find_first_nonfinite(engine: Engine, batches: Iterable[MicroBatch]) -> str:
    """Describe the first non-finite value, with the same text on every rank. All ranks must call it together."""
    groups, rank, chunks = engine.groups, engine.rank_description, engine.job.chunks
    positions = _positions(engine.module)
    first_stages = {p: stage for stage, p in reversed(positions)}
    # Under ZeRO 3 a rank looks at its own shard, `ds_tensor`: the parameter itself is empty between forwards.
    weights = [
        _Seen(first_stages.get(p, 0), name)
        for name, p in engine.named_parameters()
        if not _is_finite(getattr(p, "ds_tensor", p).detach())
    ]
    outputs, gradients = _run_with_hooks(engine, batches, positions)
    if engine.job.schedule.split:
        # A split backward gives a stage's biases and norms first and its matrices last, so the hook order does not show
        # which layer failed first. Within a stage, gradients are therefore sorted from its end, in backward order.
        gradients.sort(key=lambda each: -each.position)

    def found(phase: int, what: str, seen: _Seen) -> NonFinite:
        place = chunks.last - seen.stage if phase == 2 else seen.stage
        of_stage = f", stage {seen.stage}" if chunks.num > 1 else ""
        return NonFinite(phase, place, groups.rank, f"{what} {seen.name}{of_stage}", rank)

    every = [found(0, "the weight", seen) for seen in weights]
    every += [found(1, "the output of", seen) for seen in outputs]
    every += [found(2, "the gradient of", seen) for seen in gradients]
    # The first value in the first stage of the first phase. One per rank is enough.
    own = [min(every, key=lambda each: (each.phase, each.stage))] if every else []
    by_rank = collectives.gather_objects(own, groups.axis("pipe", "data", "tensor"))
    firsts = [first for found_there in by_rank for first in found_there]
    if not firsts:
        return "the loss, or a sum of finite numbers: no weight, layer or gradient by itself"
    first = min(firsts)
    return f"{first.value}, on {first.rank_description}"


def _positions(module: nn.Module) -> dict[tuple[int, nn.Parameter], int]:
    """Return each parameter's position in forward order, by (stage of this rank, parameter)."""
    stages = {stage: module.stage_parameters(stage) for stage in module.stages} if isinstance(module, Pipeline) else {}
    return {(stage, p): position for stage, held in stages.items() for position, p in enumerate(held)}


def _run_with_hooks(
    engine: Engine, batches: Iterable[MicroBatch], positions: Mapping[tuple[int, nn.Parameter], int]
) -> tuple[list[_Seen], list[_Seen]]:
    """Return the layers with a non-finite output and the parameters with a non-finite gradient, in hook order."""
    outputs: list[_Seen] = []
    gradients: list[_Seen] = []
    whole = engine.module

    def running_stage() -> int:
        return whole.stage if isinstance(whole, Pipeline) else 0

    def check_output(name: str, module: nn.Module, inputs: object, output: object) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not all(_is_finite(each) for each in tensors if isinstance(each, Tensor)):
            outputs.append(_Seen(running_stage(), name))

    def check_gradient(name: str, p: nn.Parameter, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            stage = running_stage()
            gradients.append(_Seen(stage, name, positions.get((stage, p), 0)))

    with ExitStack() as stack:
        for name, module in whole.named_modules():
            if not any(True for _ in module.children()):  # a container returns its last layer's output
                own = global_name(name, whole.layer_names).rstrip(".") if isinstance(whole, Pipeline) else name
                hook = module.register_forward_hook(partial(check_output, f"{own} ({type(module).__name__})"))
                stack.callback(hook.remove)
        for name, p in engine.named_parameters():
            if p.requires_grad:
                hook = p.register_hook(partial(check_gradient, name, p))  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        engine.forward_backward(batches)
    return outputs, gradients


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())
