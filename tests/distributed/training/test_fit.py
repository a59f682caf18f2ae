"""`dslpar.fit`: train.py's loop in a program, with metrics, checkpoints, resume, evaluation and signals."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dslpar
from dslpar.core.errors import DslparError
from dslpar.reporting import run_list
from dslpar.training import metrics
from tests.support.forked_training import start_program
from tests.support.ranks import on_ranks

CONFIG = """\
optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
batch = dict(global_size=16, accumulation=2)
train = dict(steps=6, save_interval=2, eval_interval=3, eval_steps=2, log_interval=3, output_dir={folder!r})
"""
DATA, PIPE = "parallel = dict(data=2)\nzero = 1\n", "parallel = dict(pipeline=2)\n"
LAYOUTS = {"one": (1, ""), "data": (2, DATA), "pipe": (2, PIPE)}
Hooks = Sequence[Callable[[dslpar.Event], object]]


def config(folder: Path, text: str = "") -> str:
    path = folder / "cfg.py"
    path.write_text(CONFIG.format(folder=str(folder / "out")) + text)
    return str(path)


def points(count: int, seed: int = 0) -> TensorDataset:
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > x[:, 1]).long())


def program(path: str, overrides: Sequence[str] = (), hooks: Hooks = (), data: Any = None, **flags: Any) -> Any:
    run = dslpar.start(path, overrides)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    train_data = points(40) if data is None else data
    made = dslpar.initialize(
        run, model=model, criterion=nn.CrossEntropyLoss(), train_data=train_data, eval_data=points(32, 1)
    )
    return dslpar.fit(run, made.engine, made.train_data, made.eval_data, hooks=hooks, **flags)


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]


def numbers(records: Iterable[dict[str, Any]]) -> list[float]:
    return [record[name] for record in records for name in ("loss", "grad_norm", "eval_loss") if name in record]


# ---- metrics, checkpoints, resume ----


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ("pipe", "data"),
        pytest.param("one", "pipe", marks=pytest.mark.prove),
        pytest.param("data", "one", marks=pytest.mark.prove),
    ],
)
def test_a_run_that_resumes_on_another_layout_is_the_run_that_did_not_stop(
    tmp_path: Path, first: str, then: str
) -> None:
    """To 1e-5: in fp32, only the order of sums differs."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    on_ranks(1, program, config(whole), init="deepspeed")
    ranks, text = LAYOUTS[first]
    on_ranks(ranks, program, config(cut, text), ["train.steps=3"], init="deepspeed")
    ranks, text = LAYOUTS[then]
    flags = {"resume": True}
    on_ranks(ranks, _flagged, config(cut, text), flags, init="deepspeed")
    assert [record["step"] for record in lines(cut)] == [1, 2, 3, 4, 5, 6]
    assert numbers(lines(cut)) == pytest.approx(numbers(lines(whole)), rel=1e-5)
    assert [record["step"] for record in lines(whole) if "eval_loss" in record] == [3, 6]
    assert sorted(path.name for path in (whole / "out/checkpoints").iterdir()) == [f"step_00000{n}" for n in (2, 4, 6)]
    assert lines(whole)[-1]["samples"] == 96
    listed = run_list.read_run(whole / "out")
    assert (listed.step, listed.unit) == (6, "samples")
    assert listed.per_s
    assert (whole / "out/config.yaml").is_file()


def _flagged(path: str, flags: dict[str, Any], overrides: Sequence[str] = ()) -> Any:
    return program(path, overrides, **flags)


@pytest.mark.prove
def test_the_log_says_parameters_memory_and_evaluations(tmp_path: Path) -> None:
    on_ranks(1, program, config(tmp_path), init="deepspeed")
    log = (tmp_path / "out/log.txt").read_text()
    assert "built on all ranks: 58 parameters in all, of which rank 0 holds 58" in log
    assert "memory of the model, built: rank 0 has 0." in log
    assert "memory after the first step: rank 0 has 0." in log
    assert "held-out loss before: " in log
    assert "step 3/6  loss " in log


