"""Reference of a proof: the model on one process, in double precision and plain torch, with bounds for rounding.

    reference = train(job, model, steps=3, samples_of=draw)
    reference.curve.losses, reference.curve.gradients        # in float64
    reference.loss_bounds, reference.gradient_bounds         # how far another order of sums may be from that

The reference uses no DeepSpeed, no process group and no pipeline, only a forward, a backward, clipping and a torch
optimizer. The model is built from dslpar's layers on a mesh of one rank, on which collectives do nothing. Tests and
`dslpar policy check` compare these layers with torch's, and transformers models with plain transformers.

A layout sums in another order than one process. Further runs on one process measure how much that may change results:

- `DRAWS` runs in float32. Their errors are the rounding errors of this model, and give the bounds of gradients. In some
  models all errors follow from a few numbers, such as the similarities of samples in MoCo, and may all be small by
  chance. So in all draws but the first, each weight is first changed by one rounding.
- Runs in float64 with *shifts*: gradients are changed by as much as their bounds allow. The effects on losses, norms
  and weights of later steps give the bounds of these. Adaptive optimizers need no exception: if a gradient is zero
  except for rounding, such as that of a key's bias, Adam moves its weight by whole steps in these runs, too.
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
from dslpar.engine.micro_batches import with_denominator
from dslpar.engine.optimizers import lr_scheduler_factory, optimizer_factory
from dslpar.layers.parameter import stable_hash
from dslpar.layout.resolve import Job
from dslpar.models import LayeredModel, build_module
from dslpar.parity.without_dropout import disable_dropout
from dslpar.schema import sections, torch_optimizers

FLOOR = 1e-6
"""Least relative bound: a dozen roundings of float32, 6e-8 each."""
DRAWS = 3
"""Number of runs in float32."""
FACTOR = 8.0
"""Factor by which another order of the same sums may exceed the largest rounding error of the float32 runs.

The errors of two orders of sums are two draws from one distribution. The largest error over a tensor's elements is
compared. For a tensor of ten elements, the largest errors of two draws differ by a factor of up to about five.
"""
MOST_ROUNDING = 1e-3
"""Largest bound of a gradient, as a share of the largest gradient, at which a mistake still stands out from rounding.

