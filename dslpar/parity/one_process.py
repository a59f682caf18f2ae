"""The reference: the model on one process, in double precision, by torch alone; and what rounding does to it.

    reference = train(job, model, steps=3)
    reference.curve.losses, reference.curve.gradients        # in float64
    reference.noise                                          # how far the same in float32 is from that

There is no DeepSpeed here, no process group and no pipeline: forward, backward, clipping, and an optimizer of torch's.
The model is built by the same layers, on a mesh of one rank, where every collective is nothing. Layers themselves are
compared with torch's, and models of transformers with plain transformers, by tests and by `dslpar policy check`.

Runs more say how much a sum in another order may change. `DRAWS` are in float32: what they are off by is the rounding
of this very model, layer by layer. Where all errors follow from a few numbers, as MoCo's do from the similarities of
its samples, one draw may be small by chance, and with it the errors of all tensors; so in all draws but the first each
weight is one rounding beside itself. The others are in float64 with gradients that are off by as much as the bound for
gradients allows: what that does to losses, norms and weights of later steps is what may be claimed of these. So an
optimizer that divides by the root of a second moment needs no exception: where a gradient is zero but for rounding,
such as that of a key's bias, its elements move by whole steps here too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dslpar.core.catalog import raise_finding
from dslpar.core.mesh import Mesh
from dslpar.data.order import Samples, micro_batches
from dslpar.distributed.groups import Groups
from dslpar.engine.build import parameter_groups
from dslpar.engine.gradient_handlers import handler_classes
from dslpar.engine.optimizers import lr_scheduler_factory, optimizer_factory
from dslpar.layers.parameter import stable_hash
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel, build_module
from dslpar.parity.dropout import disable_dropout
from dslpar.schema import sections, torch_optimizers

FLOOR = 1e-6
"""Least bound, relative: a dozen roundings of float32, 6e-8 each."""
DRAWS = 3
"""Runs in float32."""
FACTOR = 8.0
"""How often the largest rounding of the runs in float32 may be exceeded by another order of the same sums.

Errors of two orders are draws of one distribution, of which the largest over a tensor's elements is compared; of a
tensor of ten elements the largest of two draws differ by a factor of up to about five.
"""
MOST_ROUNDING = 1e-3
"""Share of the largest gradient that rounding may be, for a mistake to be told from it.

A missing reduction is a half or so of a gradient, and one sample of a hundred a hundredth.
"""
ZERO = 3e-8
"""Share of the largest gradient, half a rounding of float32, below which an element is not told from zero."""


Shift = Callable[[int, str, Tensor], Tensor]
"""What is added to a parameter's gradient, by the step from 0, its name and the gradient."""


@dataclass
class Curve:
    """What a run gives."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of each step's gradient, before clipping."""
    lrs: list[float] = field(default_factory=list)
    """The learning rate that each step used."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Of the first step, before handlers and clipping, by global name."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """After the last step."""


@dataclass
class Reference:
    """The curve of one process, and how far another order of sums may be from it."""

    curve: Curve
    loss_bounds: list[float]
    """Relative, of each step."""
    norm_bounds: list[float]
    gradient_bounds: dict[str, float]
    """Absolute, of each tensor."""
    weight_bounds: dict[str, Tensor]
    """Absolute, of each element."""
    samples: Samples
    clip: float | None
    """The largest norm that was used: the config's, or a smaller one, so that clipping acts."""
    order: list[str]
    """Names of parameters in the order of the forward."""
    not_proven: tuple[str, ...] = ()
    """What of the built model the comparison does not show."""
    off_transformers: dict[str, float] = field(default_factory=dict)
    """How far the first step is from that of transformers' own forward, by its names; empty: it has no part in it."""


