"""Curves of runs: what is read from metrics.jsonl, the scales, and the text of the pictures."""

from __future__ import annotations

import io
import json
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dslpar.reporting import plot_svg, plot_terminal
from dslpar.reporting.curves import Curve, Panel, read_panels, segments, short_names, thinned
from dslpar.reporting.plot_terminal import Terminal, terminal_of
from dslpar.reporting.scale import label, make_scale

FINITE = st.floats(allow_nan=False, allow_infinity=False)
SVG = "{http://www.w3.org/2000/svg}"


def run(folder: Path, name: str, losses: list[float | None], **more: float) -> Path:
    (folder / name).mkdir()
    records = [
        {"step": step, "loss": loss, "tokens": 10 * step, "step_s": 0.5, **({"skipped": True} if loss is None else {})}
        for step, loss in enumerate(losses, 1)
    ]
    text = "".join(json.dumps(record | more) + "\n" for record in records)
    (folder / name / "metrics.jsonl").write_text(text)
    return folder / name


# ---- what is read ----


@pytest.mark.parametrize(("x", "xs"), [("step", [1, 2, 3]), ("tokens", [10, 20, 30]), ("time", [0.5, 1.0, 1.5])])
def test_curves_over_steps_tokens_and_time(tmp_path: Path, x: str, xs: list[float]) -> None:
    ((panel,), problems) = read_panels([run(tmp_path, "a", [3.0, None, 1.0])], ["loss"], x)
    assert panel == Panel("loss", [Curve("a", xs, [3.0, None, 1.0])])
    assert problems == []


def test_runs_of_different_lengths_a_missing_metric_and_a_missing_file(tmp_path: Path) -> None:
    folders = [run(tmp_path, "a", [3.0, 2.0, 1.0], lr=0.1), run(tmp_path, "b", [4.0]), tmp_path / "none"]
    (loss, lr), problems = read_panels(folders, ["loss", "lr"])
    assert [(curve.run, len(curve.xs)) for curve in loss.curves] == [("a", 3), ("b", 1)]
    assert [(curve.run, len(curve.xs)) for curve in lr.curves] == [("a", 3), ("b", 0)]
    assert problems == [f"{tmp_path / 'none' / 'metrics.jsonl'}: No such file or directory"]


def test_a_smoothed_value_is_the_mean_of_the_last_ones_and_gaps_stay(tmp_path: Path) -> None:
    folder = run(tmp_path, "a", [4.0, 2.0, None, 6.0, 8.0], eval_loss=1.0)
    (loss, held_out), _ = read_panels([folder], ["loss", "eval_loss"], smooth=2)
    assert loss.curves[0].ys == [4.0, 3.0, None, 6.0, 7.0]
    assert held_out.curves[0].ys == [1.0] * 5


def test_images_per_s_stands_for_tokens_per_s(tmp_path: Path) -> None:
    (panel,), _ = read_panels([run(tmp_path, "a", [1.0, 1.0], images_per_s=5.0)], ["tokens_per_s"])
    assert panel.curves[0].ys == [5.0, 5.0]


def test_names_tell_runs_apart() -> None:
    assert short_names([Path("a/x/1"), Path("a/y/1"), Path("a/y/2")]) == ["x/1", "y/1", "y/2"]
    assert short_names([Path("outputs/one")]) == ["one"]
    assert short_names([Path("a"), Path("a/earlier/1")]) == ["a", "a/earlier/1"]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(1, 20))
def test_thinning_keeps_the_ends_and_every_extreme(ys: list[float], columns: int) -> None:
    points = [(float(x), y) for x, y in enumerate(ys)]
    kept = thinned(points, columns)
    assert len(kept) <= max(4 * columns, 1)
    assert kept == sorted(kept)
    assert set(kept) <= set(points)
    assert {kept[0], kept[-1]} == {points[0], points[-1]}
    assert {min(y for _, y in kept), max(y for _, y in kept)} == {min(ys), max(ys)}


# ---- scales ----


@given(st.lists(FINITE, max_size=5), st.booleans(), st.integers(1, 12))
@example([0.0, 5e-324], False, 5)
@example([-1.7e308, 1.7e308], False, 5)
@example([5e-324, 1.7e308], True, 5)
@example([1.0, 1.0 + 2e-16], True, 5)
def test_a_scale_holds_its_values_and_its_ticks(values: list[float], log: bool, count: int) -> None:
    scale = make_scale(values, log)
    assert scale.low < scale.high
    ticks = scale.ticks(count)
    assert ticks == sorted(ticks)
    assert len(ticks) <= 4 * count + 2
    assert all(0 <= scale.at(tick) <= 1 for tick in ticks)
    assert all(len(label(tick)) <= 12 for tick in ticks)
    places = [scale.at(value) for value in sorted(values) if not log or value > 0]
    assert places == sorted(places)
    assert all(0 <= place <= 1 for place in places)


