"""`train.compile`: the repeated layers of a model, each compiled by torch.

    compile_layers(module, backend="inductor")       # before DeepSpeed sees the module; nothing runs yet

Layer by layer, as torchtitan does: the graph of one block is compiled once, and all blocks of a rank share it. Between
layers nothing changes, so pipelines, recomputation and ZeRO 0 to 2 are as without. The layers of dslpar.layers are
whole graphs in every tensor mode, collectives included; what torch cannot take into a graph (dropout, which draws from
seeds of its own) runs as before.
"""

from __future__ import annotations

from torch import nn

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
