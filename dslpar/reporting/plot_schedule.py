"""Plot a pipeline's schedule as an SVG: one row per rank over time, and one box per action.

    Path("schedule.svg").write_text(draw(timeline, chunks, "1f1b over 4 ranks"))

An action is the forward, backward, or weight backward of a micro-batch through a stage. A box's colour shows the kind
of action, in Okabe and Ito's colours, which colour-blind readers can tell apart too. The shade shows which of the
rank's stages (chunks) it belongs to, and the number is the micro-batch. arXiv 2104.04473 and 2401.10241 draw the
interleaved and the zero bubble schedule in this way. The SVG needs no library, scripts or fonts.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

from dslpar.core.visible import visible
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Action
from dslpar.layout.simulation import Span, Timeline, held
from dslpar.reporting.picture import Picture
from dslpar.reporting.scale import label, make_scale

COLORS = {"F": (0x00, 0x72, 0xB2), "B": (0xD5, 0x5E, 0x00), "W": (0x00, 0x9E, 0x73)}
_WIDTH, _LEFT, _RIGHT = 1180, 66, 74
_INNER = _WIDTH - _LEFT - _RIGHT
_TOP, _ROW, _BOX, _BELOW = 62, 30, 24, 46
_DIGIT = 7
"""Approximate width in pixels of a digit in a box."""
_MOST_WHITE = 0.62
"""Share of white in the lightest shade."""
_MOST_CHUNKS = 6
"""With more chunks, the legend shows only the shades of the first and the last."""
_STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.grid{stroke:#e2e2e2}.box{stroke:#fff;stroke-width:.6}"
    ".n{font-size:11px}.light{fill:#fff}"
)


def draw(timeline: Timeline, chunks: Chunks, title: str) -> str:
    """Draw a step as the text of an SVG file."""
    height = _height(timeline)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{_WIDTH}" height="{height}" fill="#fff"/>',
        *_elements(timeline, chunks, title),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def picture(timeline: Timeline, chunks: Chunks, title: str) -> Picture:
    """Draw a step as a picture for a page, with tooltips.

    Rows are named "pipe 0" and not "rank 0", because other pictures of the page show global ranks.
    """
    elements = list(_elements(timeline, chunks, title, on_page=True))
    return Picture("schedule", "Schedule", title, _WIDTH, _height(timeline), elements)


def _height(timeline: Timeline) -> int:
    return _TOP + _ROW * len(timeline.orders) + _BELOW


def _elements(timeline: Timeline, chunks: Chunks, title: str, on_page: bool = False) -> Iterator[str]:
    yield _text(_LEFT, 20, title, css="title")
    yield from _legend(chunks, any(action.kind == "W" for action in timeline.spans))
    height = _height(timeline)
    bottom, wide = height - _BELOW, _INNER / timeline.makespan
    for tick in make_scale((0.0, timeline.makespan)).ticks(12):
        x = _LEFT + wide * tick
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}"/>'
        yield _text(x, bottom + 14, label(tick), "middle")
    for rank, order in enumerate(timeline.orders):
        y = _TOP + _ROW * rank
        yield _text(_LEFT - 8, y + 16, f"{'pipe' if on_page else 'rank'} {rank}", "end")
        for action in order:
            yield from _box(action, timeline.spans[action], y, wide, chunks, on_page)
        yield _text(_WIDTH - _RIGHT + 8, y + 16, f"holds {round(held(order, chunks).total, 2):g}")
    axis = "time, in forwards of a mean stage; on the right, the most micro-batches whose activations a rank holds"
    yield _text(_LEFT + _INNER / 2, height - 10, axis, "middle")


def _box(action: Action, span: Span, y: float, wide: float, chunks: Chunks, has_tip: bool) -> Iterator[str]:
    x, width = _LEFT + wide * span.start, wide * (span.end - span.start)
    chunk, micro = action.stage // chunks.pipe, str(action.micro)
    fill = _shade(action.kind, chunk, chunks.num)
    yield f'<rect class="box" x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BOX}" fill="{fill}"' + (
        f"><title>{action.kind} of stage {action.stage}, micro-batch {micro}</title></rect>" if has_tip else "/>"
    )
    if width > _DIGIT * len(micro):
        css = "n light" if 2 * _white(chunk, chunks.num) <= _MOST_WHITE else "n"
        yield _text(x + width / 2, y + 16, micro, "middle", css)


def _legend(chunks: Chunks, split: bool) -> Iterator[str]:
    names = {"F": "forward", "B": "backward of inputs" if split else "backward"}
    if split:
        names["W"] = "backward of weights"
    entries = [([_shade(kind, 0, 1)], f"{kind}: {name}") for kind, name in names.items()]
    if chunks.num > 1:
        named = range(chunks.num) if chunks.num <= _MOST_CHUNKS else (0, chunks.num - 1)
        entries += [([_shade(kind, chunk, chunks.num) for kind in names], f"chunk {chunk}") for chunk in named]
    x = float(_LEFT)
    for fills, name in entries:
        width = 12 / len(fills)
        for stripe, fill in enumerate(fills):
            yield f'<rect x="{x + width * stripe:.1f}" y="34" width="{width:.1f}" height="12" fill="{fill}"/>'
        yield _text(x + 18, 44, name)
        x += 42 + 6.5 * len(name)


def _white(chunk: int, num_chunks: int) -> float:
    """Return the share of white in a chunk's shade; 0 for the first chunk."""
    return _MOST_WHITE * chunk / max(num_chunks - 1, 1)


def _shade(kind: str, chunk: int, num_chunks: int) -> str:
    white = _white(chunk, num_chunks)
    return "#" + "".join(f"{round(part + (255 - part) * white):02x}" for part in COLORS[kind])


def _text(x: float, y: float, text: str, anchor: str = "start", css: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{css}>{escape(visible(text))}</text>'
