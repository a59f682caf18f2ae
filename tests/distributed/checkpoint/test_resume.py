"""Bitwise resume: ten steps equal five steps, a checkpoint, new processes and five more, over layouts and stages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dslpar
from dslpar import checkpoint
from dslpar.core.errors import DslparError
from dslpar.layout.lr_scheduler import learning_rate
from dslpar.layout.resolve import Job
from dslpar.schema import sections as schema_sections
from dslpar.schema.torch_optimizers import OPTIMIZERS as KNOWN
from dslpar.schema.torch_optimizers import KnownOptimizer
from tests.support.plain_models import points, shares, written
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import (
    PIPED,
    Samples,
    engine_of,
    job_of,
    loaded,
    parallel,
    run,
    same,
    scheduled,
    step,
)
from tests.support.sampling import sampled
from tests.support.versions import TORCH


def _statistics(path: str, saves: bool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return held-out loss and norm statistics of a model, after three steps or loaded from the path."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    engine = dslpar.initialize(path, model=model, criterion=nn.CrossEntropyLoss()).engine
    world = engine.groups.axis("pipe", "data", "tensor")
    if saves:
        for step in range(3):
            engine.train_batch(shares(engine, *points(step)))
        checkpoint.save(engine)
    else:
        stored = checkpoint.find_checkpoint(engine.job, world)
        assert stored is not None
        checkpoint.load(engine, stored)
    return engine.eval_batch(shares(engine, *points(9))), dict(engine.module.named_buffers())


def test_each_replica_has_its_own_statistics_again(tmp_path: Path) -> None:
    text = f"batch = dict(global_size=16)\ntrain = dict(output_dir={str(tmp_path / 'out')!r})\n"
    path = written(tmp_path, text)
    before = on_ranks(2, _statistics, path, True, init="deepspeed")
    after = on_ranks(2, _statistics, path, False, init="deepspeed")
    name = "1.running_mean"
    assert not torch.equal(before[0][1][name], before[1][1][name]), "they differ, else this shows nothing"
    for (loss, buffers), (other_loss, others) in zip(before, after, strict=True):
        assert loss == other_loss
        assert all(torch.equal(value, others[name]) for name, value in buffers.items())


def _elements_read(job: Job) -> dict[str, int]:
    """Return the number of elements that this rank reads from the tensor files of a checkpoint, by state ("" is the
    weight).
    """
    from dslpar.checkpoint.tensor_reader import TensorReader

    read: dict[str, int] = {}
    fragment = TensorReader.fragment

    def counting(self: TensorReader, name: str, key: str, *where: Any) -> torch.Tensor:
        piece = fragment(self, name, key, *where)
        read[key] = read.get(key, 0) + piece.numel()
        return piece

    TensorReader.fragment = counting  # type: ignore[method-assign]  # in this forked rank alone
    run(job, 2)
    return read


@pytest.mark.parametrize(("stage", "dtype"), sampled([(1, "fp32"), (2, "bf16"), (2, "fp32")], {(2, "bf16")}))
def test_each_data_rank_reads_its_own_shard_alone(tmp_path: Path, stage: int, dtype: Any) -> None:
    precision = schema_sections.Precision(dtype=dtype)
    job = job_of(tmp_path, 2, zero=schema_sections.Zero(stage=stage), precision=precision)
    on_ranks(2, run, job, 2, init="deepspeed")
    counted = on_ranks(2, _elements_read, job, init="deepspeed")
    shards = {key: [rank[key] for rank in counted] for key in counted[0]}
    assert set(shards) == {"", "exp_avg", "exp_avg_sq"}
    assert len({sum(sizes) for sizes in shards.values()}) == 1, "weights no more often than what is sharded anyway"
    assert abs(shards[""][0] - shards[""][1]) <= 64, "halves, but for padding"


PIPE = schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))


LEGACY = ("data", "pipe", "tensor")
BF16 = schema_sections.Precision(dtype="bf16")
FP16 = schema_sections.Precision(
    dtype="fp16", extra={"initial_scale_power": 20, "hysteresis": 1, "loss_scale_window": 3}
)
"""The scale is so large that the first three steps overflow, and its window is so short that it rises and step 9
overflows again.
"""
CPU = {"device": "cpu"}
RECOMPUTED = schema_sections.ActivationCheckpoint(interval=1)


def zero(stage: int, **extra: Any) -> schema_sections.Zero:
    return schema_sections.Zero(stage=stage, extra=extra)


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tied over 2 stages, data 4, zero 0": (8, {"parallel": parallel(2), "batch": PIPED}),
    "tied over 2 stages, data 4, zero 1": (8, {"parallel": parallel(2), "batch": PIPED, "zero": zero(1)}),
    "pipe 2, data 4, bf16": (8, {"parallel": parallel(2), "batch": PIPED, "zero": zero(1), "precision": BF16}),
    "pipe 2, data 2, order of ColossalAI": (
        4,
        {"parallel": parallel(2, order=LEGACY), "batch": PIPED, "zero": zero(1)},
    ),
    "pipe 2, data 2, interleaved 2": (4, scheduled("interleaved", 2)),
    "pipe 2, data 2, interleaved 2, zero 1, bf16": (
        4,
        scheduled("interleaved", 2, zero=zero(1), precision=BF16, activation_checkpoint=RECOMPUTED),
    ),
    "pipe 2, data 2, zero bubble 2, zero 1": (4, scheduled("zero_bubble", 2, zero=zero(1))),
    "data 2, tensor 2, zero 0": (4, {"parallel": parallel(size=2, mode="1d"), "batch": PIPED}),
    "data 2, zero 1": (2, {"zero": zero(1)}),
    "data 2, zero 2": (2, {"zero": zero(2), "batch": PIPED}),
    "data 2, tensor 2, zero 3": (4, {"parallel": parallel(size=2, mode="1d", sequence=True), "zero": zero(3)}),
    "data 2, tensor 2, zero 3, recomputed": (
        4,
        {"parallel": parallel(size=2, mode="1d", sequence=True), "zero": zero(3), "activation_checkpoint": RECOMPUTED},
    ),
    "data 2, zero 3, bf16": (2, {"zero": zero(3), "precision": BF16}),
    "data 2, zero 2, fp16": (2, {"zero": zero(2), "precision": FP16}),
    "data 4, zero 3, second copies": (4, {"zero": zero(3, zero_hpz_partition_size=2)}),
    "data 2, zero 3, offload": (2, {"zero": zero(3, offload_optimizer=CPU, offload_param=CPU)}),
}


EACH_TIME = {
    "pipe 2, data 2, interleaved 2",
    "data 2, tensor 2, zero 3, recomputed",  # where DeepSpeed forgets what a layer borrows (patch M9)
}
"""Layouts that `make test` runs: a pipeline and ZeRO 3, each with many other features.

