"""Types of sections: generated from the declarations, accepted by lint, and checked by mypy and Pyright."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import typing
from pathlib import Path

import pytest

from dslpar import config_types
from dslpar.language.load import load_text
from dslpar.linter import check
from dslpar.provenance import typed_dicts
from dslpar.provenance.reference import NAMES, rows
from tests.support.paths import ROOT

CONFIG = """\
from dslpar.config import Batch, GPT, Parallel, TensorParallel

parallel: Parallel = {{"pipeline": 2, "tensor": {{"size": 4, "mode": {mode}}}}}
model = GPT(type="GPT", num_layers=2, hidden_size=64, num_heads=4, vocab_size=256, max_seq_len=64)
batch = Batch({key}=8)
"""


def test_the_module_is_that_of_the_declarations() -> None:
    ruff = [sys.executable, "-m", "ruff", "format", "--config", str(ROOT / "pyproject.toml"), "-"]
    made = subprocess.run(ruff, input=typed_dicts.text(), capture_output=True, text=True, timeout=60, check=True)
    assert typed_dicts.PATH.read_text() == made.stdout, (
        "python -m dslpar.provenance.typed_dicts --write, then ruff format"
    )


def test_every_key_of_a_section_is_in_its_type() -> None:
    hints = {name: typing.get_type_hints(getattr(config_types, name)) for name in ("Parallel", "Batch", "Train")}
    for section, name in (("parallel", "Parallel"), ("batch", "Batch"), ("train", "Train")):
        keys = {
            row.key.partition(".")[2] for row in rows() if row.key.count(".") == 1 and row.key.startswith(f"{section}.")
        }
        assert keys - {"*"} <= set(hints[name])


def test_lint_reads_a_typed_config() -> None:
    config = load_text(CONFIG.format(mode="'1d'", key="global_size"), "cfg.py")
    assert config.root.get("parallel.tensor.size").plain() == 4  # type: ignore[union-attr]
    assert config.root.get("model.hidden_size").plain() == 64  # type: ignore[union-attr]
    assert [item.code for item in check.check(config, 8).findings if item.severity == "error"] == []


TEXTS = {"right": ("'1d'", "global_size"), "mode": ("'4d'", "global_size"), "key": ("'1d'", "globl_size")}
"""File -> a mode and a key; the checkers refuse all but the first."""


def _write(folder: Path) -> None:
    for name, (mode, key) in TEXTS.items():
        (folder / f"{name}.py").write_text(CONFIG.format(mode=mode, key=key))


@pytest.mark.prove
@pytest.mark.minutes(5)
def test_mypy_checks_typed_configs(tmp_path: Path) -> None:
    """One run for all of them: mypy reads dslpar once."""
    _write(tmp_path)
    command = [sys.executable, "-m", "mypy", "--no-error-summary", "--follow-imports=silent", "--cache-dir", "cache"]
    files = [f"{name}.py" for name in TEXTS]
    done = subprocess.run([*command, *files], cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert [line.partition(":")[0] for line in sorted(errors)] == ["key.py", "mode.py"], done.stdout + done.stderr
    assert "globl_size" in done.stdout
    assert '"tensor"' in done.stdout


@pytest.mark.skipif(shutil.which("pyright") is None, reason="npm's package `pyright` is not installed")
def test_pyright_checks_typed_configs_and_the_shipped_sections(tmp_path: Path) -> None:
    _write(tmp_path)
    (tmp_path / "shipped.py").write_text(_shipped())
    settings = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--outputjson", *(f"{name}.py" for name in (*TEXTS, "shipped"))]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    found = {Path(each["file"]).name: each["message"] for each in json.loads(done.stdout)["generalDiagnostics"]}
    assert sorted(found) == ["key.py", "mode.py"], done.stdout
    assert "TensorParallel" in found["mode.py"]


def _shipped() -> str:
    """Return the sections of the shipped configs that have a type, as annotated dicts."""
    lines = ["from dslpar import config_types", "from typing import Any"]
    of_section = {"parallel": "Parallel", "batch": "Batch", "train": "Train", "zero": "Zero", "cluster": "Cluster"}
    of_type = {name: cls.__name__ for cls, name in NAMES.items()}
    for path in sorted((ROOT / "configs").rglob("*.py")):
        config = check.load(str(path))
        for section, node in config.root.value.items() if config.has("model") else ():
            value = node.plain()
            given = value.get("type") if node.is_mapping else None
            name = of_section.get(section) if given is None else of_type.get(str(given))
            if node.is_mapping and name is not None and "Reference(" not in repr(value):
                lines.append(f"_{len(lines)}: config_types.{name} = {value!r}")
    assert len(lines) > 50
    return "\n".join(lines) + "\n"
