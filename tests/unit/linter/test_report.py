"""Reports of `dslpar lint`: colour, GitHub's commands, SARIF against its schema, statistics.

sarif-2.1.0.json is the schema of SARIF 2.1.0 as Microsoft's SARIF SDK ships it (npm `@microsoft/sarif-multitool-linux`
5.7.0, MIT licence).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import jsonschema
import pytest

from dslpar.cli.main import main
from dslpar.core.catalog import Page
from dslpar.core.errors import COMMAND_LINE, WORLD, Finding, Fix, Location
from dslpar.linter.registry import RULES, pages, url_of
from dslpar.linter.report import text as report_text
from dslpar.linter.report.github import github
from dslpar.linter.report.sarif import sarif
from dslpar.linter.rule import Rule
from tests.support.lint import MODEL, findings
from tests.support.paths import ROOT
from tests.support.rule_pages import sections

BAD = MODEL + "parallel = dict(pipline=3, tensor=dict(size=2, mode='1D'))\nidle = dict(a='\\x1b')\n"
VALIDATOR = jsonschema.Draft202012Validator(
    json.loads((ROOT / "tests/support/sarif-2.1.0.json").read_text()), format_checker=jsonschema.FormatChecker()
)


def finding(path: str = "cfg.py", message: str = "message", severity: Any = "error", fix: Fix | None = None) -> Finding:
    return Finding("CFG101", "unknown-key", severity, message, "help", Location(path, 1, 3, 1, 4), "a.b", fix)


def log_of(found: list[Finding], sources: dict[str, str], status: int = 1, **env: str) -> Any:
    """Return a SARIF log that its schema validates."""
    log = json.loads(sarif(found, sources, ["cfg.py"], status, env))
    VALIDATOR.validate(log)
    return log["runs"][0]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    path = tmp_path / "cfg.py"
    path.write_text(BAD)
    return path


# Colour -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "terminal", "environ", "colored"),
    [
        ("auto", True, {}, True),
        ("auto", False, {}, False),
        ("auto", True, {"NO_COLOR": "1"}, False),
        ("auto", True, {"NO_COLOR": ""}, True),
        ("auto", True, {"TERM": "dumb"}, False),
        ("auto", False, {"FORCE_COLOR": "1"}, True),
        ("auto", False, {"CLICOLOR_FORCE": "1"}, True),
        ("auto", False, {"FORCE_COLOR": "0"}, False),
        ("auto", False, {"FORCE_COLOR": "1", "TERM": "dumb"}, True),
        ("auto", False, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, False),
        ("always", False, {"NO_COLOR": "1"}, True),
        ("never", True, {"FORCE_COLOR": "1"}, False),
    ],
)
def test_when_to_color(choice: str, terminal: bool, environ: dict[str, str], colored: bool) -> None:
    assert report_text.wants_color(choice, terminal, environ) is colored


@pytest.mark.parametrize("form", ["text", "concise"])
def test_color_changes_no_letter(form: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    printed = {}
    for choice in ("never", "always"):
        main(["lint", "cfg.py", "--color", choice, "--format", form])
        printed[choice] = capsys.readouterr().out
    assert "\x1b[" in printed["always"]
    assert re.sub(r"\x1b\[[0-9;]*m", "", printed["always"]) == printed["never"]


def test_escape_sequences_of_a_file_are_not_printed() -> None:
    text = "x = '\x1b[2J\x07\x9b'"
    shown = report_text.block(finding(), {"cfg.py": text})
    assert r"x = '\x1b[2J\x07\x9b'" in shown
    assert not set(shown) & {"\x1b", "\x07", "\x9b"}


# GitHub -----------------------------------------------------------------------------------------------------------


def test_github(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(config), "--format", "github", "--world-size", "8"]) == 1
    first, second, third = capsys.readouterr().out.splitlines()
    assert first == (
        "::error file=cfg.py,line=2,endLine=2,col=17,endColumn=24,title=CFG101 unknown-key"
        "::unknown key 'pipline' in parallel%0Ahelp: did you mean 'pipeline'?"
    )
    assert second.startswith("::error file=cfg.py,line=2,endLine=2,col=53,endColumn=57,title=TEN102 unknown-mode::")
    assert third.startswith("::warning file=cfg.py,line=3,")


def test_github_escapes(tmp_path: Path) -> None:
    place = Location(f"{tmp_path}/a,b:c%.py", 1, 2, 3, 4)
    found = Finding("CFG101", "unknown-key", "info", "50 %\r\n::error::x", "", place, details=("3\n", "4"))
    (line,) = github([found], {"GITHUB_WORKSPACE": str(tmp_path)}).splitlines()
    message = r"50 %25\r\n::error::x%0A    3\n%0A    4"
    assert line == f"::notice file=a%2Cb%3Ac%25.py,line=1,endLine=3,title=CFG101 unknown-key::{message}"


@pytest.mark.parametrize("path", [WORLD, COMMAND_LINE])
def test_github_of_no_file(path: str) -> None:
    assert github([finding(path)], {}) == "::error title=CFG101 unknown-key::message%0Ahelp: help\n"


# SARIF ------------------------------------------------------------------------------------------------------------


def test_sarif_of_every_rule_is_valid() -> None:
    """The findings of every page's example, in one log."""
    found: list[Finding] = []
    for rule in RULES:
        page = sections(rule)["Example"]
        text = page if re.search(r"^model\b", page, re.MULTILINE) else MODEL + page
        found += findings(text, 8, re.findall(r"^# override: (.*)$", text, re.MULTILINE))
    run = log_of(found, {})
    rules = run["tool"]["driver"]["rules"]
    assert len(rules) > 100
    for result in run["results"]:
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
    assert {result["level"] for result in run["results"]} == {"error", "warning", "note"}
    assert all(rule["help"]["markdown"].count("```") == 4 for rule in rules)


