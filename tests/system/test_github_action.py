"""The GitHub action: its shell steps run in bash, on two commits of a repository, without a network."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def step(name: str, repository: Path, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a step as GitHub does: `bash -eo pipefail`, with the files that its variables name."""
    (run,) = [each["run"] for each in STEPS if each.get("id") == name]
    files = repository.parent
    env = {
        **os.environ,
        "PATH": f"{files / 'bin'}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "RUNNER_TEMP": str(files),
        "GITHUB_ACTION_PATH": str(FOLDER),
        "GITHUB_STEP_SUMMARY": str(files / "summary"),
        "GITHUB_OUTPUT": str(files / "output"),
        "BASE": "base",
        "CONFIGS": "configs",
        "FLAGS": "--world-size 8",
        "DEVICE": "h100-80g",
        **more,
    }
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", run]
    return subprocess.run(command, cwd=repository, env=env, capture_output=True, text=True)


def test_lint_comes_first_and_later_steps_run_whatever_it_finds() -> None:
    names = [each.get("id") for each in STEPS]
    assert names.index("lint") == names.index("install") + 1
    later = STEPS[names.index("lint") + 1 :]
    assert len(later) == 4
    assert all(each["if"].startswith("${{ !cancelled() && steps.") for each in later)
    assert not any("continue-on-error" in each for each in STEPS)


# The comment --------------------------------------------------------------------------------------------------------


def test_the_table_has_what_changed(repository: Path) -> None:
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


def test_nothing_changed(repository: Path) -> None:
    commit(repository, "branch", "-f", "base", "HEAD")
    assert step("plan", repository).returncode == 0
    assert (repository.parent / "dslpar-plan.md").read_text() == ""
    assert (repository.parent / "output").read_text() == "changed=false\n"


def test_a_missing_merge_base_is_a_warning_that_says_what_to_set(repository: Path) -> None:
    commit(repository, "branch", "-D", "base")
    ran = step("plan", repository)
    assert ran.returncode == 0
    assert "::warning" in ran.stdout
    assert "give actions/checkout fetch-depth: 0\n" in ran.stdout
    assert not (repository.parent / "output").exists(), "the comment's step is skipped"


def test_configs_whose_files_did_not_change_are_not_planned(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.util.spec_from_file_location("plan_changes", FOLDER / "plan_changes.py")
    assert module is not None
    assert module.loader is not None
    plan_changes = importlib.util.module_from_spec(module)
    module.loader.exec_module(plan_changes)
    planned: list[str] = []
    monkeypatch.setattr(plan_changes, "_row", lambda name, *_: planned.append(name))
    monkeypatch.chdir(repository)
    (repository / "configs" / "importer.py").write_text("from .changed import model\n")
    (repository / "README.md").write_text("documentation\n")
    commit(repository, "add", "-A")
    commit(repository, "commit", "-qm", "an importer")
    commit(repository, "branch", "-f", "base")
    (repository / "configs" / "changed.py").write_text(SMALL.replace("num_layers=4", "num_layers=8"))
    (repository / "README.md").write_text("other documentation\n")
    commit(repository, "commit", "-qam", "a change")
    plan_changes.main("base", "configs")
    assert planned == ["configs/changed.py", "configs/importer.py"]
    planned.clear()
    (repository / "model.json").write_text("{}")  # a file that a config may name
    commit(repository, "add", "-A")
    commit(repository, "commit", "-qm", "a file")
    plan_changes.main("base", "configs")
    assert planned == [f"configs/{name}.py" for name in ("changed", "importer", "same", "wrong")]


GH = """\
#!{python}
import json, pathlib, sys
folder = pathlib.Path(__file__).parent
with open(folder / "calls", "a") as file:
    print(json.dumps(sys.argv[1:]), file=file)
if "--paginate" in sys.argv:
    print({ids!r}, end="")
elif {status}:
    print("Resource not accessible by integration (HTTP 403)", file=sys.stderr)
    sys.exit({status})
"""
"""A program in place of GitHub's, which no test can reach. It records its arguments, and lists these comments' ids."""
LISTED = ["api", "--paginate", "repos/a/b/issues/7/comments"]


def comment_of(repository: Path, changed: bool, ids: str = "", status: int = 0, fork: bool = False) -> tuple[str, Any]:
    """Run the comment's step; return its output, and the arguments of each call of `gh`."""
    folder = repository.parent / "bin"
    folder.mkdir()
    (folder / "gh").write_text(GH.format(python=sys.executable, ids=ids, status=status))
    (folder / "gh").chmod(0o755)
    (repository.parent / "dslpar-plan.md").write_text("| table |\n" if changed else "")
    variables = {"CHANGED": str(changed).lower(), "FORK": str(fork).lower(), "REPOSITORY": "a/b", "NUMBER": "7"}
    ran = step("comment", repository, **variables)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, [json.loads(line) for line in (folder / "calls").read_text().splitlines()]


def test_the_first_comment_is_new_and_has_the_marker(repository: Path) -> None:
    printed, (listed, written) = comment_of(repository, changed=True)
    assert printed == ""
    assert listed[:3] == LISTED
    assert listed[4] == '.[] | select(.body | startswith("<!-- dslpar plan -->")) | .id'
    body = f"body=@{repository.parent / 'dslpar-comment.md'}"
    assert written == ["api", "--method", "POST", "repos/a/b/issues/7/comments", "--field", body]
    assert (repository.parent / "dslpar-comment.md").read_text() == "<!-- dslpar plan -->\n| table |\n"


@pytest.mark.parametrize(("changed", "text"), [(True, "| table |"), (False, "No layout changed.")])
def test_an_old_comment_is_updated(repository: Path, changed: bool, text: str) -> None:
    _, (_, written) = comment_of(repository, changed, ids="12\n34\n")
    assert written[:4] == ["api", "--method", "PATCH", "repos/a/b/issues/comments/12"]
    assert (repository.parent / "dslpar-comment.md").read_text() == f"<!-- dslpar plan -->\n{text}\n"


def test_without_a_change_there_is_no_new_comment(repository: Path) -> None:
    printed, calls = comment_of(repository, changed=False)
    assert (printed, len(calls)) == ("", 1)


@pytest.mark.parametrize(
    ("fork", "expected"),
    [
        (True, "::notice title=dslpar::no comment: the token of a fork's pull request may only read;"),
        (
            False,
            "::warning title=dslpar::no comment: gh failed, see the log; the job needs permissions: {pull",
        ),
    ],
)
def test_a_comment_that_cannot_be_written_fails_nothing(repository: Path, fork: bool, expected: str) -> None:
    printed, _ = comment_of(repository, changed=True, status=1, fork=fork)
    assert expected in printed
    assert "HTTP 403" in printed


# Lint ---------------------------------------------------------------------------------------------------------------


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


@pytest.mark.skipif(shutil.which("check-jsonschema") is None, reason="PyPI's package check-jsonschema is not installed")
def test_the_schema_of_actions_accepts_the_file() -> None:
    command = ["check-jsonschema", "--builtin-schema", "vendor.github-actions", str(FOLDER / "action.yml")]
    checked = subprocess.run(command, env={"PATH": os.environ["PATH"]}, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
