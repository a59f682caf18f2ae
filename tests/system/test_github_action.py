"""The GitHub action: its shell steps run in bash, on two commits of a repository, without a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.paths import ROOT

FOLDER = ROOT / ".github" / "actions" / "lint"
STEPS = yaml.safe_load((FOLDER / "action.yml").read_text())["runs"]["steps"]
SMALL = "model = dict(type='GPT', num_layers=4, hidden_size=128, num_heads=8, vocab_size=256, max_seq_len=128)\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "configs").mkdir(parents=True)
    for name in ("changed.py", "same.py", "gone.py"):
        (folder / "configs" / name).write_text(SMALL)
    commit(folder, "init", "-q")
    commit(folder, "add", "-A")
    commit(folder, "commit", "-qm", "before")
    commit(folder, "branch", "base")
    (folder / "configs" / "changed.py").write_text(SMALL.replace("num_layers=4", "num_layers=400"))
    (folder / "configs" / "gone.py").unlink()
    (folder / "configs" / "wrong.py").write_text(SMALL.replace("num_heads=8", "num_head=8"))
    commit(folder, "add", "-A")
    commit(folder, "commit", "-qm", "after")
    return folder


def commit(folder: Path, *words: str) -> None:
    subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=folder, check=True)


def step(name: str, repository: Path) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does: `bash -eo pipefail`, with the files that its variables name."""
    (run,) = [each["run"] for each in STEPS if each.get("id") == name]
    files = repository.parent
    env = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(files),
        "GITHUB_ACTION_PATH": str(FOLDER),
        "GITHUB_STEP_SUMMARY": str(files / "summary"),
        "GITHUB_OUTPUT": str(files / "output"),
        "BASE": "base",
        "CONFIGS": "configs",
        "FLAGS": "--world-size 8",
        "DEVICE": "h100-80g",
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run]
    return subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)


def test_the_comment_has_what_changed(repository: Path) -> None:
    ran = step("plan", repository)
    assert ran.returncode == 0, ran.stderr
    table = (repository.parent / "dslpar-plan.md").read_text()
    head, _, changed, gone, wrong = table.splitlines()
    assert head == "| config | memory of the fullest rank | time per step |"
    row = (
        r"\| `configs/changed.py` \| [\d.]+ GiB -> [\d.]+ GiB \(\+[\d.]+ %\) \| [\d.]+ s -> [\d.]+ s \(\+[\d.]+ %\) \|"
    )
    assert re.fullmatch(row, changed)
    assert re.fullmatch(r"\| `configs/gone.py` \(no such config\) \| [\d.]+ GiB -> - \| [\d.]+ s -> - \|", gone)
    assert wrong == "| `configs/wrong.py` (errors) | - -> - | - -> - |"
    assert (repository.parent / "summary").read_text() == table
    assert (repository.parent / "output").read_text() == "changed=true\n"


def test_no_comment_without_a_change(repository: Path) -> None:
    commit(repository, "branch", "-f", "base", "HEAD")
    assert step("plan", repository).returncode == 0
    assert (repository.parent / "dslpar-plan.md").read_text() == ""
    assert not (repository.parent / "output").exists()


def test_an_unknown_base_fails(repository: Path) -> None:
    commit(repository, "branch", "-D", "base")
    assert step("plan", repository).returncode != 0


def test_findings_are_annotations_and_sarif(repository: Path) -> None:
    ran = step("lint", repository)
    assert ran.returncode == 1
    assert "::error file=configs/wrong.py,line=1" in ran.stdout
    assert step("sarif", repository).returncode == 0
    assert '"CFG101"' in (repository.parent / "dslpar.sarif").read_text()


def test_actions_are_pinned_and_no_input_is_in_a_shell_text() -> None:
    used = [each["uses"] for each in STEPS if "uses" in each]
    assert len(used) == 2
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", each) for each in used)
    assert [each["run"] for each in STEPS if "${{" in each.get("run", "")] == []
