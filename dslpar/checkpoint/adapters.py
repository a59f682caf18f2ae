"""Locate the tensors of a transformers model that a policy runs, adapters included, in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from dslpar.checkpoint.slices import Segment
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers.lora import ExpertAdapter
from dslpar.models.pretrained import Source
from dslpar.policies.experts import Experts
from dslpar.policies.lora import parameters_with_peft_names
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import Part, parameters_with_sources, parts


class OfExperts(NamedTuple):
    """The matrices of the adapters of one parameter of experts."""

    adapter: ExpertAdapter
    a: str
    b: str
    """Names of A and B in the checkpoint."""


class Contents(NamedTuple):
    """Names and places of a transformers model's tensors in a checkpoint."""

    parts: Mapping[str, Part]
    """Name in transformers' state dict -> parameter of the checkpoint, and the rows that hold the tensor."""
    trained: frozenset[str]
    """Names in transformers' state dict of the tensors that are not frozen."""
    matrices: Mapping[str, str]
    """Names of the adapters' A and B as in peft -> parameter names in the checkpoint."""
    scale: float = 1.0
    """Factor s of an adapter's update s B A."""
    of_experts: Mapping[str, OfExperts] = {}
    """Adapters of experts' weights, by the weight's name in transformers' state dict."""

    def is_adapted(self, state: str) -> bool:
        """Return whether a weight has an adapter."""
        return state in self.of_experts or (state.endswith(".weight") and _matrix(state, "lora_A") in self.matrices)

    def delta_of_experts(self, reader: TensorReader, state: str, experts: slice) -> Tensor:
        """Return the update that adapters add to the weights of some experts, in float32: only these are read."""
        adapter, a, b = self.of_experts[state]
        left, right = (b, a) if not adapter.transposed else (a, b)
        one, other = (_of_experts(reader, each, experts).float() for each in (left, right))
        if adapter.transposed:
            one, other = one.transpose(1, 2), other.transpose(1, 2)
        return adapter.scale * (one @ other)

    def delta(self, reader: TensorReader, state: str) -> Tensor:
        """Return the update that an adapter adds to a weight: s B A, float32 [out, in]."""
        a, b = (reader.full(self.matrices[_matrix(state, each)]).float() for each in ("lora_A", "lora_B"))
        return self.scale * (b @ a)


def _of_experts(reader: TensorReader, name: str, experts: slice) -> Tensor:
    """Read A or B of some experts."""
    _, *others = reader.index.entry(name).shape
    box = ((Segment(experts.start, experts.stop - experts.start),), *((Segment(0, each),) for each in others))
    return reader.local(name, "", box)


def _matrix(state: str, matrix: str) -> str:
    return f"{state.removesuffix('.weight')}.{matrix}.weight"


def contents(model: HuggingFaceModel) -> Contents:
    """Find the place of each tensor of a model. Builds the layers on torch's default device, which may be meta."""
    sources: list[tuple[str, tuple[Source, ...]]] = []
    trained: set[str] = set()
    matrices: dict[str, str] = {}
    of_experts: dict[str, OfExperts] = {}
    for layer in model.layers(Groups(Mesh())):
        if layer.tied is not None:
            continue
        module = layer.build()
        for name, p, of in parameters_with_sources(module):
            sources.append((f"{layer.owner}.{name}", of))
            trained |= {source.name for source in of if p.requires_grad}
        for path, owner in module.named_modules():
            for adapter in owner.adapters if isinstance(owner, Experts) else ():
                a, b = (".".join(filter(None, (layer.owner, path, each))) for each in adapter.matrices)
                of_experts[owner.sources[adapter.name][0].name] = OfExperts(adapter, a, b)
        matrices |= {own: f"{layer.owner}.{name}" for name, _, own in parameters_with_peft_names(module)}
    shapes = {name: tuple(state.shape) for name, state in model.model.state_dict().items()}
    scale = 1.0 if model.adapters is None else model.adapters.lora.scale
    return Contents(parts(sources, shapes), frozenset(trained), matrices, scale, of_experts)