def test_an_evaluation_that_counts_samples_twice_warns_once(tmp_path: Path) -> None:
    more = ["train.eval_steps=3", "train.save_interval=0"]
    on_ranks(1, program, config(tmp_path), more, init="deepspeed")
    log = (tmp_path / "out/log.txt").read_text()
    repeats = "an evaluation reads 48 held-out samples, but there are 32, so some count more often than others"
    assert log.count(repeats + ": train.eval_steps=2\n") == 1
    on_ranks(1, program, config(tmp_path), [*more, "train.eval_steps=2"], init="deepspeed")
    assert repeats not in (tmp_path / "out/log.txt").read_text()


@pytest.mark.prove
def test_a_complete_run_is_evaluated_alone_and_not_trained_again(tmp_path: Path) -> None:
    on_ranks(1, program, config(tmp_path), init="deepspeed")
    before = (tmp_path / "out/metrics.jsonl").read_text()
    nothing = ["train.save_interval=0"]  # as dslpar.arguments adds it
    (record,) = on_ranks(1, _flagged, config(tmp_path), {"eval_only": True}, nothing, init="deepspeed")
    assert record == {"step": 6, "eval_loss": lines(tmp_path)[-1]["eval_loss"], "samples": 32}
    assert json.loads((tmp_path / "out/eval.jsonl").read_text()) == record
    assert on_ranks(1, _flagged, config(tmp_path), {"resume": True}, init="deepspeed") == [{}]
    assert (tmp_path / "out/metrics.jsonl").read_text() == before


@pytest.mark.prove
def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    nothing = ["train.save_interval=0"]
    assert on_ranks(1, _flagged, config(tmp_path), {"dry_run": True}, nothing, init="deepspeed") == [{}]
    assert not (tmp_path / "out").exists()


# ---- a program's own iterable ----


def _batches() -> list[tuple[Tensor, Tensor]]:
    data = points(48)
    return [(data.tensors[0][i : i + 8], data.tensors[1][i : i + 8]) for i in range(0, 48, 8)]


class Iterated:
    """Micro-batches that can only be iterated over."""

    def __iter__(self) -> Any:
        return iter(_batches())


