"""The commands as a person runs them: output, exit status, hostfiles, JSON."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dslpar.cli.main import main
from dslpar.core.errors import Finding, Location
from dslpar.linter.report import text as report_text
from tests.support.lint import MODEL
from tests.support.paths import ROOT

FIELDS = ["code", "name", "severity", "message", "help", "path", "line", "column", "end_line", "end_column", "key"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "cfg.py"
    parallel = "parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))\n"
    path.write_text(MODEL + parallel + "batch = dict(accumulation=8)\n")
    return path


def test_lint_of_a_right_config(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(config), "--world-size", "8"]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_lint_shows_the_line_and_a_caret(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(MODEL + "parallel = dict(tensor=dict(size=6, mode='3d'))\n")
    assert main(["lint", str(config), "--world-size", "8"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"{config}:2:34: TEN103 not-a-cube: size 6, and mode '3d' needs q*q*q ranks",
        "    2 | parallel = dict(tensor=dict(size=6, mode='3d'))",
        "      |                                  ^",
        "help: nearest legal: 1 or 8; or mode 'cuboid' with a shape",
        "1 error",
    ]


def test_flags_and_overrides_stand_anywhere(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "parallel.pipeline=3", "--world-size", "6", str(config), "train.steps=0"]) == 1
    out = capsys.readouterr().out
    assert "<command line>:1:33: CFG103 out-of-range: train.steps is 0" in out
    assert "    1 | parallel.pipeline=3 train.steps=0" in out


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
    "words",
    [
        [],
        ["lint"],
        ["lnit", "cfg.py"],
        ["lint", "a=1"],
        ["lint", "cfg.py", "--world-size", "0"],
        ["lint", "cfg.py", "--world-size", "eight"],
        ["lint", "cfg.py", "--hostfile", "no/such/file"],
        ["lint", "cfg.py", "--format", "xml"],
        ["explain", "XYZ999"],
        ["show", "cfg.py"],
        ["launch"],
        ["launch", "cfg.py"],
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
def test_a_wrong_command_line_is_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(words)
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    assert status == 2
    captured = capsys.readouterr()
    assert "usage" in captured.err + captured.out


def test_did_you_mean_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["lnit"])
    assert "did you mean 'lint'?" in capsys.readouterr().err


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ten103"]) == 0
    by_code = capsys.readouterr().out
    assert by_code.startswith("TEN103 not-a-cube (error)\n\nMode '3d' with a size that is no cube.")
    assert main(["explain", "not-a-cube"]) == 0
    assert capsys.readouterr().out == by_code


def test_show_text(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8"]) == 0
    out = capsys.readouterr().out
    assert "pipeline 2 * data 2 * tensor 2 (1d: x 1, y 2, z 1)" in out
    assert "pipe   [0, 4]  [1, 5]  [2, 6]  [3, 7]" in out
    assert main(["show", str(config), "--world-size", "64"]) == 0
    assert "... 24 more ..." in capsys.readouterr().out


def test_show_json_has_the_contract(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8", "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert list(shown)[:6] == ["world_size", "parallel", "groups", "stages", "batch", "deepspeed"]
    assert list(shown)[6:] == ["divisors", "traffic"]
    assert shown["parallel"]["order"] == ["pipe", "data", "tensor"]
    assert shown["stages"]["counts"] == [4, 4]
    assert shown["batch"] == {"global_size": 16, "micro_size": 1, "accumulation": 8}
    assert main(["show", str(config), "--world-size", "8", "--format", "json", "parallel.pipeline=1"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert (stages["auto_pipeline_stage_id"], stages["actual_pipeline_stage_id"]) == (None, None)


def test_show_says_what_must_divide_and_what_is_sent(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["parallel={'tensor': {'size': 4, 'mode': '2d'}}", "model.num_kv_heads=6", "model.positions='rotary'"]
    words += ["model.vocab_size=257", "batch={'micro_size': 4}"]
    assert main(["show", str(config), "--world-size", "8", *words]) == 0
    out = capsys.readouterr().out
    for line in (
        "divides",
        "  batch.micro_size 4 by x = 2",
        "  model.num_heads 24 by y = 2, num_kv_heads = 6",
        "  model.num_kv_heads 6 by y = 2",
        "  model.hidden_size 96 by z * q = 2, y * q = 4, num_heads = 24, "
        "num_heads * 2 = 48 (features of num_kv_heads by y * q), num_heads * 2 = 48 (pairs of features for rotary "
        "positions)",
        "  model.ffn_hidden_size 384 by y * q = 4",
        "  model.vocab_size 260 by y * q = 4; 257 padded to 260",
        "sends, elements a rank for a micro-batch of 384 tokens, forward and backward",
    ):
        assert line in out.splitlines(), line
    assert main(["show", str(config), "--world-size", "8", "--format", "json", *words]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"key": "model.num_kv_heads", "value": 6, "by": 2, "why": "y = 2"} in shown["divisors"]
    assert all(each["value"] % each["by"] == 0 < each["by"] for each in shown["divisors"])
    layer, model = (sum(shown["traffic"][name].values()) for name in ("layer", "model"))
    assert 8 * layer < model
    assert f"  a layer {layer:,} (" in out
    assert f"  less than 1d on 4 ranks: from {shown['traffic']['break_even_tokens']:,} tokens on" in out


def test_show_says_that_no_rank_sends_what_all_stages_send(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "8"]) == 0
    assert "  all 2 stages " in capsys.readouterr().out


def test_show_of_one_rank_has_nothing_to_send(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "1", "--format", "json", "parallel=None"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["traffic"] is None
    assert [each["why"] for each in shown["divisors"]] == ["num_heads = 24"]


def test_show_prints_findings_and_stops(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(config), "--world-size", "6"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "PAR101" in captured.err) == ("", True)


# ---- lint: what to report, and which files ----


@pytest.mark.parametrize(
    ("words", "left"),
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
def test_select_and_ignore(config: Path, capsys: pytest.CaptureFixture[str], words: str, left: list[str]) -> None:
    config.write_text(MODEL + "idle = dict(a=1)\nparallel = dict(pipline=1, tensor=dict(size=2, mode='1D'))\n")
    status = main(["lint", str(config), "--format", "json", *words.split()])
    records = json.loads(capsys.readouterr().out)
    assert sorted(record["code"] for record in records) == sorted(left)
    assert status == any(record["severity"] == "error" for record in records)


def test_what_cannot_be_read_is_told_whatever_is_selected(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text("model = dict(\n")
    assert main(["lint", str(config), "no/such.py", "--select", "PERF", "--format", "json"]) == 1
    assert {record["code"] for record in json.loads(capsys.readouterr().out)} == {"CFG001", "CFG009", "CFG112"}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--select PERG", "did you mean 'PERF'?"),
        ("--ignore CFG106,unused-dct", "did you mean 'unused-dict'?"),
        ("--ignore HST204", "HST204 is found while a job starts or runs"),
        ("--select QQQQ", "the families are BAT, CFG, DEAD,"),
        ("--statistics --format sarif", "--statistics goes with"),
        ("--fix --diff", "not allowed with argument"),
        ("--stdin-filename a.py", "--stdin-filename goes with `-`"),
        ("-", "`-` cannot be combined with other configs"),
    ],
)
def test_wrong_words_of_lint(config: Path, capsys: pytest.CaptureFixture[str], words: str, said: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["lint", str(config), *words.split()])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err


def test_the_shipped_configs_as_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "configs", "--world-size", "8", "--verbose"]) == 0
    captured = capsys.readouterr()
    over = [line.partition(": ")[0].removeprefix("skipped ") for line in captured.err.splitlines()]
    parts = [str(path) for path in Path("configs/common").rglob("*.py")]
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


def test_a_named_file_is_a_config_whatever_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_stdin_that_is_no_text(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\xfe")))
    with pytest.raises(SystemExit) as ended:
        main(["lint", "-"])
    assert ended.value.code == 2
    assert "stdin is not UTF-8" in capsys.readouterr().err


def test_what_one_flag_needs_is_imported_for_it_alone(config: Path) -> None:
    """A start of the plain command is short: no format, fix or folder of others is loaded."""
    program = "import sys; from dslpar.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"
    ran = subprocess.run(
        [sys.executable, "-c", program, "lint", str(config), "--world-size", "8"], capture_output=True, text=True
    )
    loaded = set(ran.stdout.split())
    assert "dslpar.cli.lint" in loaded
    names = ("selection", "suppressions", "fixes", "config_files", "report.github", "report.sarif")
    assert not loaded & {"json", "hashlib", "tempfile", "yaml", "locale", "dslpar.cli.fix", "dslpar.cluster.hostfile"}
    assert not loaded & {f"dslpar.linter.{name}" for name in names}


@pytest.mark.parametrize("encoding", ["ascii", "utf-8:strict"])
@pytest.mark.parametrize("format_", ["text", "concise", "json", "github", "sarif"])
def test_what_stdout_cannot_encode_is_no_reason_to_stop(tmp_path: Path, encoding: str, format_: str) -> None:
    wrong = (MODEL + "parallel = dict(pipelin=1)  # \u65e5\n").encode()
    for name in (b"\xff.py", "\u65e5.py".encode()):
        Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name)).write_bytes(wrong)
    environ = {**os.environ, "PYTHONIOENCODING": encoding}
    words = [sys.executable, "-m", "dslpar.cli", "lint", str(tmp_path), "--world-size", "8", "--format", format_]
    ran = subprocess.run(words, capture_output=True, env=environ, timeout=60)
    assert (ran.returncode, ran.stderr) == (1, b"")
    assert ran.stdout.count(b"unknown key 'pipelin'") == 2
    diff = subprocess.run([*words, "--diff"], capture_output=True, env=environ, timeout=60)
    assert diff.stdout.count("+parallel = dict(pipeline=1)  # \u65e5\n".encode()) == 2


# ---- pre-commit ----


def test_the_hooks_run_on_a_list_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = yaml.safe_load(Path(".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in hooks] == ["dslpar-lint", "dslpar-fix"]
    for hook in hooks:
        assert {"name", "description", "entry", "language", "types_or", "files"} <= set(hook)
        assert re.search(hook["files"], "configs/gpt_3d.py")
        assert not re.search(hook["files"], "tests/test_x.py")
        program, *words = hook["entry"].split()
        assert program == "tools/pre_commit.py"
        good, bad, part = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "part.py"
        good.write_text(MODEL)
        bad.write_text(MODEL.replace("num_heads", "num_head"))
        part.write_text("train = dict(steps=1)\n")
        assert main([*words, str(good), str(part)]) == 0
        assert main([*words, str(good), str(bad), str(part)]) == (hook["id"] == "dslpar-lint")
        assert (bad.read_text() == MODEL) is (hook["id"] == "dslpar-fix")
    capsys.readouterr()


def hook(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """`tools/pre_commit.py` in a Python without any package, started elsewhere."""
    program = [sys.executable, "-S", str(ROOT / "tools/pre_commit.py")]
    return subprocess.run([*program, *map(str, words)], capture_output=True, text=True, cwd="/", timeout=60)


def test_the_hooks_program_needs_no_package(tmp_path: Path) -> None:
    assert os.access(ROOT / "tools/pre_commit.py", os.X_OK)
    good, bad, in_yaml = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "a.yaml"
    good.write_text(MODEL)
    bad.write_text(MODEL.replace("num_heads", "num_head"))
    in_yaml.write_text("model: {type: GPT}\n")
    assert hook("lint", "--configs-only", good).returncode == 0
    found = hook("lint", "--configs-only", "--format", "concise", good, bad)
    assert found.returncode == 1
    assert "CFG101 unknown-key: unknown key 'num_head'" in found.stdout
    without = hook("lint", "--configs-only", in_yaml)
    assert (without.returncode, without.stdout) == (2, "")
    assert without.stderr.startswith("dslpar's hook needs PyYAML for configs in YAML; it runs by ")


# ---- launch, as far as nothing starts (test_launchers has the rest) ----


def test_launch_prints_the_command_line_alone(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", str(config), "--print", "--world-size", "4", "--launcher", "torchrun", "--resume", "--dry-run"]
    assert main([*words, "train.steps=2"]) == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    assert line.endswith(f"--standalone -m dslpar.training --config {config} --resume --dry-run train.steps=2")
    assert captured.err == ""


def test_launch_prints_one_line_a_host_where_it_needs_them(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=4\nnode2 slots=4\n")
    words = ["launch", str(config), "--print", "--hostfile", str(hosts), "--launcher", "torchrun"]
    assert main(words) == 0
    first, over_ssh, second, also_over_ssh, wait = capsys.readouterr().out.splitlines()
    assert (first, second, wait) == ("# for node1", "# for node2", "wait")
    assert over_ssh.startswith("ssh ")
    assert over_ssh.endswith(" &")
    assert "--node_rank 1" in also_over_ssh
    assert main([*words, "--no-ssh"]) == 0
    first, of_first, second, of_second = capsys.readouterr().out.splitlines()
    assert (first, second) == ("# on node1", "# on node2")
    assert "--node_rank 0" in of_first
    assert "--node_rank 1" in of_second
    assert "ssh " not in of_first + of_second
    assert main([*words, "--no-ssh", "--node-rank", "1"]) == 0
    assert capsys.readouterr().out.splitlines() == [second, of_second]


def test_launch_starts_nothing_on_hosts_that_cannot_be_reached(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = tmp_path / "hosts"
    hosts.write_text("node1.invalid slots=4\nnode2.invalid slots=4\n")
    assert main(["launch", str(config), "--hostfile", str(hosts), "--launcher", "torchrun"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("HST211") == 2, "each of them, at once"
    assert f"{hosts}:2:1: HST211 unreachable-host: node2.invalid has a name that is not known here" in captured.err


def test_launch_starts_nothing_that_lint_refuses(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", str(config), "--world-size", "6"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, "PAR101" in captured.err, "help:" in captured.err) == ("", True, True)


def test_launch_of_a_launcher_that_is_missing(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", str(config), "--world-size", "4", "--launcher", "slurm"]) == 1
    assert "HST204 launcher-not-installed: slurm: no srun here" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["lint", "explain", "show", "launch"])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], [command]):
        with pytest.raises(SystemExit) as stopped:
            main([*words, "--help"])
        assert stopped.value.code == 0
        assert command in capsys.readouterr().out


def test_a_long_line_is_cut_around_the_caret() -> None:
    line = "x = [" + "1, " * 200 + "]"
    place = Location("f.py", 1, 300, 1, 301)
    finding = Finding("CFG102", "wrong-type", "error", "said", "fix", place)
    shown, caret = report_text.block(finding, {"f.py": line}).splitlines()[1:3]
    assert len(shown) < 180
    assert shown[caret.index("^")] == line[299]


def test_a_tab_keeps_the_caret_in_place() -> None:
    finding = Finding("CFG102", "wrong-type", "error", "said", "fix", Location("f.py", 1, 3, 1, 4))
    assert report_text.block(finding, {"f.py": "\tx1\n"}).splitlines()[2] == "      | \t ^"


def test_flags_are_not_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    """--res, which would be taken for --resume, may mean something else one day."""
    with pytest.raises(SystemExit) as ended:
        main(["launch", "configs/gpt_3d.py", "--world-size", "8", "--print", "--res"])
    assert ended.value.code == 2
    assert "--res" in capsys.readouterr().err


def test_who_reads_no_further_gets_no_traceback() -> None:
    """As in `dslpar explain TEN101 | head -1`."""
    command = f"{sys.executable} -m dslpar.cli explain TEN101"
    with subprocess.Popen(command.split(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=30) == 128 + 13
