"""Partition a model whose layers are known only at run time: an nn.Sequential or a user's class.

    job, layers = partition_layers(job, model, groups)        # job.stages says which layers are on which stage

The linter checks the partition of models that it knows. Here, all mistakes are found before DeepSpeed is called. In
DeepSpeed, a rank without parameters fails alone and the others wait for it (DeepSpeed issue 1522).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError, Finding
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.engine.model import CustomModel
from dslpar.engine.pipeline_module import TIED_MODULES, Pipeline, global_name
from dslpar.engine.stage_layers import stage_parts
from dslpar.layers.parameter import PlacedModule, placement_of
from dslpar.layout.resolve import Job, Stages, stages_from
from dslpar.layout.stages import Counts, automatic, group_layers, in_order, num_matches
from dslpar.models import LayeredModel, LayerSpec, Sequential
from dslpar.models.sequential import Stage
from dslpar.schema.parallel_forms import pipeline_of
from dslpar.watchdog.status_page import stages_name

log = logging.getLogger("dslpar")


def partition_layers(job: Job, model: LayeredModel, groups: Groups) -> tuple[Job, list[LayerSpec]]:
    """Return the job with its stages, and the model's layers.

    With a pipeline, layers have layer_idx: their own indices, or their positions if no layer has an index.

    Raises:
        DslparError: the layers cannot be partitioned as the job requests.
    """
    _check_num_modules(job, model)
    layers = model.layers(groups)
    if job.mesh.pipe == 1:
        # Checked without a pipeline too, so that the same models are valid in every layout.
        _check_order(job, layers, (1 + max((layer.layer_idx or 0 for layer in layers), default=0),))
        return job, layers
    model, method = _requested_method(job, model)
    layers = _indexed(job, layers)
    # The job already has a partition if the linter knows the layers. Only a program's own method overrides it.
    if job.stages.counts is None or method is not None:
        job = dataclasses.replace(job, stages=_stages(job, layers, method))
    assert job.stages.counts is not None
    _check_order(job, layers, job.stages.counts)
    if isinstance(model, Sequential):
        _refuse_shared_parameters(job, layers)
    log.info("layers on each stage: %s", job.stages.counts)
    return job, layers


def check_module(job: Job, module: nn.Module, groups: Groups) -> None:
    """Check this rank's module, and raise any rank's findings on every rank. Collective over all ranks.

    Raises:
        DslparError: a rank has no trainable parameter, a plain parameter would be copied on all tensor ranks, a
            parameter has no dims, a layer's layer_idx belongs to another stage, or a recomputed layer keeps running
            statistics.
    """
    findings = [
        *_untrainable(job, module, groups),
        *_misplaced_layers(job, module),
        *_unsharded_parameters(job, module),
        *_scalar_parameters(job, module),
        *_recomputed_statistics(job, module),
    ]
    # Gathered before any rank raises: if one rank left alone, the others would hang in their next collective.
    gathered = collectives.gather_objects(findings, groups.axis("pipe", "data", "tensor"))
    every = dict.fromkeys(finding for found in gathered for finding in found)
    if every:
        raise DslparError(every)


# ---- the partition ----


def _check_num_modules(job: Job, model: LayeredModel) -> None:
    """Refuse a hand-split model whose number of modules is not this rank's number of stages."""
    model, num = _innermost(model), job.chunks.num
    if isinstance(model, Stage) and len(model.modules) != num:
        modules = f"{len(model.modules)} modules" if len(model.modules) != 1 else "one module"
        stages = f"{num} stages" if num > 1 else "one stage"
        message = f"dslpar.Stage has {modules}, but each rank has {stages} (schedule.num_model_chunks)"
        hint = "give one module per stage, in order: dslpar.Stage(*[part(stage) for stage in run.stages])"
        raise_finding("PIP202", message, hint, job.path, "parallel.pipeline")


def _innermost(model: LayeredModel) -> LayeredModel:
    """Return a program's model without its CustomModel wrappers."""
    while isinstance(model, CustomModel):
        model = model.model
    return model


def _indexed(job: Job, layers: list[LayerSpec]) -> list[LayerSpec]:
    """Set each layer's layer_idx to its position if no layer has one. The partition may then split between any two."""
    if len(layers) == 1:
        message = f"the model is one module, which cannot be split over {job.chunks.stages} stages"
        hint = "give an nn.Sequential or a dslpar.models.LayeredModel; or give each rank its own dslpar.Stage(module)"
        raise_finding("PIP204", message, hint, job.path, "parallel.pipeline")
    if any(layer.layer_idx is not None and layer.layer_idx < -1 for layer in layers):
        raise_finding(
            "PIP202", "a layer_idx below -1", "number layers from 0, or -1 for the last", job.path, "parallel.pipeline"
        )
    if any(layer.layer_idx is not None for layer in layers):
        return layers
    return [dataclasses.replace(layer, layer_idx=index) for index, layer in enumerate(layers)]


