"""Runs whose replicas differ: how programs, `dslpar.fit` and train.py end, and what a resume accepts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import dslpar
from dslpar.checkpoint import folder
from dslpar.cli import main as cli
from dslpar.core.errors import DslparError
from dslpar.engine.engine import Engine
from tests.distributed.training import test_fit
from tests.distributed.training.test_program import config
from tests.support.forked_training import start_job
from tests.support.plain_models import mlp, points, sgd, shares
from tests.support.ranks import on_ranks
from tests.support.runs import write_config

CHECK = ", check_replicas=2"
NAME = "2.weight"


def flip(engine: Engine) -> None:
    """Flip one bit of a weight and its master on rank 1, so that the next gather of ZeRO 1 does not repair it."""
    if engine.groups.rank == 1:
        p = dict(engine.named_parameters())[NAME]
        p.detach().view(-1).view(torch.int32)[3] ^= 1 << 12


def _program(path: str, flipped_after: int, own_loop: bool) -> tuple[list[str], str]:
    """Return the saved checkpoints, and how the program ended."""
    engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
    saved: list[str] = []
    try:
        while engine.steps_done < 6:
            micro_batches = shares(engine, *points(engine.steps_done))
            if own_loop:
                for x, y in micro_batches:
                    engine.backward(engine.criterion(engine(x), y))
                    engine.step()
            else:
                engine.train_batch(micro_batches)
            if engine.steps_done == flipped_after:
                flip(engine)
            saved.append(engine.save().name)
    except DslparError as error:
        return saved, str(error)
    return saved, ""


DATA = "parallel = dict(data=2)\n"


def _suspects(tmp_path: Path) -> dict[str, str]:
    stored = folder.scan(tmp_path / "out/checkpoints").checkpoints
    return {Path(each.path).name: each.suspect for each in stored}


@pytest.mark.parametrize("own_loop", [True, False])
def test_a_program_ends_and_what_it_saved_since_is_marked(tmp_path: Path, own_loop: bool) -> None:
    """Each step saves, and so reads the verdict of its own comparison: step 4 is not saved."""
    path = config(tmp_path, DATA, CHECK)
    for saved, said in on_ranks(2, _program, path, 2, own_loop, init="deepspeed"):
        assert saved == ["step_000001", "step_000002", "step_000003"]
        assert "PRE231 replicas-differ: weight 2.weight is not the same on all ranks after step 4: rank 0 on" in said
        assert "they were equal after step 2" in said
        assert "step_000003, saved since, is marked as suspect" in said
    suspects = _suspects(tmp_path)
    assert {name for name, why in suspects.items() if why} == {"step_000003"}
    assert suspects["step_000003"].startswith("weight 2.weight is not the same on all ranks after step 4")


def test_of_a_run_whose_first_comparison_differs_all_checkpoints_are_marked(tmp_path: Path) -> None:
    for saved, said in on_ranks(2, _program, config(tmp_path, DATA, CHECK), 1, True, init="deepspeed"):
        assert saved == ["step_000001"]
        assert "after step 2: rank 0 on" in said
        assert "differ; this is the first comparison" in said
    assert [name for name, why in _suspects(tmp_path).items() if why] == ["step_000001"]


def _resume(path: str) -> str:
    engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
    try:
        return str(engine.resume())
    except DslparError as error:
        return str(error)


def test_a_resume_takes_no_suspect_checkpoint_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    on_ranks(2, _program, config(tmp_path, DATA, CHECK), 2, False, init="deepspeed")

    def resumed(choice: str) -> str:
        text = f"{DATA}checkpoint = dict(resume_from={choice!r})\n" if choice else DATA
        first, second = on_ranks(2, _resume, config(tmp_path, text, CHECK), init="deepspeed")
        assert first == second
        return str(first)

    said = resumed("")
    assert "CKP232 suspect-checkpoint" in said
    assert "step_000002 is not marked" in said
    assert "checkpoint.resume_from=step_000002" in said
    assert resumed("step_000002").endswith("step_000002")
    assert resumed("newest_whole").endswith("step_000002")
    assert resumed("step_000003").endswith("step_000003"), "its name is enough to take it all the same"
    # and offline
    out = str(tmp_path / "out")
    for command, status, text in (
        (["list", out], 0, "suspect: weight 2.weight is not"),
        (["show", f"{out}/checkpoints/step_000003"], 0, "suspect: weight 2.weight is not"),
        (["verify", out], 1, "CKP232 suspect-checkpoint: step_000003 is suspect: weight 2.weight is not"),
        (["verify", f"{out}/checkpoints/step_000002"], 0, "intact"),
    ):
        capsys.readouterr()
        assert cli.main(["checkpoint", *command]) == status
        assert text in capsys.readouterr().out
    for each in ("step_000001", "step_000002"):
        (path,) = (tmp_path / "out/checkpoints").glob(each)
        for file in sorted(path.rglob("*"), reverse=True):
            file.unlink() if file.is_file() else file.rmdir()
        path.rmdir()
    assert "start again in another train.output_dir" in resumed("newest_whole"), "none is left that is good"


# ---- fit, which reports ----


@pytest.fixture
def damaged_step_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make rank 1's weight wrong from the end of step 3 on, in forks of this process."""
    step = Engine.step

    def damage(engine: Engine) -> None:
        step(engine)
        if engine.steps_done == 3 and engine.is_between_steps and engine.groups.rank == 1:
            p = next(p for name, p in engine.named_parameters() if name.endswith("weight"))
            p.detach().view(-1).view(torch.int32)[3] ^= 1 << 12

    monkeypatch.setattr(Engine, "step", damage)


