"""mypy checks the fields that rules read: `cx.spec` has the fields of the sections, and no others."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT

RULE = """\
from dslpar.linter.context import Context


def conditions(cx: Context) -> tuple[bool, ...]:
    return (
        cx.spec.train.steps > 10,
        cx.spec.train.stesp > 10,
        cx.tensor.section.mode == "1d",
        cx.tensor.section is not None and cx.tensor.section.mode == "1d",
    )
"""
ERRORS = {
    7: '"Train" has no attribute "stesp"; maybe "steps"?',
    8: 'Item "None" of "TensorParallel | None" has no attribute "mode"',
}


@pytest.mark.prove  # mypy on everything, half a minute on two busy cores
def test_a_misspelt_field_is_a_type_error(tmp_path: Path) -> None:
    rule = tmp_path / "rule.py"
    rule.write_text(RULE)
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "setup.cfg"), str(rule)]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    errors = [line for line in checked.stdout.splitlines() if ": error: " in line]
    assert len(errors) == len(ERRORS), checked.stdout
    for error, (line, message) in zip(errors, ERRORS.items(), strict=True):
        assert f"rule.py:{line}: error: {message}" in error
