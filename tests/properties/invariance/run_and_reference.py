"""Run one layout and its reference, and return how far they are apart."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dslpar.data.order import micro_batches
from dslpar.layout.lr_scheduler import learning_rate
from dslpar.schema.types import SYMMETRIC_MEMORY
from tests.properties.invariance.layouts import (
    CLIP,
    GPT,
    MODELS,
    ONE,
    SAMPLES,
    SQUARE,
    STEPS,
    Bound,
    Layout,
    Problem,
    bound_of,
)
from tests.support.ranks import on_ranks
from tests.support.symmetric_memory import fused_products_on_cpus
from tests.support.warm import import_transformers

TIMEOUT_S, COMPILED_TIMEOUT_S = 240, 600
"""Time limits of a run: each rank compiles its layers itself, for 4 s on a core."""
TABLES = (
    *("embedding.tokens.weight", "model.embed_tokens.weight", "transformer.wte.weight", "shared.weight"),
    "bert.embeddings.word_embeddings.weight",
)


NO_GRADIENT = ("moco.encoder.norm.bias", "moco.momentum_encoder.norm.bias")
"""Zero apart from rounding: the following BatchNorm subtracts what is added to every sample."""


class Curve(NamedTuple):
    """Results of a run: loss and norm of each step, and the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


class Samples:
    """Random tokens, some far more frequent than others, as in text, so that gradients have a direction beside noise.

    If `ignoring`, about a third of the labels does not count, and in some rows none does.
    """

    def __init__(self, ignoring: bool, num_samples: int = 50, model: str = "") -> None:
        self.model = model
        generator = torch.Generator().manual_seed(7)
        length = GPT["max_seq_len"]
        self.num_samples = num_samples
        chance = torch.rand(num_samples, length + 1, generator=generator)
        self.tokens = (chance**4 * GPT["vocab_size"]).long()
        self.labels = self.tokens[:, 1:].clone()
        if ignoring:
            share = torch.rand(num_samples, 1, generator=generator) * 1.2
            self.labels[torch.rand(num_samples, length, generator=generator) < share - 0.2] = -100

        self.lengths = torch.randint(length // 2, length + 1, (num_samples, 1), generator=generator)
        self.classes = self.tokens[:, 0] % 5
        noise = torch.randn(num_samples, 2, 28, 4, generator=generator)
        self.images = noise + self.classes[:, None, None, None]
        noise = torch.randn(num_samples, 2, 12, 12, generator=generator)
        self.pictures = noise + self.classes[:, None, None, None]
        noise = torch.randn(num_samples, 2, SQUARE, SQUARE, generator=generator)
        self.squares = noise + self.classes[:, None, None, None]
        self.noise = torch.rand(num_samples, 16, generator=generator)

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and labels as the model takes them."""
        ids, labels, mask = self.tokens[samples, :-1], self.labels[samples], self._mask(samples)
        if self.model == "transformers' BERT":
            return (ids, mask, (ids > 9).long()), (labels.masked_fill(~mask, -100), self.classes[samples] % 2)
        if self.model == "transformers' T5":
            return (ids, mask, ids.flip(1)), labels
        if self.model == "transformers' ViT":
            return self.images[samples], self.classes[samples]
        if self.model == "ResMLP":
            return self.pictures[samples], self.classes[samples]
        if self.model == "MoCo":
            views = self.pictures[samples]
            return (views[..., :6, :6], views[..., 6:, 6:]), self.classes[samples]
        if self.model == "transformers' MAE":
            return (self.squares[samples], self.noise[samples]), self.squares[samples]
        if self.model in ("transformers' Swin", "transformers' SwinV2", "transformers' ResNet"):
            return self.squares[samples], self.classes[samples]
        return ids, labels

    def _mask(self, samples: list[int]) -> Tensor:
        return torch.arange(self.tokens.shape[1] - 1) < self.lengths[samples]


def run(layout: Layout) -> Curve:
    """Train on this layout's ranks, through DeepSpeed."""
    ranks = run_ranks(layout)
    losses, norms, _ = ranks[0]
    weights: dict[str, Tensor] = {}
    for other_losses, other_norms, held in ranks:
        assert (other_losses, other_norms) == (losses, norms), "ranks disagree"
        for name, weight in held.items():
            first = weights.setdefault(name, weight)
            # Tied copies may differ by rounding: each stage's data all-reduce sums in its own order.
            tied = layout.tied and name in TABLES
            assert torch.equal(first, weight) or (tied and _apart(first, weight.double()) < 1e-6), f"{name} differs"
    return Curve(losses, norms, weights)


Held = tuple[list[float], list[float], dict[str, Tensor]]
"""Losses, norms, and the full weights of a rank's stage."""


def run_ranks(layout: Layout, before: Callable[[], None] = lambda: None) -> list[Held]:
    """Return each rank's results; `before` is called first on each rank."""
    if layout.model.startswith("transformers'"):
        import_transformers(MODELS[layout.model](layout.tied).target.rpartition(".")[2])
    return on_ranks(layout.world, _rank, layout, before, init="deepspeed")


def _rank(layout: Layout, before: Callable[[], None]) -> Held:
    before()
    if layout.overlap == SYMMETRIC_MEMORY:
        with fused_products_on_cpus() as calls:
            held = _trained(layout)
        assert calls, "nothing came through symmetric memory"
        return held
    return _trained(layout)


def _trained(layout: Layout) -> Held:
    from dslpar.checkpoint import full_state
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    job = layout.job()
    engine = build_engine(job, Groups(job.mesh), all_counted=not layout.ignoring)
    samples, losses, norms = Samples(layout.ignoring, model=layout.model), [], []
    for _ in range(STEPS):
        batches = micro_batches(
            samples, job.batch, 1, engine.consumed_samples, job.mesh.data, engine.groups.coord["data"]
        )
        losses.append(engine.train_batch(batches))
        norms.append(engine.grad_norm)
    return losses, norms, full_state(engine.module, engine.groups)


# ---- the reference: one process, double precision, torch alone ----


@lru_cache
def reference(problem: Problem) -> Curve:
    """Run the same without DeepSpeed and parallelism, with every operation in double precision."""
    curve: Curve = on_ranks(1, _reference, problem, init=None)[0]
    return curve


OPTIMIZERS: Mapping[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=1e-3, betas=(0.9, 0.999), eps=1e-8),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-4, momentum=0.5),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
}


