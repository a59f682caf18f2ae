"""Build a job's model: one of dslpar's families, or a class that the config names, checked before it is called.

A policy partitions transformers' causal language models over tensor ranks and stages
(`type='transformers.LlamaForCausalLM', config=dict(...)`). A `LayeredModel`, an nn.Sequential and a `layers_cfg` can be
partitioned over stages. Any other `torch.nn.Module` is a model of one layer, for data parallelism and ZeRO. A program
may instead pass a `LayeredModel`, or a module that it has built.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn, cast

import torch
from torch import nn

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import Location
from dslpar.distributed.groups import Groups
from dslpar.language.lazy import instantiate, locate
from dslpar.layout.resolve import Job
from dslpar.models.layered import LayeredModel, LayerSpec, Loss
from dslpar.models.sequential import Layers, Sequential, SingleModule, check_arguments, is_plain_sequential
from dslpar.schema import families, transformers_configs
from dslpar.schema.class_registry import MODELS
from dslpar.schema.sections import Model, OtherModel, PipelineSchedule
from dslpar.schema.transformers_policies import DERIVED, POLICIES

LAYERS_CFG = "layers_cfg"


def model_from_job(job: Job, *, has_criterion: bool = False) -> LayeredModel:
    """Return the job's model, before its layers are built. Raises DslparError: the class is unknown or not a model.

    `has_criterion`: the program passes the loss. A transformers class without a policy is then a plain module, like any
        other class, unless the job has tensor parallelism, a pipeline or LoRA.
    """
    model = job.spec.model
    if isinstance(model, Model):
        return _family_model(type(model).__name__, vars(model))
    cls = _find_class(model.target, job.path)
    is_cut = job.mesh.tensor.size > 1 or job.mesh.pipe > 1
    by_policy = is_cut or model.lora is not None or cls.__name__ in DERIVED | POLICIES.keys()
    if _is_of_transformers(cls) and (by_policy or not has_criterion):
        own = {"lora": model.lora, "attn_implementation": model.attn_implementation}
        given = {name: value for name, value in own.items() if value is not None}
        return _transformers_model(cls, {**model.args, **given}, job.path, job.trusted)
    size = job.mesh.tensor.size
    if size > 1 and not issubclass(cls, LayeredModel | nn.Sequential):
        message = f"{model.target!r} is a plain module: {size} tensor ranks would each hold all of it"
        hint = "tensor=1, or a dslpar.models.LayeredModel over dslpar.layers"
        raise_finding("TEN111", message, hint, job.path, "model")
    with torch.random.fork_rng(devices=[]):
        # Each rank builds the whole nn.Sequential, which draws its weights at once: they must be equal.
        torch.manual_seed(job.spec.train.seed)
        return _model_from_class(cls, model.args, job.path, job.trusted)


def model_from_cfg(cfg: Mapping[str, object], path: str = "<program>") -> LayeredModel:
    """Return the model for a config's dict(type=..., ...). An nn.Sequential is built, and draws its weights, here."""
    arguments = {str(name): value for name, value in cfg.items() if name != "type"}
    name = str(cfg.get("type", ""))
    if name in families.FAMILIES:
        return _family_model(name, arguments)
    return _model_from_class(_find_class(name, path), arguments, path)


def _family_model(name: str, arguments: Mapping[str, object]) -> LayeredModel:
    model: LayeredModel = families.class_of(name, "model")(**arguments)
    return model


def _model_from_class(cls: type, args: Mapping[str, object], path: str, trusted: tuple[str, ...] = ()) -> LayeredModel:
    """Instantiate a class as a LayeredModel; most plain modules become a model of a single layer."""
    if cls is nn.Sequential and LAYERS_CFG in args:
        check_arguments(Layers, args, Location(path))
        return Layers(cast("Sequence[Mapping[str, Any]]", args[LAYERS_CFG]), path, trusted)
    arguments = dict(instantiate({name: value for name, value in args.items() if name != LAYERS_CFG}, trusted))
    arguments |= {name: value for name, value in args.items() if name == LAYERS_CFG}  # built layer by layer
    check_arguments(cls, arguments, Location(path))
    if issubclass(cls, LayeredModel):
        model: LayeredModel = cls(**arguments)
        if isinstance(model, Layers):
            model.trusted = trusted
        return model
    build: Callable[[], Any] = partial(cls, **arguments)
    return Sequential.of(build()) if is_plain_sequential(cls) else SingleModule(build)


def transformers_class(section: OtherModel, path: str, trusted: tuple[str, ...]) -> tuple[Any, dict[str, Any]] | None:
    """Return the transformers class that a section names, with its arguments; None: it names another kind of class.

    Raises:
        DslparError: there is no such class, or its arguments may not be instantiated.
    """
    cls = _find_class(section.target, path)
    return (cls, dict(instantiate(dict(section.args), trusted))) if _is_of_transformers(cls) else None