def test_the_schema_can_refuse() -> None:
    log = json.loads(sarif([finding()], {}, ["cfg.py"], 1, {}))
    log["runs"][0]["results"][0]["level"] = "info"
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(log)


def test_sarif_of_a_command(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(config), "train.stps=2", "--format", "sarif"]) == 1
    log = json.loads(capsys.readouterr().out)
    VALIDATOR.validate(log)
    (run,) = log["runs"]
    assert run["invocations"] == [{"executionSuccessful": True, "exitCode": 1}]
    assert run["originalUriBaseIds"]["%SRCROOT%"]["uri"] == config.parent.as_uri() + "/"
    results = {result["ruleId"]: result for result in run["results"]}
    place = results["TEN102"]["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "cfg.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"] == {"startLine": 2, "startColumn": 53, "endLine": 2, "endColumn": 57}
    (change,) = results["TEN102"]["fixes"][0]["artifactChanges"]
    assert change["replacements"][0]["deletedRegion"]["startColumn"] == 54
    assert change["replacements"][0]["insertedContent"] == {"text": "1d"}
    names = [where.get("fullyQualifiedName") for item in run["results"] for where in _logical(item)]
    assert names == [COMMAND_LINE, WORLD]


def _logical(result: Any) -> list[Any]:
    logical: list[Any] = result["locations"][0].get("logicalLocations", [])
    return logical


def test_sarif_of_nothing_is_valid() -> None:
    run = log_of([], {}, status=0)
    assert (run["results"], run["tool"]["driver"]["rules"]) == ([], [])


def test_sarif_counts_utf_16() -> None:
    place = Location("cfg.py", 1, 4, 1, 5)
    found = finding()._replace(location=place, fix=Fix(place, "y"))
    (result,) = log_of([found], {"cfg.py": "'😀'x"})["results"]
    assert result["locations"][0]["physicalLocation"]["region"]["startColumn"] == 5
    assert log_of([found], {"cfg.py": "'é'x"})["results"][0]["locations"][0]["physicalLocation"]["region"] == {
        "startLine": 1,
        "startColumn": 4,
        "endLine": 1,
        "endColumn": 5,
    }


def test_sarif_of_files_elsewhere_and_odd_names(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in" / "a b#é.py", tmp_path / "out.py"
    run = log_of([finding(str(inside)), finding(str(outside))], {}, GITHUB_WORKSPACE=str(tmp_path / "in"))
    first, second = (item["locations"][0]["physicalLocation"]["artifactLocation"] for item in run["results"])
    assert first == {"uri": "a%20b%23%C3%A9.py", "uriBaseId": "%SRCROOT%"}
    assert second == {"uri": outside.as_uri()}


def test_a_fingerprint_stays_as_lines_move() -> None:
    def prints(text: str) -> list[str]:
        run = log_of(findings(text), {"cfg.py": text})
        return [item["partialFingerprints"]["primaryLocationLineHash"] for item in run["results"]]

    before = prints(BAD)
    assert len(set(before)) == len(before) == 3
    assert prints("# one line\n\n" + BAD) == before
    assert prints(BAD.replace("idle", "idler"))[:2] == before[:2]
    assert prints(BAD.replace("pipline=3", "pipline=2")) != before
    assert prints(BAD + "idle2 = dict(a=1)\n")[:3] == before


# Statistics -------------------------------------------------------------------------------------------------------


def test_statistics(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", "cfg.py", "--statistics", "--format", "concise", "--world-size", "8", "train.stps=2"]) == 1
    assert capsys.readouterr().out.splitlines()[4:] == [
        "    2  CFG101   unknown-key (error), 1 with a fix",
        "    1  CFG106   unused-dict (warning)",
        "    1  TEN102   unknown-mode (error), 1 with a fix",
    ]
    assert main(["lint", "cfg.py", "--statistics", "--format", "json", "--world-size", "8"]) == 1
    first = json.loads(capsys.readouterr().out)[0]
    assert first == {"code": "CFG101", "name": "unknown-key", "severity": "error", "count": 1, "fixable": 1}


@pytest.mark.parametrize("form", ["text", "concise", "json", "github", "sarif"])
def test_each_format_of_a_right_config(form: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config.write_text(MODEL)
    assert main(["lint", "cfg.py", "--format", form, "--world-size", "8"]) == 0
    out = capsys.readouterr().out
    assert {"text": out == "no findings\n", "json": out == "[]\n", "sarif": '"results": []' in out}.get(form, not out)


def test_a_long_line_is_cut_around_the_caret() -> None:
    line = "x = [" + "1, " * 200 + "]"
    found = Finding("CFG102", "wrong-type", "error", "message", "fix", Location("f.py", 1, 300, 1, 301))
    shown, caret = report_text.block(found, {"f.py": line}).splitlines()[1:3]
    assert len(shown) < 180
    assert shown[caret.index("^")] == line[299]


def test_a_tab_keeps_the_caret_in_place() -> None:
    found = Finding("CFG102", "wrong-type", "error", "message", "fix", Location("f.py", 1, 3, 1, 4))
    assert report_text.block(found, {"f.py": "\tx1\n"}).splitlines()[2] == "      | \t ^"


# JSON and GitLab --------------------------------------------------------------------------------------------------


def test_json_has_the_edits_of_a_fix_and_the_address_of_the_page(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["lint", "cfg.py", "--format", "json"]) == 1
    found = {item["code"]: item for item in json.loads(capsys.readouterr().out)}
    lines = BAD.split("\n")
    (edit,) = found["CFG101"]["fix"]
    assert lines[edit["line"] - 1][edit["column"] - 1 : edit["end_column"] - 1] == "pipline"
    assert (edit["path"], edit["text"]) == ("cfg.py", "pipeline")
    assert all(Path(item["url"].removeprefix("file://")).name == f"{code}.md" for code, item in found.items())


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.code)
def test_every_code_has_an_address(page: Rule | Page) -> None:
    path = Path(unquote(url_of(page.code).removeprefix("file://")))
    assert page.text().strip().endswith(path.read_text().strip().splitlines()[-1])


def test_no_address_of_an_unknown_code() -> None:
    assert url_of("CFG999") == ""


def test_gitlab_reads_the_report(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The required fields of a code quality report: description, check_name, fingerprint, severity, location."""
    assert main(["lint", "cfg.py", "--format", "gitlab"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found
    assert len({item["fingerprint"] for item in found}) == len(found)
    for item in found:
        assert set(item) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert item["severity"] in {"info", "minor", "major", "critical", "blocker"}
        assert item["location"]["path"] == "cfg.py"
        assert item["location"]["lines"]["begin"] >= 1
    by_code = {item["check_name"].partition(" ")[0]: item for item in found}
    assert by_code["CFG101"]["location"]["lines"] == {"begin": 2, "end": 2}
    config.write_text("\n\n" + BAD)
    assert main(["lint", "cfg.py", "--format", "gitlab"]) == 1
    moved = json.loads(capsys.readouterr().out)
    assert [item["fingerprint"] for item in moved] == [item["fingerprint"] for item in found]


def test_gitlab_s_paths_are_those_of_the_checkout(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI_PROJECT_DIR", str(config.parent.parent))
    assert main(["lint", "cfg.py", "--format", "gitlab", "--world-size", "6"]) == 1
    paths = {item["location"]["path"] for item in json.loads(capsys.readouterr().out)}
    assert paths == {f"{config.parent.name}/cfg.py"}
