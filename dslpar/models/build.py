"""The model of a Job: dslpar's own GPT, or what a config names, checked to be of the right kind before it is called.

A `LayeredModel`, an nn.Sequential and a `layers_cfg` can be cut over stages like the GPT. Any other `torch.nn.Module`
is one layer, with data parallelism and ZeRO. A program may give a model in the same ways, built or not.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import Location
from dslpar.distributed.groups import Groups
from dslpar.language.lazy import instantiate, locate
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayeredModel, LayerSpec, Loss
from dslpar.models.sequential import Layers, Sequential, Whole, bind, is_chain
from dslpar.schema import families
from dslpar.schema.registry import MODELS
from dslpar.schema.sections import Model

LAYERS_CFG = "layers_cfg"


def model_of(job: Job) -> LayeredModel:
    """The Job's model, not built yet. Raises DslparError where the class is not there, or is no model."""
    model = job.spec.model
    if isinstance(model, Model):
        return _family_model(type(model).__name__, vars(model))
    made = _class(model.target, job.path)
    if not issubclass(made, LayeredModel | nn.Sequential):
        _refuse_copies(job, model.target)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.spec.train.seed)  # for a Sequential that draws its own weights, whole on each rank
        return layered(made, model.args, job.path)


def model_from_cfg(cfg: Mapping[str, Any], path: str = "<program>") -> LayeredModel:
    """The model that dict(type=..., ...) describes, as in a config; an nn.Sequential draws its weights now."""
    given = {str(name): value for name, value in cfg.items() if name != "type"}
    name = str(cfg.get("type", ""))
    if name in families.FAMILIES:
        return _family_model(name, given)
    return layered(_class(name, path), given, path)


def _family_model(name: str, arguments: Mapping[str, Any]) -> LayeredModel:
    model: LayeredModel = families.class_of(name, "model")(**arguments)
    return model


def layered(made: type, args: Mapping[str, Any], path: str) -> LayeredModel:
    """A class of models and its arguments as a model that a pipeline can cut, or as one of one layer."""
    if made is nn.Sequential and LAYERS_CFG in args:
        bind(Layers, args, Location(path))
        return Layers(args[LAYERS_CFG], path)
    arguments = {name: value if name == LAYERS_CFG else instantiate(value) for name, value in args.items()}
    bind(made, arguments, Location(path))
    if issubclass(made, LayeredModel):
        model: LayeredModel = made(**arguments)
        return model
    build: Callable[[], Any] = partial(made, **arguments)
    return Sequential.of(build()) if is_chain(made) else Whole(build)


def given_model(model: object, path: str) -> LayeredModel:
    """What a program gives as a model: a LayeredModel or a built module."""
    if isinstance(model, LayeredModel):
        return model
    if isinstance(model, nn.Sequential) and is_chain(type(model)):
        return Sequential.of(model)
    if not isinstance(model, nn.Module):
        _refuse_model(type(model).__name__, path)
    return Whole(lambda: model)


@dataclasses.dataclass(frozen=True)
class Given(LayeredModel):
    """A model with what a program says of it."""

    model: LayeredModel
    criterion: Callable[[Any, Any], Any] | None = None
    """(output, label) to the mean over the micro-batch; None: the model's own loss."""
    method: str | None = None
    """How a pipeline cuts it, as parallel.pipeline.method; None: as the job says."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """The model's."""
        return self.model.layers(groups)

    def loss(self, groups: Groups) -> Loss:
        """The criterion: as a function, since DeepSpeed's pipeline would make a module one of the model's.

        It is given the output in fp32, as ColossalAI and Megatron-LM have it: a loss of 8 bits says little, and means
        of it depend on the layout.
        """
        return self.model.loss(groups) if self.criterion is None else partial(_in_fp32, self.criterion)


def _in_fp32(criterion: Callable[[Any, Any], Any], output: Any, label: Any) -> Any:
    return criterion(_widened(output), label)


def _widened(output: Any) -> Any:
    if isinstance(output, tuple):
        return tuple(map(_widened, output))
    half = isinstance(output, torch.Tensor) and output.dtype in (torch.float16, torch.bfloat16)
    return output.float() if half else output


METHODS: Mapping[str, str] = {"parameter": "parameters", "uniform": "uniform"}
"""ColossalAI's partition methods, by dslpar's names."""


def build_pipeline_model_from_cfg(
    config: Mapping[str, Any], num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> LayeredModel:
    """The model of dict(type=..., ...), to be cut and built by `dslpar.initialize`, each layer on its stage alone.

    `partition_method` is 'parameter' or 'uniform'; left out: as the config's parallel.pipeline says. The cut is logged;
    `verbose` prints it.

    Raises:
        DslparError: there is no such model, or more than one chunk is asked for.
    """
    return _deferred(model_from_cfg(config), num_chunks, partition_method, verbose)


def build_pipeline_model(
    layers: nn.Sequential, num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> LayeredModel:
    """The same for modules that are built already; every rank needs the same weights: seed before they are built."""
    return _deferred(given_model(layers, "<program>"), num_chunks, partition_method, verbose)


def _deferred(model: LayeredModel, num_chunks: int, partition_method: str | None, verbose: bool) -> LayeredModel:
    place = Location("<program>")
    if verbose:
        logging.getLogger("dslpar").setLevel(logging.INFO)
    if num_chunks != 1:
        message = (
            f"num_chunks={num_chunks}: the interleaved schedule, which runs several chunks a stage, is not there yet"
        )
        raise_finding("PIP209", message, "leave num_chunks out, or write 1", place)
    if partition_method is not None and partition_method not in METHODS:
        message = f"there is no partition_method {partition_method!r}"
        hint = f"one of {', '.join(map(repr, METHODS))}, or parallel.pipeline.method in the config"
        raise_finding("PIP202", message, hint, place)
    return Given(model, method=METHODS[partition_method] if partition_method else None)


def _refuse_copies(job: Job, target: str) -> None:
    """A module that knows nothing of tensor groups would stand on each of their ranks, whole."""
    size = job.mesh.tensor.size
    if size > 1:
        message = f"{target!r} is a plain module: {size} tensor ranks would each hold all of it"
        hint = "tensor=1, or a dslpar.models.LayeredModel over dslpar.layers"
        raise_finding("TEN111", message, hint, job.path, "model")


def _class(target: str, path: str) -> type[Any]:
    """The class of that name, a model's: registered, 'Sequential', or by its full name."""
    place = Location(path)
    made = MODELS.find(target) or (nn.Sequential if target == "Sequential" else None)
    made = made or (locate(target, place) if "." in target else MODELS.get(target, place))
    if not (isinstance(made, type) and issubclass(made, (nn.Module, LayeredModel))):
        _refuse_model(repr(target), path)
    return made


def _refuse_model(name: str, path: str) -> NoReturn:
    message = f"{name} is neither a torch.nn.Module nor a dslpar.models.LayeredModel"
    hint = "name a class of either kind, or type='GPT'"
    raise_finding("CFG201", message, hint, path, "model")
