"""Build one pipeline stage on the meta device, and run its forward and backward with one micro-batch.

    with fake_rank(mesh, rank) as groups:
        run = run_stage(job, model, Part(range(4), True, False), groups, [input_form(job)])
    run.calls["F"], run.outputs, run.parameters["blocks.0.mlp.up.weight"].local_shape

The layers are those of training, with the rank's own groups. Weights are not initialized and no number is computed.
Inputs are given by their form: a dtype and a shape. The actions are F (forward), B (backward) and, if the schedule
splits the backward, W (gradients of weights). The last stage also computes the loss. A model without a pipeline is one
stage.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.errors import DslparError
from dslpar.distributed.groups import Groups
from dslpar.distributed.point_to_point import Form, Forms, forms_of
from dslpar.dry_run.even_routing import even_routing
from dslpar.dry_run.fused_kernels import fused_kernels
from dslpar.dry_run.recorder import Call, dtype_name, recording
from dslpar.layers.parameter import defer_sums, mark_owners, placement_of
from dslpar.layers.placement import Placement
from dslpar.layers.weight_gradients import WeightGradients, splitting
from dslpar.layout.deepspeed_config import keeps_gradients
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Kind
from dslpar.layout.transformers_data_types import inputs_of
from dslpar.models.layered import LayeredModel, LayerSpec, Loss, forward_steps
from dslpar.models.recompute import Step, run_layers
from dslpar.schema.policy import DECODER_INPUTS
from dslpar.schema.sections import ImageModel, Model, TokenModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
META = torch.device("meta")

REFUSALS = (DslparError, RuntimeError, ValueError, TypeError, IndexError, AssertionError)
"""Exceptions that layers and torch raise if shapes do not fit."""


class ParameterRecord(NamedTuple):
    """A parameter on one rank."""

    placement: Placement | None
    """Sharding over the tensor group; None if all ranks hold equal copies."""
    local_shape: tuple[int, ...]
    """Shape of the rank's shard."""
    dtype: str
    is_owner: bool
    """True if DeepSpeed counts this rank's copy in norms."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, without padding."""
        return self.local_shape if self.placement is None else self.placement.shape


class StageError(ValueError):
    """A layer rejects its input, or the backward fails."""


@dataclass
class StageRun:
    """Result of one micro-batch on a stage."""

    inputs: Forms
    """Forms of the tensors that the stage receives."""
    outputs: Forms
    """Forms of the tensors that the stage sends to the next one; for the last stage, the form of the loss."""
    input_gradients: Forms
    """Forms of the gradients that the stage sends to the stage before."""
    calls: dict[Kind, tuple[Call, ...]]
    """This rank's collectives during F, B and W."""
    module: nn.Module
    """The stage's layers, with parameters and gradients on the meta device."""
    saved_bytes: int
    """Bytes that live from the forward to the backward, each tensor once, without parameters.

    These are the tensors that autograd saves. In a pipeline they include the stage's inputs, which get a gradient, and
    its outputs.
    """
    parameters: dict[str, ParameterRecord] = field(default_factory=dict)
    """Parameters by global name; a tied parameter has the name of the layer that owns it."""
    repeated: dict[int, bool] = field(default_factory=dict)
    """By the layer's position in the model: True if the layer's output has the form of its input."""


class Part(NamedTuple):
    """Layers of a stage to run, and the stage's place in the pipeline."""

    positions: Sequence[int]
    """Positions of the layers in the model; repeated layers may be left out (`dslpar.dry_run.rank_classes`)."""
    is_first: bool
    """True for the first stage of the pipeline."""
    is_last: bool
    """True for the last stage, which computes the loss."""


def run_stage(job: Job, model: LayeredModel, part: Part, groups: Groups, inputs: Forms) -> StageRun:
    """Build the layers of a part, and run F, B and, if the schedule splits the backward, W.

    Raises:
        StageError: a layer cannot be built or rejects its input, or the backward fails.
    """
    all_specs = model.layers(groups)
    specs = [(position, all_specs[position]) for position in part.positions]
    with torch.random.fork_rng(devices=()):  # dropout draws a seed even without a mask
        try:
            module = _build(job, specs, groups)
        except REFUSALS as error:
            raise StageError(f"cannot be built: {message_of(error)}") from error
        forward = _Forward(job, specs, module)
        loss_fn = model.loss(groups) if part.is_last else None
        with recording(groups) as calls, even_routing() if may_have_experts(job) else nullcontext():
            run = _run(job, forward, loss_fn, inputs, module, calls)
    run.parameters = _parameters(specs, module)
    run.repeated = forward.repeated
    return run


