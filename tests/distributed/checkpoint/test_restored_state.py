"""Rarely used state that a resume must restore: one engine saves it, and a fresh one loads it."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import torch

from dslpar import checkpoint
from dslpar.checkpoint import train_state
from dslpar.checkpoint.shards import parameter_shards
from dslpar.schema import sections
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import PIPED, engine_of, job_of, loaded, parallel, step
from tests.support.versions import TORCH


def _draws() -> tuple[float, float]:
    return random.random(), float(np.random.default_rng(np.random.randint(1 << 30)).random())


def _random_states(folder: Path) -> None:
    engine = engine_of(job_of(folder, 1))
    step(engine)
    random.seed(3)
    np.random.seed(4)  # a program's data may draw from it
    checkpoint.save(engine)
    expected = _draws()
    loaded(job_of(folder, 1))
    assert _draws() == expected


def test_generators_of_python_and_numpy_go_on(tmp_path: Path) -> None:
    on_ranks(1, _random_states, tmp_path, init="deepspeed")


def _loss_scale(folder: Path) -> None:
    extra = {"initial_scale_power": 28, "hysteresis": 1}
    job = job_of(folder, 1, precision=sections.Precision(dtype="fp16", extra=extra), zero=sections.Zero(stage=1))
    engine = engine_of(job)
    for _ in range(3):
        step(engine)
    checkpoint.save(engine)
    saved, fresh, again = (train_state.collect(each)["scale"] for each in (engine, engine_of(job), loaded(job)))
    assert saved["cur_scale"] < fresh["cur_scale"]
    assert again == saved


def test_a_loss_scale_goes_on(tmp_path: Path) -> None:
    """The first steps overflow, so the scale is not the initial one."""
    on_ranks(1, _loss_scale, tmp_path, init="deepspeed")


def _rows_and_columns(folder: Path) -> None:
    job = job_of(folder, 1, optimizer=sections.OtherOptimizer(target="torch.optim.Adafactor", lr=1e-3))
    engine = engine_of(job)
    step(engine)
    checkpoint.save(engine)
    saved, again = ({each.name: each.irregular for each in parameter_shards(of)} for of in (engine, loaded(job)))
    assert any("row_var" in tensors for tensors in saved.values())
    for name, tensors in saved.items():
        assert tensors.keys() == again[name].keys()
        assert all(torch.equal(value, again[name][key]) for key, value in tensors.items())


def test_states_of_another_shape_than_the_weight_go_on(tmp_path: Path) -> None:
    """Adafactor has such states; torch has it since 2.5."""
    if TORCH >= (2, 5):
        on_ranks(1, _rows_and_columns, tmp_path, init="deepspeed")


def _groups(folder: Path) -> None:
    cycle = sections.OtherLRScheduler(
        target="torch.optim.lr_scheduler.OneCycleLR", args={"max_lr": 1e-2, "total_steps": 10}
    )
    job = job_of(folder, 1, lr_scheduler=cycle)
    engine = engine_of(job)
    for _ in range(2):
        step(engine)
    checkpoint.save(engine)
    saved, fresh, again = (
        [(group["betas"], group["lr"]) for group in each.deepspeed.optimizer.param_groups]
        for each in (engine, engine_of(job), loaded(job))
    )
    assert fresh != saved
    assert again == saved
    group = {"step": 0, "kernel reads": torch.zeros(())}
    train_state.restore_group(engine, group, {"step": 2})
    assert group["step"] == 2, "FusedAdam counts in its groups"


def test_what_schedulers_and_optimizers_set_in_groups_goes_on(tmp_path: Path) -> None:
    on_ranks(1, _groups, tmp_path, init="deepspeed")


def _in_the_middle(folder: Path) -> None:
    job = job_of(folder, 1, batch=PIPED)
    engine = engine_of(job)
    step(engine)
    checkpoint.save(engine)
    engine.deepspeed.micro_steps += 1  # a program that computes a micro-batch, and then loads
    stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
    assert stored is not None
    checkpoint.load(engine, stored)
    assert engine.deepspeed.micro_steps == 2


def test_a_step_begins_at_its_first_micro_batch(tmp_path: Path) -> None:
    on_ranks(1, _in_the_middle, tmp_path, init="deepspeed")


def _tied_copies(folder: Path) -> None:
    job = job_of(folder, 2, parallel=parallel(2), batch=PIPED)
    engine = engine_of(job)
    step(engine)
    copies = [each.weight for each in parameter_shards(engine) if each.tied_copy_rank is not None]
    assert len(copies) == engine.groups.coord["pipe"], "the last stage's; the first one owns the weight"
    for weight in copies:
        weight.add_(1.0)  # far more than any rounding
    checkpoint.save(engine)
    again = [each.weight for each in parameter_shards(loaded(job)) if each.tied_copy_rank is not None]
    assert all(torch.equal(a, b) for a, b in zip(again, copies, strict=True))


def test_tied_copies_keep_their_own_bits(tmp_path: Path) -> None:
    """Stages that each step a tied weight may differ in its last bits: a resume on the same layout restores these."""
    on_ranks(2, _tied_copies, tmp_path, init="deepspeed")