def test_ticks_are_round_numbers() -> None:
    assert make_scale([0.0, 10.0]).ticks(5) == [0, 2, 4, 6, 8, 10]
    assert [label(tick) for tick in make_scale([3e-4, 3e-3]).ticks(3)] == ["0.001", "0.002", "0.003"]
    assert make_scale([0.02, 500.0], log=True).ticks(5) == pytest.approx([0.1, 1, 10, 100])
    assert (
        make_scale([2.0, 3.0], log=True).ticks(4) == [2.0, 2.5, 3.0] or len(make_scale([2.0, 3.0], True).ticks(4)) > 1
    )


# ---- SVG ----

PANELS = [
    Panel("loss", [Curve("a", [1, 2, 3, 4, 5], [5.0, 4.0, None, 3.0, 2.0]), Curve("<b>&\x1b", [1, 2], [4.5, 4.0])]),
    Panel("lr", [Curve("a", [1, 2], [0.1, 0.2]), Curve("<b>&\x1b", [1], [0.1])]),
]


def test_an_svg_has_a_line_between_gaps_a_dot_for_one_point_and_a_legend() -> None:
    root = ET.fromstring(plot_svg.draw(PANELS, "tokens"))
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    assert [len(points) for points in lines] == [2, 2, 2, 2], "the gap cuts a's loss in two"
    assert len(list(root.iter(f"{SVG}circle"))) == 1
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a", "<b>&\\x1b", "loss", "lr", "tokens"} <= set(texts)
    first, second = (line.attrib["stroke"] for line in list(root.iter(f"{SVG}line"))[:2])
    assert first != second
    width, height = (float(root.attrib[name]) for name in ("width", "height"))
    for point in (point for points in lines for point in points):
        x, y = map(float, point.split(","))
        assert 0 < x < width
        assert 0 < y < height


def test_a_falling_loss_falls_in_the_picture() -> None:
    root = ET.fromstring(plot_svg.draw([Panel("loss", [Curve("a", [0, 10], [2.0, 1.0])])]))
    (line,) = root.iter(f"{SVG}polyline")
    (x0, y0), (x1, y1) = (tuple(map(float, point.split(","))) for point in line.attrib["points"].split())
    assert x1 > x0
    assert y1 > y0, "y grows downwards"


def test_zero_is_a_gap_on_a_log_scale() -> None:
    panel = Panel("loss", [Curve("a", [1, 2, 3, 4, 5], [1.0, 10.0, 0.0, 10.0, 100.0])])
    assert [len(points) for points in segments(panel.curves[0], log=True)] == [2, 2]
    assert "loss (log)" in plot_svg.draw([panel], log=["loss"])


def test_a_long_run_makes_a_small_file() -> None:
    curve = Curve("a", range(100_000), [math.sin(step) for step in range(100_000)])
    assert len(plot_svg.draw([Panel("loss", [curve])])) < 60_000


@settings(max_examples=30)
@given(st.lists(st.tuples(FINITE, FINITE | st.none()), max_size=8), st.booleans())
def test_no_numbers_break_a_picture(points: list[tuple[float, float | None]], log: bool) -> None:
    points.sort(key=lambda point: point[0])
    panels = [Panel("loss", [Curve("a", [x for x, _ in points], [y for _, y in points])])]
    logs = ["loss"] if log else []
    drawn = plot_svg.draw(panels, log=logs)
    ET.fromstring(drawn)
    assert "nan" not in drawn
    assert "inf" not in drawn
    assert all(len(line) <= 60 for line in plot_terminal.draw(panels, "step", Terminal(60), logs).splitlines())


# ---- the terminal ----


def test_one_run_is_drawn_in_braille_and_fits_the_width() -> None:
    drawn = plot_terminal.draw([Panel("loss", [Curve("a", [0, 1, 2], [3.0, 2.0, 1.0])])], "step", Terminal(60))
    lines = drawn.splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[0] == "loss"
    assert "\u2800" not in drawn, "an empty cell is a space"
    rows = [row for row, line in enumerate(lines) if any("\u2801" <= char <= "\u28ff" for char in line)]
    assert len(rows) >= 10
    columns = [min(line.index(char) for char in line if "\u2801" <= char <= "\u28ff") for line in lines[1:11]]
    assert columns == sorted(columns), "it falls from left to right"


def test_runs_without_colours_are_letters_and_with_colours_braille() -> None:
    plain = plot_terminal.draw(PANELS, "step", Terminal(60))
    assert re.search(r"a a$", plain, re.MULTILINE)
    assert re.search(r"b <b>&\\x1b$", plain, re.MULTILINE)
    assert "\x1b" not in plain
    colored = plot_terminal.draw(PANELS, "step", Terminal(60, colors=True))
    assert "\x1b[34m" in colored
    assert "\x1b[31m" in colored
    assert "\\x1b" in colored, "a name commands nobody"


def test_an_encoding_without_braille_gets_ascii() -> None:
    ascii_file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    assert terminal_of(ascii_file, {}) == Terminal(terminal_of(ascii_file, {}).width, unicode=False, colors=False)
    assert terminal_of(io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), {}).unicode
    plot_terminal.draw(PANELS, "step", Terminal(60, unicode=False)).encode("ascii")


def test_a_png_through_matplotlib(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is no dependency: PNG is drawn where it is installed")
    from dslpar.reporting import plot_png

    plot_png.write(tmp_path / "out.png", PANELS, log=["lr"])
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
