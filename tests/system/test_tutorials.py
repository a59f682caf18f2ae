"""docs/tutorials: every block of code runs, in the page's order and in its own folder.

`tests/support/tutorials.py` describes the kinds of blocks. Here `dslpar launch` and `torchrun` start their ranks by a
fork, and the page's programs run unchanged.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from dslpar.cli.main import main as cli
from tests.support.forked_training import start_program
from tests.support.paths import ROOT
from tests.support.tutorials import FOLDER, PAGES, blocks, commands
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

OF_THE_CHECKOUT = ("configs", "hostfiles", "tools", "train.py", "dslpar", "layers")
WORDS_A_MINUTE = 200


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_short_and_has_no_block_that_is_not_run(page: str) -> None:
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    assert len(text.split()) < 10 * WORDS_A_MINUTE, "ten minutes to read"
    assert blocks(page)
    assert len(blocks(page)) == text.count("\n```") // 2 + text.startswith("```"), "a block is not closed"
    for block in blocks(page):
        assert block.language == "console" or block.name, f"{page}.md:{block.line}: neither a file nor commands"


def test_the_index_has_every_page() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\]\((\w+)\.md\)", index)) == PAGES


KUBERNETES = json.loads((ROOT / "tests" / "support" / "kubernetes-1.37.json").read_text())["definitions"]


def manifests() -> list[dict[str, Any]]:
    """Return the manifests of Kubernetes."""
    (block,) = (block for block in blocks("hosts") if block.language == "yaml")
    return list(yaml.safe_load_all(block.text))


def test_the_manifests_are_valid() -> None:
    for manifest in manifests():
        jsonschema.Draft7Validator(KUBERNETES[manifest["kind"]]).validate(manifest)
    assert {manifest["kind"] for manifest in manifests()} == KUBERNETES.keys()
    *_, job = manifests()
    with pytest.raises(jsonschema.ValidationError, match="completionmode"):
        jsonschema.Draft7Validator(KUBERNETES["Job"]).validate(
            job | {"spec": job["spec"] | {"completionmode": "Indexed"}}
        )


def test_what_a_pod_runs_is_what_the_page_prints() -> None:
    """The manifest's command is the page's, apart from the path of the hosts' file, and the pod's number."""
    *_, hosts, job = manifests()
    (container,) = job["spec"]["template"]["spec"]["containers"]
    of_pod = " ".join([*container["command"], *container["args"]])
    shown = next(each.text for block in blocks("hosts") for each in commands(block) if "hosts_of_pods" in each.text)
    assert of_pod.replace("/hosts/hosts", "hosts_of_pods").replace("$(JOB_COMPLETION_INDEX)", "1") + " --print" == shown
    (listed,) = (block.text for block in blocks("hosts") if block.name == "hosts_of_pods")
    assert hosts["data"]["hosts"] == listed


@pytest.mark.prove
@pytest.mark.parametrize("page", [page for page in PAGES if page != "your_text"])  # test_new_user.py runs that page
def test_every_block_of_a_page_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if re.search(r"transformers\.|import transformers|from transformers", str(blocks(page))) and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    for name in OF_THE_CHECKOUT:
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    for block in blocks(page):
        where = f"{page}.md:{block.line}"
        if block.language != "console":
            file = tmp_path / block.name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text, encoding="utf-8")
            continue
        for command in commands(block):
            command.check(*run(command.text, tmp_path), where)


# ---- commands ----


def run(command: str, folder: Path) -> tuple[int, str]:
    """Run a command of a page, and return its status and output."""
    words = shlex.split(command)
    if words[:2] == ["dslpar", "launch"] and not {"--print", "--check"} & set(words):
        return launch(words[2:], folder)
    if words[0] == "torchrun":
        count, program = int(words[words.index("--nproc_per_node") + 1]), words[3]
        return forked(count, lambda: run_file(program, words[4:]), folder)
    if words[:2] in (["dslpar", "eval"], ["dslpar", "generate"]):
        return forked(1, lambda: cli(words[1:]), folder)
    if words[0] == "dslpar":
        return in_process(words[1:])
    ran = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True)
    return ran.returncode, ran.stdout + ran.stderr


def in_process(words: list[str]) -> tuple[int, str]:
    """Run a command of dslpar in this process."""
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            status = cli(words)
        except SystemExit as ended:
            status = int(ended.code or 0)
    return status, printed.buffer.getvalue().decode()  # type: ignore[attr-defined]


def launch(words: list[str], folder: Path) -> tuple[int, str]:
    """Run `dslpar launch CFG --world-size N ...`: the same lint, and then the same program on as many ranks."""
    at = words.index("--world-size")
    count, rest = int(words[at + 1]), words[:at] + words[at + 2 :]
    config = next(word for word in rest if not word.startswith("-") and "=" not in word)
    rest.remove(config)

    def program() -> int:
        from dslpar.training.main import main

        return main(["--config", config, *rest])

    return forked(count, program, folder)


def run_file(name: str, argv: list[str]) -> int:
    """Run a program of the page, as Python runs a file."""
    sys.argv = [name, *argv]
    runpy.run_path(name, run_name="__main__")
    return 0


def forked(count: int, program: Callable[[], int], folder: Path) -> tuple[int, str]:
    """Fork ranks in the page's folder, and return the first nonzero status."""

    def there() -> int:
        os.chdir(folder)
        sys.path.insert(0, str(folder))  # as `python -m` does, which `dslpar launch` starts
        return program()

    said = folder / ".said"
    said.write_text("")
    with start_program(count, there, said) as job:
        statuses = job.wait(200)
    return next((int(status) for status in statuses if status), 0), said.read_text(encoding="utf-8")