def _is_of_transformers(cls: type) -> bool:
    """Return whether a class is a transformers model, by its bases' module, so that transformers may be missing."""
    return any(base.__module__ == "transformers.modeling_utils" for base in cls.__mro__)


def _transformers_model(cls: Any, args: Mapping[str, object], path: str, trusted: tuple[str, ...]) -> LayeredModel:
    """Return a transformers class as a LayeredModel, by its policy.

    args: the model's arguments. `config` among them is a config object, or a dict of that object's arguments.
    """
    from dslpar.policies.model import HuggingFaceModel

    arguments = dict(instantiate(dict(args), trusted))
    check_arguments(HuggingFaceModel, {"cls": cls} | arguments, Location(path))
    config = arguments.get("config")
    if isinstance(config, Mapping):
        # Some valid keys are in no signature: properties such as num_labels, other names for a size, keys that only the
        # model's code reads (Qwen3-MoE's head_dim), and older ones that every config still reads (rope_theta). Lint's
        # table lists the last two kinds.
        table = transformers_configs.table()
        known = {*table["configs"].get(cls.config_class.__name__, {}).get("defaults", ()), *table["common"]}
        named = {
            key: value
            for key, value in config.items()
            if key not in known and not _is_set_elsewhere(cls.config_class, key)
        }
        check_arguments(cls.config_class, named, Location(path), "model.config")
    model: LayeredModel = HuggingFaceModel(cls, **arguments)
    return model


def _is_set_elsewhere(config_class: Any, key: str) -> bool:
    return key in config_class.attribute_map or isinstance(getattr(config_class, key, None), property)


def as_layered_model(model: object, path: str) -> LayeredModel:
    """Return a program's model, a LayeredModel or a built module, as a LayeredModel."""
    if isinstance(model, LayeredModel):
        return model
    if isinstance(model, nn.Sequential) and is_plain_sequential(type(model)):
        return Sequential.of(model)
    if not isinstance(model, nn.Module):
        _refuse_model(type(model).__name__, path)
    return SingleModule.of(model)


@dataclasses.dataclass(frozen=True)
class CustomModel(LayeredModel):
    """A model with the loss and the pipeline partition that a program passes for it."""

    model: LayeredModel
    criterion: Callable[[Any, Any], Any] | None = None
    """Maps (output, label) to the micro-batch's mean loss; None: the model's own loss."""
    method: str | None = None
    """Method that partitions the model over stages, as in parallel.pipeline.method; None: the job's method."""
    num_chunks: int = 1
    """Number of stages per rank, as in schedule.num_model_chunks; 1: the job's number."""

    def layers(self, groups: Groups) -> list[LayerSpec]:
        """Return the model's layers."""
        return self.model.layers(groups)

    @property
    def takes_statistics(self) -> bool:  # type: ignore[override]
        """True if the loss, or what the model adds to the criterion, takes statistics of each global micro-batch."""
        return self.model.takes_statistics and (self.criterion is None or self.model.completes_criteria)

    @property
    def built_everywhere(self) -> bool:  # type: ignore[override]
        """True if every rank has built all of the model's modules."""
        return self.model.built_everywhere

    def built(self, groups: Groups) -> Mapping[str, nn.Module]:
        """Return the model's built modules."""
        return self.model.built(groups)

    def loss(self, groups: Groups) -> Loss:
        """Return the criterion as a loss, or the model's own."""
        return self.model.loss(groups) if self.criterion is None else loss_of(self.criterion, self.model, groups)

    def after_step(self, module: nn.Module, progress: float) -> None:
        """Call the model's `after_step`."""
        self.model.after_step(module, progress)

    @property
    def changes_after_step(self) -> bool:
        """True if the model's `after_step` does anything."""
        return self.model.changes_after_step

    def whole_output(self, groups: Groups, output: Any) -> Any:
        """Return the model's whole output."""
        return self.model.whole_output(groups, output)


def loss_of(criterion: Callable[[Any, Any], Any], model: LayeredModel, groups: Groups) -> Loss:
    """Return a program's criterion as a loss that receives the output in fp32, as in ColossalAI and Megatron-LM.

    A bf16 loss has 8 significant bits, so a mean of such losses would depend on the layout.
    """

    # A function, never the criterion itself: DeepSpeed's pipeline would register an nn.Module as part of the model.
    def loss(output: Any, label: Any) -> Any:
        return criterion(model.whole_output(groups, to_fp32(output)), label)

    return model.complete_criterion(groups, loss)


def check_criterion(criterion: object, path: str) -> None:
    """Refuse a criterion with parameters. Raises DslparError."""
    if isinstance(criterion, nn.Module) and any(True for _ in criterion.parameters()):
        message, hint = "the criterion has parameters, but no optimizer trains them", "make them part of the model"
        raise_finding("CFG227", message, hint, path)


