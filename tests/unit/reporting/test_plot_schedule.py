"""Pictures of schedules: a box per action, placed by rank and time, by colour and shade."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.layout.simulation import even_durations, simulate
from dslpar.reporting.plot_schedule import draw

SVG = "{http://www.w3.org/2000/svg}"


def drawn(schedule: Schedule, title: str = "a <title>") -> ElementTree.Element:
    timeline = simulate(schedule.orders(), schedule.chunks, even_durations(schedule.chunks.stages))
    return ElementTree.fromstring(draw(timeline, schedule.chunks, title))


def boxes(picture: ElementTree.Element) -> list[tuple[float, float, float, str]]:
    """Return row, left, width and colour of each box."""
    found = [each for each in picture.iter(f"{SVG}rect") if each.get("class") == "box"]
    return [(*(float(each.get(name, "")) for name in ("y", "x", "width")), each.get("fill", "")) for each in found]  # type: ignore[misc]


@pytest.mark.parametrize(("num", "split", "colours"), [(1, False, 2), (2, False, 4), (1, True, 3), (3, True, 9)])
def test_every_action_has_a_box_of_its_own(num: int, split: bool, colours: int) -> None:
    schedule = Schedule(Chunks(4, num), 8, split)
    found = boxes(drawn(schedule))
    assert len(found) == 4 * 8 * num * (3 if split else 2)
    assert len({colour for *_, colour in found}) == colours
    rows = sorted({row for row, *_ in found})
    assert len(rows) == 4
    for row in rows:
        spans = sorted((left, left + width) for each, left, width, _ in found if each == row)
        # positions are written to a hundredth of a pixel
        assert all(end <= start + 0.011 for (_, end), (start, _) in pairwise(spans))


def test_a_row_is_as_wide_as_its_rank_is_busy() -> None:
    found = boxes(drawn(Schedule(Chunks(2), 2)))
    first = [(left, width) for row, left, width, _ in found if row == found[0][0]]
    (begin, unit), *_ = first
    assert [round((left - begin) / unit, 2) for left, _ in first] == [0, 1, 4, 7]  # F0 F1, and B0 B1 of 2 forwards each
    assert [round(width / unit, 2) for _, width in first] == [1, 1, 2, 2]


def test_what_is_written_beside_the_boxes() -> None:
    texts = [each.text for each in drawn(Schedule(Chunks(3, 2), 3, split=True)).iter(f"{SVG}text")]
    for text in ("a <title>", "rank 0", "rank 2", "holds 3", "F: forward", "B: backward of inputs", "chunk 1"):
        assert text in texts
    assert "W: backward of weights" in texts
    assert "B: backward" in [each.text for each in drawn(Schedule(Chunks(3), 3)).iter(f"{SVG}text")]


def test_of_many_chunks_the_legend_has_two() -> None:
    texts = [each.text or "" for each in drawn(Schedule(Chunks(2, 12), 2)).iter(f"{SVG}text")]
    assert [text for text in texts if text.startswith("chunk")] == ["chunk 0", "chunk 11"]
