"""The command `dslpar`: selecting a command, its help, wrong usage, and closed output pipes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.cli.main import COMMANDS, main
from tests.support.waiting import wait


def test_flags_and_overrides_in_any_order(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "parallel.pipeline=3", "--world-size", "6", str(config), "train.steps=0"]) == 1
    out = capsys.readouterr().out
    assert "<command line>:1:33: CFG103 out-of-range: train.steps is 0" in out
    assert "    1 | parallel.pipeline=3 train.steps=0" in out


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["lnit", "cfg.py"],
        ["lint", "a=1"],
        ["lint", "cfg.py", "--world-size", "0"],
        ["lint", "cfg.py", "--world-size", "eight"],
        ["lint", "cfg.py", "--hostfile", "no/such/file"],
        ["lint", "cfg.py", "--format", "xml"],
        ["explain", "XYZ999"],
        ["show", "configs/gpt_3d.py"],
        ["launch"],
        ["launch", "configs/gpt_3d.py"],
        ["launch", "cfg.py", "other.py", "--world-size", "2"],
        ["launch", "cfg.py", "--world-size", "2", "--launcher", "ssh"],
        ["launch", "cfg.py", "--hostfile", "no/such/file"],
        ["launch", "cfg.py", "--hostfile", "slurm"],
        ["launch", "cfg.py", "--hostfile", "pbs"],
        ["launch", "cfg.py", "--world-size", "2", "--node-rank", "0"],
        ["launch", "cfg.py", "--world-size", "2", "--no-ssh"],
        ["launch", "cfg.py", "--world-size", "2", "--master-port", "70000"],
        ["lint", "cfg.py", "--include", "node1"],
        ["lint", "cfg.py", "--hostfile", "hostfiles/8gpu", "--include", "a", "--exclude", "b"],
    ],
    ids=" ".join,
)
def test_a_usage_error_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(argv)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    captured = capsys.readouterr()
    assert "usage" in captured.err + captured.out


def test_a_misspelt_command_gets_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lnit"])
    assert "did you mean 'lint'?" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The program's help names each command. A command's help fits a terminal, apart from commands to copy."""
    for argv in (["--help"], [command, "--help"]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 0
        out = capsys.readouterr().out
        assert command in out
        assert all(len(line) <= 100 or line.startswith("dslpar ") for line in out.splitlines())


def test_flags_cannot_be_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    """An abbreviation such as --res for --resume may mean another flag some day."""
    with pytest.raises(SystemExit) as ended:
        main(["launch", "configs/gpt_3d.py", "--world-size", "8", "--print", "--res"])
    assert ended.value.code == 2
    assert "--res" in capsys.readouterr().err


def test_a_closed_pipe_gives_no_traceback() -> None:
    """As in `dslpar explain TEN101 | head -1`."""
    command = f"{sys.executable} -m dslpar.cli explain TEN101"
    with subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert wait(process) == 128 + 13


@pytest.mark.parametrize(
    ("argv", "status"),
    [
        (["plan"], 1),
        (["prove"], 2),
        (["launch"], 1),
        (["show"], 1),
        (["checkpoint", "reshard", "run", "--output", "new", "--config"], 1),
    ],
)
def test_a_missing_config_is_said_before_a_missing_world_size(
    argv: list[str], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*argv, "nosuch.py"]) == status
    assert "CFG009" in capsys.readouterr().err
