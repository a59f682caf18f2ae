"""Reference for a proof on devices: the first step of the whole model on one process, in plain torch, with bounds.

    first = first_step(job, model, batches, ranks=8)
    first.gradients["blocks.0.mlp.up.weight"]       # on the CPU, in float32 or wider
    first.bounds["blocks.0.mlp.up.weight"].norm     # how far a layout in the job's precision may be from it

The reference uses no DeepSpeed, no process group and no pipeline. Micro-batches run one by one and their gradients are
added up, so that only one micro-batch's activations are in memory. Only weights and gradients are held whole.

**Precision.** The reference need not be exact, only far more exact than the compared layout. bfloat16 rounds by 2^-8,
float16 by 2^-11 and float32 by 2^-24. For a job in half precision the reference is computed in float32: this is 8,000
to 65,000 times as exact, tensors are half as large as in float64, and devices are many times as fast. For a job in fp32
the reference is computed in float64. Weights and inputs are first rounded to the job's precision, so that both sides
begin with the same numbers.

**Device.** The reference runs on this rank's device if weights and gradients take at most six tenths of its free
memory. The rest is for activations. Otherwise it runs on the CPU, in the same precision, if the host has enough memory.

**Bounds.** The growth of rounding errors with depth depends on the model, so it is measured: the same step runs on one
process in the job's precision, with fp32 sums over micro-batches, as in the engine. Its error against the reference is
one draw from the distribution of the model's rounding errors. Another layout rounds at other places, so its error is
another draw:

- The largest error of a tensor's elements is at most `FACTOR` times the measured draw's, as in `one_process`.
- The 2-norm of a tensor's error averages over its elements, so it varies far less between two draws: `NORM_FACTOR`. A
  missing sum changes all elements of a tensor, each by less than the largest error, and is detected here.

A layout also rounds where one process does not: a product over ranks is a sum of the ranks' rounded parts, and each hop
of a reduction over replicas rounds gradients. There are at most as many such roundings as ranks. Their signs are
random, and they round partial sums that grow to the whole sum, so together they are sqrt(ranks / 3) roundings of the
whole sum. `least` is a few times that, for tensors whose measured draw happens to be small.

The loss is an fp32 mean computed from rounded logits. Its bound is `FACTOR` times the largest error of a micro-batch's
loss, and at least one rounding.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.engine.build import parameter_groups
from dslpar.engine.gradient_handlers import handler_classes
from dslpar.engine.micro_batches import MicroBatch, with_denominator
from dslpar.layers.initial_values import skip_init
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel, build_module
from dslpar.parity.one_process import (
    FACTOR,
    FLOOR,
    ZERO,
    check_any_gradient,
    finite,
    float64_of_transformers,
    is_of_transformers,
    optimizer_of,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
NORM_FACTOR = 4.0
"""Factor by which the 2-norm of a tensor's measured error may be exceeded.

For tensors of some hundred elements or more, the norms of two draws differ by some tens of percent. Twice as many
roundings make the norm 1.4 times as large. Terms that nearly cancel in a sum over ranks add some more.
"""
FEW_ELEMENTS = 100
"""Number of elements below which a tensor's norm averages too little: `FACTOR` then bounds the norm, too."""
SHARE_OF_MEMORY = 0.6
"""Share of the free memory for weights and gradients."""
_FIRST_SCALE, _LEAST_SCALE = 2.0**16, 1.0
"""Range of fp16's loss scale, which is halved until gradients are finite: the same maths, without underflow."""


class StepBatches(NamedTuple):
    """The micro-batches of a step, for all replicas."""

    batches: list[MicroBatch]
    all_counted: bool
    """True if every label counts, or the loss is a mean over micro-batches regardless of labels."""


class Bound(NamedTuple):
    """Absolute bounds for a gradient's error."""

    element: float
    """Bound for the largest error of an element."""
    norm: float
    """Bound for the 2-norm of the error."""


@dataclass
class FirstStep:
    """The first step on one process, with bounds for other layouts."""

    loss: float
    norm: float
    """The 2-norm of all gradients, before clipping, after the job's gradient handlers."""
    gradients: dict[str, Tensor]
    """Gradients by global name, before handlers and clipping, on the CPU."""
    order: list[str]
    """Names of parameters in the order of the forward."""
    where: str
    """Precision and device, such as 'float32 on cuda:0'."""
    loss_bound: float = 0.0
    """Relative bound."""
    bounds: dict[str, Bound] = dataclasses.field(default_factory=dict)
    """Bounds for the error of each gradient, by global name."""

    @property
    def norm_bound(self) -> float:
        """Relative bound for the norm of all gradients, if every tensor's error is at its bound."""
        return math.hypot(*(each.norm for each in self.bounds.values())) / max(self.norm, 1e-300)