A missing reduction changes a gradient by about half. One missing sample of a hundred changes it by a hundredth.
"""
ZERO = 3e-8
"""Share of the largest gradient below which an element counts as zero: half a rounding of float32."""


Shift = Callable[[int, str, Tensor], Tensor]
"""Returns the change to add to a gradient, given (the step from 0, the parameter's name, the gradient)."""


@dataclass
class Curve:
    """The results of a run on one process, step by step."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Norm of each step's gradient, before clipping."""
    lrs: list[float] = field(default_factory=list)
    """The learning rate that each step used."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Gradients of the first step, before handlers and clipping, by global name."""
    weights: dict[str, Tensor] = field(default_factory=dict)
    """Weights after the last step."""


@dataclass
class Reference:
    """The curve of one process, and bounds for other orders of sums."""

    curve: Curve
    loss_bounds: list[float]
    """Relative bound per step."""
    norm_bounds: list[float]
    """Relative bound per step."""
    gradient_bounds: dict[str, float]
    """Absolute bound per tensor."""
    weight_bounds: dict[str, Tensor]
    """Absolute bound per element."""
    samples: Samples
    clip: float | None
    """The value of clip_grad_norm that all runs use: the config's, or a smaller one, so that clipping has an effect."""
    order: list[str]
    """Names of parameters in the order of the forward."""
    not_proven: tuple[str, ...] = ()
    """Parts of the built model that the comparison does not cover."""
    off_transformers: dict[str, float] = field(default_factory=dict)
    """Deviations of the first step from transformers' own forward, by transformers' names; empty: not compared."""


def train(
    job: Job,
    model: LayeredModel,
    steps: int,
    samples_of: Callable[[nn.Module], Samples],
    resumed: tuple[int, Job] | None = None,
) -> Reference:
    """Train the model of `job`, which has the layout's batch, on this process alone.

    Args:
        samples_of: draws the samples for the built model.
        resumed: the first step under another layout, and that layout's job. If a model's result depends on which
            samples share a micro-batch, the other layout's micro-batches are used from that step on.
    """
    torch.manual_seed(job.spec.train.seed)
    groups = Groups(Mesh(), rank=0)
    built = build_module(model, groups, job.spec.train.seed)
    lost = ["dropout: its rates are 0, because each rank draws masks for its own shard"] * disable_dropout(built)
    if model.takes_statistics and job.batch.accumulation > 1:
        lost.append(
            f"the load-balancing loss for another accumulation: one process also takes {job.batch.accumulation}"
            " micro-batches per step, because each of them has its own statistics"
        )
    if takes_batch_statistics(built):
        lost.append("running statistics of batch norms: buffers are not compared")
    samples = samples_of(built)
    if samples.num_samples < job.batch.global_size:
        message = f"a step takes {job.batch.global_size} samples, but there are {samples.num_samples}"
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
    """Refuse a model whose rounding would hide mistakes of a layout, or that has no gradient. Raises DslparError."""
    check_any_gradient(job, largest)
    worst = max(bounds, key=bounds.__getitem__, default="")
    numbers = (number for each in curves for number in (*each.losses, *each.norms))
    is_finite = all(map(math.isfinite, (*numbers, *bounds.values())))
    if is_finite and (not worst or bounds[worst] <= MOST_ROUNDING * largest):
        return
    share = f"{bounds[worst] / largest:.0e} of the largest gradient" if is_finite else "without a bound"
    message = f"rounding in float32 changes the gradient of {worst} so much that a mistake could hide in it: {share}"
    hint = "choose another seed, train.seed=1, or a smaller optimizer.lr; a router may have chosen other experts"
    raise_finding("PRE234", message, hint, job.path, "model")


def check_any_gradient(job: Job, largest: float) -> None:
    """Refuse a first step whose `largest` gradient is zero. Raises DslparError."""
    if largest == 0:
        message = "all gradients of the first step are zero, so a comparison could not show a mistake"
        hint = "batch.micro_size=4, if the loss compares samples with each other; or leave some weights to be trained"
        raise_finding("PRE234", message, hint, job.path, "model")


def _clip_that_acts(run: _Run, clip: float | None) -> float | None:
    """Return `clip`, or a smaller value below the first step's gradient norm, so that clipping has an effect."""
    if clip is None:
        return None
    norm = run.train(1).norms[0]
    return clip if clip < 0.9 * norm else float(f"{0.7 * norm:.2g}")


def _nudged(name: str, value: Tensor, draw: int) -> Tensor:
    """Return a weight with each element moved up or down at random by one rounding of float32."""
    generator = torch.Generator().manual_seed(stable_hash("draw", draw, name))
    return value * (1 + 2.0**-23 * (torch.randint(2, value.shape, generator=generator) * 2 - 1).to(torch.float64))


def _shifts(bounds: Mapping[str, float]) -> Iterator[Shift]:
    """Yield four shifts. Each returns the gradient's bound for every element, with signs that depend on the shift.

    Signs of steps: Adam divides by the size of its own gradients, so errors of equal sign in all steps nearly cancel,
    and others do not. The four shifts have all sign patterns of the first three steps, up to an overall sign. To first
    order, one of the shifts changes an element as much as any errors of that size can. Signs of later steps are random.

    Signs of elements: equal in the first shift, which moves sums such as the loss most, and random in the others.

    Elements that are exactly zero, such as those of tokens that no sample has, are zero in every order of sums.
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
    """Return the bound of each element: the effect of shifts or of float32 runs on it, plus a dozen roundings.

    If a gradient is zero except for rounding, Adam takes whole steps in directions that rounding decides, both under a
    layout and under a shift. Of thousands of such elements, the four shifts happen to move some very little, although a
    layout may move them as far as their neighbours. So an element that a shift moves at all may move at least as far as
    the median of the moved elements in its tensor.
    """
    by_shift = torch.stack([(each - true).abs() for each in shifted]).amax(0)
    moved = by_shift > 0
    if bool(moved.any()):
        by_shift = torch.maximum(by_shift, moved * by_shift[moved].median())
    by_rounding = torch.stack([(each.double() - true).abs() for each in rounded]).amax(0)
    return torch.maximum(2 * by_shift, FACTOR * by_rounding) + FLOOR * true.abs().max()


def finite(value: float) -> float:
    """Return the value, or infinity for NaN, because a comparison with NaN is never true."""
    return math.inf if math.isnan(value) else value


# ---- one run ----


class _Run:
    """A run of the built model from its initial weights, in one dtype."""

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
        """Largest element of each gradient in the first step."""

    def train(self, steps: int, shift: Shift | None = None) -> Curve:
        """Train for `steps` steps; add `shift`, if given, to each gradient."""
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
                p.grad = torch.zeros_like(p)  # not reached by a backward; DeepSpeed still applies weight decay to it
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
        """Return how many times larger a gradient's largest element is than in the first step; at least 1.

        Shifts are multiplied by this factor, because their bounds come from the first step, but rounding errors grow
        with the gradient. MoCo's gradients grow threefold in three steps.
        """
        largest = float(gradient.abs().max())
        first = self.largest.setdefault(name, largest)
        return max(1.0, largest / first) if first else 1.0

    def batches(self, step: int) -> Iterator[tuple[Any, Any]]:
        """Yield the global batch at once, or as micro-batches if batch statistics or the loss depend on them."""
        batch, seed = self.job.batch, self.job.spec.train.seed
        if self.resumed is not None and step >= self.resumed[0]:
            batch = self.resumed[1].batch
        apart = takes_batch_statistics(self.module) or getattr(self.model, "criterion", None) is not None
        size = batch.micro_size if apart else batch.global_size
        if self.model.takes_statistics:
            size = batch.global_size // batch.accumulation
        parts = batch._replace(micro_size=size, accumulation=batch.global_size // size)
        batches = list(micro_batches(self.samples, parts, seed, step * batch.global_size, 1, 0))
        if self.model.takes_statistics and not self.samples.all_counted:
            data, num_labels = Groups(Mesh(), rank=0).axis("data"), getattr(self.loss_of, "num_labels", 1)
            batches = with_denominator(batches, num_labels, data, self.job)
        for x, y in batches:
            yield _in(self.dtype, x), _in(self.dtype, y)

    def _precision(self) -> AbstractContextManager[None]:
        return (
            float64_of_transformers() if self.dtype is torch.float64 and is_of_transformers(self.job) else nullcontext()
        )


def takes_batch_statistics(module: nn.Module) -> bool:
    """Return whether the result depends on which samples share a micro-batch, as with torch's batch norms."""
    return any(isinstance(each, _BatchNorm) for each in module.modules())


def is_of_transformers(job: Job) -> bool:
    """Return whether the job's model is a transformers class."""
    model = job.spec.model
    return isinstance(model, sections.OtherModel) and model.is_of_transformers


@contextmanager
def float64_of_transformers() -> Iterator[None]:
    """Return a context in which transformers' casts to float32 keep float64."""
    from dslpar.policies.hf_parity import in_float64  # it imports transformers

    with in_float64():
        yield


def _in(dtype: torch.dtype, value: Any) -> Any:
    if isinstance(value, tuple | list):
        return tuple(_in(dtype, each) for each in value)
    return value.to(dtype) if value.is_floating_point() else value


# ---- the optimizer ----


def optimizer_of(job: Job, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return a torch optimizer for the job's section, for any dtype: DeepSpeed's kernels are float32 only."""
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
    """Return the torch optimizer that corresponds to one of DeepSpeed's CPU kernels."""
    args = {name: value for name, value in section.args.items() if name in ("betas", "eps", "amsgrad")}
    if "Adagrad" in section.target:
        args.pop("betas", None)
        return torch.optim.Adagrad(groups, **settings, **args)
    is_decoupled = section.args.get("adamw_mode", section.args.get("adam_w_mode", True))
    return (torch.optim.AdamW if is_decoupled else torch.optim.Adam)(groups, **settings, **args)
