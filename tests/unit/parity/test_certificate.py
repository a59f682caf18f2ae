"""Certificates: whether one applies to a config, a world, and the installed versions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dslpar.cli.main import main
from dslpar.linter.check import load
from dslpar.parity import certificate

CONFIG = "configs/gpt_3d.py"


def stored(**changes: Any) -> dict[str, Any]:
    made = certificate.Certificate(
        verdict="proved",
        layout={"world_size": 8, "axes": {}, "proved_on": []},
        shrunk=(),
        not_proven=(),
        checks=({"name": "loss", "worst": 0.0, "bound": 1e-6, "at": "step 1"},),
        first_difference=None,
        versions=certificate.versions(),
        config_sha256=certificate.digest(load(CONFIG), 8),
    )
    return {**made.as_dict(), **changes}


def test_it_holds_for_what_it_was_made_of() -> None:
    assert certificate.outdated(stored(), load(CONFIG), 8) == []
    assert certificate.outdated(stored(), load(CONFIG), None) == []


@pytest.mark.parametrize(
    ("changes", "overrides", "world", "reason"),
    [
        ({"verdict": "differs"}, [], 8, "verdict"),
        ({"checks": []}, [], 8, "no check"),
        ({}, ["train.steps=7"], 8, "has changed since"),
        ({}, [], 16, "world size of 8, not 16"),
        ({"versions": {"dslpar": "0.0.1"}}, [], 8, "dslpar 0.0.1"),
    ],
)
def test_it_does_not_hold_for_something_else(
    changes: dict[str, Any], overrides: list[str], world: int, reason: str
) -> None:
    reasons = certificate.outdated(stored(**changes), load(CONFIG, overrides), world)
    assert any(reason in each for each in reasons), reasons


def test_verify_prints_whether_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "proof.json"
    path.write_text(json.dumps(stored()))
    assert main(["prove", CONFIG, "--verify", str(path)]) == 0
    assert "holds for configs/gpt_3d.py in a world of 8" in capsys.readouterr().out
    assert main(["prove", CONFIG, "--verify", str(path), "zero.stage=2", "--format", "json"]) == 1
    assert json.loads(capsys.readouterr().out)["holds"] is False


DAMAGED = [stored(layout={}), stored(versions=[]), stored(checks=None)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{}", "not a certificate"),
        ("[1]", "not a certificate"),
        ("x", "not valid JSON"),
        *((json.dumps(each), "has the wrong type") for each in DAMAGED),
    ],
)
def test_a_file_that_is_no_certificate_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "proof.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as ended:
        main(["prove", CONFIG, "--verify", str(path)])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


def test_lint_errors_refuse_a_proof(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prove", CONFIG, "--world-size", "7"]) == 2
    assert "PAR1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--ranks", "1"], "axis"),
        (["--resume-on", "'"], "--resume-on: No closing quotation"),
        (["--resume-on", "zero=0", "--steps", "1"], "at least 2 steps"),
        (["--resume-on", "train.clip_grad_norm=3.0"], "train.clip_grad_norm would be another run"),
        (["--resume-on", "zero=0", "--ranks", "4"], "needs all axes of a layout at once: 8 ranks"),
    ],
)
def test_what_would_prove_nothing_is_wrong_usage(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prove", CONFIG, "--world-size", "8", *argv])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err