def to_fp32(output: object) -> object:
    """Return half-precision tensors, also within tuples, in fp32; other values unchanged."""
    if isinstance(output, tuple):
        return tuple(map(to_fp32, output))
    if isinstance(output, torch.Tensor) and output.dtype in (torch.float16, torch.bfloat16):
        return output.float()
    return output


PARTITION_METHODS: Mapping[str, str] = {"parameter": "parameters", "uniform": "uniform"}
"""ColossalAI's partition_method -> parallel.pipeline.method."""


def build_pipeline_model_from_cfg(
    config: Mapping[str, object], num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> CustomModel:
    """Return the model for dict(type=..., ...).

    `dslpar.initialize` partitions the model over stages, and builds each layer only on its stage. `num_chunks` above 1
    is the number of stages per rank. The schedule is then 'interleaved', unless the config has another type with
    several stages per rank. `partition_method` is 'parameter' or 'uniform'; default: the config's parallel.pipeline.
    The number of layers on each stage is logged as information, which `verbose` enables.

    Raises:
        DslparError: there is no such model, or no such method.
    """
    return _custom_model(model_from_cfg(config), num_chunks, partition_method, verbose)


def build_pipeline_model(
    layers: nn.Sequential, num_chunks: int = 1, partition_method: str | None = None, verbose: bool = False
) -> CustomModel:
    """Return the model for layers that are already built; see `build_pipeline_model_from_cfg`.

    Weights must be equal on every rank: build the layers after `dslpar.start`, which seeds torch.
    """
    return _custom_model(as_layered_model(layers, "<program>"), num_chunks, partition_method, verbose)


def _custom_model(model: LayeredModel, num_chunks: int, partition_method: str | None, verbose: bool) -> CustomModel:
    location = Location("<program>")
    if verbose:
        logging.getLogger("dslpar").setLevel(logging.INFO)
    if num_chunks < 1:
        raise_finding("PIP209", f"num_chunks is {num_chunks}", "1 or more", location)
    if partition_method is not None and partition_method not in PARTITION_METHODS:
        message = f"unknown partition_method {partition_method!r}"
        hint = f"one of {', '.join(map(repr, PARTITION_METHODS))}, or parallel.pipeline.method in the config"
        raise_finding("PIP202", message, hint, location)
    method = PARTITION_METHODS[partition_method] if partition_method else None
    return CustomModel(model, method=method, num_chunks=num_chunks)


def with_program_chunks(job: Job, model: LayeredModel) -> Job:
    """Return the job with the number of stages per rank that a program's model requests.

    As in ColossalAI, the config may leave the number out. Lint then cannot check that the number of micro-batches is a
    multiple of the pipeline ranks, so it is checked here.

    Raises:
        DslparError: the config has another number, or the job's micro-batches do not fit it.
    """
    num_chunks = 1
    while isinstance(model, CustomModel):
        num_chunks, model = max(num_chunks, model.num_chunks), model.model
    if num_chunks == 1 or job.mesh.pipe == 1:
        return job
    schedule = job.spec.schedule or PipelineSchedule()
    _check_chunks(job, schedule, num_chunks)
    kind = "interleaved" if schedule.type == "1f1b" else schedule.type
    schedule = dataclasses.replace(schedule, type=kind, num_model_chunks=num_chunks)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, schedule=schedule))


def _check_chunks(job: Job, schedule: PipelineSchedule, num_chunks: int) -> None:
    pipe, count, written = job.mesh.pipe, job.batch.accumulation, schedule.num_model_chunks
    if written is not None and written != num_chunks:
        message = f"num_chunks is {num_chunks}, but the config's schedule.num_model_chunks is {written}"
        raise_finding("PIP209", message, "leave one of them out", job.path, "schedule")
    if count % pipe:
        message = f"num_chunks is {num_chunks}: {count} micro-batches must be a multiple of {pipe} pipeline ranks"
        hint = f"batch.accumulation={-(-count // pipe) * pipe}, or leave num_chunks out"
        raise_finding("PIP209", message, hint, job.path, "batch")


def _find_class(target: str, path: str) -> type[nn.Module | LayeredModel]:
    """Return a model's class: a registered class, nn.Sequential for 'Sequential', or a class by its full name."""
    location = Location(path)
    cls = MODELS.find(target) or (nn.Sequential if target == "Sequential" else None)
    cls = cls or (locate(target, location) if "." in target else MODELS.get(target, location))
    if not (isinstance(cls, type) and issubclass(cls, (nn.Module, LayeredModel))):
        _refuse_model(repr(target), path)
    return cls


def _refuse_model(name: str, path: str) -> NoReturn:
    message = f"{name} is neither a torch.nn.Module nor a dslpar.models.LayeredModel"
    hint = "name a class of either kind, or type='GPT'"
    raise_finding("CFG201", message, hint, path, "model")