test_after_a_skipped_step_the_schedule_stays_behind has ZeRO 0.
"""


@pytest.mark.parametrize("name", sampled(LAYOUTS, EACH_TIME))
def test_a_resume_continues_to_the_bit(tmp_path: Path, name: str) -> None:
    world, sections = LAYOUTS[name]
    whole, halves = (job_of(tmp_path / part, world, **sections) for part in ("whole", "halves"))
    undisturbed = on_ranks(world, run, whole, 10, init="deepspeed")
    on_ranks(world, run, halves, 5, init="deepspeed")
    resumed = on_ranks(world, run, halves, 10, init="deepspeed")
    for rank, (one, other) in enumerate(zip(undisturbed, resumed, strict=True)):
        assert same((one[0][5:], one[1]), other) == [], f"rank {rank}"


SCHEDULES: dict[str, tuple[str, int]] = {
    "1f1b": ("1f1b", 1),
    "interleaved 2": ("interleaved", 2),
    "zero bubble 1": ("zero_bubble", 1),
    "zero bubble 2": ("zero_bubble", 2),
}


def run_whole(job: Job, until: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return `run`'s losses, and this rank's part of the model under global names."""
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
    if stored is not None:
        checkpoint.check(stored, job, "text")
        checkpoint.load(engine, stored)
    losses = []
    while engine.steps_done < until:
        at, seed = engine.consumed_samples, job.spec.train.seed
        fed = micro_batches(Samples(), job.batch, seed, at, job.mesh.data, engine.groups.coord["data"])
        losses.append(engine.train_batch(fed if engine.needs_data else ()))
    checkpoint.save(engine, "text")
    return losses, checkpoint.full_state(engine.module, engine.groups)


OTHER_SCHEDULES = [(one, other) for one in SCHEDULES for other in SCHEDULES if one != other]


