"""The table of all classes of transformers: each is exact, refused by a finding, or takes other inputs."""

from __future__ import annotations

import pytest

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support import transformers_classes as table

PARTS = 8


def test_the_page_is_that_of_the_record() -> None:
    version, found = table.read()
    assert table.page(version, found) == table.PAGE.read_text(), f"out of date: {table.COMMAND} --page"


def test_no_class_computes_something_else_or_crashes() -> None:
    _, found = table.read()
    outcomes = {name: row.outcome for name, row in found.items()}
    assert set(outcomes.values()) == {"exact", "refused", "other input"}
    assert {outcomes[name] for name in {*DERIVED, *POLICIES}} == {"exact"}
    assert [name for name, row in found.items() if row.outcome != "exact" and not row.help] == []


@pytest.mark.parametrize("name", ["CamembertForMaskedLM", "MambaForCausalLM", "LlavaForConditionalGeneration"])
def test_a_sample_is_as_recorded(name: str) -> None:
    (row,) = table.rows([name])
    assert row == table.read()[1][name]


@pytest.mark.parametrize(
    ("help", "written"),
    [
        ("policy='T5ForConditionalGeneration', untested: ...", {"policy": "T5ForConditionalGeneration"}),
        ("policy=dict(blocks=['h'], fused={'c': 3}), untested: ...", {"policy": {"blocks": ["h"], "fused": {"c": 3}}}),
        ("tie_word_embeddings=True", {"tie_word_embeddings": True}),
        ("dslpar.initialize(config, model=..., criterion=...) without parallel.tensor", {}),
    ],
)
def test_helps_are_followed(help: str, written: dict[str, object]) -> None:
    assert table.to_write(help) == written


def test_an_error_of_code_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table can fail: for code that raises."""
    monkeypatch.setattr(table.check, "check", lambda *_: 1 / 0)
    (row,) = table.rows(["LlamaForCausalLM"])
    assert (row.outcome, "ZeroDivisionError" in row.finding) == ("crashed", True)


@pytest.mark.prove
def test_the_record_is_of_all_classes() -> None:
    version, found = table.read()
    assert (version, sorted(found)) == (transformers.__version__, sorted(table.classes()))


@pytest.mark.prove
@pytest.mark.minutes(10)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_is_as_recorded(part: int) -> None:
    _, found = table.read()
    differ = [row for row in table.rows(sorted(found)[part::PARTS]) if row.outcome != found[row.name].outcome]
    assert differ == []
