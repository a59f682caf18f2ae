"""`train.compile`: compile each repeated layer of a model with torch.compile.

    compile_layers(module, backend="inductor")       # before DeepSpeed sees the module; nothing runs yet

Layers are compiled one by one, as in torchtitan: the graph of one block is compiled once, and all blocks of a rank
share it. Code between layers is unchanged, so pipelines, recomputation and ZeRO 0 to 2 work as without compilation.
Each layer of dslpar.layers is one whole graph in every tensor mode, collectives included. Code that torch cannot trace
runs uncompiled, such as dropout, which draws from its own seeds. The engine also compiles the cross-entropy
(`layers.loss.compiled_losses`), which copies the logits if it is not compiled. `train.compile_components`, named after
torchtitan's key, restricts compilation to the layers or to the loss.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.engine.pipeline_module import Pipeline
from dslpar.layers.parameter import Vectors
from dslpar.models.layered import LayeredModule


def compile_layers(module: LayeredModule | Pipeline, backend: str) -> int:
    """Have torch compile each repeated layer at its first call; return this rank's number of repeated layers.

    Repeated layers are the layers that activation checkpointing may recompute. `backend` is the name of a torch.compile
    backend.
    """
    layers: list[nn.Module] = [layer for spec, layer in module.built_layers() if spec.recomputable]
    for layer in layers:
        for vectors in (getattr(inner, "vectors", None) for inner in layer.modules()):
            if isinstance(vectors, Vectors):
                vectors.find()  # Found before the first call: recomputation must trace the same graph as that call.
        layer.compile(backend=backend, dynamic=False)
    return len(layers)


def refuse_lossy_compiler() -> None:
    """Raise DslparError if this torch version loses gradients when it compiles layers or cross-entropy."""
    if loses_gradients():
        message = f"torch {torch.__version__} loses gradients when it compiles functions with a custom backward"
        hint = "use another torch version, such as 2.13; or set train.compile=False"
        raise_finding("HST233", message, hint, key="train.compile")


@lru_cache
def loses_gradients() -> bool:
    """Return whether torch.compile drops the custom backward of an autograd.Function.

    torch 2.11 silently leaves the backward out if the function's result was modified in place. The gradient is then
    zero or partial. dslpar's layers return such results, so a run would still learn, but worse.
    """
    weight = torch.full((2,), 3.0, requires_grad=True)
    torch.compile(_WrittenInto.apply, backend="aot_eager", dynamic=False)(weight.view(2)).sum().backward()
    return weight.grad is None or not torch.equal(weight.grad, torch.ones(2))


class _WrittenInto(torch.autograd.Function):
    """A function whose result is modified in place. Its backward passes the gradient on, unlike autograd's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone().mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone()
