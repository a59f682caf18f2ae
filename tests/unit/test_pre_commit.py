"""`.pre-commit-hooks.yaml`: the hooks run on a list of files, and pre-commit installs and runs them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
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
        assert (program, hook["language"]) == ("dslpar", "python")
        good, bad, part = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "part.py"
        good.write_text(MODEL)
        bad.write_text(MODEL.replace("num_heads", "num_head"))
        part.write_text("train = dict(steps=1)\n")
        assert main([*argv, str(good), str(part)]) == 0
        assert main([*argv, str(good), str(bad), str(part)]) == (hook["id"] == "dslpar-lint")
        assert (bad.read_text() == MODEL) is (hook["id"] == "dslpar-fix")
    capsys.readouterr()


def run(*command: str, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" and not name.startswith("GIT_")}
    return subprocess.run(command, cwd=cwd, env=env | environ, capture_output=True, text=True, timeout=300)


def committed(folder: Path) -> str:
    """Make a repository of a folder, and return its only commit."""
    git = ("git", "-c", "user.name=a", "-c", "user.email=a@example.org")
    for words in (("init", "-q"), ("add", "-A"), ("commit", "-q", "-m", "all")):
        assert run(*git, *words, cwd=folder).returncode == 0
    return run("git", "rev-parse", "HEAD", cwd=folder).stdout.strip()


@pytest.mark.prove
def test_pre_commit_installs_and_runs_the_hook(tmp_path: Path) -> None:
    """pre-commit clones the repository and installs it with pip, which needs a package index; it brings no torch."""
    if importlib.util.find_spec("pre_commit") is None:
        pytest.skip("needs pre-commit: pip install -e '.[test]'")
    if run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "PyYAML", cwd=tmp_path).returncode:
        pytest.skip("pip reaches no package index")
    source, mine, home = tmp_path / "dslpar", tmp_path / "mine", tmp_path / "home"
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    if listed.returncode:
        pytest.skip("not a git checkout")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    (mine / "configs").mkdir(parents=True)
    (mine / "configs/good.py").write_text(MODEL)
    (mine / "configs/bad.yaml").write_text("model: {type: GTP}\n")
    repo = {"repo": str(source), "rev": committed(source), "hooks": [{"id": "dslpar-lint"}]}
    (mine / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [repo]}))
    committed(mine)
    command = (sys.executable, "-m", "pre_commit", "run", "--all-files", "--color", "never")
    ran = run(*command, cwd=mine, PRE_COMMIT_HOME=str(home))
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert "unknown model 'GTP'" in ran.stdout
    assert "good.py" not in ran.stdout
    (site,) = home.glob("*/py_env-*/lib/python*/site-packages")
    assert {path.name for path in site.iterdir()} >= {"dslpar", "psutil", "yaml"}
    assert {path.name for path in site.iterdir()}.isdisjoint({"torch", "deepspeed", "numpy"})
