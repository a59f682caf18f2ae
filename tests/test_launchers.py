"""train.py under every launcher: the same run, rank 0 alone speaks, and a rank that fails ends the job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.runs import BIN, CONFIG, ROOT, Finished, deepspeed, metrics, mpirun, start, write_config

PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
HOSTFILE = ["--hostfile", "hostfiles/8gpu", "--no_ssh_check", "--master_addr", "127.0.0.1"]
PROGRAM = ["train.py", "--config"]

PIPED = "parallel = dict(pipeline=2)\n"
ALL_THREE = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"


def run(tmp_path: Path, launcher: list[str], parallel: str = "", timeout_s: float = 120) -> str:
    """Trains; what was printed, but for DeepSpeed's launcher's own lines."""
    config = write_config(tmp_path, parallel + CONFIG)
    output_dir = tmp_path / "out"
    done = start([*launcher, *PROGRAM, str(config), f"train.output_dir={output_dir}"], timeout_s)
    assert done.status == 0, done.output
    lines = metrics(output_dir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["loss"] == pytest.approx(5.545, abs=0.05), "ln 256"
    return "\n".join(line for line in done.output.splitlines() if "[INFO]" not in line and "[WARNING]" not in line)


def test_plain_python_is_a_world_of_one(tmp_path: Path) -> None:
    printed = run(tmp_path, [PYTHON])
    assert "world of 1" in printed
    assert "step 3/3" in printed


def test_deepspeed(tmp_path: Path) -> None:
    printed = run(tmp_path, deepspeed("--num_gpus", "2"), PIPED)
    assert printed.count("step 3/3") == 1, "rank 0 alone speaks"


def test_deepspeed_as_a_module(tmp_path: Path) -> None:
    config = write_config(tmp_path)
    words = ["--config", str(config), f"train.output_dir={tmp_path / 'out'}", "train.steps=1"]
    done = start([*deepspeed("--num_gpus", "1", "--module"), "dslpar.train", *words])
    assert done.status == 0, done.output
    assert len(metrics(tmp_path / "out")) == 1


def test_mpirun(tmp_path: Path) -> None:
    assert run(tmp_path, [*mpirun(2), PYTHON], PIPED).count("step 3/3") == 1


@pytest.mark.prove
def test_mpirun_with_its_own_mapping(tmp_path: Path) -> None:
    """Over more ranks than cores OpenMPI numbers local ranks otherwise than DeepSpeed would (FACTS 1.4)."""
    run(tmp_path, [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4", PYTHON], PIPED)  # type: ignore[list-item]


@pytest.mark.prove
def test_torchrun(tmp_path: Path) -> None:
    run(tmp_path, [*TORCHRUN, "2"], PIPED)


@pytest.mark.prove
@pytest.mark.parametrize("how", [["--num_gpus", "8"], HOSTFILE], ids=["num_gpus", "hostfile"])
def test_deepspeed_on_8_ranks(tmp_path: Path, how: list[str]) -> None:
    run(tmp_path, deepspeed(*how), ALL_THREE, timeout_s=240)


@pytest.mark.prove
def test_mpirun_on_8_ranks(tmp_path: Path) -> None:
    run(tmp_path, [*mpirun(8), PYTHON], ALL_THREE, timeout_s=240)


# ---- a rank that fails ----

FAILING = f"""\
import sys
sys.path.insert(0, {str(ROOT)!r})
import dslpar.engine as engine
train_batch = engine.Engine.train_batch
def failing(self, batches):
    if self.groups.rank == 1 and self.step == 1:
        raise RuntimeError("rank 1 broke")
    return train_batch(self, batches)
engine.Engine.train_batch = failing
from dslpar.train import main
sys.exit(main())
"""


@pytest.mark.parametrize("launcher", ["deepspeed", "mpirun"])
def test_a_rank_that_fails_ends_the_job(tmp_path: Path, launcher: str) -> None:
    """The other rank waits for it in a collective."""
    config = write_config(tmp_path, PIPED + CONFIG)
    (tmp_path / "failing.py").write_text(FAILING)
    begin = deepspeed("--num_gpus", "2") if launcher == "deepspeed" else [*mpirun(2), PYTHON]
    done = start(
        [*begin, str(tmp_path / "failing.py"), "--config", str(config), f"train.output_dir={tmp_path / 'out'}"]
    )
    assert done.status != 0
    assert "rank 1 broke" in done.output
    assert "[rank 1 of 2 on " in done.output
    assert len(metrics(tmp_path / "out")) == 1, "what was written before stays"


def _two_programs(first: list[str], second: list[str]) -> Finished:
    """Two ranks of one mpirun job with different command lines, as two hosts with different files would have."""
    return start([*mpirun(1), sys.executable, *PROGRAM, *first, ":", "-np", "1", sys.executable, *PROGRAM, *second])


def test_ranks_that_differ_do_not_start(tmp_path: Path) -> None:
    command = [str(write_config(tmp_path)), f"train.output_dir={tmp_path / 'out'}"]
    done = _two_programs(command, [*command, "train.seed=7"])
    assert done.status == 1, done.output
    assert "HST203" in done.output
    assert "rank 1 on" in done.output
    assert "has another config" in done.output
    assert not (tmp_path / "out").exists()


def test_a_rank_that_cannot_run_says_so(tmp_path: Path) -> None:
    command = [str(write_config(tmp_path)), f"train.output_dir={tmp_path / 'out'}"]
    done = _two_programs(command, [str(tmp_path / "nothing.py"), *command[1:]])
    assert done.status != 0, done.output
    assert "rank 1 on" in done.output
    assert "CFG009" in done.output


def test_a_config_that_is_wrong_is_told_once_before_anything_starts(tmp_path: Path) -> None:
    config = write_config(tmp_path, CONFIG + "parallel = dict(pipeline=3)\n")
    done = start([*deepspeed("--num_gpus", "2"), *PROGRAM, str(config), f"train.output_dir={tmp_path / 'out'}"])
    assert done.status == 1, done.output
    assert done.output.count("PAR102") == 1
    assert done.output.count("help:") >= 1
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()
