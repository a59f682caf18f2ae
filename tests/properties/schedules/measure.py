"""Run rows and their 1F1B counterparts, and return how far they are apart: `run(rows)`.

Ranks fork once and build one engine after the other: on few cores, 32 of them take longer to start than to compute.
"""

from __future__ import annotations

import gc
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dslpar.data.order import micro_batches
from dslpar.distributed.collectives import Axis, gather_objects
from tests.properties.invariance.layouts import MODELS
from tests.properties.invariance.measure import Samples
from tests.properties.schedules.table import LR, Row
from tests.support.ranks import on_ranks
from tests.support.warm import import_transformers

TIMEOUT_S = 900
SEED = 1

Gradients = dict[str, Tensor]
"""Whole, by name."""


class Deviation(NamedTuple):
    """The worst of an evaluation and two steps, relative to 1F1B; of gradients the worst tensor, max|a-b| / max|b|."""

    loss: float
    norm: float
    gradient: float


BOUND = Deviation(0.0, 1e-6, 1e-6)
"""Of one layout and one type, whatever these are: nothing is rounded otherwise but sums.

Losses are equal: each micro-batch's forward is the same operations on the same numbers, and the last stage adds losses
up in the order of the micro-batches under every schedule. A weight's gradient is the same sum over micro-batches in the
same order, too, and W has the product of B. What may differ is which parameters stand together in a bucket of replicas'
gradients, and in a sum of squares; and of a tied weight, which stage's gradient comes first. Each rounds by 6e-8 in
fp32, in which half types keep these sums as well; there are few of them. A mistake, such as a micro-batch that is left
out, taken twice, scaled, or taken for another, is about 1/m: 0.03 at least.
"""


class Run(NamedTuple):
    """What one rank has of a run."""

    losses: list[float]
    """Of an evaluation and two steps."""
    norms: list[float]
    gradients: Gradients
    """Of the layers that this rank holds."""


class Compared(NamedTuple):
    """What one rank gives of a row."""

    losses: list[float]
    norms: list[float]
    deviation: Deviation
    worst: str
    """The tensor whose gradient is furthest off."""


def run(rows: Sequence[Row], change: Callable[[], None] | None = None) -> list[Deviation]:
    """Run rows of one world, and their references; `change` is called in each rank before the first row that is not."""
    for row in rows:
        if row.model.startswith("transformers'"):
            import_transformers(MODELS[row.model](row.tied).target.rpartition(".")[2])
    ranks = on_ranks(rows[0].world, _rank, list(rows), change, init="deepspeed")
    found = []
    for of_ranks in zip(*ranks, strict=True):
        assert len({str((each.losses, each.norms)) for each in of_ranks}) == 1, "ranks disagree"
        found.append(Deviation(*(_largest(each) for each in zip(*(each.deviation for each in of_ranks), strict=True))))
    return found


def _rank(rows: Sequence[Row], change: Callable[[], None] | None) -> list[Compared]:
    from dslpar.distributed.groups import Groups

    stages = Groups(rows[0].job().mesh).axis("pipe")
    next_engine = _reuse_groups()
    reference, true, found = None, Run([], [], {}), []
    for row in rows:
        if row.reference != reference:
            assert change is None or reference is None, "what is changed stays so"
            reference = row.reference
            next_engine()
            true = _of_all_stages(_run(reference), stages)
        if change is not None:
            change()
        next_engine()
        found.append(_compared(_run(row), true, stages))
    return found


def _run(row: Row) -> Run:
    """An evaluation, a step that leaves the weights as they are, and one that shows the gradient.

    The gradient is (before - after) / LR, whatever ZeRO does with it: without momentum, decay and clipping. A weight w
    of 1 at most is rounded by 6e-8 w before, which is 6e-12 of its gradient; after, by 6e-8 of the gradient itself. The
    largest of each tensor are 1e-3 and more, but those of a key's bias, which are zero, and stand in one tensor with
    others.
    """
    from dslpar.checkpoint import full_state
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    job = row.job()
    engine = build_engine(job, Groups(job.mesh), all_counted=not row.ignoring)
    samples, data_rank = Samples(row.ignoring, model=row.model), engine.groups.coord["data"]

    def batches(step: int) -> Iterable[Any]:
        return micro_batches(samples, job.batch, SEED, step * job.batch.global_size, job.mesh.data, data_rank)

    before = full_state(engine.module, engine.groups)
    losses, norms = [engine.eval_batch(batches(0))], []
    for step, lr in enumerate((0.0, LR)):
        for group in engine.deepspeed.optimizer.param_groups:
            group["lr"] = lr
        losses.append(engine.train_batch(batches(step)))
        norms.append(engine.grad_norm)
        assert engine.lr == lr
    after = full_state(engine.module, engine.groups)
    trained = {name for name, p in engine.named_parameters() if p.requires_grad}
    gradients = {name: (before[name] - after[name]) / LR for name in trained}
    del engine
    gc.collect()
    return Run(losses, norms, gradients)


def _of_all_stages(run: Run, stages: Axis) -> Run:
    """Put the gradients of all stages together; they are those whose norm the engine gives."""
    gradients: Gradients = {}
    for held in gather_objects(run.gradients, stages):
        for name, gradient in held.items():
            assert _apart(gradients.setdefault(name, gradient), gradient) < BOUND.gradient, f"copies of {name} differ"
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))
    assert abs(norm - run.norms[-1]) < 1e-4 * norm, (norm, run.norms)
    return run._replace(gradients=gradients)


def _compared(run: Run, true: Run, stages: Axis) -> Compared:
    assert set().union(*gather_objects(set(run.gradients), stages)) == true.gradients.keys()
    apart = {name: _apart(gradient, true.gradients[name]) for name, gradient in run.gradients.items()}
    worst = max(apart, key=lambda name: _largest([apart[name]]))
    deviation = Deviation(_worst(run.losses, true.losses), _worst(run.norms, true.norms), _largest(apart.values()))
    return Compared(run.losses, run.norms, deviation, worst)


def _reuse_groups() -> Callable[[], None]:
    """Give each engine the process groups of the one before; return what is to be called before each.

    An engine makes dozens of them, each with threads and files of its own, and nothing ends them while a process lives.
    """
    make, made, requests = dist.new_group, dict[Any, Any](), Counter[Any]()

    def new_group(ranks: Any = None, *args: Any, use_local_synchronization: bool = False, **options: Any) -> Any:
        # Apart by who calls: all ranks, or those in it alone. So either all that must call it make one, or none.
        key = (ranks if ranks is None else tuple(ranks), use_local_synchronization)
        number = requests[key]
        requests[key] += 1
        if (key, number) not in made:
            local = {"use_local_synchronization": use_local_synchronization}
            made[key, number] = make(ranks, *args, **local, **options)
        return made[key, number]

    dist.new_group = new_group
    return requests.clear


# ---- how far apart ----


def _worst(values: Sequence[float], true: Sequence[float]) -> float:
    return _largest([abs(a - b) / abs(b) for a, b in zip(values, true, strict=True)])


def _largest(values: Iterable[float]) -> float:
    """NaN is no small deviation, as `max` has it, but the largest."""
    return max(math.inf if math.isnan(value) else value for value in values)


def _apart(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0  # of zeros too, such as positions that nothing looks up
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())
