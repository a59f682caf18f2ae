"""Shared parameters in DeepSpeed: read by more than one module, or held by more than one stage."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import nn


def disown_tied_copies(module: nn.Module) -> None:
    """M4. Mark the tied copies of a pipeline as owned by another stage, so that norms count each weight once.

    DeepSpeed marks tied copies with `ds_pipe_replicated`, but does not read this mark without ZeRO. Call this after a
    PipelineModule is built and before `deepspeed.initialize`.
    """
    for p in module.parameters():
        if getattr(p, "ds_pipe_replicated", False):
            p.tensor_model_parallel = False  # type: ignore[attr-defined]


def tied_gradients(weights: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """M5. Return (weight, group) pairs in which DeepSpeed finds the accumulated gradients of tied weights.

    A pipeline sums `.grad` of tied weights over their stages before gradients are averaged over data. If ZeRO 1
    accumulates half-precision gradients in fp32, they are in `.grad_accum` by then and `.grad` is None. Nothing would
    be summed, and no error raised. In that case the pair holds an object whose `.grad` is the accumulated gradient.
    """
    sums = [(getattr(weight, "grad_accum", None), weight, group) for weight, group in weights]
    return [(weight if summed is None else SimpleNamespace(grad=summed), group) for summed, weight, group in sums]


def register_external_parameters(external: Iterable[tuple[nn.Module, nn.Parameter]]) -> None:
    """M9. Register with ZeRO 3 the parameters that a module's forward reads from another module, on a built engine.

    ZeRO 3 detects such a parameter when it is first empty in that forward. After a checkpoint was loaded, small
    parameters are not empty and are never registered. ZeRO 3 empties them later all the same, and activation
    checkpointing then reads an empty parameter.

    external: pairs of a module and a parameter of another module.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    for module, p in external:
        register_external_parameter(module, p)