def _fit(path: str, *overrides: str) -> tuple[list[int], str]:
    try:
        seen: list[int] = []
        test_fit.program(path, overrides, hooks=[lambda event: seen.append(event.step) if event.name == "step" else 0])
    except DslparError as error:
        return seen, str(error)
    return seen, ""


def _fit_noting_marks(path: str, *overrides: str) -> dict[int, bool]:
    """Return by step whether a checkpoint is marked when hooks hear of it; the marking rank knows it."""
    marked: dict[int, bool] = {}

    def note(event: dslpar.Event) -> None:
        if event.checkpoint is not None:
            marked[event.step] = bool(folder.open_checkpoint(event.checkpoint).suspect)

    test_fit.program(path, overrides, hooks=[note])
    return marked


CHECKED = ("train.check_replicas=2", "train.save_interval=1", "train.eval_interval=None")


@pytest.mark.usefixtures("damaged_step_3")
def test_fit_goes_on_where_differences_are_reported_alone(tmp_path: Path) -> None:
    overrides = (*CHECKED, "train.on_replica_difference='report'", "checkpoint.keep=2", "train.async_save=False")
    path = test_fit.config(tmp_path, "parallel = dict(data=2)\n")
    first, second = on_ranks(2, _fit_noting_marks, path, *overrides, init="deepspeed")
    assert first == {1: False, 2: False, 3: False, 4: True, 5: True, 6: True}, "marked as soon as they are saved"
    assert list(second) == [1, 2, 3, 4, 5, 6]
    noted = {line["step"]: line["replicas_differ"] for line in test_fit.lines(tmp_path) if "replicas_differ" in line}
    assert noted == {5: 4, 6: 6}, "that of step 4 was known before its save, and its line was written; the last at once"
    log = (tmp_path / "out/log.txt").read_text()
    assert log.count("PRE231 replicas-differ [warning]") == log.count("PRE231") == 1
    assert "\n  help: --resume from a checkpoint that is not marked" in log
    suspects = _suspects(tmp_path)
    assert {name for name, why in suspects.items() if not why} == {"step_000002"}, "kept: the last that is confirmed"
    assert {name for name, why in suspects.items() if why} >= {"step_000005", "step_000006"}


@pytest.mark.usefixtures("damaged_step_3")
def test_fit_ends_on_all_ranks_with_one_finding(tmp_path: Path) -> None:
    path = test_fit.config(tmp_path, "parallel = dict(data=2)\n")
    first, second = on_ranks(2, _fit, path, "train.check_replicas=2", "train.save_interval=3", init="deepspeed")
    assert first == second
    seen, said = first
    assert seen == [1, 2, 3, 4], "known a step after step 4, whose metrics are written, and whose hooks are not called"
    assert "PRE231" in said
    assert said.startswith("<command line>:1:22: PRE231"), "at the key, where it was written"
    assert [line["step"] for line in test_fit.lines(tmp_path)] == [1, 2, 3, 4, 5]
    assert test_fit.lines(tmp_path)[-1]["replicas_differ"] == 4
    assert {name for name, why in _suspects(tmp_path).items() if why} == {"step_000003"}, "it was being written"


@pytest.mark.usefixtures("damaged_step_3")
def test_train_py_ends_with_status_1_and_says_which_ranks_differ(tmp_path: Path) -> None:
    path = write_config(tmp_path)
    words = ["--config", str(path), "train.steps=20", "train.check_replicas=2", f"train.output_dir={tmp_path / 'out'}"]
    said = tmp_path / "said.txt"
    with start_job(2, words, said) as job:
        assert job.wait(60) == [1, 1]
    text = said.read_text()
    assert text.count("PRE231") == 1
    assert "is not the same on all ranks after step 4: rank 0 on" in text
    steps = [json.loads(line)["step"] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    assert steps[-1] == 5


# ---- buffers ----


class Normed(nn.Module):
    """A model with torch's BatchNorm, whose statistics are per replica. Its SyncBatchNorm runs only on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)
        self.synced = nn.SyncBatchNorm(16, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.norm(self.up(x)))


def _buffers(path: str) -> list[str]:
    torch.manual_seed(0)
    engine = dslpar.initialize(path, model=Normed(), optimizer=sgd).engine
    said = []
    for step in range(4):
        if step == 2 and engine.groups.rank == 1:
            named = {name.rpartition("synced.")[2]: value for name, value in engine.module.named_buffers()}
            named["running_var"][2] += 1e-6
        try:
            engine.train_batch(shares(engine, *points(step)))
            difference = engine.session.conclude_comparison(engine)
            said.append("" if difference is None else difference.title)
        except DslparError as error:
            said.append(str(error))
    return said


def test_statistics_are_compared_where_a_module_synchronizes_them(tmp_path: Path) -> None:
    for said in on_ranks(2, _buffers, config(tmp_path, DATA, ", check_replicas=1"), init="deepspeed"):
        assert said[:2] == ["", ""], "those of BatchNorm differ by now, as they must"
        assert said[2].startswith("buffer ")
        assert said[2].endswith("synced.running_var")