def train(
    job: Job,
    model: LayeredModel,
    steps: int,
    samples_of: Callable[[nn.Module], Samples],
    resumed: tuple[int, Job] | None = None,
) -> Reference:
    """Train the model of `job`, whose batch is that of the layout, on this process alone.

    Args:
        samples_of: draws the samples for the built model.
        resumed: the step from which on another layout runs, and its job: where a model's result depends on who is in a
            micro-batch, its micro-batches are those of that layout.
    """
    torch.manual_seed(job.spec.train.seed)
    groups = Groups(Mesh(), rank=0)
    built = build_module(model, groups, job.spec.train.seed)
    lost = ["dropout: its rates are 0, since each rank draws masks for its own piece"] * disable_dropout(built)
    if takes_batch_statistics(built):
        lost.append("running statistics of batch norms: buffers are not compared")
    samples = samples_of(built)
    if samples.num_samples < job.batch.global_size:
        message = f"a step takes {job.batch.global_size} samples, and there are {samples.num_samples}"
        raise_finding("BAT210", message, "give more samples", job.path, "data")
    order = [name for name, _ in built.named_parameters()]
    initial = {name: value.detach().clone() for name, value in built.state_dict().items()}

    def run_of(dtype: torch.dtype, clip: float | None, draw: int = 0) -> _Run:
        first = {
            name: _nudged(name, value, draw) if draw and name in order else value for name, value in initial.items()
        }
        return _Run(job, model, built, first, samples, dtype, clip, resumed)

    clip = _clip_that_acts(run_of(torch.float64, None), job.spec.train.clip_grad_norm)

    def run(dtype: torch.dtype, shift: Shift | None = None) -> Curve:
        return run_of(dtype, clip).train(steps, shift)

    true = run(torch.float64)
    rounded = [run_of(torch.float32, clip, draw).train(steps) for draw in range(DRAWS)]
    largest = max((float(g.abs().max()) for g in true.gradients.values()), default=0.0)
    bounds = {
        name: max(
            FLOOR * float(gradient.abs().max()),
            *(FACTOR * float((each.gradients[name].double() - gradient).abs().max()) for each in rounded),
            ZERO * largest,
        )
        for name, gradient in true.gradients.items()
    }
    _check_stable(job, [true, *rounded], bounds, largest)
    shifted = [run(torch.float64, shift) for shift in _shifts(bounds)]
    return Reference(
        curve=true,
        loss_bounds=_relative_bounds(true.losses, [each.losses for each in rounded], [each.losses for each in shifted]),
        norm_bounds=_relative_bounds(true.norms, [each.norms for each in rounded], [each.norms for each in shifted]),
        gradient_bounds=bounds,
        weight_bounds={
            name: _weight_bound(weight, *([each.weights[name] for each in of] for of in (rounded, shifted)))
            for name, weight in true.weights.items()
        },
        samples=samples,
        clip=clip,
        order=order,
        not_proven=tuple(lost),
        off_transformers=_off_transformers(run_of(torch.float64, clip), true),
    )


def _off_transformers(run: _Run, curve: Curve) -> dict[str, float]:
    if not is_of_transformers(run.job):
        return {}
    from dslpar.parity import plain_transformers  # it imports transformers

    model = plain_transformers.as_plain(run.model)
    if model is None:
        return {}
    weights = {name: p.detach() for name, p in run.module.named_parameters()}
    batches = list(run.batches(0))
    return plain_transformers.deviations(model, weights, run.module, batches, curve.gradients, curve.losses[0])


def _check_stable(job: Job, curves: Sequence[Curve], bounds: Mapping[str, float], largest: float) -> None:
    """Refuse a model whose rounding hides what a layout could do wrong, or that has no gradient. Raises DslparError."""
    check_any_gradient(job, largest)
    worst = max(bounds, key=bounds.__getitem__, default="")
    numbers = (number for each in curves for number in (*each.losses, *each.norms))
    is_finite = all(map(math.isfinite, (*numbers, *bounds.values())))
    if is_finite and (not worst or bounds[worst] <= MOST_ROUNDING * largest):
        return
    share = f"{bounds[worst] / largest:.0e} of the largest gradient" if is_finite else "without a bound"
    message = f"float32 rounds the gradient of {worst} by what is not told from a mistake: {share}"
    hint = "choose another seed, train.seed=1, or a smaller optimizer.lr; a router of experts may have changed sides"
    raise_finding("PRE234", message, hint, job.path, "model")


def check_any_gradient(job: Job, largest: float) -> None:
    """Refuse a first step whose `largest` gradient is zero. Raises DslparError."""
    if largest == 0:
        message = "all gradients of the first step are zero: whatever a layout does to them, they stay so"
        hint = "batch.micro_size=4, if the loss compares samples with each other; or leave some weights to be trained"
        raise_finding("PRE234", message, hint, job.path, "model")


def _clip_that_acts(run: _Run, clip: float | None) -> float | None:
    """Return a largest norm below that of the first gradient, so that clipping is not nothing in a small model."""
    if clip is None:
        return None
    norm = run.train(1).norms[0]
    return clip if clip < 0.9 * norm else float(f"{0.7 * norm:.2g}")


def _nudged(name: str, value: Tensor, draw: int) -> Tensor:
    """Return a weight with each element one rounding of float32 up or down, as drawn."""
    generator = torch.Generator().manual_seed(stable_hash("draw", draw, name))
    return value * (1 + 2.0**-23 * (torch.randint(2, value.shape, generator=generator) * 2 - 1).to(torch.float64))


