"""`train.compile`: the repeated layers of a model, each compiled by torch.

    compile_layers(module, backend="inductor")       # before DeepSpeed sees the module; nothing runs yet

Layer by layer, as torchtitan does: the graph of one block is compiled once, and all blocks of a rank share it. Between
layers nothing changes, so pipelines, recomputation and ZeRO 0 to 2 are as without. The layers of dslpar.layers are
whole graphs in every tensor mode, collectives included; what torch cannot take into a graph (dropout, which draws from
seeds of its own) runs as before. The engine has cross-entropy compiled too (`layers.loss.compiled_losses`): without,
it makes copies of the logits. `train.compile_components`, after torchtitan's, names one of the two alone.
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
    """Have torch compile each repeated layer at its first call; return how many there are on this rank.

    Repeated are those that activation checkpointing may run again. `backend`: torch.compile's name of it.
    """
    layers: list[nn.Module] = [layer for spec, layer in module.built_layers() if spec.recomputable]
    for layer in layers:
        for vectors in (getattr(inner, "vectors", None) for inner in layer.modules()):
            if isinstance(vectors, Vectors):
                vectors.find()  # One graph for all calls: recomputation compares what it does with the first one.
        layer.compile(backend=backend, dynamic=False)
    return len(layers)


def refuse_lossy_compiler() -> None:
    """Raise DslparError if this torch compiles layers, or cross-entropy, to such as lose gradients."""
    if loses_gradients():
        message = f"torch {torch.__version__} compiles functions to such as lose gradients"
        hint = "take another torch: 2.13 is right; or train.compile=False"
        raise_finding("HST233", message, hint, key="train.compile")


@lru_cache
def loses_gradients() -> bool:
    """Try whether torch compiles a function with a backward of its own as it is.

    torch 2.11 leaves the backward out, without a word, where the result was written into: the gradient is then zero,
    or a part of it. Layers here have such results, and a run would learn, but worse.
    """
    weight = torch.full((2,), 3.0, requires_grad=True)
    torch.compile(_WrittenInto.apply, backend="aot_eager", dynamic=False)(weight.view(2)).sum().backward()
    return weight.grad is None or not torch.equal(weight.grad, torch.ones(2))


class _WrittenInto(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone().mul_(2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].clone()
