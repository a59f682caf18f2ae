"""Names, keys, rules, options and fields of JSON are those that were written down before the house was rebuilt."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.public_surface import PATH, surface

WRITTEN: dict[str, Any] = json.loads(PATH.read_text())


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return surface()


@pytest.mark.parametrize("part", sorted(WRITTEN))
def test_what_can_be_said_is_as_written_down(part: str, found: dict[str, Any]) -> None:
    """To add to it, or to take something away with a warning: `python -m tests.support.public_surface --write`."""
    assert found[part] == WRITTEN[part]


def test_the_list_is_not_empty() -> None:
    sizes = {part: len(found) for part, found in WRITTEN.items()}
    assert sizes["keys"] > 500 and sizes["rules"] > 300 and sizes["options"] > 25, sizes  # noqa: PT018
    assert "prove" in WRITTEN["names"]["dslpar"]
    assert "config (keyword)" not in WRITTEN["names"]["dslpar"]["prove"]
    assert ".groups.tensor[][]" in WRITTEN["json"]["show configs/gpt_3d.py --world-size 8 --format json"]
