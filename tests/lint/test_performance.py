"""PERF103: what it says is what plan/traffic.py counts, and what it offers is no longer told."""

from __future__ import annotations

import re

import pytest

from tests.lint.helpers import MODEL, findings

WIDE = MODEL.replace("hidden_size=96", "hidden_size=192")


def told(tensor: str, micro_size: int, world: int = 8) -> list[str]:
    """Messages and helps of PERF103."""
    text = f"{WIDE}parallel = dict(tensor=dict({tensor}))\nbatch = dict(micro_size={micro_size})\n"
    found = findings(text, world, ignored=())
    assert {finding.code for finding in found} <= {"PERF103"}
    return [f"{finding.message}; {finding.help}" for finding in found]


@pytest.mark.parametrize(
    ("tensor", "least"), [("size=4, mode='2d'", 2), ("size=8, mode='2.5d', depth=2", 4), ("size=4, mode='sequence'", 1)]
)
def test_the_micro_size_that_it_offers_is_the_smallest_that_will_do(tensor: str, least: int) -> None:
    (line,) = told(tensor, least)
    offered = int(re.findall(r"micro_size at least (\d+)", line)[0])
    assert offered > least
    assert told(tensor, offered) == []
    assert len(told(tensor, offered - least)) == 1


def test_1d_is_offered_where_it_fits_alone() -> None:
    (line,) = told("size=4, mode='2d'", 2)
    assert line.endswith("batch.micro_size at least 6 or mode '1d'")
    assert "for a micro-batch of 192 tokens" in line
    (line,) = told("size=16, mode='sequence'", 1, world=16)  # 24 heads
    assert re.search("; batch.micro_size at least [0-9]+$", line)


def test_nothing_is_said_of_1d() -> None:
    assert told("size=4, mode='1d'", 1) == told("size=4, mode='1d', sequence=True", 1) == []
    assert told("size=4, mode='cuboid', shape=(1, 4, 1), residual='sequence'", 1) == []


def test_what_is_not_legal_is_not_called_slow() -> None:
    text = f"{WIDE}parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=3)\n"
    assert {finding.code for finding in findings(text, 8, ignored=())} == {"BAT102"}
