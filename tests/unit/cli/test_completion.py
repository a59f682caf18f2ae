"""`dslpar completion`: the words that bash offers, scripts that zsh and fish can read, and what the program answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.cli.completion import SCRIPTS, candidates
from dslpar.cli.main import COMMANDS, main
from tests.support.paths import ROOT


def words(*typed: str) -> list[str]:
    return [each.word for each in candidates(typed, COMMANDS)]


@pytest.fixture(scope="module")
def environ(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which `dslpar` is this checkout's."""
    folder = tmp_path_factory.mktemp("bin")
    (folder / "dslpar").write_text(f'#!/bin/sh\nexec {sys.executable} -m dslpar.cli "$@"\n')
    (folder / "dslpar").chmod(0o755)
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def shell(name: str, script: str, environ: dict[str, str], *flags: str) -> str:
    program = shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is not installed")
    command = [program, *flags, "-c", f"{SCRIPTS[name]}\n{script}"]
    ran = subprocess.run(command, env=environ, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def test_the_words_are_those_of_the_parsers_and_the_schema() -> None:
    words = ROOT / "dslpar" / "cli" / "completion.json"
    made = subprocess.run(
        [sys.executable, "-c", "from completion_words import text; print(text(), end='')"],
        cwd=ROOT / "tools",
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert words.read_text(encoding="utf-8") == made.stdout, "python tools/docs.py"


def test_commands_actions_flags_and_choices() -> None:
    assert words("pl") == ["plan"]
    assert set(COMMANDS) <= set(words(""))
    assert words("checkpoint", "re") == ["reshard"]
    assert words("lint", "--form") == ["--format"]
    assert {"text", "json", "sarif"} <= set(words("lint", "--format", ""))
    assert words("lint", "--format=js") == ["--format=json"]
    assert {"failed", "finished"} <= set(words("runs", "--state", "f"))
    assert words("completion", "") == ["bash", "zsh", "fish"]
    assert words("help", "lin") == ["lint"]
    assert words("explain", "TEN103") == ["TEN103"]
    assert words("nosuch", "") == []
    assert words("lint", "--world-size", "") == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_completes_its_flags(command: str) -> None:
    assert words(command, "--") or words(command, "")


def test_configs_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.py").touch()
    Path("mine.txt").touch()
    Path("mines").mkdir()
    assert words("lint", "mi") == ["mine.py", "mines/"]
    assert words("lint", "nosuch/a") == []


def test_keys_and_their_values_follow_a_config() -> None:
    assert words("show", "parallel.ten") == []
    assert words("show", "cfg.py", "parallel.ten") == ["parallel.tensor.", "parallel.tensor="]
    assert "parallel.tensor.mode=" in words("lint", "cfg.py", "--world-size", "8", "parallel.tensor.")
    assert "parallel.tensor.mode=3d" in words("plan", "cfg.py", "parallel.tensor.mode=")
    assert words("show", "cfg.py", "parallel.tensor.sequence=") == [
        "parallel.tensor.sequence=False",
        "parallel.tensor.sequence=True",
    ]
    assert words("show", "cfg.py", "optimizer.type=AdamW") == ["optimizer.type=AdamW"]
    assert words("launch", "cfg.py", "~zero.st") == ["~zero.stage"]
    assert "zero.stage" in words("config", "cfg.py", "--explain", "zero.st")


def test_bash_offers_the_words(environ: dict[str, str]) -> None:
    def offered(line: str) -> list[str]:
        script = f'COMP_LINE="{line}" COMP_POINT={len(line)}; _dslpar; printf "%s\\n" "${{COMPREPLY[@]}}"'
        return shell("bash", script, environ, "--norc").split()

    assert offered("dslpar pla") == ["plan"]
    assert offered("dslpar lint configs/gpt_3") == ["configs/gpt_3d.py"]
    assert offered("dslpar lint configs/gpt_3d.py --format ")[:2] == ["text", "concise"]
    # Behind `=`, bash completes a word of its own.
    assert offered("dslpar show configs/gpt_3d.py parallel.tensor.mode=2") == ["2.5d", "2d"]
    assert offered("dslpar show configs/gpt_3d.py zero.st") == ["zero.stage="]
    assert shell("bash", "complete -p dslpar", environ, "--norc") == "complete -F _dslpar dslpar\n"


def test_zsh_offers_the_words(environ: dict[str, str]) -> None:
    """compadd exists in a completion alone; here it prints what it is given."""
    stub = 'compdef() { : }; compadd() { shift ${@[(i)--]}; print -l -- "$@" }'
    program = shutil.which("zsh")
    if program is None:
        pytest.skip("zsh is not installed")
    script = (
        f"{stub}\n{SCRIPTS['zsh']}\nwords=(dslpar show configs/gpt_3d.py zero.st) CURRENT=4 PREFIX=zero.st; _dslpar"
    )
    assert subprocess.run([program, "-n", "-c", SCRIPTS["zsh"]]).returncode == 0
    ran = subprocess.run([program, "-f", "-c", script], env=environ, cwd=ROOT, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("zero.stage=\n", "")


def test_fish_offers_the_words(environ: dict[str, str], tmp_path: Path) -> None:
    environ = {**environ, "HOME": str(tmp_path)}
    line = "dslpar show configs/gpt_3d.py "
    assert shell("fish", f"complete -C '{line}zero.st'", environ, "--no-config").split() == ["zero.stage="]
    assert "plan\tforecast memory" in shell("fish", "complete -C 'dslpar pla'", environ, "--no-config")
    assert shell("fish", "complete -C 'dslpar completion '", environ, "--no-config").split() == ["bash", "fish", "zsh"]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_command_prints_the_script(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", name]) == 0
    assert capsys.readouterr().out == SCRIPTS[name]


def test_the_answer_has_a_word_and_its_help_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["__complete", "expl"]) == 0
    assert capsys.readouterr().out == f"explain\t{COMMANDS['explain']}\n"


@pytest.mark.parametrize("typed", [("show", "cfg.py", "zero."), ("lint", "--form"), ("explain", "TEN10")])
def test_a_tab_needs_few_imports(typed: tuple[str, ...]) -> None:
    """A person waits for it: neither torch, nor the schema, nor any command is imported."""
    code = "import sys; from dslpar.cli.main import main; main(); print(*sys.modules, file=sys.stderr)"
    command = [sys.executable, "-c", code, "__complete", *typed]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ran.stdout.startswith(typed[-1])
    modules = ran.stderr.split()
    assert {"torch", "yaml", "inspect", "dataclasses"}.isdisjoint(modules)
    ours = {name for name in modules if name.startswith("dslpar.") and not name.startswith("dslpar.core")}
    assert ours == {"dslpar.cli", "dslpar.cli.main", "dslpar.cli.completion"}