def _reference(problem: Problem) -> Curve:
    from dslpar.core.mesh import Mesh
    from dslpar.distributed.groups import Groups
    from dslpar.engine.model import model_from_job
    from dslpar.models import build_module

    described = problem._asdict()
    size = described.pop("micro_size")
    job = ONE._replace(**described).job()
    model, groups = model_from_job(job), Groups(Mesh(), rank=0)
    torch.manual_seed(job.spec.train.seed)
    module = build_module(model, groups, job.spec.train.seed).double()
    loss_of = model.loss(groups)
    decay = [
        {"params": [p for p in module.parameters() if p.dim() >= 2], "weight_decay": job.spec.optimizer.weight_decay},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[problem.optimizer](decay)
    samples, losses, norms = Samples(problem.ignoring, model=problem.model), [], []
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(job.spec.lr_scheduler, job.spec.optimizer.lr, STEPS, step)
        parts = job.batch._replace(micro_size=size, accumulation=SAMPLES // size)
        optimizer.zero_grad()
        batches = micro_batches(samples, parts, 1, step * SAMPLES, 1, 0)
        found = [loss_of(module(_double(x)), _double(labels)) for x, labels in batches]
        loss = torch.stack(found).mean()
        loss.backward()
        trained = [p for p in module.parameters() if p.requires_grad]
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained))
        for p in trained if problem.clip else ():
            p.grad *= min(1.0, CLIP / (norm + 1e-6))
        optimizer.step()
        model.after_step(module, (step + 1) / STEPS)
        losses.append(loss.item())
        norms.append(norm)
    assert min(norms) > CLIP
    return Curve(losses, norms, {name: p.detach() for name, p in module.named_parameters()})


def _double(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_double, value))
    return value.double() if value.is_floating_point() else value


# ---- deviations ----


def out_of_bound(layout: Layout) -> str:
    """Run a layout, and return its excess over `bound_of`, or ""."""
    off, bound = deviation(layout, run(layout)), bound_of(layout)
    within = all(value <= most for value, most in zip(off, bound, strict=True))
    return "" if within else f"{off} is out of {bound}"


def deviation(layout: Layout, curve: Curve) -> Bound:
    """Return the largest deviations from the reference; for weights, max|a - b| / max|b| of the worst tensor."""
    true = reference(layout.problem)
    assert curve.weights.keys() == true.weights.keys()
    weights = [
        _apart(_counted(name, curve.weights[name], layout), _counted(name, true.weights[name], layout))
        for name in true.weights
        if name not in NO_GRADIENT
    ]
    return Bound(_worst(curve.losses, true.losses), _worst(curve.norms, true.norms), _largest(weights))


def _worst(values: list[float], true: list[float]) -> float:
    return _largest([abs(a - b) / abs(b) for a, b in zip(values, true, strict=True)])


def _largest(values: list[float]) -> float:
    """Return the largest value, with NaN as the largest of all; `max` would ignore it."""
    return max(math.inf if math.isnan(value) else value for value in values)


def _apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    if not (a.any() or b.any()):
        return 0.0  # such as positions that transformers initializes with zeros and freezes
    return float((a.double() - b).abs().max() / b.abs().max())


def _counted(name: str, weight: Tensor, layout: Layout) -> Tensor:
    """Leave out key biases if steps do not shrink with the gradient: their true gradient is 0, and the optimizer makes
    full steps of its noise.
    """
    if not (layout.optimizer != "SGD" and name.endswith("qkv.bias")):
        return weight
    query, _, value = weight.chunk(3)
    return torch.cat([query, value])