# ---- build ----


def _build(job: Job, specs: Sequence[tuple[int, LayerSpec]], groups: Groups) -> nn.ModuleDict:
    """Build the layers. Specs with the same owner, such as tied layers, share one module."""
    modules = nn.ModuleDict()
    with META:
        for _, spec in specs:
            if _key(spec) not in modules:
                modules[_key(spec)] = spec.build()
    modules.to(META, DTYPES[job.spec.precision.dtype])  # also moves buffers that layers compute
    mark_owners(modules, groups)
    defer_sums(modules, groups.axis("tensor").size > 1 and keeps_gradients(job.spec))
    return modules.train()


def _key(spec: LayerSpec) -> str:
    return spec.owner.replace(".", "/")  # module names have no dots


def _parameters(specs: Sequence[tuple[int, LayerSpec]], modules: nn.ModuleDict) -> dict[str, ParameterRecord]:
    found: dict[str, ParameterRecord] = {}
    for _, spec in specs:
        for name, p in modules[_key(spec)].named_parameters():
            is_owner = bool(getattr(p, "tensor_model_parallel", False))
            record = ParameterRecord(placement_of(p), tuple(p.shape), dtype_name(p.dtype), is_owner)
            found[f"{spec.owner}.{name}"] = record
    return found


# ---- run ----


class _Forward:
    """Forward of a stage's layers; an error names the layer that fails, and `repeated` is as in `StageRun`."""

    def __init__(self, job: Job, specs: Sequence[tuple[int, LayerSpec]], modules: nn.ModuleDict) -> None:
        checkpoint = job.spec.activation_checkpoint
        self._interval = checkpoint.interval if checkpoint else 0
        self.repeated: dict[int, bool] = {}
        built = [(position, spec, modules[_key(spec)]) for position, spec in specs]
        steps = forward_steps(built, None, None)
        self._steps = [
            step._replace(apply=partial(self._apply, position, spec.name, step))
            for (position, spec), step in zip(specs, steps, strict=True)
        ]

    def __call__(self, x: Any) -> Any:
        return run_layers(self._steps, x, self._interval)

    def _apply(self, position: int, name: str, step: Step, x: Any) -> Any:
        try:
            y = step.apply(x)
        except REFUSALS as error:
            taken = ", ".join(map(shown_form, forms_of(tensors_of(x))))
            raise StageError(f"{name!r} cannot take {taken}: {message_of(error)}") from error
        self.repeated[position] = forms_of(tensors_of(x)) == forms_of(tensors_of(y))
        return y


def _run(
    job: Job,
    forward: Callable[[Any], Any],
    loss_fn: Loss | None,
    forms: Forms,
    module: nn.Module,
    calls: list[Call],
) -> StageRun:
    split = splits_backward(job)
    inputs = [empty(form).requires_grad_(form[0].is_floating_point) for form in forms]
    with _counting_saved(module) as saved, fused_kernels(), splitting() if split else nullcontext():
        # Copies, which the engine makes too: a layer may work in place, and autograd forbids that for leaves.
        x = [each.clone() for each in inputs]
        output = forward(x[0] if len(x) == 1 else tuple(x))
        outputs = tensors_of(output) if loss_fn is None else [_loss(job, loss_fn, output)]
    kept = [each for each in (*inputs, *outputs) if each.is_floating_point()] if job.mesh.pipe > 1 else []
    saved |= {_storage(each): each.untyped_storage().nbytes() for each in kept}
    by_action: dict[Kind, tuple[Call, ...]] = {"F": _taken(calls)}
    aside = WeightGradients()
    with fused_kernels(), splitting(aside, [aside]) if split else nullcontext():
        _backward(outputs)
    by_action["B"] = _taken(calls)
    if split:
        aside.accumulate()
        by_action["W"] = _taken(calls)
    # An input that the stage does not use has no gradient. The stage before still waits for one, so count its form.
    gradients = [each if each.grad is None else each.grad for each in inputs if each.is_floating_point()]
    num_bytes = sum(saved.values())
    return StageRun(forms, forms_of(outputs), forms_of(gradients), by_action, module, num_bytes)