@pytest.mark.prove  # `make test` has tests/properties/reshape
@pytest.mark.parametrize(("saves", "resumes"), OTHER_SCHEDULES)
def test_a_run_goes_on_under_another_schedule(tmp_path: Path, saves: str, resumes: str) -> None:
    """With dropout on the same ranks, the numbers equal the undisturbed run under the first schedule.

    The optimizer is SGD, since AdamW divides noise of gradients near zero by itself.
    """
    sgd = schema_sections.SGD(lr=0.1, momentum=0.9)
    first, then = (scheduled(*SCHEDULES[name], optimizer=sgd) for name in (saves, resumes))
    ((losses, _), *_) = undisturbed = on_ranks(
        4, run_whole, job_of(tmp_path / "whole", 4, **first), 10, init="deepspeed"
    )
    on_ranks(4, run_whole, job_of(tmp_path / "halves", 4, **first), 5, init="deepspeed")
    resumed = on_ranks(4, run_whole, job_of(tmp_path / "halves", 4, **then), 10, init="deepspeed")
    assert resumed[0][0] == pytest.approx(losses[5:], rel=1e-6)
    whole, other = ({name: p for _, held in ranks for name, p in held.items()} for ranks in (undisturbed, resumed))
    assert whole.keys() == other.keys()
    for name, p in whole.items():
        assert (other[name] - p).abs().max() <= 1e-6 * p.abs().max(), name


@pytest.mark.parametrize("stage", sampled([0, 1], {0}))
def test_after_a_skipped_step_the_schedule_stays_behind(tmp_path: Path, stage: int) -> None:
    """DeepSpeed delays the LR scheduler by a skipped step; a resumed run must keep that delay."""
    whole, halves = (job_of(tmp_path / part, 2, zero=zero(stage)) for part in ("whole", "halves"))
    undisturbed = on_ranks(2, run, whole, 10, 4, init="deepspeed")
    on_ranks(2, run, halves, 5, 4, init="deepspeed")
    resumed = on_ranks(2, run, halves, 10, init="deepspeed")
    for one, other in zip(undisturbed, resumed, strict=True):
        assert [skipped for *_, skipped in one[0]] == [False] * 3 + [True] + [False] * 6
        assert one[0][3][3] == one[0][4][3], "the lr of the skipped step, again"
        assert same((one[0][5:], one[1]), other) == []


def test_a_run_may_be_made_longer(tmp_path: Path) -> None:
    """From the first new step on, the learning rate follows the longer run's schedule, not the stored rate."""
    job = job_of(tmp_path, 1)
    on_ranks(1, run, job, 5, init="deepspeed")
    longer = _with(job, steps=20)
    lines, _ = on_ranks(1, run, longer, 8, init="deepspeed")[0]
    rates = [learning_rate(job.spec.lr_scheduler, job.spec.optimizer.lr, 20, step) for step in (5, 6, 7)]
    assert [lr for *_, lr, _ in lines] == pytest.approx(rates, rel=1e-12)


def _with(job: Job, **train: Any) -> Job:
    changed = dataclasses.replace(job.spec.train, **train)
    return dataclasses.replace(job, spec=dataclasses.replace(job.spec, train=changed))


# ---- states of optimizers and precisions ----


def runs_here(row: KnownOptimizer) -> bool:
    """Return whether it is torch's: DeepSpeed's own optimizers are compiled at first use."""
    return not row.refused and row.dotted.startswith("torch.")


OPTIMIZERS: dict[str, Any] = {
    "SGD": schema_sections.SGD(lr=0.1),
    "SGD, momentum": schema_sections.SGD(lr=0.1, momentum=0.9, nesterov=True),
    "Adam, amsgrad": schema_sections.Adam(lr=1e-2, amsgrad=True),
} | {name: schema_sections.OtherOptimizer(target=name, lr=1e-3) for name, row in KNOWN.items() if runs_here(row)}
"""Every torch optimizer that dslpar runs."""


