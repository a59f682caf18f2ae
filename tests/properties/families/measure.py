"""Run a row through DeepSpeed and through plain transformers in float64, and return how far they are apart.

The reference is transformers' own class with torch's optimizer, without a policy and without DeepSpeed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

import dslpar
from dslpar.data.order import micro_batches
from dslpar.policies import hf_parity
from dslpar.policies.model import HuggingFaceModel
from dslpar.policies.weights import parameters_with_sources
from tests.properties.families.table import CLIP, OPTIMIZER, SAMPLES, STEPS, Problem, Row
from tests.support import hugging_face as hf
from tests.support.ranks import on_ranks
from tests.support.warm import import_transformers

SEED = 1


class Curve(NamedTuple):
    """Results of a run: loss and norm of each step, and the final weights."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


class Deviation(NamedTuple):
    """Largest deviations from the reference; for weights, max|a - b| / max|b| of the worst tensor."""

    loss: float
    norm: float
    weights: float


BOUND = Deviation(1e-6, 1e-6, 2e-6)
"""float32: sums in another order are noise, and one process is as far from double precision."""


class Samples:
    """Random tokens. If `padded`, samples have four lengths, and labels of padding do not count."""

    def __init__(self, problem: Problem) -> None:
        family = hf.FAMILIES[problem.family]
        cls = family.classes()[0]
        model = HuggingFaceModel(cls, problem.sizes())
        self.num_samples = STEPS * SAMPLES
        policy, config = model.policy, model.config
        self.inputs = hf_parity.make_inputs(config, policy.inputs, padded=problem.padded, batch=self.num_samples)
        generator = torch.Generator().manual_seed(8)
        ids = self.inputs["input_ids"]
        tokens = torch.randint(0, config.vocab_size, ids.shape, generator=generator)
        masks = [value for name, value in self.inputs.items() if "mask" in name]
        if problem.padded:
            tokens = tokens.masked_fill(~masks[-1], hf_parity.IGNORED)
        others = model.skeleton.outline.outputs
        self.labels = [tokens, *(torch.randint(0, 2, (len(ids),), generator=generator) for _ in others)]

    def batch(self, samples: list[int], numbers: Sequence[int]) -> tuple[Any, Any]:
        """Return inputs and labels, each one tensor or a tuple of tensors."""
        inputs, labels = ([value[samples] for value in values] for values in (self.inputs.values(), self.labels))
        return _alone_or_all(inputs), _alone_or_all(labels)


def _alone_or_all(values: list[Tensor]) -> Any:
    return tuple(values) if len(values) > 1 else values[0]


def run(row: Row) -> Curve:
    """Train on this row's ranks, through DeepSpeed."""
    import_transformers(hf.FAMILIES[row.family].classes()[0].__name__)
    ranks = on_ranks(row.world, _rank, row, init="deepspeed")
    losses, norms, _ = ranks[0]
    weights: dict[str, Tensor] = {}
    for other_losses, other_norms, held in ranks:
        assert (other_losses, other_norms) == (losses, norms), "ranks disagree"
        for name, weight in held.items():
            first = weights.setdefault(name, weight)
            # Tied copies may differ by rounding: each stage's data all-reduce sums in its own order.
            is_copied = row.pipe > 1 and row.tied
            assert torch.equal(first, weight) or (is_copied and _apart(first, weight) < 1e-6), f"{name} differs"
    return Curve(losses, norms, weights)


def _rank(row: Row) -> Curve:
    from dslpar.checkpoint import full_state
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    job = dslpar.resolve(row.config(), row.world)
    engine = build_engine(job, Groups(job.mesh), all_counted=not row.padded)
    samples, losses, norms = Samples(row.problem), [], []
    for _ in range(STEPS):
        data, consumed = engine.groups.coord["data"], engine.consumed_samples
        losses.append(engine.train_batch(micro_batches(samples, job.batch, SEED, consumed, job.mesh.data, data)))
        norms.append(engine.grad_norm)
    return Curve(losses, norms, full_state(engine.module, engine.groups))


# ---- the reference: plain transformers, one process, double precision, torch alone ----


@lru_cache
def reference(problem: Problem) -> Curve:
    """Run the same without DeepSpeed and policy, with every operation in double precision."""
    curve: Curve = on_ranks(1, _reference, problem, init=None)[0]
    return curve


