"""Levels, files and names of ColossalAI's logger."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from dslpar.compat.dist_logger import disable_existing_loggers, get_dist_logger


def test_a_logger_per_name_writes_to_a_file_and_to_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    logger = get_dist_logger("compat-test")
    assert get_dist_logger("compat-test") is logger
    logger.log_to_file(str(tmp_path / "logs"), suffix="a", level="WARNING")
    logger.info({"loss": 1})
    logger.warning("100 % done")
    logger.set_level("ERROR")
    logger.warning("unheard")
    assert capsys.readouterr().err.splitlines() == [
        "colossalai - compat-test - INFO: {'loss': 1}",
        "colossalai - compat-test - WARNING: 100 % done",
    ]
    assert (tmp_path / "logs" / "rank_0_a.log").read_text() == "colossalai - compat-test - WARNING: 100 % done\n"
    with pytest.raises(ValueError, match="unknown level 'LOUD': one of DEBUG"):
        logger.set_level("LOUD")


def test_other_loggers_are_set_to_warnings() -> None:
    logger = logging.getLogger("compat-chatty")
    logger.setLevel(logging.DEBUG)
    disable_existing_loggers(include=["compat-chatty"])
    assert logger.level == logging.WARNING
