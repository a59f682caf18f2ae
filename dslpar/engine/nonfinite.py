"""Where the first value stands that is not finite: a weight, a layer's output, or a parameter's gradient.

    words = where(engine, batches)          # all ranks together, after a step that was skipped; no step may follow

Looked for once, when a run ends over it: weights as they are, then one more forward and backward over the same
micro-batches with a hook on every layer and parameter. TorchTitan and Megatron look in every step or not at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.distributed import collectives
from dslpar.engine.engine import Engine, MicroBatch


class Found(NamedTuple):
    """The first that a rank has seen; the least of all ranks' is the first of all."""

    pass_: int
    """0: before, 1: in the forward, 2: in the backward."""
    stage: int
    """In the order in which the pass comes by."""
    rank: int
    what: str
    place: str
    """Where that rank is: host, stage, step."""


def where(engine: Engine, batches: Iterable[MicroBatch]) -> str:
    """What was not finite first, and where, in the same words on every rank. All ranks together."""
    groups = engine.groups
    stage, last, place = groups.coord["pipe"], groups.mesh.pipe - 1, engine.place
    found = [Found(0, stage, groups.rank, f"the weight {name}", place) for name in _weights(engine)]
    outputs, gradients = _watched_pass(engine, batches)
    found += [Found(1, stage, groups.rank, f"the output of {name}", place) for name in outputs]
    found += [Found(2, last - stage, groups.rank, f"the gradient of {name}", place) for name in gradients]
    seen = collectives.gather_objects(found[:1], groups.axis("pipe", "data", "tensor"))
    firsts = [first for its in seen for first in its]
    if not firsts:
        return f"the loss, or a sum of finite numbers: no weight, layer or gradient by itself, says {engine.place}"
    first = min(firsts)
    return f"{first.what}, on {first.place}"


def _weights(engine: Engine) -> list[str]:
    """By their global names."""
    held = ((name, getattr(p, "ds_tensor", p)) for name, p in engine.named_parameters())
    return [name for name, p in held if not _is_finite(p.detach())]


def _watched_pass(engine: Engine, batches: Iterable[MicroBatch]) -> tuple[list[str], list[str]]:
    """The layers whose output, and the parameters whose gradient was not finite, in the order in which they came."""
    outputs: list[str] = []
    gradients: list[str] = []
    with ExitStack() as stack:
        for name, module in engine.module.named_modules():
            if not any(True for _ in module.children()):
                hook = module.register_forward_hook(_noting(outputs, f"{name} ({type(module).__name__})"))
                stack.callback(hook.remove)
        for name, p in engine.named_parameters():
            if p.requires_grad:
                hook = p.register_hook(_noting_gradient(gradients, name))  # type: ignore[no-untyped-call]
                stack.callback(hook.remove)
        engine.forward_backward(batches)
    return outputs, gradients


def _noting(names: list[str], name: str) -> Any:
    def note(module: Any, inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not all(_is_finite(each) for each in tensors if isinstance(each, Tensor)):
            names.append(name)

    return note


def _noting_gradient(names: list[str], name: str) -> Any:
    def note(gradient: Tensor) -> None:
        if not _is_finite(gradient):
            names.append(name)

    return note


def _is_finite(x: Tensor) -> bool:
    return not x.is_floating_point() or bool(torch.isfinite(x).all())
