"""tools/pre_commit.py and .pre-commit-hooks.yaml: the hooks run on a list of files, without any package."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dslpar.cli.main import main
from tests.support.lint import MODEL
from tests.support.paths import ROOT


def test_the_hooks_run_on_a_list_of_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hooks = yaml.safe_load(Path(".pre-commit-hooks.yaml").read_text())
    assert [hook["id"] for hook in hooks] == ["dslpar-lint", "dslpar-fix"]
    for hook in hooks:
        assert {"name", "description", "entry", "language", "types_or", "files"} <= set(hook)
        for name in (
            "configs/gpt_3d.py",
            "a/config/b.yaml",
            "config.py",
            "a/config.yml",
            "my_configs/a/b.py",
            "gpt_config.py",
        ):
            assert re.search(hook["files"], name), name
        for name in ("tests/test_x.py", "configurable.py", "myconfigs.py", "a/config_loader.py", "config.json"):
            assert not re.search(hook["files"], name), name
        program, *argv = hook["entry"].split()
        assert program == "tools/pre_commit.py"
        good, bad, part = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "part.py"
        good.write_text(MODEL)
        bad.write_text(MODEL.replace("num_heads", "num_head"))
        part.write_text("train = dict(steps=1)\n")
        assert main([*argv, str(good), str(part)]) == 0
        assert main([*argv, str(good), str(bad), str(part)]) == (hook["id"] == "dslpar-lint")
        assert (bad.read_text() == MODEL) is (hook["id"] == "dslpar-fix")
    capsys.readouterr()


def hook(*argv: str | Path) -> subprocess.CompletedProcess[str]:
    """Run `tools/pre_commit.py` in a Python without packages, from another folder."""
    program = [sys.executable, "-S", str(ROOT / "tools/pre_commit.py")]
    return subprocess.run([*program, *map(str, argv)], capture_output=True, text=True, cwd="/")


def test_the_hook_program_needs_no_package(tmp_path: Path) -> None:
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
    assert without.stderr.startswith("dslpar's hook needs PyYAML for configs in YAML; it runs on ")
