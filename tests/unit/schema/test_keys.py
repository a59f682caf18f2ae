"""Keys are declared once: all other text about a key follows from its field."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from dslpar.schema import keys
from dslpar.schema.fields import Resume
from dslpar.schema.types import TYPES
from tests.support.lint import MODEL
from tests.support.paths import ROOT

FIELD = """    seed: NonNegativeInt ="""
NEW = '''    fresh: PositiveInt = key(
        default=3, resume="reported", aliases="freshness", synonyms="new_key", deepspeed="fresh_key"
    )
    """A key that is new."""
'''


def leaves() -> list[keys.DeclaredKey]:
    """Return keys that have a value, and no keys below them."""
    return [each for each in keys.declared() if not keys.classes_of(each.field)]


def test_every_key_says_what_a_resume_does_with_it() -> None:
    for each in leaves():
        assert keys.resume_class(each.key.replace("*", "any_other")) in get_args(Resume), each.key


def test_every_key_has_a_type() -> None:
    for each in leaves():
        found = keys.type_of(each.field)
        assert found in TYPES.values() or found.choices, each.key


@pytest.mark.parametrize("fact", ["synonyms", "deepspeed"])
def test_a_name_of_others_leads_to_one_key(fact: str) -> None:
    found: dict[str, set[str]] = {}
    for each in keys.declared():
        for name in getattr(each.facts, fact).split():
            found.setdefault(name, set()).add(each.key)
    assert found
    assert {name: own for name, own in found.items() if len(own) > 1} == {}


def test_other_forms_are_keys_themselves() -> None:
    assert set(keys.other_forms().values()) <= {each.key for each in keys.declared()}


def test_a_new_key_is_one_field(tmp_path: Path) -> None:
    """Only its field is added to a copy of the package, and everything else knows it."""
    shutil.copytree(ROOT / "dslpar", tmp_path / "dslpar", ignore=shutil.ignore_patterns("__pycache__", "layers"))
    path = tmp_path / "dslpar" / "schema" / "sections.py"
    assert path.read_text().count(FIELD) == 1
    path.write_text(path.read_text().replace(FIELD, NEW + FIELD))

    def run(code: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-c", code]
        ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert ran.returncode in (0, 1), ran.stderr
        return ran.stdout

    def dslpar(*arguments: str) -> str:
        return run(f"from dslpar.cli.main import main; raise SystemExit(main({list(arguments)}))")

    config = tmp_path / "cfg.py"
    config.write_text(MODEL + "train = dict(freshness=5)\n")
    assert "train.fresh = 5 (written)\n  by train.freshness\n" in dslpar(
        "config", str(config), "--explain", "train.fresh"
    )
    assert dslpar("lint", str(config), "--world-size", "1") == "no findings\n"
    reference = dslpar("config", "--reference", "train.fresh")
    assert reference.startswith("train.fresh: a whole number, at least 1 (and below 2**31); default 3\n")
    assert reference.endswith("    A key that is new.\n    also train.freshness\n")
    for text, said in (
        ("fresh=0", "but must be a whole number"),
        ("frehs=1", "did you mean 'fresh'?"),
        ("new_key=1", "fresh"),
    ):
        config.write_text(MODEL + f"train = dict({text})\n")
        assert said in dslpar("lint", str(config))
    facts = "keys.resume_class('train.fresh'), deepspeed_policy.OURS['fresh_key']"
    code = f"from dslpar.schema import deepspeed_policy, keys; print({facts})"
    assert run(code) == "reported train.fresh\n"