def test_an_iterable_begins_again_and_a_resume_passes_over_what_was_read(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    on_ranks(1, _flagged, config(whole), {"data": Iterated()}, init="deepspeed")
    on_ranks(1, _flagged, config(cut), {"data": Iterated()}, ["train.steps=4"], init="deepspeed")
    on_ranks(1, _flagged, config(cut), {"data": Iterated(), "resume": True}, init="deepspeed")
    assert numbers(lines(cut))[:1] == numbers(lines(whole))[:1]
    assert [record["loss"] for record in lines(cut)] == [record["loss"] for record in lines(whole)]


def _shuffled(path: str, sampled: bool, overrides: Sequence[str] = (), **flags: Any) -> None:
    data = points(48)
    sampler = DistributedSampler(data, 1, 0) if sampled else None
    loader = DataLoader(data, batch_size=8, sampler=sampler, shuffle=None if sampled else True)
    program(path, overrides, data=loader, **flags)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_resume_within_an_epoch_goes_on_in_its_order(tmp_path: Path, sampled: bool) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    on_ranks(1, _shuffled, config(whole), sampled, init="deepspeed")
    on_ranks(1, _shuffled, config(cut), sampled, ["train.steps=4"], init="deepspeed")
    on_ranks(1, partial(_shuffled, resume=True), config(cut), sampled, init="deepspeed")
    assert [record["loss"] for record in lines(cut)] == [record["loss"] for record in lines(whole)]
    assert len(lines(whole)) == 6


def _resumes_itself(path: str) -> None:
    """Resume by the engine's own method, then call fit."""
    run = dslpar.start(path)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    made = dslpar.initialize(
        run, model=model, criterion=nn.CrossEntropyLoss(), train_data=Iterated(), eval_data=points(32, 1)
    )
    made.engine.resume()
    dslpar.fit(run, made.engine, made.train_data, made.eval_data)


def test_fit_after_the_engine_s_resume_passes_over_what_was_read(tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir(), cut.mkdir()
    on_ranks(1, _flagged, config(whole), {"data": Iterated()}, init="deepspeed")
    on_ranks(1, _flagged, config(cut), {"data": Iterated()}, ["train.steps=4"], init="deepspeed")
    on_ranks(1, _resumes_itself, config(cut), init="deepspeed")
    assert [record["loss"] for record in lines(cut)] == [record["loss"] for record in lines(whole)]


def _ends(path: str) -> str:
    with pytest.raises(DslparError) as caught:
        program(path, data=iter(_batches()))
    return str(caught.value)


@pytest.mark.prove
def test_an_iterator_that_ends_is_said(tmp_path: Path) -> None:
    (said,) = on_ranks(1, _ends, config(tmp_path), init="deepspeed")
    assert "BAT208 data-ended: the data ended after step 3" in said
    assert "that can be read again" in said
    assert "BAT208" in (tmp_path / "out/log.txt").read_text()


# ---- hooks ----


def _told(path: str, *overrides: str) -> list[Any]:
    told: list[Any] = []

    def hook(event: dslpar.Event) -> None:
        told.append((event.name, event.step, "eval_loss" in event.metrics, event.checkpoint and event.checkpoint.name))
        assert event.metrics["step"] == event.step
        assert event.engine.steps_done == event.step or (event.name == "save" and not overrides)
        assert event.checkpoint is None or event.checkpoint.is_dir()

    program(path, overrides, hooks=[hook])
    return told


STEPS_TOLD = [
    *(("eval", 0, True, None), ("step", 1, False, None), ("step", 2, False, None), ("step", 3, True, None)),
    *(("eval", 3, True, None), ("step", 4, False, None), ("step", 5, False, None), ("step", 6, True, None)),
    *(("eval", 6, True, None), ("end", 6, True, None)),
]
SAVES_TOLD = [("save", step, step == 6, f"step_00000{step}") for step in (2, 4, 6)]


def test_hooks_are_told_of_steps_evaluations_checkpoints_and_the_end_on_every_rank(tmp_path: Path) -> None:
    first, second = on_ranks(2, _told, config(tmp_path, PIPE), "train.async_save=False", init="deepspeed")
    assert first == second
    assert first[:3] == STEPS_TOLD[:3]
    assert first[3:6] == [SAVES_TOLD[0], *STEPS_TOLD[3:5]]
    assert first[-4:] == [*STEPS_TOLD[-3:-1], SAVES_TOLD[2], STEPS_TOLD[-1]]


def test_hooks_are_told_of_a_checkpoint_once_it_is_published(tmp_path: Path) -> None:
    """The order is that on disk, the same on all ranks, and before the next checkpoint begins."""
    first, second = on_ranks(2, _told, config(tmp_path, PIPE), init="deepspeed")
    assert first == second
    assert [told for told in first if told[0] != "save"] == STEPS_TOLD
    assert [told for told in first if told[0] == "save"] == SAVES_TOLD
    at = {told[:2]: index for index, told in enumerate(first)}
    assert at["step", 3] < at["save", 2] < at["step", 5]
    assert at["step", 5] < at["save", 4] < at["save", 6] == len(first) - 2


def _saves_in_a_hook(path: str) -> list[Any]:
    told: list[Any] = []

    def hook(event: dslpar.Event) -> None:
        if event.name == "step" and event.step in (3, 4):
            told.append(event.engine.save().name)  # type: ignore[attr-defined]
        if event.name == "save":
            told.append((event.step, event.checkpoint and event.checkpoint.name))

    program(path, hooks=[hook])
    return told


def test_a_hook_that_saves_waits_for_what_is_being_written(tmp_path: Path) -> None:
    """Step 2's checkpoint is published by the hook's save of step 3, and reported after it; step 4 is saved once."""
    expected = ["step_000003", (2, "step_000002"), "step_000004", (4, "step_000004"), (6, "step_000006")]
    for told in on_ranks(2, _saves_in_a_hook, config(tmp_path, DATA), init="deepspeed"):
        assert told == expected
    names = [f"step_00000{step}" for step in (2, 3, 4, 6)]
    assert sorted(path.name for path in (tmp_path / "out/checkpoints").iterdir()) == names


@pytest.mark.prove
def test_what_a_hook_raises_ends_the_job_with_its_traceback_and_place(tmp_path: Path) -> None:
    path = config(tmp_path, DATA)

    def fails(event: dslpar.Event) -> None:
        if event.name == "step" and event.step == 2 and event.engine.groups.rank == 1:
            raise ValueError("no more room for plots")

    with start_program(2, lambda: program(path, hooks=[fails]) and 0, tmp_path / "said.txt") as job:
        statuses = job.wait(60)
    said = (tmp_path / "said.txt").read_text()
    assert 0 not in statuses
    assert "ValueError: no more room for plots" in said
    assert "rank 1 of 2 on " in said
    assert "in hook fails after step 2" in said
    assert [record["step"] for record in lines(tmp_path)] == [1, 2], "what was done is on disk"


def test_sigterm_saves_and_ends_with_75_and_resume_goes_on(tmp_path: Path) -> None:
    path = config(tmp_path, DATA)

    def told_to_stop(event: dslpar.Event) -> None:
        if event.name == "step" and event.step == 3 and event.engine.groups.rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def stops() -> None:
        program(path, hooks=[told_to_stop])
        print("not reached", flush=True)

    with start_program(2, stops, tmp_path / "said.txt") as job:
        statuses = job.wait(60)
    said = (tmp_path / "said.txt").read_text()
    assert statuses == [75, 75], said
    assert "not reached" not in said
    assert "Traceback" not in said
    step = lines(tmp_path)[-1]["step"]
    assert f"told to stop: step {step} is saved in {tmp_path / 'out/checkpoints'}/step_00000{step}" in said
    on_ranks(2, _flagged, path, {"resume": True}, init="deepspeed")
    assert [record["step"] for record in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]


# ---- wrong calls ----


def _wrong(path: str) -> str:
    run, other = dslpar.start(path), dslpar.start(path)
    engine = dslpar.initialize(run, model=nn.Linear(4, 2), criterion=nn.CrossEntropyLoss()).engine
    with pytest.raises(DslparError) as caught:
        dslpar.fit(other, engine, points(40))
    return str(caught.value)


def test_the_engine_of_another_run_is_refused(tmp_path: Path) -> None:
    (said,) = on_ranks(1, _wrong, config(tmp_path), init="deepspeed")
    assert "fit() was called with the engine of another run" in said


# ---- the command line, and the remaining time ----


def test_arguments_of_a_program_stand_among_train_py_s() -> None:
    import argparse

    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="here")
    args = dslpar.arguments(parser, ["train.steps=3", "--images", "there", "--resume", "a.b=1"], config="cfg.py")
    assert (args.config, args.images, args.resume, args.eval_only) == ("cfg.py", "there", True, False)
    assert args.overrides == ["train.steps=3", "a.b=1"]
    assert dslpar.arguments(argv=["--config", "c.py", "--eval-only"]).overrides == ["train.save_interval=0"]


def test_a_config_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        dslpar.arguments(argv=[])
    assert "--config" in capsys.readouterr().err


def test_the_time_that_is_left_is_that_of_the_steps_after_the_first(tmp_path: Path) -> None:
    job = dslpar.resolve(config(tmp_path, "model = dict(type='my.Model')\n"), 1)
    assert metrics.seconds_left(job, {"step": 1, "step_s": 60.0}, 0.0, first_step=1) == 300.0
    assert metrics.seconds_left(job, {"step": 3, "step_s": 9.0}, 4.0, first_step=1) == 6.0
    assert metrics.seconds_left(job, {"step": 6, "step_s": 9.0}, 9.0, first_step=1) == 0.0
    assert [metrics.duration(seconds) for seconds in (0.4, 59.6, 4000, 200_000)] == [
        *("0:00:00", "0:01:00", "1:06:40", "2d 7:33:20")
    ]