# ---- memory estimate, before anything is allocated ----


def reference_dtype(job: Job) -> torch.dtype:
    """Return the precision of the reference; the module docstring gives the reasons."""
    return torch.float64 if job.spec.precision.dtype == "fp32" else torch.float32


def needed_bytes(job: Job, model: LayeredModel) -> int:
    """Return the bytes of the whole model's weights and gradients, from a build on torch's "meta" device.

    Raises:
        DslparError: the model cannot be built.
    """
    elements = 0
    with torch.device("meta"), torch.random.fork_rng(devices=[]), skip_init():
        for spec in model.layers(Groups.without_processes(Mesh())):
            elements += 0 if spec.tied else sum(p.numel() for p in spec.build().parameters())
    return 2 * elements * reference_dtype(job).itemsize


def places(free_bytes: Callable[[torch.device], int], device: torch.device, needed: int) -> list[torch.device]:
    """Return the devices on which `needed` bytes fit: this rank's device, the CPU, both, or neither."""
    found = dict.fromkeys([device, torch.device("cpu")])
    return [each for each in found if needed <= SHARE_OF_MEMORY * free_bytes(each)]


# ---- the step ----


def first_step(
    job: Job,
    model: LayeredModel,
    batches_of: Callable[[nn.Module], StepBatches],
    device: torch.device,
    progress: Callable[[int, int], None] = lambda done, count: None,
) -> FirstStep:
    """Compute the first step twice on one process: in the reference's precision, and in the job's.

    Args:
        job: the layout's job, with its batch, precision and mesh.
        batches_of: returns the micro-batches of the first step, on the CPU, for the built model.
        device: the device to compute on.
        progress: called before each micro-batch with the number of finished micro-batches and the total.

    Raises:
        DslparError: the model cannot be built, all gradients are zero, or a number is not finite (PRE234).
        torch.cuda.OutOfMemoryError: the device has too little memory for activations.
    """
    torch.manual_seed(job.spec.train.seed)
    groups = Groups.without_processes(Mesh())
    module = build_module(model, groups, job.spec.train.seed)
    order = [name for name, _ in module.named_parameters()]
    exact, own = reference_dtype(job), DTYPES[job.spec.precision.dtype]
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    batches, all_counted = batches_of(module)
    loss_of = model.loss(groups)
    if not all_counted:
        batches = with_denominator(batches, getattr(loss_of, "num_labels", 1), groups.axis("data"), job)
    for p in module.parameters():
        p.data = p.data.to(own)  # as in the engine, whose fp32 masters are copies of these
    step = _Step(job, module, loss_of, batches, device, progress)
    found = step.run(exact, own)
    norm = _norm(job, module, found.gradients)
    gradients = {name: value.cpu() for name, value in found.gradients.items()}
    del found.gradients
    for name, value in module.named_buffers():
        value.copy_(buffers[name])
    first = FirstStep(_mean(found.losses), norm, gradients, order, f"{str(exact).split('.')[1]} on {device}")
    _bound(first, found.losses, step.run(own, own, with_scale=own is torch.float16), own, job.mesh.world_size)
    _check_bounded(job, first)
    return first


def _check_bounded(job: Job, first: FirstStep) -> None:
    """Refuse a step that could not reveal a difference: no gradient, or no finite bound. Raises DslparError."""
    check_any_gradient(job, max((float(g.abs().max()) for g in first.gradients.values()), default=0.0))
    unbounded = [name for name, each in first.bounds.items() if not all(map(math.isfinite, each))]
    if unbounded or not all(map(math.isfinite, (first.loss, first.norm, first.loss_bound))):
        of = unbounded[0] if unbounded else "the loss"
        message = f"{of} is not finite in the first step of one process, in {job.spec.precision.dtype}"
        hint = "choose another seed, train.seed=1; with fp16, precision='bf16' has the range of float32"
        raise_finding("PRE234", message, hint, job.path, "precision")


@dataclass
class _Found:
    """Results of one computation of the step."""

    losses: list[float]
    """The loss of each micro-batch."""
    gradients: dict[str, Tensor]


