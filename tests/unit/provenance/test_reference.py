"""The reference lists every field of the spec with its help."""

from __future__ import annotations

import json
from dataclasses import MISSING, fields, is_dataclass

import pytest

from dslpar.cli import main as cli_main
from dslpar.models.gpt import section
from dslpar.provenance.reference import below, help_of, rows
from dslpar.schema import datasets, deepspeed_policy, families, sections
from dslpar.schema.keys import aliases_of
from dslpar.schema.torch_optimizers import OPTIMIZERS
from dslpar.schema.torch_schedulers import LR_SCHEDULERS

CLASSES = [cls for cls in (vars(datasets) | vars(sections)).values() if isinstance(cls, type) and is_dataclass(cls)]
CLASSES += families.sections().values()
CLASSES.remove(sections.ImageModel)  # a base class, whose keys belong to its families


def test_every_field_of_the_spec_is_listed_with_its_help() -> None:
    listed = {row.field: row for row in rows() if row.field}
    assert set(listed) == {f"{cls.__name__}.{field.name}" for cls in CLASSES for field in fields(cls)}
    for cls in CLASSES:
        for field in fields(cls):
            row = listed[f"{cls.__name__}.{field.name}"]
            assert row.help == help_of(cls, field.name) != ""
            if field.default is not MISSING:
                assert row.default == repr(field.default)


def test_every_row_has_all_that_it_needs() -> None:
    for row in rows():
        assert row.key, row
        assert row.type, row
        assert row.help.endswith((".", ":")), row


def test_every_key_of_the_tables_is_listed() -> None:
    keys = {(row.key, row.of) for row in rows()}
    for name, row in OPTIMIZERS.items():
        assert {(f"optimizer.{arg}", f"type={name!r}") for arg in ("type", *row.args)} <= keys
    for name, known in LR_SCHEDULERS.items():
        assert {(f"lr_scheduler.{arg}", f"type={name!r}") for arg in ("type", *known.args)} <= keys
    assert {f"zero.{name}" for name in deepspeed_policy.ZERO} <= {key for key, _ in keys}
    assert {f"deepspeed.{name}" for name in deepspeed_policy.TOP} <= {key for key, _ in keys}


def test_aliases_are_those_of_the_spec() -> None:
    for alias, name in aliases_of(section.GPT).items():
        assert {row.key for row in below(f"model.{alias}")} == {f"model.{name}"}  # a row per family
    assert [row.key for row in below("train.dist.tensor_parallel_size")] == ["parallel.tensor.size"]


def test_a_key_and_all_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "--reference", "parallel.pipeline", "--format", "json"]) == 0
    listed = [row["key"] for row in json.loads(capsys.readouterr().out)]
    names = ("size", "stage_ids", "counts", "method")
    assert listed == ["parallel.pipeline", *(f"parallel.pipeline.{name}" for name in names)]


def test_reference_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.main(["config", "--reference", "train.steps"]) == 0
    assert capsys.readouterr().out == (
        "train.steps: a whole number, at least 1 (and below 2**31); default 100\n    Optimizer steps.\n"
    )
