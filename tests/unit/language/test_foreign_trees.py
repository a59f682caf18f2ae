"""Config trees in LiBai's and ColossalAI's shapes: values equal those that CPython computes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dslpar.core.errors import has_errors
from dslpar.language.load import load
from dslpar.language.tree import Reference
from tests.support.paths import ROOT

TREES = ROOT / "tests" / "support" / "foreign_configs"
NOT_OURS = {
    "colossalai/sharded_zero.py": "CFG003",  # creates an object
    "colossalai/from_environment.py": "CFG003",  # its values depend on where it runs
}
"""Code that CPython evaluates and a config must not contain; the finding has this code."""


def plain(value: Any) -> Any:
    """Convert as tests.support.python_configs does."""
    if isinstance(value, Reference):
        return {"$name": value.name}
    if isinstance(value, dict):
        return {"$dict": [[plain(key), plain(item)] for key, item in value.items()]}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return {"$tuple": [plain(item) for item in value]} if isinstance(value, tuple) else value


def run_by_python(tree: Path, files: list[Path]) -> dict[str, Any]:
    command = [sys.executable, "-B", "-m", "tests.support.python_configs", str(tree), *map(str, files)]
    ended = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=ROOT, env={**os.environ, "BATCH": "8"}
    )
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


@pytest.mark.parametrize("name", ["libai", "colossalai"])
def test_values_equal_those_of_cpython(name: str) -> None:
    tree = TREES / name
    files = sorted(tree.rglob("*.py"))
    by_python = run_by_python(tree, files)
    compared = 0
    for file in files:
        config = load(str(file))
        refused = NOT_OURS.get(file.relative_to(TREES).as_posix())
        if refused:
            assert refused in {item.code for item in config.findings}, file
            continue
        assert not has_errors(config.findings), (file, config.findings[0].concise())
        values = {key: plain(node.plain()) for key, node in config.root.value.items()}
        assert values == by_python[str(file)], file
        compared += 1
    assert compared == {"libai": 23, "colossalai": 9}[name]
