"""`dslpar lint` on the command line: output, exit status, hostfiles, JSON, selected rules and files."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.cli.main import main
from tests.support.lint import MODEL

FIELDS = [
    "code",
    "name",
    "severity",
    "message",
    "help",
    "path",
    "line",
    "column",
    "end_line",
    "end_column",
    "key",
    "fix",
    "related",
    "url",
]


def test_lint_of_a_valid_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(config), "--world-size", "8"]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_lint_shows_the_line_and_a_caret(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(MODEL + "parallel = dict(tensor=dict(size=6, mode='3d'))\n")
    assert main(["lint", str(config), "--world-size", "8"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{config}:2:34: TEN103 not-a-cube: size 6, and mode '3d' needs q*q*q ranks",
        "    2 | parallel = dict(tensor=dict(size=6, mode='3d'))",
        "      |                                  ^",
        "help: nearest legal: 1 or 8; or choose mode 'cuboid', and a shape",
        "1 error",
    ]


def test_lint_json(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(config), "--world-size", "6", "--format", "json"]) == 1
    (record,) = json.loads(capsys.readouterr().out)
    assert list(record) == FIELDS
    assert (record["code"], record["path"], record["line"], record["column"]) == ("PAR101", str(config), 2, 26)
    assert (record["end_line"], record["end_column"], record["key"]) == (2, 27, "parallel.pipeline")


def test_lint_strict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cfg.py"
    path.write_text(MODEL + "idle = dict(a=1)\n")
    assert main(["lint", str(path), "--world-size", "8", "--format", "concise"]) == 0
    assert main(["lint", str(path), "--world-size", "8", "--format", "concise", "--strict"]) == 1
    assert capsys.readouterr().out.count("CFG106 unused-dict") == 2


def test_several_configs(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.py"
    other.write_text("parallel = dict()\n")
    assert main(["lint", str(config), str(other), "--world-size", "4", "--format", "concise"]) == 1
    assert capsys.readouterr().out.startswith(f"{other}:1:1: CFG107 no-model")


def test_a_hostfile_gives_the_world(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("# two nodes\nnode1 slots=3\nnode2 slots=3\n")
    assert main(["lint", str(config), "--hostfile", str(hosts), "--format", "concise"]) == 1
    out = capsys.readouterr().out
    assert "PAR101" in out
    assert "PERF101" in out
    assert main(["show", str(config), "--hostfile", str(hosts)]) == 1
    hosts.write_text("node1 slots=4\nnode2 slots=4\n")
    assert main(["show", str(config), "--hostfile", str(hosts), "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["world_size"] == 8


@pytest.mark.parametrize(
    ("argv", "reported"),
    [
        ("", ["CFG101", "CFG106", "TEN102", "CFG112"]),
        ("--select TEN", ["TEN102", "CFG112"]),
        ("--select ten1,CFG106", ["CFG106", "TEN102", "CFG112"]),
        ("--select unknown-key --ignore CFG112", ["CFG101"]),
        ("--ignore CFG", ["TEN102"]),
        ("--ignore CFG --select CFG106", ["CFG106"]),
        ("--select CFG1 --ignore CFG10", ["CFG112"]),
        ("--select CFG --ignore CFG", []),
        ("--ignore CFG101,TEN102 --ignore unused-dict", ["CFG112"]),
    ],
)
def test_select_and_ignore(config: Path, capsys: pytest.CaptureFixture[str], argv: str, reported: list[str]) -> None:
    config.write_text(MODEL + "idle = dict(a=1)\nparallel = dict(pipline=1, tensor=dict(size=2, mode='1D'))\n")
    status = main(["lint", str(config), "--format", "json", *argv.split()])
    records = json.loads(capsys.readouterr().out)
    assert sorted(record["code"] for record in records) == sorted(reported)
    assert status == any(record["severity"] == "error" for record in records)


def test_unreadable_files_are_reported_whatever_is_selected(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("model = dict(\n")
    assert main(["lint", str(config), "no/such.py", "--select", "PERF", "--format", "json"]) == 1
    assert {record["code"] for record in json.loads(capsys.readouterr().out)} == {"CFG001", "CFG009", "CFG112"}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--select PERG", "did you mean 'PERF'?"),
        ("--ignore CFG106,unused-dct", "did you mean 'unused-dict'?"),
        ("--ignore HST204", "HST204 is found while a job starts or runs"),
        ("--select QQQQ", "the families are BAT, CFG, CKP, DEAD,"),
        ("--statistics --format sarif", "--statistics goes with"),
        ("--fix --diff", "not allowed with argument"),
        ("--stdin-filename a.py", "--stdin-filename goes with `-`"),
        ("-", "`-` cannot be combined with other configs"),
    ],
)
def test_usage_errors_of_lint(config: Path, capsys: pytest.CaptureFixture[str], argv: str, message: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(config), *argv.split()])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_the_shipped_configs_as_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "configs", "--world-size", "8", "--verbose"]) == 0
    captured = capsys.readouterr()
    over = [line.partition(": ")[0].removeprefix("skipped ") for line in captured.err.splitlines()]
    common = Path("configs/common").rglob("*.py")
    parts = [str(path) for path in common if not re.search("^model = ", path.read_text(), re.MULTILINE)]
    assert sorted(over) == sorted(parts)
    whole = len(list(Path("configs").rglob("*.py"))) - len(parts)
    assert captured.out.splitlines()[-1] == f"{whole} configs linted, {len(parts)} files skipped"


def test_which_files_of_a_folder_are_configs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    outer = "parallel = dict(pipeline=1)\n"
    files = {
        "whole.py": "from .part import train\n" + MODEL,
        "part.py": "train = dict(steps=2)\nbatch = dict(micro_size=1)\n",
        "alone.py": outer,
        "misspelt.py": "modle = dict(type='GPT')\ntrain = dict(steps=2)\n",
        "broken.py": "parallel = dict(\n",
        "deep/er.yaml": "parallel: {pipeline: 1}\n",
        "program.py": "import torch\n\ndef main():\n    model = 1\n\nmodel = torch.nn.Linear(2, 2)\ndata = {'a': 1}\n",
        "text.py": "print('parallel = dict()')\n",
        "broken_text.py": "print(\n",
        "ci.yml": "on: push\njobs: {}\n",
        "notes.txt": outer,
        ".hidden/cfg.py": outer,
        "outputs/run/config.yaml": "parallel: {pipeline: 1}\n",
        "env/pyvenv.cfg": "",
        "env/cfg.py": outer,
    }
    (tmp_path / "latin_config.py").write_bytes(b"model = dict(type='\xe9')\n")
    (tmp_path / "latin_program.py").write_bytes(b"print('\xe9')\n")
    (tmp_path / "long_program.py").write_text("print(1)\n" * 30_000)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["lint", str(tmp_path), "--format", "json", "--world-size", "1", "--verbose"]) == 1
    captured = capsys.readouterr()
    found = {Path(record["path"]).name for record in json.loads(captured.out) if record["severity"] == "error"}
    assert found == {"alone.py", "misspelt.py", "broken.py", "er.yaml", "latin_config.py"}
    over = {Path(line.partition(": ")[0]).name: line.partition(": ")[2] for line in captured.err.splitlines()}
    programs = {"program.py", "text.py", "broken_text.py", "latin_program.py", "long_program.py"}
    assert set(over) == {"part.py", "ci.yml", *programs}
    assert over["part.py"].startswith("a part of")


def test_a_named_file_is_always_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    part = tmp_path / "part.py"
    part.write_text("train = dict(steps=2)\n")
    assert main(["lint", str(part), "--format", "concise"]) == 1
    assert "CFG107" in capsys.readouterr().out
    assert main(["lint", str(part), "--configs-only"]) == 0
    assert capsys.readouterr().out == "no findings\n0 configs linted, 1 file skipped\n"
    assert main(["lint", str(tmp_path / "missing.py"), "--configs-only"]) == 1
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(tmp_path)])
    assert ended.value.code == 2
    assert "no config in" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["stdin.py", "below/cfg.yaml"])
def test_stdin(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = "parallel: {pipeline: x}" if name.endswith("yaml") else "parallel = dict(pipeline='x')"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    named = [] if name == "stdin.py" else ["--stdin-filename", name]
    assert main(["lint", "-", *named, "--format", "concise", "--select", "CFG102"]) == 1
    assert capsys.readouterr().out.startswith(f"{name}:1:")


def test_stdin_that_is_not_utf8(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    with pytest.raises(SystemExit) as ended:
        main(["lint", "-"])
    assert ended.value.code == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err


def test_plain_lint_imports_nothing_slow(config: Path) -> None:
    """The plain command starts quickly: what takes long to import is loaded by the flags that need it."""
    program = "import sys; from dslpar.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program, "lint", str(config), "--world-size", "8"], capture_output=True, text=True
    )
    loaded = set(ran.stdout.split())
    assert "dslpar.cli.lint" in loaded
    names = ("suppressions", "fixes", "report.sarif")
    assert not loaded & {"json", "hashlib", "tempfile", "yaml", "torch", "transformers", "dslpar.cli.lint_fix"}
    assert "dslpar.cluster.hostfile" not in loaded
    assert not loaded & {f"dslpar.linter.{name}" for name in names}


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
@pytest.mark.parametrize("format_", ["text", "concise", "json", "github", "sarif"])
def test_names_that_stdout_cannot_encode_are_escaped(tmp_path: Path, encoding: str, format_: str) -> None:
    wrong = (MODEL + "parallel = dict(pipelin=1)  # \u65e5\n").encode()
    for name in (b"\xff.py", "\u65e5.py".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(wrong)
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    argv = [sys.executable, "-m", "dslpar.cli", "lint", str(tmp_path), "--world-size", "8", "--format", format_]
    ran = subprocess.run(argv, capture_output=True, env=environ)
    assert (ran.returncode, ran.stderr) == (1, b"")
    assert ran.stdout.count(b"unknown key 'pipelin'") == 2
    diff = subprocess.run([*argv, "--diff"], capture_output=True, env=environ)
    assert diff.stdout.count("+parallel = dict(pipeline=1)  # \u65e5\n".encode()) == 2