def whole_tensors(engine: Any, folder: Path) -> dict[str, Any]:
    """Return everything that a save of the engine holds, as full tensors and numbers."""
    from dslpar.checkpoint import index, tensor_reader
    from dslpar.distributed import collectives

    place = dataclasses.replace(engine.job, output_dir=str(folder))
    engine.job, before = place, engine.job
    at = checkpoint.save(engine)
    engine.job = before
    collectives.barrier(engine.groups.axis("pipe", "data", "tensor"))
    found_index = index.load_index(at)
    reader = tensor_reader.TensorReader(at, found_index)
    whole = {
        f"{name}::{key}": reader.full(name, key).clone()
        for name, entry in found_index.parameters.items()
        for key in ("", *entry.states)
    }
    odd = {
        f"{name}::{key}": reader.irregular(name, key).clone()
        for name, entry in found_index.parameters.items()
        for key in entry.irregular
    }
    return whole | odd | {f"{name}::numbers": dict(entry.scalars) for name, entry in found_index.parameters.items()}


def unequal(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Return the names of values that are not bitwise equal."""
    assert one.keys() == other.keys()
    same = {name: torch.equal(a, other[name]) if torch.is_tensor(a) else a == other[name] for name, a in one.items()}
    return [name for name, equal in same.items() if not equal]


def _each_optimizer(folder: Path) -> None:
    for number, (name, optimizer) in enumerate(OPTIMIZERS.items()):
        if name == "Adafactor" and TORCH < (2, 5):
            continue  # torch has it since 2.5
        job = job_of(folder / str(number), 2, optimizer=optimizer)
        engine = engine_of(job)
        for _ in range(3):
            step(engine)
        checkpoint.save(engine)
        before, undisturbed = whole_tensors(engine, folder / f"{number} before"), [step(engine) for _ in range(2)]
        again = loaded(job)
        assert [step(again) for _ in range(2)] == undisturbed, name
        assert (
            unequal(whole_tensors(engine, folder / f"{number} a"), whole_tensors(again, folder / f"{number} b")) == []
        )
        if name == "Adafactor":
            assert any(key.endswith("row_var") for key in before)
            continue  # ZeRO cannot shard it
        other = loaded(job_of(folder / str(number), 2, optimizer=optimizer, zero=zero(1 + number % 3)))
        assert unequal(before, whole_tensors(other, folder / f"{number} after")) == [], name
        assert [step(other) for _ in range(2)] == [pytest.approx(line, rel=1e-5) for line in undisturbed], name


@pytest.mark.prove
def test_every_optimizer_s_state_is_restored_on_this_layout_and_on_another(tmp_path: Path) -> None:
    on_ranks(2, _each_optimizer, tmp_path, init="deepspeed")


def _through(folder: Path, world: int, rows: list[dict[str, Any]], steps: int) -> None:
    """Pass a checkpoint through these sections one after the other, each in a fresh engine."""
    engine = engine_of(job_of(folder / "0", world, **rows[0]))
    for _ in range(steps):
        step(engine)
    checkpoint.save(engine)
    first, scale = whole_tensors(engine, folder / "first"), _scale(engine)
    for number, row in enumerate(rows[1:]):
        engine = loaded(job_of(folder / str(number), world, **row))
        assert unequal(first, whole_tensors(engine, folder / f"{number} after")) == [], row
        assert _scale(engine) == scale
        engine.job = dataclasses.replace(engine.job, output_dir=str(folder / str(number + 1)))
        checkpoint.save(engine)


def _scale(engine: Any) -> float:
    """Return the scale of the next step's loss; with fp16 it has been halved and doubled by then."""
    return float(getattr(engine.deepspeed.optimizer, "loss_scale", 1.0))


HALF: dict[str, tuple[int, list[dict[str, Any]]]] = {
    "bf16": (2, [{"precision": BF16, "zero": zero(stage)} for stage in (1, 2, 3, 0, 1)]),
    "bf16, pipelines and offload": (
        2,
        [
            {"precision": BF16, "parallel": PIPE, "batch": PIPED},
            {"precision": BF16, "zero": zero(2, offload_optimizer=CPU)},
            {"precision": BF16, "parallel": PIPE, "batch": PIPED, "zero": zero(1)},
            {"precision": BF16, "parallel": parallel(size=2, mode="1d"), "zero": zero(3, offload_param=CPU)},
        ],
    ),
    "fp16": (2, [{"precision": FP16, "zero": zero(stage)} for stage in (2, 3, 0, 1)]),
}


@pytest.mark.parametrize("name", sampled(HALF, {"bf16, pipelines and offload"}))
def test_masters_of_half_precision_go_through_every_stage_to_the_bit(tmp_path: Path, name: str) -> None:
    world, rows = HALF[name]
    on_ranks(world, _through, tmp_path, world, rows, 6, init="deepspeed")


def test_the_present_config_decides_and_training_state_is_restored(tmp_path: Path) -> None:
    """DeepSpeed restores an optimizer's settings with its state, so a changed setting would have no effect."""
    on_ranks(1, _with_other_settings, tmp_path, init="deepspeed")


def _with_other_settings(folder: Path) -> None:
    engine = engine_of(job_of(folder, 1))
    for _ in range(4):
        step(engine)
    checkpoint.save(engine)
    changed = schema_sections.AdamW(lr=5e-3, weight_decay=0.3, betas=(0.8, 0.9))
    other = loaded(job_of(folder, 1, optimizer=changed))
    groups = other.deepspeed.optimizer.param_groups
    assert [(tuple(group["betas"]), group["weight_decay"]) for group in groups] == [
        ((0.8, 0.9), 0.3),
        ((0.8, 0.9), 0.0),
    ]
    job, runner = other.job, other.deepspeed
    assert step(other)[2] == pytest.approx(learning_rate(job.spec.lr_scheduler, 5e-3, 10, 4), rel=1e-12)
    assert (runner.global_steps, runner.global_samples, runner.skipped_steps, runner.micro_steps) == (5, 40, 0, 5)
    assert {float(state["step"]) for state in runner.optimizer.state.values()} == {5.0}


def _frozen(path: str, saves: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Train a program's own model with a frozen layer, a norm's statistics, and its own optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model[0].weight.requires_grad_(False)
    if not saves:
        torch.nn.init.zeros_(model[0].weight)
    optimizer = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    engine = dslpar.initialize(path, model=model, criterion=nn.CrossEntropyLoss(), optimizer=optimizer).engine
    if saves:
        for number in range(3):
            engine.train_batch(shares(engine, *points(number)))
        checkpoint.save(engine)
    else:
        stored = checkpoint.find_checkpoint(engine.job, engine.groups.axis("pipe", "data", "tensor"))
        assert stored is not None
        checkpoint.load(engine, stored)
    losses = [engine.eval_batch(shares(engine, *points(9)))]
    states = engine.deepspeed.optimizer.state
    assert all(state["step"].shape == () and state["step"] == 3 for state in states.values())
    assert all(state["exp_avg"].shape == p.shape for p, state in states.items())
    assert len(states) == 5, "all but the frozen one"
    return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("world", [1, 4])
def test_frozen_weights_and_buffers_of_a_program_s_own_model_are_loaded_elsewhere(tmp_path: Path, world: int) -> None:
    text = f"batch = dict(global_size=16)\ntrain = dict(output_dir={str(tmp_path / 'out')!r})\n"
    path = written(tmp_path, text)
    before = on_ranks(2, _frozen, path, True, init="deepspeed")
    after = on_ranks(world, _frozen, path, False, init="deepspeed")
    for rank, (_, state) in enumerate(after):
        its = before[rank if rank < 2 else 0][1]
        assert [name for name, value in state.items() if not torch.equal(value, its[name])] == []


def _other_model(job: Job) -> str:
    engine = engine_of(job)
    stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
    assert stored is not None
    with pytest.raises(DslparError) as refused:
        checkpoint.load(engine, stored)
    return str(refused.value)


def test_another_model_is_refused_by_its_names_and_shapes_on_all_ranks(tmp_path: Path) -> None:
    on_ranks(1, run, job_of(tmp_path, 1), 1, init="deepspeed")
    gpt = job_of(tmp_path, 2).spec.model
    smaller = dataclasses.replace(gpt, num_layers=1, ffn_hidden_size=48)
    deeper = dataclasses.replace(gpt, num_layers=3)
    for message in on_ranks(2, _other_model, job_of(tmp_path, 2, model=smaller), init="deepspeed"):
        assert "CKP208 checkpoint-does-not-fit" in message
        assert "'blocks.0.mlp.up.weight' has shape (64, 16) in the checkpoint, but (48, 16) in the model" in message
    for message in on_ranks(
        2, _other_model, job_of(tmp_path, 2, model=deeper, parallel=PIPE, batch=PIPED), init="deepspeed"
    ):
        assert "'blocks.2.mlp.up.bias' (64,) is not in the checkpoint" in message
