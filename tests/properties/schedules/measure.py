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
from tests.properties.invariance.run_and_reference import Samples
from tests.properties.schedules.table import LR, Row
from tests.support.ranks import on_ranks
from tests.support.warm import import_transformers

TIMEOUT_S = 900
SEED = 1

Gradients = dict[str, Tensor]
"""Full gradients by name."""


class Deviation(NamedTuple):
    """The largest deviations of an evaluation and two steps from 1F1B; for gradients, max|a-b| / max|b| of the worst
    tensor.
    """

    loss: float
    norm: float
    gradient: float


BOUND = Deviation(0.0, 1e-6, 1e-6)
"""For any layout and dtype, only sums are rounded differently.

Losses are equal: each micro-batch's forward has the same operations on the same numbers, and under every schedule the
last stage adds losses in the order of the micro-batches. A weight's gradient is the same sum over micro-batches in the
same order, too, and W computes the same product as an unsplit backward. Two things may differ: the parameters that
share a bucket of replicas' gradients or a sum of squares, and the stage whose gradient of a tied weight comes first.
Each rounds by 6e-8 in fp32, in which half-precision runs keep these sums as well, and there are few of them. A mistake,
such as a micro-batch that is left out, doubled, scaled or swapped, is about 1/m: at least 0.03.
"""


class Run(NamedTuple):
    """One rank's results of a run."""

    losses: list[float]
    """Losses of an evaluation and two steps."""
    norms: list[float]
    gradients: Gradients
    """Gradients of the layers on this rank."""


class Compared(NamedTuple):
    """One rank's comparison of a row."""

    losses: list[float]
    norms: list[float]
    deviation: Deviation
    worst: str
    """The tensor with the largest deviation of its gradient."""


def run(rows: Sequence[Row], change: Callable[[], None] | None = None) -> list[Deviation]:
    """Run rows of one world, and their references. Each rank calls `change` before the first non-reference row."""
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
    """Run an evaluation, a step that leaves the weights unchanged, and a step that shows the gradient.

    Without momentum, decay and clipping, the gradient is (before - after) / LR for any ZeRO stage. A weight w of at
    most 1 is rounded before the step by 6e-8 w, which is 6e-12 of its gradient, and after it by 6e-8 of the gradient
    itself. The largest gradient of each tensor is at least 1e-3, apart from a key's bias, whose gradients are zero and
    share a tensor with others.
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
    """Return the gradients of all stages together, whose norm the engine reports."""
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
    """Let each engine reuse the previous one's process groups. Return the function to call before each engine.

    An engine makes dozens of groups, each with its own threads and files, which live as long as the process.
    """
    make, made, requests = dist.new_group, dict[Any, Any](), Counter[Any]()

    def new_group(ranks: Any = None, *args: Any, use_local_synchronization: bool = False, **options: Any) -> Any:
        # Kept apart by the callers: all ranks, or only the group's. So either all callers make a group, or none does.
        key = (ranks if ranks is None else tuple(ranks), use_local_synchronization)
        number = requests[key]
        requests[key] += 1
        if (key, number) not in made:
            local = {"use_local_synchronization": use_local_synchronization}
            made[key, number] = make(ranks, *args, **local, **options)
        return made[key, number]

    dist.new_group = new_group
    return requests.clear


# ---- deviations ----


def _worst(values: Sequence[float], true: Sequence[float]) -> float:
    return _largest([abs(a - b) / abs(b) for a, b in zip(values, true, strict=True)])


def _largest(values: Iterable[float]) -> float:
    """Return the largest value, with NaN as the largest of all; `max` would ignore it."""
    return max(math.inf if math.isnan(value) else value for value in values)


def _apart(a: Tensor, b: Tensor) -> float:
    if torch.equal(a, b):
        return 0.0  # also for zeros, such as positions that nothing looks up
    return float((a.double() - b.double()).abs().max() / b.double().abs().max())
