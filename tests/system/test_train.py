"""train.py as a program: what it writes and refuses, and that two layouts write the same curve."""

from __future__ import annotations

import fcntl
import itertools
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from dslpar.distributed import bootstrap
from dslpar.linter import check
from dslpar.reporting import run_dir
from dslpar.training.main import load_and_lint, main
from tests.support.forked_training import start_job, train_alone
from tests.support.runs import CONFIG, Finished, metrics, start, write_config

PYTHON = sys.executable
FIELDS = ["step", "loss", "grad_norm", "lr", "tokens", "step_s", "tokens_per_s", "data_s", "tflops_per_s"]


def train(folder: Path, *words: str, config: str = CONFIG) -> Finished:
    """Run train.py on a config in `folder`, into `folder`/out."""
    path = write_config(folder, config)
    return start([PYTHON, "train.py", "--config", str(path), f"train.output_dir={folder / 'out'}", *words])


# ---- what a run leaves ----


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished]:
    """Return the folder and the output of a run with evaluation."""
    folder = tmp_path_factory.mktemp("run")
    config = CONFIG + "train.update(steps=5, eval_interval=2, eval_steps=2)\nlr_scheduler = dict(type='linear')\n"
    (folder / "base.py").write_text("zero = dict(stage=1)\n")
    # forked; test_launchers.py and test_monitors.py start Python and torch anew
    path = write_config(folder, "from .base import zero\n" + config)
    done = train_alone("--config", str(path), f"train.output_dir={folder / 'out'}", "train.log_interval=5")
    assert done.status == 0, done.output
    return folder / "out", done


def test_metrics_have_a_line_a_step(finished: tuple[Path, Finished]) -> None:
    lines = metrics(finished[0])
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    evaluated = {2, 4, 5}
    for line in lines:
        assert list(line) == FIELDS + ["eval_loss"] * (line["step"] in evaluated)
        assert line["tokens"] == line["step"] * 4 * 16
        assert line["tokens_per_s"] == pytest.approx(4 * 16 / line["step_s"])
        assert 0 < line["loss"] < 6
        assert line["grad_norm"] > 0
    assert [line["lr"] for line in lines] == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0])
    assert repr(lines[0]["loss"]) in (finished[0] / "metrics.jsonl").read_text(), "full precision"


def test_held_out_loss_is_told_before_and_after(finished: tuple[Path, Finished]) -> None:
    out, done = finished
    last = metrics(out)[-1]["eval_loss"]
    told = [line for line in done.output.splitlines() if line.startswith("held-out loss before")]
    before, _ = told
    assert f"{before}, after: {last:.4f}" in done.output
    assert done.output.count("step 5/5") == 1
    assert "step 1/5" not in done.output, "log_interval"


def test_the_log_holds_our_lines_and_deepspeed_s(finished: tuple[Path, Finished]) -> None:
    out, done = finished
    log = (out / "log.txt").read_text()
    assert "held-out loss before" in log
    assert "DeepSpeed INFO" in log
    assert "DeepSpeed INFO" not in done.output


def test_what_was_resolved_stands_in_config_yaml(finished: tuple[Path, Finished]) -> None:
    config = check.load(str(finished[0] / "config.yaml"))
    plain: dict[str, Any] = config.root.plain()
    resolved = plain["resolved"]
    assert resolved["batch"] == {"global_size": 4, "micro_size": 4, "accumulation": 1}
    assert resolved["parallel"]["data"] == resolved["world_size"] == 1
    assert set(resolved["versions"]) == {"dslpar", "torch", "deepspeed", "python"}
    assert plain["zero"] == {"stage": 1}


def test_config_yaml_loads_as_a_config_of_the_same_job(finished: tuple[Path, Finished]) -> None:
    out, _ = finished
    assert check.lint(check.load(str(out / "config.yaml")), 1) == []
    again = check.resolve(str(out / "config.yaml"), 1)
    assert again.spec.data.files == (str(out.parent / "text.txt"),), "found from wherever the record stands"
    assert again.spec.train.steps == 5


def test_the_sources_are_beside_it(finished: tuple[Path, Finished]) -> None:
    out, _ = finished
    copies = sorted(path.name for path in (out / "sources").iterdir())
    assert copies == ["base.py", "cfg.py"]
    assert (out / "sources" / "cfg.py").read_text() == (out.parent / "cfg.py").read_text()


def test_a_folder_with_a_run_is_not_written_over(finished: tuple[Path, Finished]) -> None:
    out, _ = finished
    config = str(out.parent / "cfg.py")
    out = out.with_name("again")
    assert train_alone("--config", config, f"train.output_dir={out}", "train.steps=1").status == 0
    before = (out / "metrics.jsonl").read_bytes()
    (out / "mine.txt").write_text("not dslpar's")
    # from its own record, which changes while the run starts
    again = train_alone("--config", str(out / "config.yaml"))
    assert again.status == 0
    assert f"the run that was in {out} is in {out}/earlier/1 now" in again.output
    assert (out / "earlier" / "1" / "metrics.jsonl").read_bytes() == before
    assert (out / "mine.txt").read_text() == "not dslpar's"
    assert json.loads((out / "metrics.jsonl").read_text())["loss"] == json.loads(before)["loss"]


# ---- one run at a time ----


def _one_step(folder: Path) -> list[str]:
    words = ["train.steps=1", f"train.output_dir={folder / 'out'}"]
    return ["--config", str(write_config(folder)), *words]


@pytest.fixture
def in_use(tmp_path: Path) -> Iterator[IO[str]]:
    """Hold a run's folder in this process, as a run would."""
    (tmp_path / "out" / "checkpoints").mkdir(parents=True)
    with (tmp_path / "out" / ".lock").open("w") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        file.write("process 7 on node1")
        file.flush()
        yield file


