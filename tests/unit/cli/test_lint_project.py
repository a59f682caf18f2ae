"""`dslpar lint` in a project: `[tool.dslpar]`, flags, files, report destinations, exit statuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslpar.cli.main import main
from tests.support.lint import MODEL

WARNED = MODEL + "idle = dict(a=1)\n"
WRONG = MODEL.replace("num_heads", "num_head")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in {
        "a.py": WARNED,
        "configs/b.py": WARNED,
        "configs/old/c.py": WRONG,
        "d_test.py": "x = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def project(text: str, folder: str = ".") -> None:
    Path(folder, "pyproject.toml").write_text(f"[tool.dslpar]\n{text}\n")


def found(capsys: pytest.CaptureFixture[str], *argv: str) -> set[tuple[str, str]]:
    """Return (path, code) of the findings."""
    main(["lint", "--format", "json", *argv])
    return {(record["path"], record["code"]) for record in json.loads(capsys.readouterr().out)}


def ended(*argv: str) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["lint", *argv])
    return int(stopped.value.code or 0)


ALL = {("a.py", "CFG106"), ("configs/b.py", "CFG106"), ("configs/old/c.py", "CFG101"), ("<world>", "CFG112")}


def test_without_a_config_this_folder_is_linted(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert found(capsys) == found(capsys, ".") == ALL


def test_settings_hold_where_no_flag_is_given(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project("ignore = ['CFG106']\nexclude = ['old']\nworld-size = 8")
    assert found(capsys) == set()
    assert found(capsys, "--exclude", "b.py") == {("configs/old/c.py", "CFG101")}  # replaces the project's
    assert found(capsys, "--exclude", "old", "--select", "CFG106") == {row for row in ALL if row[1] == "CFG106"}
    assert found(capsys, "--select", "CFG") == set()  # less specific than the project's ignore
    assert found(capsys, "configs/old/c.py") == {("configs/old/c.py", "CFG101")}  # linted, since it is named
    assert found(capsys, "configs/old/c.py", "--configs-only") == set()
    assert found(capsys, "configs/old/c.py", "--ignore", "CFG101") == set()


def test_select_of_a_project(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project("select = ['unknown-key']\nworld-size = 8")
    assert found(capsys) == {("configs/old/c.py", "CFG101")}
    assert found(capsys, "--select", "CFG106") == {row for row in ALL if row[1] == "CFG106"}


def test_ignores_of_some_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project("[tool.dslpar.per-file-ignores]\n'configs/*' = ['CFG10']\n'a.py' = ['CFG112']")
    assert found(capsys) == {("a.py", "CFG106"), ("<world>", "CFG112")}
    assert found(capsys, "a.py") == {("a.py", "CFG106")}


def test_each_config_has_its_own_project(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    project("world-size = 8")
    project("ignore = ['CFG106']", "configs")
    assert found(capsys) == ALL - {("configs/b.py", "CFG106")}
    (here / "configs" / "pyproject.toml").write_text("[tool.other]\n")
    assert found(capsys) == ALL - {("<world>", "CFG112")}


def test_the_world_of_a_path(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a.py", "configs/b.py"):
        (here / name).write_text(MODEL + "parallel = dict(pipeline=3)\nbatch = dict(micro_size=1, accumulation=12)\n")
    project("world-size = {'configs/*' = 6, 'configs/old' = 1, '*' = 4}\nselect = ['PAR']")
    assert found(capsys) == {("a.py", "PAR101")}
    assert found(capsys, "--world-size", "8") == {("a.py", "PAR101"), ("configs/b.py", "PAR101")}
    assert main(["show", "configs/b.py", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 6
    main(["config", "configs/b.py", "--explain", "parallel.data"])
    assert "6 ranks" in capsys.readouterr().out
    hosts = here / "hosts"
    hosts.write_text("node1 slots=3\nnode2 slots=3\nnode3 slots=1\n")
    assert found(capsys, "a.py", "--hostfile", "hosts", "--exclude", "node3") == set()  # here it excludes hosts


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("selct = ['CFG']", "pyproject.toml:2:1: CFG230 bad-project-settings: unknown key 'selct' in [tool.dslpar]"),
        ("ignore = ['CFG106', 'PERG']", "pyproject.toml: unknown rule 'PERG'; did you mean 'PERF'?"),
        ("per-file-ignores = {a = ['PERG']}", "unknown rule 'PERG'; did you mean 'PERF'?"),
    ],
)
def test_wrong_settings_are_wrong_usage(here: Path, capsys: pytest.CaptureFixture[str], text: str, said: str) -> None:
    project(text)
    (here / "a.py").write_text(MODEL)  # without mistakes
    assert ended("a.py", "--world-size", "8") == 2
    assert said in capsys.readouterr().err
    if "selct" in text:
        for command in (["show", "a.py", "--world-size", "1"], ["config", "a.py"], ["diff", "a.py", "configs/b.py"]):
            with pytest.raises(SystemExit) as stopped:
                main(command)
            assert stopped.value.code == 2


def test_exit_zero_and_quiet(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "configs", "--world-size", "8", "--exit-zero"]) == 0
    assert capsys.readouterr().out.endswith("1 error, 1 warning\n2 configs linted, 0 files skipped\n")
    assert main(["lint", "configs", "--world-size", "8", "--quiet"]) == 1
    quiet = capsys.readouterr().out
    assert quiet.count("CFG1") == 2
    assert "linted" not in quiet
    assert "1 error" not in quiet
    (here / "a.py").write_text(MODEL)
    assert main(["lint", "a.py", "-q", "--world-size", "8"]) == 0
    assert capsys.readouterr().out == ""
    assert ended("a.py", "--exit-zero", "--strict") == 2


@pytest.mark.parametrize("form", ["text", "concise", "json", "github", "sarif"])
def test_output_file(here: Path, capsys: pytest.CaptureFixture[str], form: str) -> None:
    argv = ["lint", "a.py", "--world-size", "8", "--format", form]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert main([*argv, "--output-file", "report", "--color", "auto"]) == 0
    assert capsys.readouterr().out == ""
    assert (here / "report").read_text() == printed
    assert ended("a.py", "--output-file", "no/such/report") == 2
    assert "cannot write no/such/report" in capsys.readouterr().err


def test_show_files(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "--show-files"]) == 0
    assert capsys.readouterr().out.splitlines() == ["a.py", "configs/b.py", "configs/old/c.py"]
    assert main(["lint", "--show-files", "--exclude", "old,a.py"]) == 0
    assert capsys.readouterr().out == "configs/b.py\n"


def test_targets(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "a.py").write_text("from dslpar import L\nmodel = dict(type='net.Net', part=L('my_pkg.make')(n=1))\n")
    assert main(["lint", "a.py", "--targets"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "a.py:2:19: net.Net for model: its section: imported, and called only if it is a torch.nn.Module or "
        "dslpar.models.LayeredModel",
        "a.py:2:35: my_pkg.make for model.part: refused: a config may not call 'my_pkg.make': 'my_pkg' is not trusted",
    ]
    assert main(["lint", "a.py", "--targets", "--exit-zero", "--trust", "other,my_pkg", "--format", "json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["target"], first["key"], first["purpose"]) == ("net.Net", "model", "model")
    assert (second["allowed_by"], second["path"], second["line"], second["column"]) == (
        "trusted: my_pkg",
        "a.py",
        2,
        35,
    )
    project("trusted = ['my_pkg']\nignore = ['CFG']")
    assert main(["lint", "a.py", "--targets"]) == 0
    (here / "a.py").write_text("model = dict(\n")
    assert main(["lint", "a.py", "--targets"]) == 1  # an unreadable config may call anything
    assert "CFG001" in capsys.readouterr().err
    assert ended("a.py", "--targets", "--format", "sarif") == 2


@pytest.mark.parametrize("command", ["lint", "show", "config", "diff"])
def test_trust_is_a_flag_of_every_command_that_lints(here: Path, command: str) -> None:
    (here / "a.py").write_text("from dslpar import L\nmodel = dict(type='net.Net', part=L('my_pkg.make')(n=1))\n")
    argv = [command, *["a.py"] * (2 if command == "diff" else 1), "--world-size", "1"]
    assert main(argv) in (1, 2)
    assert main([*argv, "--trust", "my_pkg"]) == 0