def _shifts(bounds: Mapping[str, float]) -> Iterator[Shift]:
    """Yield what is added to the gradient of each parameter: its bound, with signs that are fixed before.

    Adam divides by the size of its own gradients: errors of equal sign in all steps nearly cancel, others do not. So
    the signs of the first three steps are, over the four shifts, all that there are but for a sign of all: to first
    order one of them does as much to an element as errors of that size can. Of later steps they are drawn. The signs of
    elements are equal in the first shift, which moves sums such as the loss most, and drawn in the others.

    Elements that are zero to the bit, such as those of tokens that no sample has, are so in every order of sums.
    """

    def shift(number: int, step: int, name: str, gradient: Tensor) -> Tensor:
        later = stable_hash("step", number, step) if step > 2 else 0
        sign = -1 if later % 2 or (0 < step < 3 and number >> (step - 1) & 1) else 1
        if number == 0:
            return sign * bounds[name] * (gradient != 0)
        generator = torch.Generator().manual_seed(stable_hash("element", number, name))
        signs = torch.randint(2, gradient.shape, generator=generator) * 2 - 1
        return sign * bounds[name] * signs * (gradient != 0)

    yield from (partial(shift, number) for number in range(4))


def _relative_bounds(true: list[float], rounded: list[list[float]], shifted: list[list[float]]) -> list[float]:
    bounds = []
    for step, value in enumerate(true):
        scale = max(abs(value), 1e-300)
        by_rounding = max(abs(run[step] - value) for run in rounded) / scale
        by_shift = max(abs(run[step] - value) for run in shifted) / scale
        bounds.append(max(FLOOR, FACTOR * by_rounding, 2 * by_shift))
    return bounds


def _weight_bound(true: Tensor, rounded: Sequence[Tensor], shifted: Sequence[Tensor]) -> Tensor:
    """Return the bound of each element: what shifts of the gradient did to it, and a dozen roundings of the tensor.

    Adam's whole steps along gradients that are zero but for rounding are as long in a layout as under a shift, and what
    follows from their signs as large. Of thousands of elements some are then moved by none of four shifts, and by the
    layout as their neighbours are: so each may move as far as half of those of its tensor that shifts move at all.
    """
    by_shift = torch.stack([(each - true).abs() for each in shifted]).amax(0)
    moved = by_shift > 0
    if bool(moved.any()):
        by_shift = torch.maximum(by_shift, moved * by_shift[moved].median())
    by_rounding = torch.stack([(each.double() - true).abs() for each in rounded]).amax(0)
    return torch.maximum(2 * by_shift, FACTOR * by_rounding) + FLOOR * true.abs().max()


def finite(value: float) -> float:
    """Return the number; infinity for one that is not a number, which no comparison would find large."""
    return math.inf if math.isnan(value) else value


# ---- one run ----


