"""Related places of a finding: which values they are of, and that they are in the sources."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from dslpar.cli.main import main
from dslpar.core.errors import Related
from dslpar.linter.check import check, load, load_text
from dslpar.linter.context import Context
from dslpar.linter.registry import RULES
from dslpar.linter.related import MOST, RelatedPlaces, overlap
from dslpar.linter.rule import Rule
from dslpar.linter.rules.comments import RULES as COMMENT_RULES
from dslpar.linter.rules.hosts import RULES as HOST_RULES
from dslpar.planner.rules import FORECAST
from tests.support.lint import MODEL, PATH
from tests.support.rule_pages import example_of

HEADS = MODEL.replace("num_heads=24", "num_heads=10")
TENSOR = "parallel = dict(tensor=dict(size=4, mode='1d'))\n"
CONFIG_RULES = [rule for rule in RULES if rule not in HOST_RULES]


def places(text: str, code: str, world: int = 8, path: str = PATH) -> list[str]:
    """Return the related places of the only finding with this code: `line:column message`."""
    checked = check(load_text(text, path), world)
    (item,) = [each for each in checked.findings if each.code == code]
    return [_shown(place) for place in RelatedPlaces(checked.context).of(item)]


def _shown(place: Related) -> str:
    return f"{place.location.line}:{place.location.column} {place.message}"


def test_values_that_the_message_names_are_places_in_its_order() -> None:
    assert places(HEADS + TENSOR, "TEN205") == ["1:66 num_heads = 10 is written here"]
    assert places(HEADS + TENSOR, "TEN201") == [
        "2:34 tensor.size = 4 is written here",
        "2:42 tensor.mode = '1d' is written here",
    ]


def test_a_value_that_the_rule_reads_and_the_message_does_not_name_is_no_place() -> None:
    batch = "batch = dict(micro_size=3, accumulation=5)\n"
    text = MODEL + "parallel = dict(tensor=dict(size=4, mode='2d'))\n" + batch
    assert places(text, "BAT102") == ["2:42 tensor.mode = '2d' is written here"]


def test_a_number_behind_the_name_of_another_key_is_no_place() -> None:
    """`data 8` is neither the eight layers nor two stages."""
    text = MODEL + "batch = dict(global_size=4, micro_size=1)\n"
    assert places(text, "BAT101") == ["2:40 micro_size = 1 is written here"]
    text = MODEL + "parallel = dict(pipeline=2)\nbatch = dict(global_size=7, micro_size=3)\n"
    assert places(text, "BAT101", 4) == ["3:40 micro_size = 3 is written here"]


def test_the_number_of_ranks_is_no_value_and_tensor_3_is_no_mode() -> None:
    text = MODEL + "parallel = dict(pipeline=2, tensor=dict(size=3, mode='1d'))\n"
    assert places(text, "PAR101") == ["2:26 pipeline = 2 is written here"]


def test_a_number_that_two_keys_have_is_neither_s() -> None:
    text = (
        MODEL.replace("num_heads=24", "num_heads=6") + "parallel = dict(pipeline=2, tensor=dict(size=4, mode='1d'))\n"
    )
    assert "2:46 tensor.size = 4 is written here" in places(text, "TEN201")
    both = MODEL.replace("num_layers=8", "num_layers=4").replace("num_heads=24", "num_heads=4")
    assert all("num_layers" not in place for place in places(both + TENSOR.replace("4", "3"), "TEN201", 3))


def test_the_way_of_a_value_through_a_variable() -> None:
    text = "heads = 10\n" + HEADS.replace("num_heads=10", "num_heads=heads") + TENSOR
    assert places(text, "TEN201")[0] == "2:56 num_heads is set here"


def test_a_computed_value_is_said_to_be_computed() -> None:
    text = HEADS + TENSOR.replace("size=4", "size=2 * 2")
    assert places(text, "TEN201")[0] == "2:34 tensor.size = 4 is computed here"


def test_keys_that_a_message_spells_out_are_places() -> None:
    text = MODEL.replace("num_layers=8", "num_layers=8, cfg=dict(hidden_layers=4)")
    assert places(text, "CFG110") == ["1:37 num_layers = 8 is written here"]


def test_keys_without_values_and_command_lines_are_no_places() -> None:
    checked = check(load_text(HEADS + TENSOR, PATH, ["parallel.tensor.size=2", "model.num_heads=9"]), 8)
    (item,) = [each for each in checked.findings if each.code == "TEN201"]
    assert all(place.location.path == PATH for place in RelatedPlaces(checked.context).of(item))


def test_the_way_of_a_value_through_an_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("common.py").write_text(HEADS)
    Path("cfg.py").write_text("from .common import model\n" + TENSOR)
    checked = check(load("cfg.py"), 8)
    (item,) = [each for each in checked.findings if each.code == "TEN201"]
    found = RelatedPlaces(checked.context).of(item)
    assert [f"{place.location.path}:{_shown(place)}" for place in found] == [
        "cfg.py:1:21 model is imported here",
        "cfg.py:2:34 tensor.size = 4 is written here",
        "cfg.py:2:42 tensor.mode = '1d' is written here",
    ]


@pytest.mark.parametrize("form", ["json", "sarif"])
def test_reports_for_programs_have_the_places(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cfg.py").write_text(HEADS)
    assert main(["lint", "cfg.py", "--world-size", "1", "--format", form]) == 1
    made = json.loads(capsys.readouterr().out)
    if form == "json":
        (found,) = made
        at = dict(path="cfg.py", line=1, column=66, end_line=1, end_column=68)
        assert found["related"] == [{**at, "message": "num_heads = 10 is written here"}]
    else:
        (place,) = made["runs"][0]["results"][0]["relatedLocations"]
        assert place["message"] == {"text": "num_heads = 10 is written here"}
        assert place["physicalLocation"]["region"]["startColumn"] == 66


def test_text_reports_have_no_places(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "cfg.py").write_text(HEADS)
    main(["lint", str(tmp_path / "cfg.py"), "--world-size", "1"])
    assert "is written here" not in capsys.readouterr().out


@pytest.mark.parametrize("rule", CONFIG_RULES, ids=[rule.code for rule in CONFIG_RULES])
def test_places_are_in_the_sources_and_hold_the_value(rule: Rule) -> None:
    linted = example_of(rule)
    checked = check(load_text(linted.text, linted.path or PATH, linted.overrides), linted.world)
    for item in checked.findings:
        found = RelatedPlaces(checked.context).of(item)
        assert found == RelatedPlaces(checked.context).of(item), "the order is steady"
        assert len(found) <= MOST
        for place in found:
            assert not overlap(place.location, item.location)
            _check_text(checked.context, place)
        assert not any(overlap(one.location, other.location) for one, other in pairwise(found))


def _check_text(cx: Context, place: Related) -> None:
    path, line, column, end_line, end_column = place.location
    lines = cx.config.sources[path].split("\n")
    assert 1 <= line <= end_line <= len(lines)
    assert end_column <= len(lines[end_line - 1]) + 1
    message = re.fullmatch(r"(\S+)(?: = (.*))? is (written|computed|set|imported) here", place.message)
    assert message is not None
    if line == end_line and message[3] == "written" and message[2]:
        text = lines[line - 1][column - 1 : end_column - 1]
        assert text == message[2] or str(_number(text)) == message[2] or repr(text) == message[2]


def _number(text: str) -> object:
    return json.loads(text.replace("_", "")) if re.fullmatch(r"-?\d[\d_]*(\.\d+)?(e-?\d+)?", text) else text


def test_the_rule_makes_the_same_finding_of_traced_sections() -> None:
    """Tracing changes no value: rules with cached, derived and nested values find what they found."""
    lost = []
    # Forecasts need a job, and comments the findings of all rules: both would cost as much as lint.
    for rule in (rule for rule in CONFIG_RULES if rule not in COMMENT_RULES and rule not in FORECAST):
        linted = example_of(rule)
        checked = check(load_text(linted.text, linted.path or PATH, linted.overrides), linted.world)
        cx = checked.context
        read: list[str] = []
        again = Context(
            cx.config,
            cx.reading,
            cx.world.requested_size,
            cx.world.cluster,
            cx.model.by_program,
            forecasts=False,
            read=read,
        )
        before = {each for each in checked.findings if each.code == rule.code}
        if not before <= set(rule.findings(again)):
            lost.append(rule.code)
    assert lost == []