def splits_backward(job: Job) -> bool:
    """Return whether the job runs B and W separately: its schedule splits the backward, and it has a pipeline."""
    return job.schedule.split and job.mesh.pipe > 1


def _loss(job: Job, loss_fn: Loss, output: Any) -> Tensor:
    try:
        return loss_fn(output, empty(label_form(job)))
    except REFUSALS as error:
        taken = ", ".join(map(shown_form, forms_of(tensors_of(output))))
        raise StageError(f"the loss cannot take {taken}: {message_of(error)}") from error


def _backward(outputs: Sequence[Tensor]) -> None:
    floating = [each for each in outputs if each.is_floating_point() and each.requires_grad]
    try:
        torch.autograd.backward(floating, [torch.empty_like(each) for each in floating])
    except REFUSALS as error:
        raise StageError(f"the backward fails: {message_of(error)}") from error


def _taken(calls: list[Call]) -> tuple[Call, ...]:
    """Return and clear the recorded calls."""
    noted = tuple(calls)
    calls.clear()
    return noted


@contextmanager
def _counting_saved(module: nn.Module) -> Iterator[dict[int, int]]:
    """Yield the bytes that autograd saves in the body, by storage, without storages of parameters."""
    own = {_storage(p) for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if _storage(x) not in own:
            saved[_storage(x)] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        yield saved


def _storage(x: Tensor) -> int:
    return int(x.untyped_storage()._cdata)


# ---- forms ----


class NoDryRunError(ValueError):
    """A dry run is impossible: the rank does not exist, or the model's input is unknown without data."""


def input_form(job: Job) -> Form:
    """Return the form of a micro-batch at the first stage; every tensor rank receives the whole micro-batch.

    Raises:
        NoDryRunError: the model's inputs are unknown.
    """
    model, micro = job.spec.model, job.batch.micro_size
    if isinstance(model, TokenModel):
        return torch.int64, (micro, job.seq_len)
    if isinstance(model, ImageModel) and not model.TOKENS_BESIDE_PATCHES:
        return DTYPES[job.spec.precision.dtype], (micro, model.num_channels, model.image_size, model.image_size)
    if is_decoder(job):
        return torch.int64, (micro, job.seq_len)
    name = getattr(model, "target", type(model).__name__)
    supported = "GPT, ResMLP and transformers' decoders with data.seq_len"
    raise NoDryRunError(f"the inputs of {name} are unknown without data: a dry run supports {supported}")


def is_decoder(job: Job) -> bool:
    """Return whether the model is a transformers decoder whose samples are sequences of a known length."""
    model = job.spec.model
    config = None if isinstance(model, Model) else model.transformers
    known = config is not None and config.is_causal and config.model.endswith(_DECODERS)
    return known and job.seq_len > 0 and inputs_of(job) == DECODER_INPUTS


def may_have_experts(job: Job) -> bool:
    """Return whether the model has mixtures of experts, or is a transformers decoder of unknown sizes."""
    return job.spec.model.num_experts is not None or is_decoder(job)


_DECODERS = ("ForCausalLM", "LMHeadModel")


def label_form(job: Job) -> Form:
    """Return the form of a micro-batch's labels."""
    model, micro = job.spec.model, job.batch.micro_size
    return torch.int64, (micro, job.seq_len) if isinstance(model, TokenModel) or is_decoder(job) else (micro,)


def empty(form: Form) -> Tensor:
    """Return a tensor of a form, on the meta device."""
    dtype, shape = form
    return torch.empty(tuple(shape), dtype=dtype, device=META)


def shown_form(form: Form) -> str:
    """Return a form as text: 'bf16[2, 128, 512]'."""
    dtype, shape = form
    return f"{dtype_name(dtype)}{list(shape)}"


def tensors_of(value: Any) -> list[Tensor]:
    """Return a layer's input or output, a tensor or several, as a list of tensors."""
    return list(value) if isinstance(value, tuple | list) else [value]


def message_of(error: BaseException) -> str:
    """Return the first line of an error; for a DslparError, its first finding."""
    if isinstance(error, DslparError):
        return error.findings[0].message
    return str(error).strip().partition("\n")[0] or type(error).__name__
