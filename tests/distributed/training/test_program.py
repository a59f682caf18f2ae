"""User programs: save and resume, SIGTERM, the hang timeout, and an exclusive run folder."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import dslpar
from dslpar.core.errors import DslparError
from dslpar.reporting import run_dir
from tests.support.forked_training import ForkedJob, start_program
from tests.support.plain_models import PIPE, mlp, points, sgd, shares, written
from tests.support.ranks import on_ranks

CONFIG = "batch = dict(global_size=16, accumulation=2)\n"
TRAIN = "train = dict(steps=6, clip_grad_norm=0.5, output_dir={folder!r}{more})\n"
ZERO = "zero = 1\nparallel = dict(data=2)\n"
STEPS = 6


def config(folder: Path, text: str = "", more: str = "") -> str:
    return written(folder, CONFIG + text + TRAIN.format(folder=str(folder / "out"), more=more))


def program(path: str, until: int = STEPS, act: Callable[[Any], None] = lambda engine: None) -> Any:
    """Run the documented program: resume, steps, a checkpoint. Return losses by step, the first step, and weights."""
    engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
    resumed = engine.resume()
    losses = {}
    while engine.steps_done < until:
        loss = engine.train_batch(shares(engine, *points(engine.steps_done)))
        losses[engine.steps_done] = loss
        act(engine)
    engine.save()
    weights = {name: p.detach().clone() for name, p in engine.named_parameters()}
    return losses, resumed and resumed.name, weights


# ---- save and resume ----


@pytest.mark.parametrize(("first", "then"), [((1, ""), (2, PIPE)), ((2, PIPE), (2, ZERO)), ((2, ZERO), (1, ""))])
def test_a_program_resumes_on_any_layout(tmp_path: Path, first: tuple[int, str], then: tuple[int, str]) -> None:
    (tmp_path / "whole").mkdir()
    ((whole, fresh, _),) = on_ranks(1, program, config(tmp_path / "whole"), init="deepspeed")
    assert fresh is None
    before = on_ranks(first[0], program, config(tmp_path, first[1]), 3, init="deepspeed")[0][0]
    after = on_ranks(then[0], program, config(tmp_path, then[1]), init="deepspeed")
    assert {resumed for _, resumed, _ in after} == {"step_000003"}
    assert list(before) == [1, 2, 3]
    assert list(after[0][0]) == [4, 5, 6]
    assert before | after[0][0] == pytest.approx(whole, rel=1e-5), "fp32's noise: only sums are in another order"
    assert (tmp_path / "out/checkpoints/step_000006").is_dir()
    assert (tmp_path / "out/config.yaml").is_file()


def test_a_program_resumes_to_the_bit_on_the_same_layout(tmp_path: Path) -> None:
    (tmp_path / "whole").mkdir()
    whole = on_ranks(2, program, config(tmp_path / "whole", ZERO), init="deepspeed")
    on_ranks(2, program, config(tmp_path, ZERO), 3, init="deepspeed")
    for (losses, _, weights), (later, _, resumed) in zip(
        whole, on_ranks(2, program, config(tmp_path, ZERO), init="deepspeed"), strict=True
    ):
        assert {step: losses[step] for step in later} == later
        assert all(torch.equal(weights[name], resumed[name]) for name in weights)


def _out_of_order(path: str) -> list[str]:
    engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
    (x, y), other = shares(engine, *points(0))
    said = []

    def refused(act: Callable[[], object]) -> None:
        with pytest.raises(DslparError) as caught:
            act()
        said.append(str(caught.value))

    engine.backward(engine.criterion(engine(x), y))
    refused(engine.save)
    refused(engine.resume)
    engine.step()
    engine.backward(engine.criterion(engine(other[0]), other[1]))
    engine.step()
    refused(engine.resume)
    assert engine.save() == engine.save(), "once a step"
    return said


def test_save_and_resume_out_of_order_are_refused(tmp_path: Path) -> None:
    (said,) = on_ranks(1, _out_of_order, config(tmp_path), init="deepspeed")
    assert "BAT206 step-out-of-order: save() was called in the middle of a step" in said[0]
    assert "BAT206 step-out-of-order: resume() was called in the middle of a step" in said[1]
    assert "BAT206 step-out-of-order: resume() was called after step 1" in said[2]
    assert "before the first step" in said[2]


def _refused(path: str) -> str:
    with pytest.raises(DslparError) as caught:
        program(path)
    return str(caught.value)


def test_a_program_does_not_resume_another_run(tmp_path: Path) -> None:
    on_ranks(1, program, config(tmp_path), 1, init="deepspeed")
    (said,) = on_ranks(1, _refused, config(tmp_path, more=", seed=5"), init="deepspeed")
    assert "CKP202 checkpoint-of-another-run" in said
    assert "train.seed: saved 1234, requested 5" in said


def _saves_alone(path: str) -> None:
    engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
    engine.train_batch(shares(engine, *points(0)))
    engine.save()


def test_a_program_that_does_not_resume_moves_the_earlier_run_s_checkpoints_aside(tmp_path: Path) -> None:
    """Files that may be the program's own are not moved."""
    on_ranks(1, program, config(tmp_path), 2, init="deepspeed")
    (tmp_path / "out/metrics.jsonl").write_text("mine\n")
    on_ranks(1, _saves_alone, config(tmp_path), init="deepspeed")
    assert (tmp_path / "out/earlier/1/checkpoints/step_000002").is_dir()
    assert [path.name for path in (tmp_path / "out/checkpoints").iterdir()] == ["step_000001"]
    assert (tmp_path / "out/metrics.jsonl").read_text() == "mine\n"


