"""Constants of the forecast: their bounds, and files of them."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from dslpar.forecast.constants import (
    BOUNDS,
    CALIBRATED,
    DEFAULT,
    ERROR,
    UNCOVERED,
    CalibrationFile,
    Constants,
    Error,
    dump,
    load,
    widest,
)


def test_every_constant_has_bounds_and_a_default_within_them() -> None:
    assert [item.name for item in fields(Constants)] == list(BOUNDS)
    for name, (least, most) in BOUNDS.items():
        assert least <= getattr(DEFAULT, name) <= most, name


def test_errors_are_in_order() -> None:
    """A calibration makes the error smaller, and an effect that no run has makes it larger."""
    for error in (CALIBRATED, ERROR, UNCOVERED):
        assert 0 < error.half < error.four_of_five < error.nine_of_ten < 1
    assert widest(CALIBRATED, ERROR) == ERROR
    assert widest(ERROR, UNCOVERED) == UNCOVERED


def test_a_file_has_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    constants = replace(DEFAULT, nic_efficiency=0.25, step_s=0.01)
    error = Error(half=0.01, four_of_five=0.02, nine_of_ten=0.04)
    path.write_text(dump(constants, error, num_runs=12, covers={"offload", "fp32"}))
    assert load(str(path)) == CalibrationFile(constants, error, 12, frozenset({"fp32", "offload"}))
    assert json.loads(path.read_text())["covers"] == ["fp32", "offload"]


def test_what_a_file_leaves_out_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({"format": 3, "constants": {"hop_s": 1e-3}}))
    assert load(str(path)) == CalibrationFile(replace(DEFAULT, hop_s=1e-3), ERROR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "a mapping"),
        ('{"format": 3}', "'constants'"),
        ('{"format": 2, "constants": {}}', "its format is 2, but this version of dslpar reads 3: calibrate again"),
        ('{"format": 3, "constants": {}, "num_runs": -1}', "num_runs is -1, not a whole number"),
        ('{"format": 3, "constants": {}, "covers": "fp32"}', "covers is 'fp32', not a list"),
        ('{"format": 3, "constants": {"nic_speed": 1}}', "unknown constants.nic_speed; there are product_efficiency"),
        (
            '{"format": 3, "constants": {"nic_efficiency": "0.5"}}',
            "nic_efficiency is '0.5', not a number from 0.05 to 1",
        ),
        ('{"format": 3, "constants": {"nic_efficiency": true}}', "nic_efficiency is True"),
        ('{"format": 3, "constants": {"nic_efficiency": NaN}}', "nic_efficiency is nan"),
        ('{"format": 3, "constants": {}, "error": {"half": -1}}', "error.half is -1, not a number from 0 to 10"),
        ('{"format": 3, "constants": {}, "error": {"most": 1}}', "unknown error.most"),
        ('{"format": 3, "constants": {"nic_efficiency": 7}}', "nic_efficiency is 7, not a number from 0.05 to 1"),
    ],
)
def test_what_no_calibration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        load(str(path))
