"""The JSON Schema of configs: what lint accepts is valid, and what it refuses for its key or type alone is not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from dslpar.cli.main import main
from dslpar.language.load import load
from dslpar.linter import check
from dslpar.linter.config_files import is_config
from dslpar.provenance.json_schema import schema, type_schema
from dslpar.provenance.reference import rows
from dslpar.schema import deepspeed_policy
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS
from dslpar.schema.types import TYPES
from tests.support.paths import ROOT

MADE = schema()
VALIDATOR = Draft202012Validator(MADE)
GPT = {"type": "GPT", "num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 256, "max_seq_len": 64}
NUMBERS: list[Any] = [-(2.0**70), -2, -1, -0.5, 0, 0.5, 0.9, 1, 1.0, 1.5, 2, 3, 4, 62, 63, 125, 126, 10_000, 10_001]
NUMBERS += [2**31 - 1, 2**31, 2**63]
OTHERS: list[Any] = [None, True, False, "", "a", "a/b", "1d", "bf16", "cpu", "symmetric_memory", "all-linear", "newest"]
LISTS: list[Any] = [[], [1], [2, 4], [4, 2], [0.5, 0.9], [0.9, 1.0], [1, 1, 2], ["a", "b"], [""], {}, {"a": 1}]
LISTS += [["pipe", "data", "tensor"], ["layers"], [0.5, 1.2], [-1, 2]]
LOOSER = {
    "CountList",
    "MeshShape",
    "Milestones",
    "Etas",
    "AdafactorEps",
    "ResumeFrom",
    "ModuleNames",
    "Path",
    "Dataset",
}
"""Types of which lint knows more than a schema can say."""


@pytest.mark.parametrize("name", TYPES)
def test_a_type_takes_what_lint_takes(name: str) -> None:
    known, validator = TYPES[name], Draft202012Validator(type_schema(name))
    for value in (*NUMBERS, *OTHERS, *LISTS):
        try:
            holds = type(value) in known.python_types and bool(known.holds(value))
        except TypeError:
            holds = False
        valid = validator.is_valid(value)
        if name in LOOSER:
            assert valid or not holds, value
        else:
            # A number such as 1.0 is a whole number for JSON, which has one type of numbers.
            assert valid == holds or (type(value) is float and value == int(value)), (value, valid, holds)


def configs() -> list[Path]:
    found = [*(ROOT / "configs").glob("*.py"), *(ROOT / "examples").rglob("*.py")]
    return sorted(path for path in found if is_config(load(str(path))) and load(str(path)).has("model"))


def plain(path: Path) -> dict[str, Any]:
    made = load(str(path)).root.plain()
    sections = {name: value for name, value in made.items() if name in MADE["properties"]}
    whole: dict[str, Any] = json.loads(json.dumps(sections, default=str))
    return whole


@pytest.mark.parametrize("path", configs(), ids=lambda path: path.stem)
def test_shipped_configs_are_valid(path: Path) -> None:
    config = plain(path)
    if "_target_" in config["model"]:
        pytest.skip("it builds the model with LazyCall, which YAML has no form for")
    assert [error.message for error in VALIDATOR.iter_errors(config)] == []


KEYS = sorted({row.key for row in rows() if "*" not in row.key and row.key.count(".") <= 2})


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=3, unique=True),
    st.lists(st.sampled_from([*NUMBERS[1:14], *OTHERS, *LISTS]), min_size=3, max_size=3),
    st.booleans(),
)
def test_keys_and_types_are_those_of_lint(keys: list[str], values: list[Any], misspells: bool) -> None:
    config: dict[str, Any] = {"model": dict(GPT)}
    for key, value in zip(keys, values, strict=False):
        section: Any = config
        *above, name = key.split(".")
        for part in above:
            section = section.setdefault(part, {})
            if not isinstance(section, dict):
                return
        section[name + "z" * misspells] = value
    text = json.dumps(config)
    found = check.lint(check.load_text(text, "cfg.json"))
    wrong = {item.code for item in found if item.severity == "error"} & {"CFG101", "CFG102", "CFG105", "CFG107"}
    if not wrong and not any(item.severity == "error" for item in found):
        assert [error.message for error in VALIDATOR.iter_errors(config)] == [], text
    if "CFG101" in wrong:
        assert not VALIDATOR.is_valid(config), [item.message for item in found]


_OF_PRECISION = {"bf16": deepspeed_policy.BF16, "fp16": deepspeed_policy.FP16}
NULLS: list[tuple[str, Any]] = [
    *((f"precision.{key}", {"dtype": dtype}) for dtype, keys in _OF_PRECISION.items() for key in keys),
    *((f"optimizer.{key}", {"type": name, "lr": 0.1}) for name, row in OPTIMIZERS.items() for key in row.args),
    *((f"lr_scheduler.{key}", {"type": name}) for name, row in LR_SCHEDULERS.items() for key in row.args),
    *((f"zero.{name}.{key}", {}) for name, (_, below) in deepspeed_policy.TABLES.items() for key in below),
    *((key, {}) for key in KEYS if not key.startswith(("model.", "precision."))),
]
"""(a key, what its section holds beside it)."""


def test_null_leaves_out_each_key_that_may_be_left_out() -> None:
    differ, passed = [], 0
    for key, beside in NULLS:
        section, *below, name = key.split(".") if "." in key else ("", key)
        inner = {name: None}
        for part in reversed(below):
            inner = {part: inner}
        whole = {section: {**beside, **inner}} if section else inner
        text = json.dumps({"model": GPT, **whole})
        errors = [item for item in check.lint(check.load_text(text, "cfg.json")) if item.severity == "error"]
        differ += [text] * (not errors and not VALIDATOR.is_valid(json.loads(text)))
        passed += not errors
    assert differ == []
    assert passed > 200, "the others have errors of another kind"


def test_null_in_place_of_what_a_scheduler_needs_is_refused() -> None:
    config = {"model": GPT, "lr_scheduler": {"type": "StepLR", "step_size": None}}
    assert [item.code for item in check.lint(check.load_text(json.dumps(config), "cfg.json"))][:1] == ["CFG104"]
    assert not VALIDATOR.is_valid(config)


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(MADE))
    Draft202012Validator.check_schema(MADE)