def test_a_second_program_in_the_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank refuses, and nothing was touched; the lock ends with the process that holds it."""
    import fcntl

    monkeypatch.setattr(run_dir, "_LOCK_TIMEOUT_S", 0.1)
    path = config(tmp_path, ZERO)
    (tmp_path / "out").mkdir()
    with open(tmp_path / "out/.lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        for said in on_ranks(2, _refused, path, init="deepspeed"):
            assert "CKP211" in said
            assert "another run writes to" in said
    assert not (tmp_path / "out/checkpoints").exists()
    assert on_ranks(2, program, path, 1, init="deepspeed")[0][1] is None


# ---- under dslpar's own startup ----


def started(tmp_path: Path, act: Callable[[Any], None], text: str = ZERO, more: str = "", world: int = 2) -> Any:
    path = config(tmp_path, text, more)

    def forked() -> None:
        losses, resumed, _ = program(path, act=act)
        print(f"done: resumed {resumed}, steps {list(losses)}", flush=True)

    return start_program(world, forked, tmp_path / "said.txt")


def said_by(job: ForkedJob, tmp_path: Path, statuses: list[int]) -> str:
    ended = job.wait(60)
    said = (tmp_path / "said.txt").read_text()
    assert ended == statuses, said
    return said


def test_sigterm_to_one_rank_saves_and_ends_all_with_75(tmp_path: Path) -> None:
    def act(engine: Any) -> None:
        if engine.steps_done == 2 and engine.groups.rank == 1 and not (tmp_path / "sent").exists():
            (tmp_path / "sent").touch()
            os.kill(os.getpid(), signal.SIGTERM)
        if engine.stopped:
            print("its own last words", flush=True)

    with started(tmp_path, act) as job:
        said = said_by(job, tmp_path, [75, 75])
    assert "Traceback" not in said
    assert said.count("its own last words") == 2
    assert f"told to stop: step 3 is saved in {tmp_path / 'out/checkpoints/step_000003'}" in said
    with started(tmp_path, act) as job:
        said = said_by(job, tmp_path, [0, 0])
    assert said.count("done: resumed step_000003, steps [4, 5, 6]") == 2


@pytest.mark.prove  # `make test` has tests/system/test_hangs.py
def test_a_hang_in_a_program_is_told_and_ends_it(tmp_path: Path) -> None:
    """It hangs in its own code while others wait in a step. There are four ranks, since two gloo ranks send to each
    other.
    """

    def hang_here(engine: Any) -> None:
        if engine.steps_done == 2 and engine.groups.rank == 1:
            time.sleep(600)

    with started(tmp_path, hang_here, "zero = 1\n", more=", step_timeout=3", world=4) as job:
        statuses = job.wait(60)
    said = (tmp_path / "said.txt").read_text()
    assert 0 not in statuses
    assert "hangs (" in said
    assert "step 3 takes longer than 3 s); it is in hang_here (" in said
    assert re.search(r"has not reached \w+ of \[.*, in which \d of its peers wait:", said), "torch's record tells"
    assert "rank 1 of 4 on" in said
    assert "in the program after step 2" in said


def test_a_program_s_own_handlers_stay(tmp_path: Path) -> None:
    path = config(tmp_path)

    def mine(number: int, frame: object) -> None:
        print("mine", flush=True)

    def forked() -> None:
        signal.signal(signal.SIGTERM, mine)
        engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
        assert signal.getsignal(signal.SIGTERM) is mine
        os.kill(os.getpid(), signal.SIGTERM)
        engine.train_batch(shares(engine, *points(0)))
        assert not engine.stopped
        assert sys.excepthook is not sys.__excepthook__, "errors are dslpar's to tell"

    with start_program(1, forked, tmp_path / "said.txt") as job:
        assert "mine" in said_by(job, tmp_path, [0])
    assert not (tmp_path / "out").exists(), "nothing is written that the program does not ask for"


def test_the_folder_is_taken_before_the_first_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless nothing is to be saved."""
    import fcntl

    monkeypatch.setattr(run_dir, "_LOCK_TIMEOUT_S", 0.1)
    (tmp_path / "out").mkdir()

    def forked(path: str) -> None:
        engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
        engine.train_batch(shares(engine, *points(0)))

    with open(tmp_path / "out/.lock", "w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        for more, status in (("", 1), (", save_interval=0", 0)):
            path = config(tmp_path, more=more)
            with start_program(1, lambda path=path: forked(path), tmp_path / "said.txt") as job:  # type: ignore[misc]
                said = said_by(job, tmp_path, [status])
            assert ("CKP211" in said) or not status