class _Step:
    """Runs the forwards and backwards of one step, in any precision."""

    def __init__(
        self,
        job: Job,
        module: nn.Module,
        loss_of: Callable[[Any, Any], Tensor],
        batches: Sequence[MicroBatch],
        device: torch.device,
        progress: Callable[[int, int], None],
    ) -> None:
        self.job, self.module, self.loss_of, self.batches = job, module, loss_of, batches
        self.device, self.progress, self.done = device, progress, 0

    def run(self, dtype: torch.dtype, inputs: torch.dtype, with_scale: bool = False) -> _Found:
        """Compute the step in `dtype`, from inputs that are first rounded to `inputs`."""
        self.module.to(self.device, dtype)
        self.module.train()
        scale = _FIRST_SCALE if with_scale else 1.0
        while True:
            found = self._at_scale(dtype, inputs, scale)
            finite = all(bool(torch.isfinite(each).all()) for each in found.gradients.values())
            if finite or not with_scale or scale <= _LEAST_SCALE:
                return found
            scale /= 2

    def _at_scale(self, dtype: torch.dtype, inputs: torch.dtype, scale: float) -> _Found:
        losses: list[float] = []
        sums: dict[str, Tensor] = {}
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        wide = dtype if dtype in (torch.float32, torch.float64) else torch.float32
        self.module.zero_grad()
        with self._precision(dtype):
            for x, y in self.batches:
                self.progress(self.done, 2 * len(self.batches))
                x, y = self._on_device(x, inputs, dtype), self._on_device(y, None, _labels_in(dtype))
                loss = self.loss_of(self.module(x), y)
                (loss * (scale / len(self.batches))).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.item())
                self.done += 1
                if wide is not dtype:
                    _add(trained, sums, wide)
        if wide is dtype:
            sums = {name: p.grad for name, p in trained if p.grad is not None}
            for _, p in trained:
                p.grad = None
        if scale != 1.0:
            for each in sums.values():
                each /= scale
        return _Found(losses, sums)

    def _on_device(self, value: Any, rounded: torch.dtype | None, dtype: torch.dtype | None) -> Any:
        """Move a value to the device; round floating-point values to `rounded`, then cast to `dtype`, if given."""
        if isinstance(value, tuple | list):
            return tuple(self._on_device(each, rounded, dtype) for each in value)
        if value.is_floating_point():
            value = value if rounded is None else value.to(rounded)
            value = value if dtype is None else value.to(dtype)
        return value.to(self.device)

    def _precision(self, dtype: torch.dtype) -> AbstractContextManager[None]:
        is_wide = dtype is torch.float64 and is_of_transformers(self.job)
        return float64_of_transformers() if is_wide else nullcontext()


def _labels_in(dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype for floating-point labels; None: unchanged, as in the engine."""
    return dtype if dtype is torch.float64 else None


def _add(trained: Sequence[tuple[str, nn.Parameter]], sums: dict[str, Tensor], wide: torch.dtype) -> None:
    """Add the gradients of a micro-batch to the sums, in `wide`, and drop them."""
    for name, p in trained:
        if p.grad is not None:
            gradient = p.grad.to(wide)
            sums[name] = sums[name].add_(gradient) if name in sums else gradient
            p.grad = None


def _norm(job: Job, module: nn.Module, gradients: dict[str, Tensor]) -> float:
    """Return the norm of the gradients after the job's gradient handlers."""
    classes = handler_classes(job)
    if not classes:
        return norm_of(gradients.values())
    for name, p in module.named_parameters():
        p.grad = gradients[name].clone() if name in gradients else None
    optimizer = optimizer_of(job, parameter_groups(module))
    for cls, args in classes:
        cls(module, optimizer, **args).handle_gradient()
    norm = norm_of(p.grad for p in module.parameters() if p.grad is not None)
    module.zero_grad()
    return norm


def norm_of(tensors: Any) -> float:
    """Return the 2-norm over all elements of all tensors, summed in float64."""
    return math.sqrt(sum(float(each.double().square().sum()) for each in tensors))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


# ---- bounds for rounding errors ----


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding: bfloat16 2^-8, float16 2^-11, float32 2^-24."""
    return torch.finfo(dtype).eps / 2


def least(dtype: torch.dtype, ranks: int) -> float:
    """Return the least relative bound: four times the rounding that a sum over ranks adds (see the module's text)."""
    return max(FLOOR, 4 * unit_roundoff(dtype) * math.sqrt(1 + ranks / 3))


def _bound(first: FirstStep, losses: Sequence[float], rounded: _Found, dtype: torch.dtype, ranks: int) -> None:
    """Set the bounds of `first` from the errors of `rounded`, the same step computed in `dtype`."""
    floor = least(dtype, ranks)
    largest = max((float(g.abs().max()) for g in first.gradients.values()), default=0.0)
    for name, true in first.gradients.items():
        error = rounded.gradients.pop(name).cpu().double() - true.double()
        factor = NORM_FACTOR if true.numel() >= FEW_ELEMENTS else FACTOR
        first.bounds[name] = Bound(
            max(floor * float(true.abs().max()), FACTOR * finite(float(error.abs().max())), ZERO * largest),
            max(floor * float(true.double().norm()), factor * finite(float(error.norm())), ZERO * largest),
        )
    pairs = zip(rounded.losses, losses, strict=True)
    off = max(finite(abs(one - other) / max(abs(other), 1e-300)) for one, other in pairs)
    first.loss_bound = max(FLOOR, unit_roundoff(dtype), FACTOR * off)