def test_a_folder_that_another_run_writes_to_is_left_alone(
    tmp_path: Path, in_use: IO[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_dir, "_LOCK_TIMEOUT_S", 0.5)
    done = train_alone(*_one_step(tmp_path))
    assert done.status == 1, done.output
    assert f"CKP211 output-dir-in-use: another run writes to '{tmp_path / 'out'}': process 7 on node1" in done.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [".lock", "checkpoints"]


def test_a_run_waits_until_the_one_before_it_has_ended(tmp_path: Path, in_use: IO[str]) -> None:
    said = tmp_path / "said"
    with start_job(1, _one_step(tmp_path), said) as job:
        while "is in use, by process 7 on node1: waiting" not in (said.read_text() if said.exists() else ""):
            assert job.runs
            time.sleep(0.01)
        fcntl.lockf(in_use, fcntl.LOCK_UN)
        assert job.wait(60) == [0], said.read_text()
    assert (tmp_path / "out" / "earlier" / "1" / "checkpoints").is_dir()
    assert len(metrics(tmp_path / "out")) == 1


# ---- two layouts, one curve ----


@pytest.mark.parametrize(
    ("parallel", "ranks"),
    [
        ("parallel = dict(pipeline=2)\nbatch['accumulation'] = 2\nzero = 1\n", 2),
        pytest.param(
            "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\nbatch['accumulation'] = 2\nzero = 1\n",
            8,
            marks=pytest.mark.prove,
        ),
    ],
)
def test_two_layouts_write_the_same_losses_and_norms(tmp_path: Path, parallel: str, ranks: int) -> None:
    curves = []
    for name, more, world in (("one", "", 1), ("many", parallel, ranks)):
        folder = tmp_path / name
        folder.mkdir()
        config = write_config(folder, CONFIG + more)
        words = ["train.steps=8", "train.eval_interval=4", f"train.output_dir={folder / 'out'}"]
        with start_job(world, ["--config", str(config), *words], folder / "said") as job:
            assert job.wait(120) == [0] * world, (folder / "said").read_text()
        curves.append(metrics(folder / "out"))
    for one, many in itertools.zip_longest(*curves):
        for field in {"loss", "grad_norm", "lr", "tokens", "eval_loss"} & set(one):
            assert many[field] == pytest.approx(one[field], rel=1e-6), (one["step"], field)


# ---- what is refused, in this process ----


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "--config"),
        (["--config", "no_such.py"], 1, "no_such.py"),
        (["--config", "CFG", "train.stepz=3"], 1, "did you mean 'steps'"),
        (["--config", "CFG", "--resum"], 2, "unrecognized arguments: --resum"),
        (["train.steps=2", "--eval-only", "--config", "CFG", "data.eval_fraction=0.0"], 1, "BAT203"),
        (["train.steps=0", "--local_rank=0", "--config", "CFG"], 1, "train.steps"),
        (["--config", "CFG", "data.files=['gone.txt']"], 1, "BAT201"),
        (["--config", "CFG", "data.seq_len=16", "data.eval_fraction=0.0", "train.eval_interval=1"], 1, "BAT203"),
    ],
)
def test_what_cannot_run_is_told_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    status: int,
    said: str,
) -> None:
    config = str(write_config(tmp_path))
    monkeypatch.setattr(bootstrap, "monitor_rank", lambda *_: None)  # this process is pytest's
    monkeypatch.chdir(tmp_path)
    assert main([config if word == "CFG" else word for word in words]) == status
    assert said in capsys.readouterr().err
    assert not (tmp_path / "outputs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], True),
        (["--dry-run"], True),
        (["--resume"], False),
        (["--eval-only"], False),
        (["checkpoint.resume_from=newest_whole"], False),
    ],
)
def test_a_checkpoint_that_is_named_and_not_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: bool
) -> None:
    config = str(write_config(tmp_path))
    argv = ["--config", config, "checkpoint.resume_from=step_000001", *words]
    status, _ = load_and_lint(argv, bootstrap.DistributedEnv())
    assert status == 0
    warning = "CKP210 resume-from-unused [warning]: checkpoint.resume_from is 'step_000001', and without --resume"
    assert (warning in capsys.readouterr().err) == said


def test_what_the_machine_alone_can_tell_is_told_once(tmp_path: Path) -> None:
    config, said = write_config(tmp_path), tmp_path / "said.txt"
    words = ["--config", str(config), f"train.output_dir={tmp_path / 'out'}", "model={'type': 'torch.relu'}"]
    with start_job(2, [*words, "data.seq_len=8"], said) as job:
        assert job.wait(60) == [1, 1]
    assert said.read_text().count("CFG201") == 1
    assert "Traceback" not in said.read_text()


# ---- torch's compiler ----


@pytest.mark.prove
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on CPUs")
def test_a_run_whose_kernels_torch_makes_anew_learns_the_same_and_ends(tmp_path: Path) -> None:
    """With inductor and an empty cache, torch leaves a pool of threads, which once kept a run from ending."""
    path, losses = write_config(tmp_path), {}
    for compiled in ("False", "True"):
        out = tmp_path / compiled
        command = [PYTHON, "train.py", "--config", str(path), f"train.output_dir={out}", f"train.compile={compiled}"]
        done = start(command, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
        assert done.status == 0, done.output
        losses[compiled] = [line["loss"] for line in metrics(out)]
    assert losses["True"] == pytest.approx(losses["False"], rel=1e-6)
    assert [*(tmp_path / "cache").rglob("*.so")], "no kernel was made"
