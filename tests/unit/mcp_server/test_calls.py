"""Answers of the tools, and the overview, without the package `mcp`."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dslpar.cli.main import COMMANDS, main
from dslpar.core.errors import DslparError, Location
from dslpar.language.errors import ConfigError, finding
from dslpar.layout.modes import MODES
from dslpar.mcp_server import calls, overview
from dslpar.mcp_server.tools import RefusedError, command_line
from tests.support.paths import ROOT


def test_a_long_list_is_cut_after_whole_entries() -> None:
    made = [{"page": "x" * 1000}] * 300
    kept, note = calls.cut(made)
    assert 0 < len(kept) < 300
    assert len(json.dumps(kept)) <= calls.MAX_CHARACTERS
    assert note == f"cut: the first {len(kept)} of 300 entries; ask for less"


def test_a_long_object_loses_its_longest_keys() -> None:
    kept, note = calls.cut({"world_size": 8, "groups": ["x" * 100] * 2000, "stages": ["y"]})
    assert kept == {"world_size": 8, "stages": ["y"]}
    assert note == "cut: without groups: too long"


def test_what_is_short_stays() -> None:
    assert calls.cut([1, 2]) == ([1, 2], "")


def test_a_command_without_json_has_no_result() -> None:
    output = calls.run(main, ["explain", "TEN999", "--format=json"])
    assert output.status == 2
    with pytest.raises(calls.CallError, match="unknown rule 'TEN999'"):
        calls.answer("explain", output)


@pytest.mark.parametrize(
    "error",
    [
        DslparError([finding("CFG009", Location("a.py"), "cannot read 'b.py'")]),
        ConfigError("CFG009", "cannot read 'b.py'"),
        ValueError("cannot read 'b.py'"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_that_the_command_does_not_print_has_its_text(error: Exception) -> None:
    def command(line: Sequence[str]) -> int:
        raise error

    output = calls.run(command, ["import", "a.py"])
    assert output.status == 2
    with pytest.raises(calls.CallError, match=re.escape("cannot read 'b.py'")):
        calls.answer("import", output)


def test_arguments_become_flags(tmp_path: Path) -> None:
    given = {"path": "c.py", "overrides": ["zero.stage=1"], "world_size": 8}
    assert command_line("lint", given, str(tmp_path)) == [
        *("lint", "c.py", "zero.stage=1", "--format=json", "--world-size=8"),
    ]
    assert command_line("runs", {"folder": "out"}, str(tmp_path)) == ["runs", "list", "out", "--format=json"]
    for bad in ({"path": "-x"}, {"path": "c.py", "overrides": ["--fix"]}, {"path": "../c.py"}):
        with pytest.raises(RefusedError):
            command_line("lint", bad, str(tmp_path))


def test_the_overview_has_all_commands_and_modes_and_is_short() -> None:
    text = overview.text(COMMANDS)
    assert len(text.encode()) < 12_000
    assert all(f"- dslpar {name}: " in text for name in COMMANDS)
    assert all(f"\n- {mode}: " in text for mode in MODES)
    assert "- 3d: size 8, 27, 64;" in text
    assert "num_layers: int>=1!" in text
    assert "reduce_bucket_size" not in text  # DeepSpeed's own


@pytest.mark.parametrize(
    ("type", "expected"),
    [
        ("a whole number, at least 1 (and below 2**31)", "int>=1"),
        ("a number, at least 0 and below 1", "0<=float<1"),
        ("a number above 0", "float>0"),
        ("one of 'a', 'b'", "'a'|'b'"),
        ("a dict, or its size", "dict or size"),
        ("three whole numbers (x, y, z)", "three whole numbers (x, y, z)"),
    ],
)
def test_types_have_short_forms(type: str, expected: str) -> None:
    assert overview.short(type) == expected


def test_without_the_extra_the_message_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(sys, "path", list(sys.path))  # which the command changes
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else real(name))
    with pytest.raises(SystemExit):
        main(["mcp", "--root", str(tmp_path)])
    shown = " ".join(capsys.readouterr().err.split())
    assert "dslpar mcp needs mcp, which is not installed: pip install 'dslpar[mcp]'" in shown


def test_a_root_that_is_no_folder_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["mcp", "--root", str(tmp_path / "none")])
    assert "is not a folder" in capsys.readouterr().err


def test_lint_and_plan_open_files_through_python(tmp_path: Path) -> None:
    """A library in another language would open files past the confinement, which Python alone reports to."""
    (tmp_path / "cfg.py").write_text(
        "model = dict(type='GPT', num_layers=2, hidden_size=96, num_heads=8, vocab_size=256, max_seq_len=96)\n"
        "batch = dict(global_size=16, micro_size=2)\n"
        "data = dict(type='text', files=['text.txt'], tokenizer='tokenizer')\n"
    )
    (tmp_path / "text.txt").write_text("hello\n")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text(
        '{"model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}'
    )
    (tmp_path / "cfg.yaml").write_text("parallel: {pipeline: 2}\nbatch: {global_size: 4}\n")
    program = (
        "import sys\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from dslpar.cli.main import main\n"
        "for name in ('cfg.py', 'cfg.yaml'):\n"
        "    for line in (['lint'], ['show'], ['plan', '--device=h100-80g'], ['diff', 'cfg.py']):\n"
        "        main([*line, name, '--world-size=2'])\n"
        "files = {name: getattr(module, '__file__', None) or '' for name, module in sys.modules.items()}\n"
        "installed = {name.partition('.')[0] for name, file in files.items()"
        " if file.endswith('.so') and '-packages' in file}\n"
        "print('native:', *sorted(installed))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    native = set(ran.stdout.splitlines()[-1].split()[1:])
    assert native <= {"yaml", "xxhash"}, "does it open files that a config names?"  # these two get bytes
