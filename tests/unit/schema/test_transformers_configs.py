"""The table of transformers' configs, against the installed transformers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from dslpar.schema.transformers_configs import MAX_BYTES, config_of, read_config_json, table
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support.paths import ROOT
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if HAS_TRANSFORMERS:
    import transformers

    NO_TRANSFORMERS = f"the table is of transformers {table()['version']}"
of_this_transformers = pytest.mark.skipif(
    not HAS_TRANSFORMERS or transformers.__version__ != table()["version"], reason=NO_TRANSFORMERS
)


@of_this_transformers
@pytest.mark.prove
@pytest.mark.minutes(3)
def test_the_table_is_what_its_tool_writes() -> None:
    ran = subprocess.run(
        [sys.executable, "tools/transformers_tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-2000:]


@of_this_transformers
@pytest.mark.parametrize("name", sorted({*DERIVED, *POLICIES}))
def test_keys_and_defaults_are_those_of_the_config_class(name: str) -> None:
    """For each class with a policy, the table's values equal transformers' defaults, apart from derived ones."""
    row = table()["models"][name]
    config = getattr(transformers, name).config_class
    assert row["config"] == config.__name__
    theirs = {field.name: field.default for field in dataclasses.fields(config)}
    ours = table()["configs"][row["config"]]["defaults"]
    plain = {key: default for key, default in ours.items() if default is not None and key in theirs}
    assert {key: theirs[key] for key in plain if not isinstance(plain[key], list)} == {
        key: default for key, default in plain.items() if not isinstance(default, list)
    }
    assert {*theirs} - {*ours} <= {*table()["common"]}


def test_what_config_json_lacks_is_said(tmp_path: Path) -> None:
    folder = str(tmp_path)
    assert read_config_json(folder).missing
    for text, problem in (
        ("{", "it is not JSON"),
        ("[]", "it is not a JSON object"),
        (" " * (MAX_BYTES + 1), "longer"),
    ):
        (tmp_path / "config.json").write_text(text)
        found = read_config_json(folder)
        assert not found.missing
        assert problem in found.problem
        assert found.values == {}


@pytest.mark.parametrize(
    ("target", "args"),
    [
        ("my.LlamaForCausalLM", {"config": {}}),
        ("transformers.LlamaForCausalLM", {}),
        ("transformers.LlamaForCausalLM", {"config": 3}),
        ("transformers.LlamaForCausalLM", {"pretrained": 3}),
    ],
)
def test_what_is_no_config_is_not_read(target: str, args: dict[str, object]) -> None:
    assert config_of(target, args) is None
