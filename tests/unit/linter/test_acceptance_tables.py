"""The acceptance tables: every form of `parallel`, every custom list of stage ids, all rank groups."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dslpar.core.errors import has_errors
from dslpar.layout.stages import libai
from dslpar.linter.check import lint, load_text, resolve
from dslpar.planner.show import AXES, as_record
from tests.support.lint import BATCH, MODEL, PATH, TOO_SMALL, findings
from tests.support.paths import TABLES

FORMS = json.loads((TABLES / "parallel_forms.json").read_text())["forms"]
STAGES = json.loads((TABLES / "stage_ids.json").read_text())
GROUPS = json.loads((TABLES / "groups.json").read_text())["cases"]


def config_of(parallel: str) -> str:
    return MODEL + BATCH + ("" if parallel == "<absent>" else f"parallel = {parallel}\n")


def name_of(row: dict[str, Any]) -> str:
    return str(row.get("parallel", f"{row.get('stages')}-{row.get('layers')}-{row.get('stage_ids')}"))


@pytest.mark.parametrize("row", FORMS, ids=name_of)
def test_forms_of_parallel(row: dict[str, Any]) -> None:
    text = config_of(row["parallel"])
    config = load_text(text, PATH)
    found = lint(config, row["world"])
    assert has_errors(found) == (row["verdict"] == "error"), found
    if row["verdict"] == "ok":
        assert [finding.concise() for finding in found if finding.code not in TOO_SMALL] == []
        shown: Any = as_record(resolve(config, row["world"]))["parallel"]
        assert (shown["data"], shown["pipeline"]) == (row["data"], row["pipeline"])
        assert shown["tensor"] == {"size": row["tensor"], "mode": row["mode"], "shape": row["shape"]}
    for finding in found:
        assert finding.help, finding
        assert finding.location.path == PATH
        assert 1 <= finding.location.line <= len(text.splitlines())


@pytest.mark.parametrize(
    ("parallel", "world", "count", "words"),
    [
        ("dict(pipeline=2, tensor=4)", 8, 1, "tensor=dict(size=4, mode='1d')"),
        ("dict(tensor=dict(size=4, mode='1D'))", 4, 1, "did you mean '1d'?"),
        ("dict(tensor=dict(size=4, mode='4d'))", 4, 1, "choose one of '1d', '2d'"),
        ("dict(tensor=dict(size=2, mode='2d'))", 4, 1, "nearest legal: 1 or 4"),
        ("dict(tensor=dict(size=4, mode='3d'))", 4, 1, "nearest legal: 1 or 8"),
        ("dict(pipline=2)", 4, 1, "did you mean 'pipeline'?"),
        ("dict(pipeline=-1, tensor=dict(size=-4, mode='1d'))", 4, 2, "at least 1"),
        ("dict(pipeline=dict(num=2))", 4, 2, "size"),
        ("dict(tensor=dict(size=4, mode='1d', vocab=True))", 4, 1, "choose from the keys"),
        ("dict(data=3, pipeline=2)", 8, 1, "write 4"),
    ],
)
def test_findings_of_a_form(parallel: str, world: int, count: int, words: str) -> None:
    found = findings(config_of(parallel), world)
    assert len(found) == count, found
    assert all(words in finding.help or words in finding.message for finding in found)


@pytest.mark.parametrize("row", STAGES["automatic"], ids=name_of)
def test_libai_automatic_stages(row: dict[str, Any]) -> None:
    assert list(libai(row["layers"], row["stages"])) == row["counts"]


@pytest.mark.parametrize("form", ["parallel", "dist"])
@pytest.mark.parametrize("row", STAGES["custom"], ids=name_of)
def test_custom_stage_ids(row: dict[str, Any], form: str) -> None:
    ids, size = row["stage_ids"], row["stages"]
    model = MODEL.replace("num_layers=8", f"num_layers={row['layers']}")
    if form == "parallel":
        layout = f"parallel = dict(pipeline=dict(size={size}, stage_ids={ids}))\n"
    else:
        layout = f"train = dict(dist=dict(pipeline_parallel_size={size}, custom_pipeline_stage_id={ids}))\n"
    config = load_text(model + BATCH + layout, PATH)
    found = findings(model + BATCH + layout)
    assert {finding.severity for finding in found} == ({row["verdict"]} - {"ok"}), found
    if row["verdict"] == "ok":
        stages: Any = as_record(resolve(config, 8))["stages"]
        assert stages["counts"] == row["counts"]
        expected = [stage for stage, count in enumerate(row["counts"]) for _ in range(count)]
        assert stages["actual_pipeline_stage_id"] == expected
    else:
        assert len(found) == 1
        assert found[0].location.line == 3


@pytest.mark.parametrize("row", GROUPS, ids=name_of)
def test_rank_groups(row: dict[str, Any]) -> None:
    shown: Any = as_record(resolve(load_text(config_of(row["parallel"]), PATH), row["world"]))
    assert set(row["groups"]) == set(AXES)
    assert shown["groups"] == row["groups"]