def _check_order(job: Job, layers: Sequence[LayerSpec], counts: Sequence[int]) -> None:
    indices = [layer.layer_idx for layer in layers]
    if indices == [None] * len(indices):
        return
    try:
        stage_parts(indices, counts)
    except ValueError as error:
        hint = "number layers from 0 without gaps, in their order; -1 is the last"
        raise_finding("PIP202", str(error), hint, job.path, "parallel.pipeline")


def _requested_method(job: Job, model: LayeredModel) -> tuple[LayeredModel, str | None]:
    """Return a program's model without its wrappers, and the partition method that the program requests."""
    method: str | None = None
    while isinstance(model, CustomModel):
        method = method or model.method
        # The outermost wrapper's method wins: the program called it last.
        model = model.model
    names = ("stage_ids", "counts", "method", "custom_pipeline_stage_id")
    sections = (job.spec.parallel.pipeline, job.spec.train.dist)
    written = [name for section in sections for name in names if getattr(section, name, None) is not None]
    if method is not None and written:
        message = f"partition_method and {written[0]} both set the partition of layers over stages"
        raise_finding("PIP202", message, "leave one of them out", job.path, "parallel.pipeline")
    return model, method


def _stages(job: Job, layers: Sequence[LayerSpec], method: str | None) -> Stages:
    pipeline = pipeline_of(job.spec)
    assert pipeline is not None, "a mesh of several stages comes from a pipeline"
    units = [[layers[position] for position in group] for group in group_layers([layer.layer_idx for layer in layers])]
    num_stages = job.chunks.stages
    if len(units) < num_stages:
        message = f"{num_stages} stages, but the model has {len(units)} layers"
        raise_finding("PIP201", message, f"at most {len(units)} stages", job.path, "parallel.pipeline")
    if pipeline.stage_ids is not None:
        _check_stage_ids(job, pipeline.stage_ids, len(units))
    auto = _automatic(job, method or pipeline.method or "cost", units)
    stages = stages_from(pipeline, job.chunks, auto)
    counts = stages.counts or ()
    if len(counts) != num_stages or sum(counts) != len(units) or 0 in counts:
        message = f"counts {list(counts)} for {num_stages} stages and {len(units)} layers"
        hint = f"{num_stages} numbers, each 1 or more, that add up to {len(units)}"
        raise_finding("PIP202", message, hint, job.path, "parallel.pipeline")
    return stages


def _check_stage_ids(job: Job, ids: Sequence[int], num_layers: int) -> None:
    if len(ids) != num_layers or not in_order(ids, job.chunks):
        message = f"{len(ids)} stage ids {list(ids)} for {num_layers} layers"
        again = f", but for {job.chunks.num - 1} times to 0" if job.chunks.num > 1 else ""
        hint = f"{num_layers} ids from 0 to {job.mesh.pipe - 1}, never decreasing{again}"
        raise_finding("PIP202", message, hint, job.path, "parallel.pipeline")


def _automatic(job: Job, method: str, units: Sequence[Sequence[LayerSpec]]) -> Counts:
    if len(units) == job.chunks.stages:
        # One unit per stage needs no weights, so no layer is built. A hand-split model has only this rank's stages.
        return (1,) * len(units)

    def weights_by(method: str) -> list[int]:
        if not method.startswith("type:"):  # 'cost' counts parameters too: a built layer's FLOPs are unknown
            built = [[p for module in _built(unit) for p in module.parameters()] for unit in units]
            # Frozen parameters count for 'cost', since they compute too. 'parameters' leaves them out: they have no
            # gradient or optimizer state to balance.
            counted = [[p for p in parameters if method == "cost" or p.requires_grad] for parameters in built]
            return [sum(p.numel() for p in parameters) for parameters in counted]
        weights = [num_matches(method, _class_names(unit)) for unit in units]
        if not any(weights):
            names = ", ".join(dict.fromkeys(name for unit in units for name in _class_names(unit)))
            message = f"{method!r} matches no class of layers"
            raise_finding("PIP202", message, f"the classes are {names}", job.path, "parallel.pipeline")
        return weights

    counts = automatic(method, len(units), job.chunks, weights_by)
    assert counts is not None
    return counts


def _class_names(unit: Sequence[LayerSpec]) -> list[str]:
    return [type(module).__name__ for module in _built(unit)]


def _built(unit: Sequence[LayerSpec]) -> list[nn.Module]:
    """Build layers on the meta device, without memory. A tied layer is left out: its first use counts its weights."""
    with torch.device("meta"):
        return [layer.build() for layer in unit if layer.tied is None]


# ---- checks of this rank's module ----