def _reference(problem: Problem) -> Curve:
    from dslpar.core.mesh import Mesh
    from dslpar.distributed.groups import Groups
    from dslpar.engine.model import model_from_job
    from dslpar.models import build_module

    row = Row(problem.family, "no tensor ranks", 1, 1, 0, problem.tied, False, problem.padded)
    job, family = dslpar.resolve(row.config(), 1), hf.FAMILIES[problem.family]
    module = build_module(model_from_job(job), Groups(Mesh(), rank=0), job.spec.train.seed)
    cls, config_cls = family.classes()
    model, _ = hf_parity.plain(cls, config_cls(**problem.sizes()), family.attention)
    with torch.no_grad():
        for _, p, sources in parameters_with_sources(module):
            for name, part in _split(model, p, sources):
                model.get_parameter(name).copy_(part)
    samples, losses, norms = Samples(problem), [], []
    trained = list(model.parameters())
    matrices, vectors = ([p for p in trained if (p.dim() >= 2) is is_matrix] for is_matrix in (True, False))
    decayed = {"params": matrices, "weight_decay": OPTIMIZER["weight_decay"]}
    optimizer = torch.optim.SGD([decayed, {"params": vectors}], lr=OPTIMIZER["lr"], momentum=OPTIMIZER["momentum"])
    for step in range(STEPS):
        whole = job.batch._replace(micro_size=SAMPLES, accumulation=1)
        ((_, labels),) = micro_batches(samples, whole, SEED, step * SAMPLES, 1, 0)
        (chosen,) = micro_batches(_Numbers(samples.num_samples), whole, SEED, step * SAMPLES, 1, 0)
        inputs = {name: value[chosen] for name, value in samples.inputs.items()}
        optimizer.zero_grad()
        loss = _loss(model, inputs, labels if isinstance(labels, tuple) else (labels,))
        loss.backward()
        norm = math.sqrt(sum(float(p.grad.square().sum()) for p in trained if p.grad is not None))
        for p in trained:
            if p.grad is not None:
                p.grad *= min(1.0, CLIP / (norm + 1e-6))
        optimizer.step()
        losses.append(loss.item())
        norms.append(norm)
    assert min(norms) > CLIP, norms
    found = {}
    for name, p, sources in parameters_with_sources(module):
        parts = [(model.get_parameter(source.name).detach(), source.transposed) for source in sources]
        found[name] = torch.cat([part.t() if is_transposed else part for part, is_transposed in parts])
        assert found[name].shape == p.shape
    return Curve(losses, norms, found)


class _Numbers:
    """Samples that are their own indices."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def batch(self, samples: list[int], numbers: Sequence[int]) -> Any:
        """Return the indices."""
        return samples


def _split(model: Any, p: Tensor, sources: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the transformers tensors that a parameter is made of, by name."""
    lengths = [model.get_parameter(source.name).shape[1 if source.transposed else 0] for source in sources]
    for source, part in zip(sources, torch.split(p, lengths), strict=True):
        yield source.name, part.t() if source.transposed else part


def _loss(model: Any, inputs: dict[str, Tensor], labels: tuple[Tensor, ...]) -> Tensor:
    """Return the sum of the mean losses of the model's outputs, over counted labels."""
    settings = {} if "bert" in model.config.model_type else {"use_cache": False}
    with hf_parity.in_float64():
        output = model(**{name: x.long() if "mask" in name else x for name, x in inputs.items()}, **settings)
        logits = [value for name, value in output.items() if "logits" in name]
        losses = [
            functional.cross_entropy(each.flatten(0, -2), of.flatten(), ignore_index=hf_parity.IGNORED)
            for each, of in zip(logits, labels, strict=True)
        ]
        return torch.stack(losses).sum()


# ---- deviations ----


def deviation(row: Row, curve: Curve) -> Deviation:
    """Return the deviation of a run from plain transformers."""
    true = reference(row.problem)
    assert curve.weights.keys() == true.weights.keys()
    weights = [_apart(curve.weights[name], weight) for name, weight in true.weights.items()]
    return Deviation(_worst(curve.losses, true.losses), _worst(curve.norms, true.norms), _largest(weights))


def _worst(values: list[float], true: list[float]) -> float:
    return _largest([abs(a - b) / abs(b) for a, b in zip(values, true, strict=True)])


def _largest(values: list[float]) -> float:
    """Return the largest value, with NaN as the largest of all; `max` would ignore it."""
    return max(math.inf if math.isnan(value) else value for value in values)


JUST_MOVED = 1e-2
"""Smallest reference size of a tensor: gains and biases that were zeros three steps ago may be smaller. They are sums
of gradients that cancel, so their noise is that of the summands. A lost term is as large as the summands.
"""


def _apart(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a.double() - b.double()).abs().max()) / max(float(b.abs().max()), JUST_MOVED)
