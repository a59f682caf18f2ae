"""The model of a Job: dslpar's own GPT, or a class by name, checked to be of the right kind before it is called.

A class that is a `LayeredModel` can be cut like the GPT. Any other `torch.nn.Module` is one layer: ids [batch,
sequence] in, logits [batch, sequence, vocabulary] out, trained by cross-entropy, with data parallelism and ZeRO.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional

from dslpar import spec
from dslpar.config.lazy import instantiate, locate
from dslpar.errors import DslparError, Finding, Location
from dslpar.groups import Groups
from dslpar.job import Job
from dslpar.layers import IGNORE_INDEX
from dslpar.models import GPT, LayeredModel, LayerSpec
from dslpar.models.layered import Labels, Loss


def model_of(job: Job) -> LayeredModel:
    """The Job's model, not built yet. Raises DslparError where the class is not there, or is no model."""
    model = job.spec.model
    if isinstance(model, spec.GPT):
        return GPT(**{field.name: getattr(model, field.name) for field in dataclasses.fields(model)})
    made, args = _class(model.target, job.path), instantiate(model.args)
    if issubclass(made, LayeredModel):
        return made(**args)
    _refuse_copies(job, model.target)
    return Foreign(made, args)


class Foreign(LayeredModel):
    """A module of someone else's as a model of one layer, named "model"."""

    def __init__(self, made: type[nn.Module], args: Mapping[str, Any]) -> None:
        self.made, self.args = made, args

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """The one layer."""
        return [LayerSpec(name="model", build=partial(self.made, **self.args))]

    def loss(self, groups: Groups) -> Loss:
        """The sum of token losses over counted tokens, or over `labels[1]`."""
        return _cross_entropy


def _cross_entropy(logits: Tensor, labels: Labels) -> Tensor:
    labels, denominator = labels if isinstance(labels, tuple) else (labels, (labels != IGNORE_INDEX).sum().clamp(min=1))
    flat = logits.flatten(0, -2).float()
    return functional.cross_entropy(flat, labels.flatten(), ignore_index=IGNORE_INDEX, reduction="sum") / denominator


def _refuse_copies(job: Job, target: str) -> None:
    """A module that knows nothing of tensor groups would stand on each of their ranks, whole."""
    size = job.mesh.tensor.size
    if size > 1:
        said = f"{target!r} is a plain module: {size} tensor ranks would each hold all of it"
        help_ = "tensor=1, or a dslpar.models.LayeredModel over dslpar.layers"
        raise DslparError([Finding("TEN111", "model-not-parallel", "error", said, help_, Location(job.path), "model")])


def _class(target: str, path: str) -> type[Any]:
    """The class of that dotted name, a model's."""
    made = locate(target, Location(path))
    if isinstance(made, type) and issubclass(made, (nn.Module, LayeredModel)):
        return made
    said = f"{target!r} is no torch.nn.Module and no dslpar.models.LayeredModel"
    help_ = "name a class of either kind, or type='GPT'"
    raise DslparError([Finding("CFG201", "not-a-model", "error", said, help_, Location(path), "model")])