class _Run:
    """A run of the built model from its first weights, in one dtype."""

    def __init__(
        self,
        job: Job,
        model: LayeredModel,
        module: nn.Module,
        initial: Mapping[str, Tensor],
        samples: Samples,
        dtype: torch.dtype,
        clip: float | None,
        resumed: tuple[int, Job] | None,
    ) -> None:
        module.to(dtype)
        module.load_state_dict({name: _in(dtype, value) for name, value in initial.items()})
        self.job, self.model, self.module, self.samples = job, model, module, samples
        self.dtype, self.clip, self.resumed = dtype, clip, resumed
        self.loss_of = model.loss(Groups(Mesh(), rank=0))
        self.optimizer = optimizer_of(job, parameter_groups(module))
        self.lr_scheduler = lr_scheduler_factory(job)(self.optimizer)
        self.handlers = [cls(module, self.optimizer, **args) for cls, args in handler_classes(job)]
        self.trained = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self.largest: dict[str, float] = {}
        """Of each gradient's elements in the first step."""

    def train(self, steps: int, shift: Shift | None = None) -> Curve:
        """Train; `shift` is what is added to each gradient."""
        curve = Curve()
        self.module.train()
        with self._precision():
            for step in range(steps):
                self._step(step, steps, curve, shift)
        curve.weights = {name: p.detach().clone() for name, p in self.module.named_parameters()}
        return curve

    def _step(self, step: int, steps: int, curve: Curve, shift: Shift | None) -> None:
        self.optimizer.zero_grad()
        losses = [self.loss_of(self.module(x), y) for x, y in self.batches(step)]
        loss = torch.stack(losses).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        for name, p in self.trained:
            if p.grad is None:
                p.grad = torch.zeros_like(p)  # no backward reaches it; DeepSpeed decays it as any other, in all layouts
            if shift is not None:
                p.grad += self._growth(name, p.grad) * shift(step, name, p.grad)
        if step == 0:
            curve.gradients = {name: p.grad.clone() for name, p in self.trained if p.grad is not None}
        for handler in self.handlers:
            handler.handle_gradient()
        gradients = [p.grad for _, p in self.trained if p.grad is not None]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        if self.clip is not None:
            for g in gradients:
                g *= min(1.0, self.clip / (norm + 1e-6))  # as DeepSpeed and torch divide
        curve.lrs.append(float(self.optimizer.param_groups[0]["lr"]))
        self.optimizer.step()
        self.lr_scheduler.step()
        if self.model.changes_after_step:
            self.model.after_step(self.module, (step + 1) / steps)
        curve.losses.append(loss.item())
        curve.norms.append(norm)

    def _growth(self, name: str, gradient: Tensor) -> float:
        """Return how many times as large as in the first step a gradient is, at least 1.

        Bounds are of the first step, and rounding is relative: MoCo's gradients grow threefold within three steps.
        """
        largest = float(gradient.abs().max())
        first = self.largest.setdefault(name, largest)
        return max(1.0, largest / first) if first else 1.0

    def batches(self, step: int) -> Iterator[tuple[Any, Any]]:
        """Yield the global batch at once; by micro-batches, where statistics or a program's criterion are of these."""
        batch, seed = self.job.batch, self.job.spec.train.seed
        if self.resumed is not None and step >= self.resumed[0]:
            batch = self.resumed[1].batch
        apart = takes_batch_statistics(self.module) or getattr(self.model, "criterion", None) is not None
        size = batch.micro_size if apart else batch.global_size
        parts = batch._replace(micro_size=size, accumulation=batch.global_size // size)
        for x, y in micro_batches(self.samples, parts, seed, step * batch.global_size, 1, 0):
            yield _in(self.dtype, x), _in(self.dtype, y)

    def _precision(self) -> AbstractContextManager[None]:
        return (
            float64_of_transformers() if self.dtype is torch.float64 and is_of_transformers(self.job) else nullcontext()
        )


def takes_batch_statistics(module: nn.Module) -> bool:
    """Whether the model's result depends on which samples are in a micro-batch: torch's batch norms see it alone."""
    return any(isinstance(each, _BatchNorm) for each in module.modules())


def is_of_transformers(job: Job) -> bool:
    """Whether the job's model is a class of transformers."""
    model = job.spec.model
    return isinstance(model, sections.OtherModel) and model.is_of_transformers


@contextmanager
def float64_of_transformers() -> Iterator[None]:
    """Keep float64 where transformers' code goes to float32."""
    from dslpar.policies.compare import in_float64  # it imports transformers

    with in_float64():
        yield


def _in(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_in(dtype, each) for each in value)
    return value.to(dtype) if value.is_floating_point() else value


# ---- its optimizer ----


def optimizer_of(job: Job, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return torch's optimizer of the job's section, in any dtype: DeepSpeed's are kernels of float32."""
    section = job.spec.optimizer
    settings: dict[str, Any] = {"lr": section.lr, "weight_decay": section.weight_decay}
    if isinstance(section, sections.SGD):
        return torch.optim.SGD(groups, momentum=section.momentum, nesterov=section.nesterov, **settings)
    if isinstance(section, sections.AdamW):
        cls = torch.optim.Adam if isinstance(section, sections.Adam) else torch.optim.AdamW
        betas = (float(section.betas[0]), float(section.betas[1]))
        return cls(groups, betas=betas, eps=section.eps, amsgrad=section.amsgrad, **settings)
    assert isinstance(section, sections.OtherOptimizer)
    row = torch_optimizers.named(section.target)
    dotted = row.dotted if row else section.target
    if dotted.startswith("deepspeed."):
        return _torch_kin(section, groups, settings)
    factory = optimizer_factory(job)
    assert factory is not None, "a section of another optimizer has a factory"
    return factory(groups)


def _torch_kin(
    section: sections.OtherOptimizer, groups: list[dict[str, Any]], settings: dict[str, Any]
) -> torch.optim.Optimizer:
    """Return torch's form of one of DeepSpeed's kernels for CPUs."""
    args = {name: value for name, value in section.args.items() if name in ("betas", "eps", "amsgrad")}
    if "Adagrad" in section.target:
        args.pop("betas", None)
        return torch.optim.Adagrad(groups, **settings, **args)
    is_decoupled = section.args.get("adamw_mode", section.args.get("adam_w_mode", True))
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, **settings, **args)
