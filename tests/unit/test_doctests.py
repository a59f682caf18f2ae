"""Examples in docstrings: each `>>>` gives what stands below it."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.paths import ROOT

WITH_TORCH = ("layers", "distributed", "engine", "training", "checkpoint", "policies", "inference", "parity", "dry_run")
"""Packages whose modules import torch; `make prove` runs their examples."""


def modules() -> list[str]:
    """Return the modules with examples; those of dslpar.layers once."""
    paths = [path for top in ("dslpar", "layers") for path in (ROOT / top).rglob("*.py") if ">>> " in path.read_text()]
    return sorted({_name(path.relative_to(ROOT)) for path in paths})


def _name(path: Path) -> str:
    parts = [part for part in path.with_suffix("").parts if part != "__init__"]
    return ".".join(parts if parts[0] == "dslpar" else ["dslpar", *parts])


def failed(names: list[str]) -> tuple[int, list[str]]:
    """Run the examples; return their number, and the modules in which one fails."""
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = {name: doctest.testmod(import_module(name), optionflags=options) for name in names}
    return sum(each.attempted for each in found.values()), [name for name, each in found.items() if each.failed]


def test_examples_without_torch() -> None:
    count, wrong = failed([name for name in modules() if name.split(".")[1] not in WITH_TORCH])
    assert wrong == []
    assert count > 100


@pytest.mark.prove
def test_examples_with_torch() -> None:
    count, wrong = failed([name for name in modules() if name.split(".")[1] in WITH_TORCH])
    assert wrong == []
    assert count > 10


def test_a_wrong_example_is_seen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = import_module("dslpar.core.suggest")
    monkeypatch.setattr(module, "__doc__", ">>> 1 + 1\n3\n")
    assert failed(["dslpar.core.suggest"])[1] == ["dslpar.core.suggest"]
    assert "Expected:" in capsys.readouterr().out
