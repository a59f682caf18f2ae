"""`dslpar explain`: pages by code, name and family, and the list of rules."""

from __future__ import annotations

import json

import pytest

from dslpar.cli.main import main
from dslpar.linter.registry import codes


def test_explain(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ten103"]) == 0
    by_code = capsys.readouterr().out
    assert by_code.startswith("TEN103 not-a-cube (error)\n\nThe size of mode '3d' is not a cube.")
    assert main(["explain", "not-a-cube"]) == 0
    assert capsys.readouterr().out == by_code


def test_explain_lists_all_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(codes())


def test_explain_of_codes_names_and_families(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "ten103", "no-model", "PAR", "TEN103", "--format", "json"]) == 0
    found = [page["code"] for page in json.loads(capsys.readouterr().out)]
    assert found[:3] == ["TEN103", "CFG107", "PAR101"]
    assert len(found) == len(set(found))
    assert {code[:3] for code in found[2:]} == {"PAR"}


@pytest.mark.parametrize(
    ("query", "message"),
    [("TEN999", "the families are BAT, CFG"), ("not-a-cub", "did you mean 'not-a-cube'?"), ("", "unknown rule ''")],
)
def test_explain_of_an_unknown_rule(query: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["explain", query])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
