"""The commands of docs/linting.md: each runs in a folder with the files it names."""

from __future__ import annotations

import io
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from dslpar.cli.main import main
from dslpar.core.project import find_project
from tests.support.paths import ROOT

PART = (ROOT / "docs" / "linting.md").read_text()
COMMANDS = re.findall(r"(?:^|run: )dslpar (.+?)(?:  +#.*)?$", PART, re.MULTILINE)
RIGHT = """\
model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
batch = dict(micro_size=1, accumulation=16)
"""
WRONG = """\
model = dict(type='GPT', num_layers=8, hidden_size=96, num_heads=24, vocab_size=256, max_seq_len=96)
# Six is no cube.
parallel = dict(pipeline=2, tensor=dict(size=6, mode='3d'))
"""
THEIRS = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\nclip_grad_norm = 1.0\nNUM_MICRO_BATCHES = 4\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    (tmp_path / "mine.py").write_text(RIGHT)
    (tmp_path / "theirs.py").write_text(THEIRS)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(command: str, monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the exit status; `< FILE` and `> FILE` work as in the shell."""
    argv = shlex.split(command.partition(" > ")[0].partition(" < ")[0])
    if " < " in command:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(RIGHT.encode()), encoding="utf-8"))
    try:
        return main(argv)
    except SystemExit as ended:
        return int(ended.code or 0)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_page_runs(
    command: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "-o mine.py" in command:
        (folder / "mine.py").unlink()
    if "--diff" in command:
        (folder / "mine.py").write_text(RIGHT.replace("mode='1d'", "mode='1D'"))
    status = run(command, monkeypatch)
    captured = capsys.readouterr()
    assert status in (0, 1), captured.err
    assert captured.out


def test_there_are_commands_to_run() -> None:
    assert len(COMMANDS) >= 10
    assert {command.split()[0] for command in COMMANDS} >= {"lint", "explain", "config", "diff", "import"}


def test_the_finding_is_what_lint_prints(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "configs" / "mine.py").write_text(WRONG)
    assert main(["lint", "configs/mine.py", "--world-size", "12"]) == 1
    (shown,) = re.findall(r"```\n(configs/mine.py:.*?)```", PART, re.DOTALL)
    printed = capsys.readouterr().out
    assert shown in printed
    readme = re.findall(r"```\n(configs/mine.py:.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert readme == [shown]


def test_what_is_for_ci_is_yaml() -> None:
    blocks = re.findall(r"```yaml\n(.*?)```", PART, re.DOTALL)
    assert all(yaml.safe_load(block) for block in blocks)
    hooks = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    assert hooks == {"dslpar-lint", "dslpar-fix"}
    assert all(hook in PART for hook in hooks)


def test_the_settings_of_the_page_are_all_there_are(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (settings,) = re.findall(r"```toml\n(.*?)```", PART, re.DOTALL)
    (folder / "pyproject.toml").write_text(settings)
    project = find_project(".")
    assert project is not None
    assert all(project), "each key has a value"
    assert main(["lint", "configs/gpt_3d.py"]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_a_comment_of_the_page_silences(folder: Path) -> None:
    (comment,) = re.findall(r"`(# dslpar: ignore\[\w+\][^`]*)`", PART)
    text = RIGHT.splitlines()[0] + "\nparallel = dict(pipeline=2)\nbatch = dict(micro_size=1, accumulation=2)"
    (folder / "mine.py").write_text(text + "\n")
    before = main(["lint", "mine.py", "--world-size", "2", "--strict"])
    (folder / "mine.py").write_text(f"{text}  {comment}\n")
    assert (before, main(["lint", "mine.py", "--world-size", "2", "--strict"])) == (1, 0)
