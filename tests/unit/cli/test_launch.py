"""`dslpar launch` up to the start of ranks; tests/system has the rest."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.cli.main import main


def test_launch_prints_the_command_line_alone(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["launch", str(config), "--print", "--world-size", "4", "--launcher", "torchrun", "--resume", "--dry-run"]
    assert main([*argv, "train.steps=2", "--trust", "my_pkg,other"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    program = f"--standalone -m dslpar.training --config {config} --resume --dry-run"
    assert line.endswith(f"{program} --trust my_pkg --trust other train.steps=2")
    assert captured.err == ""


@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed", "openmpi"])
def test_launch_prints_the_proof_in_place_of_the_training_program(
    launcher: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["launch", str(config), "--print", "--world-size", "4", "--launcher", launcher, "--prove", "--small"]
    assert main([*argv, "--certificate", "p.json", "train.steps=2"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    program = f" dslpar prove {config} --on-devices --small --certificate p.json train.steps=2"
    assert line.endswith(program)
    assert "dslpar.training" not in line


@pytest.mark.parametrize(
    ("flags", "word"),
    [(["--prove", "--resume"], "--resume is a flag of training"), (["--small"], "--small goes with --prove")],
)
def test_launch_refuses_flags_of_the_program_that_it_does_not_start(
    flags: list[str], word: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["launch", str(config), "--print", "--world-size", "4", *flags])
    assert ended.value.code == 2
    assert word in capsys.readouterr().err


def test_launch_of_a_proof_that_lint_refuses_has_the_status_of_a_refusal(config: Path) -> None:
    assert main(["launch", str(config), "--world-size", "6", "--prove"]) == 2


def test_launch_prints_a_line_for_each_host(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=4\nnode2 slots=4\n")
    argv = ["launch", str(config), "--print", "--hostfile", str(hosts), "--launcher", "torchrun"]
    assert main(argv) == 0
    first, over_ssh, second, also_over_ssh, wait = capsys.readouterr().out.splitlines()
    assert (first, second, wait) == ("# for node1", "# for node2", "wait")
    assert over_ssh.startswith("ssh ")
    assert over_ssh.endswith(" &")
    assert "--node_rank 1" in also_over_ssh
    assert main([*argv, "--no-ssh"]) == 0
    first, of_first, second, of_second = capsys.readouterr().out.splitlines()
    assert (first, second) == ("# on node1", "# on node2")
    assert "--node_rank 0" in of_first
    assert "--node_rank 1" in of_second
    assert "ssh " not in of_first + of_second
    assert main([*argv, "--no-ssh", "--node-rank", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [second, of_second]


def test_launch_starts_nothing_if_hosts_are_unreachable(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1.invalid slots=4\nnode2.invalid slots=4\n")
    assert main(["launch", str(config), "--hostfile", str(hosts), "--launcher", "torchrun"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("HST211") == 2, "each of them, at once"
    assert f"{hosts}:2:1: HST211 unreachable-host: node2.invalid has a name that is unknown here" in captured.err


def test_launch_starts_nothing_that_lint_refuses(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(config), "--world-size", "6"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "PAR101" in captured.err, "help:" in captured.err) == ("", True, True)


def test_launch_with_a_launcher_that_is_not_installed(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", str(config), "--world-size", "4", "--launcher", "slurm"]) == 1
    assert "HST204 launcher-not-installed: slurm: srun is not installed" in capsys.readouterr().err


def test_a_missing_path_ends_before_ranks_start(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dslpar.launch.supervise.run", lambda *_: pytest.fail("ranks were started"))
    (config.parent / "toks").mkdir()
    more = ["data=dict(type='tokens',path='tokz')", "model.vocab_size=256"]
    assert main(["launch", str(config), "--world-size", "4", *more]) == 1
    said = capsys.readouterr().err
    assert said.count("no such file or folder") == 1, "once, and not as lint's warning too"
    assert "BAT201 no-such-text" in said
    assert "did you mean 'toks'?" in said


def test_a_missing_checkpoint_ends_before_ranks_start(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dslpar.launch.supervise.run", lambda *_: 0)
    (tmp_path / "run" / "checkpoints" / "step_000005").mkdir(parents=True)
    name = tmp_path / "run" / "checkpoints" / "step_000006"
    argv = ["launch", str(config), "--world-size", "4", f"checkpoint.resume_from={name}"]
    assert main([*argv, "--resume"]) == 1
    said = capsys.readouterr().err
    assert "CKP209 no-such-checkpoint" in said
    assert f"did you mean '{name.parent / 'step_000005'}'?" in said
    assert main(argv) == 0, "without --resume no checkpoint is loaded"


def test_paths_of_other_hosts_are_not_known_here(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If this host runs no rank, or only prints, a missing path is lint's warning."""
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=2\n")
    monkeypatch.setattr("dslpar.launch.supervise.run", lambda *_: 0)
    argv = ["launch", str(config), "--hostfile", str(hosts), "--launcher", "torchrun", "data=dict(files=['gone'])"]
    for flag in ("--print", "--no-checks"):
        assert main([*argv, flag]) == 0
        assert "BAT111 text-not-found [warning]" in capsys.readouterr().err
    assert main(["launch", str(config), "--world-size", "4", "--print", "data=dict(files=['gone'])"]) == 0
