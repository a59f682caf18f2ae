"""Derived policies of every transformers class with a plan: each is exact or refused, and none is wrong."""

from __future__ import annotations

import re

import pytest

from tests.support.paths import ROOT
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.schema.transformers_policies import DERIVED
from tests.support import derive_all
from tests.support.derive_all import Row

PARTS = 4


def test_what_is_taken_unasked_is_what_was_proven() -> None:
    """The page is written from what ran."""
    text = (ROOT / "docs" / "derived_policies.md").read_text()
    exact = re.search(r"Exact: ((?:.+\n)+)", text)
    assert exact is not None
    names = exact[1].replace("\n", " ").rstrip().split(", ")
    assert sorted(names) == sorted(DERIVED)
    assert len(names) >= 40


@pytest.mark.prove
def test_the_page_has_all_classes() -> None:
    text = (ROOT / "docs" / "derived_policies.md").read_text()
    refused = re.findall(r"^\| (\w+ForCausalLM) \| .+ \|$", text, re.MULTILINE)
    assert sorted([*DERIVED, *refused]) == sorted(derive_all.classes())


@pytest.mark.prove  # `make test` has the other policies that are derived
@pytest.mark.parametrize("name", ["NanoChatForCausalLM", "DeepseekV2ForCausalLM"])
def test_norms_without_weights_and_latents_are_exact(name: str) -> None:
    (row,) = derive_all.rows([name])
    assert (row.outcome, row.worst < derive_all.CLOSE) == ("exact", True), row


@pytest.mark.prove
@pytest.mark.minutes(10)
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_is_exact_or_refused(part: int) -> None:
    names = derive_all.part_of(derive_all.classes(), f"{part + 1}/{PARTS}")
    found: list[Row] = list(derive_all.rows(names))
    assert [row for row in found if row.outcome not in ("exact", "refused")] == []
    assert {row.name for row in found if row.outcome == "exact"} == DERIVED.intersection(names)


@pytest.mark.prove
def test_an_error_of_code_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table can fail: for another model, and for code that raises."""
    weights = derive_all.hf_parity.plain

    def changed(*args: object) -> object:
        model, found = weights(*args)  # type: ignore[arg-type]
        found["model.layers.0.mlp.up_proj.weight"][0, 0] += 1e-6
        return model, found

    monkeypatch.setattr(derive_all.hf_parity, "plain", changed)
    (row,) = derive_all.rows(["LlamaForCausalLM"])
    assert row.outcome == "wrong"
    monkeypatch.setattr(derive_all.hf_parity, "plain", lambda *_: 1 / 0)
    (row,) = derive_all.rows(["LlamaForCausalLM"])
    assert row.outcome == "crashed"
    assert "ZeroDivisionError" in row.why