def _untrainable(job: Job, module: nn.Module, groups: Groups) -> list[Finding]:
    if any(p.requires_grad for p in module.parameters()):
        return []
    # A rank needs a trained parameter, since its optimizer steps. One of several stages on a rank may have none: it may
    # only reshape images, for example.
    held = stages_name(job.chunks.held_by(groups.coord["pipe"])) if job.mesh.pipe > 1 else "the model"
    hint = "partition the layers differently (parallel.pipeline method='parameters', or counts), or use fewer stages"
    message = f"{held} {'have' if job.chunks.num > 1 else 'has'} no trainable parameter"
    return [finding("PIP203", message, hint, job.path, "parallel.pipeline")]


def _misplaced_layers(job: Job, module: nn.Module) -> list[Finding]:
    """Find nested layers of dslpar.layers whose layer_idx belongs to another stage than the stage that has them."""
    if not isinstance(module, Pipeline):
        return []
    counts = enumerate(job.stages.counts or ())
    stages = dict(enumerate(stage for stage, count in counts for _ in range(count)))
    stages[-1] = job.chunks.last
    findings = []
    for name, layer in module.named_modules():
        index: int | None = getattr(layer, "layer_idx", None) if isinstance(layer, PlacedModule) else None
        # A tied layer's second use is on another stage, but has the layer_idx of the first use.
        if index is None or name.startswith(TIED_MODULES):
            continue
        stage = module.stage_of(int(name.partition(".")[0]))
        if stages.get(index) == stage:
            continue
        where = f"belongs to stage {stages[index]}" if index in stages else f"is not one of {len(stages) - 1} indices"
        message = f"layer_idx={index} of {global_name(name, module.layer_names)!r} on stage {stage} {where}"
        hint = "the layers of an nn.Sequential, or of a layers_cfg, have a layer_idx; those within them leave it out"
        findings.append(finding("PIP202", message, hint, job.path, "parallel.pipeline"))
    return findings


def _unsharded_parameters(job: Job, module: nn.Module) -> list[Finding]:
    """Find parameters without a placement: each rank of a tensor group would hold the whole parameter."""
    size = job.mesh.tensor.size
    plain = [name for name, p in module.named_parameters() if placement_of(p) is None]
    if size == 1 or not plain:
        return []
    names = ", ".join(map(repr, plain[:4])) + (", ..." if len(plain) > 4 else "")
    message = f"plain parameters, which each of {size} tensor ranks would hold whole: {names}"
    hint = "tensor=1; or use only layers of dslpar.layers: Linear for a matrix, Affine for a learned scale"
    return [finding("TEN111", message, hint, job.path, "model")]


def _scalar_parameters(job: Job, module: nn.Module) -> list[Finding]:
    """Find parameters without dims: DeepSpeed broadcasts weights as byte views, which 0-dim tensors do not have."""
    names = [name for name, p in module.named_parameters() if p.dim() == 0]
    message = f"{', '.join(map(repr, names[:4]))}: DeepSpeed cannot broadcast a parameter without dims"
    hint = "make it a vector of one element: nn.Parameter(torch.ones(1))"
    return [finding("CFG226", message, hint, job.path, "model")] if names else []


def _recomputed_statistics(job: Job, module: nn.Module) -> list[Finding]:
    """Find norms with running statistics if activation checkpointing would run their forward twice."""
    names = [name for name, child in module.named_modules() if getattr(child, "track_running_stats", False)]
    if job.spec.activation_checkpoint is None or not names:
        return []
    message = f"{names[0]!r} keeps running statistics, which activation checkpointing would update twice per step"
    hint = "leave activation_checkpoint out, or use a norm without them: GroupNorm, LayerNorm"
    key = "activation_checkpoint"
    return [finding("CFG228", message, hint, job.path, key)]


def _refuse_shared_parameters(job: Job, layers: Sequence[LayerSpec]) -> None:
    """Refuse one parameter shared by modules on two stages: only LayerSpec.tied keeps the copies equal.

    This also holds if one rank has both stages and the parameter is one tensor: one stage's gradient is reduced over
    replicas before the other stage adds to it.
    """
    assert job.stages.counts is not None
    parts = stage_parts([layer.layer_idx for layer in layers], job.stages.counts)
    home: dict[int, tuple[int, str]] = {}
    for index, layer in enumerate(layers):
        stage = sum(index >= begin for begin in parts[1:-1])
        for name, p in layer.build().named_parameters():
            other, first = home.setdefault(id(p), (stage, f"{layer.name}.{name}"))
            if other != stage:
                message = f"{first} on stage {other} and {layer.name}.{name} on stage {stage} are the same parameter"
                hint = "partition the model so that one stage has both layers, or give each layer its own weight"
                raise_finding("PIP205", message, hint, job.path, "parallel.pipeline")
