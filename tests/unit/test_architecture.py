"""docs/architecture.md on imports that import-linter cannot see: modules named in strings."""

from __future__ import annotations

import ast
import configparser
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT

DOORS = {
    "dslpar/__init__.py": "the public names, each imported at its first use",
    "dslpar/schema/families.py": "a model family's package, whose modules are found by their names",
    "dslpar/schema/class_sections.py": "what a config may call a family",
    "dslpar/schema/data_reader.py": "what a config may call a type of data",
    "dslpar/linter/imported_classes.py": "what a config may call a family",
    "dslpar/linter/registry.py": "packages above that bring rules of their own",
    "dslpar/migrate/libai.py": "what a config of LiBai becomes",
    "dslpar/migrate/colossalai.py": "what a config of ColossalAI becomes",
    "dslpar/core/trust.py": "packages whose classes a config may call",
    "dslpar/cluster/command.py": "what `python -m` runs on every rank",
    "dslpar/language/functions.py": "where a config takes LazyCall from",
    "dslpar/watchdog/processes.py": "what `python -m` runs above a rank",
}
"""Files that may name modules which stand above them, or anywhere; and what these names are."""
ENVIRONMENT = {
    "dslpar/training/main.py": "a rank of train.py starts",
    "dslpar/api.py": "a rank of a program starts",
    "dslpar/inference/ranks.py": "a rank of `dslpar generate` or `eval` starts",
    "dslpar/parity/prove_on_devices.py": "a rank of `dslpar prove --on-devices` starts",
    "dslpar/distributed/measure.py": "a rank of `dslpar measure` starts",
    "dslpar/distributed/forked_ranks.py": "it sets the variables of the ranks that it forks",
    "dslpar/compat/launch.py": "launch() of ColossalAI gives a rank's place, which its start reads",
    "dslpar/watchdog/guard.py": "a guard's process starts",
    "dslpar/launch/supervise.py": "what a launcher inherits",
    "dslpar/launch/preflight.py": "what a check of a host inherits",
    "dslpar/data/tokenize.py": "it sets a variable of Hugging Face's tokenizers",
    "dslpar/distributed/gloo_threads.py": "torch reads the same variables whenever it makes a group",
    "dslpar/distributed/symmetric_memory.py": "torch reads the same variable whenever ranks meet",
}
"""Files, but for commands, that name the process's environment; and why. All else takes it as an argument."""
_CONTRACT = (ROOT / ".importlinter").read_text().partition("[importlinter:contract:packages]")[2].partition("\n\n")[0]
ORDER = {name: number for number, name in enumerate(re.findall(r"\w+", _CONTRACT.partition("layers =")[2]))}
"""Packages from the top down; two packages side by side do not name each other."""


def named(path: Path) -> Iterator[tuple[int, str]]:
    """Yield dslpar modules that a file's strings name, with their lines; docstrings do not count."""
    source = path.read_text()
    if not re.search(r"[\"']dslpar", source):  # to parse all files takes seconds
        return
    tree = ast.parse(source)
    with_docstrings = (ast.Module, ast.ClassDef, ast.FunctionDef)
    prose = {id(node.body[0].value) for node in ast.walk(tree) if isinstance(node, with_docstrings) and _is_prose(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            found = re.fullmatch(r"dslpar\.(\w+)(\.\w*)*", node.value)
            if found and found[1] in ORDER:
                yield node.lineno, found[1]


def _is_prose(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> bool:
    return bool(node.body) and isinstance(node.body[0], ast.Expr)


def package_of(path: Path) -> str:
    return path.relative_to(ROOT / "dslpar").parts[0].removesuffix(".py")


def upward(path: Path) -> list[str]:
    own = ORDER.get(package_of(path), -1)  # of the package itself, nothing
    return [f"{path.relative_to(ROOT)}:{line}: {name}" for line, name in named(path) if ORDER[name] < own]


def test_no_string_names_a_module_that_stands_above() -> None:
    """`import_module("dslpar.policies.families")` did so nine times, unseen by any checker."""
    files = sorted((ROOT / "dslpar").rglob("*.py"))
    assert len(files) > 500
    found = [each for path in files if str(path.relative_to(ROOT)) not in DOORS for each in upward(path)]
    assert found == []


@pytest.mark.parametrize("door", DOORS)
def test_a_door_is_one(door: str) -> None:
    """It names a module above it, or a family of models."""
    assert door == "dslpar/__init__.py" or upward(ROOT / door)


def test_a_string_upward_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dslpar/layout").mkdir(parents=True)
    path = tmp_path / "dslpar/layout/family_interface.py"
    path.write_text(
        '"""dslpar.policies"""\nimport_module("dslpar.policies.families")\nimport_module("dslpar.core.mesh")\n'
    )
    monkeypatch.setattr("tests.unit.test_architecture.ROOT", tmp_path)
    assert upward(path) == ["dslpar/layout/family_interface.py:2: policies"]


def test_import_linter_looks_at_what_type_checkers_import() -> None:
    """This holds in all contracts but the torch line, below which types of upper modules may be named."""
    parser = configparser.ConfigParser()
    for name, excluded in ((".importlinter", False), (".importlinter-torch", True)):
        parser.read_string((ROOT / name).read_text())
        assert parser["importlinter"].getboolean("exclude_type_checking_imports") is excluded
    assert "lint-imports --config .importlinter-torch" in (ROOT / "Makefile").read_text()


def names_environment(path: Path) -> bool:
    """Return whether a file's code, and not its prose, has `os.environ` or `os.getenv`."""
    source = path.read_text()
    return re.search(r"\bos\s*\.\s*(?:environ|getenv)\b", source) is not None and any(
        isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and _is_os(node)
        for node in ast.walk(ast.parse(source))
    )


def _is_os(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id == "os"


def test_the_environment_is_read_where_processes_start() -> None:
    files = [path for top in ("dslpar", "layers") for path in sorted((ROOT / top).rglob("*.py"))]
    found = {str(path.relative_to(ROOT)) for path in files if names_environment(path)}
    assert found - {str(path.relative_to(ROOT)) for path in (ROOT / "dslpar/cli").glob("*.py")} == set(ENVIRONMENT)
