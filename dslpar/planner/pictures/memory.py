"""Picture of the memory of each pipeline rank at its fullest moment, by part, with the device's limit.

made = draw(forecast.memory, forecast.machine.device)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dslpar.forecast.device import GIB, Device
from dslpar.forecast.plan import AT_FULL_SPEED, COMFORTABLE, verdict_of
from dslpar.forecast.stage_memory import StageMemory
from dslpar.reporting.picture import CHAR, WIDTH, Picture, bar, label, upright
from dslpar.reporting.scale import label as tick_label
from dslpar.reporting.scale import make_scale

PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "activations": "activations",
    "logits": "logits",
    "buffers": "buffers",
    "fragmentation": "fragmentation",
    "outside": "outside torch",
}
"""Parts of a `StageMemory` and their display names."""
MOST_ROWS = 64
"""The most pipeline ranks that are drawn."""
_LEFT, _RIGHT, _LEGEND, _LABELS, _ROW, _BAR = 66, 170, 26, 40, 30, 24
_INNER = WIDTH - _LEFT - _RIGHT
_LIGHT_ON = ("weights", "activations", "buffers")
"""Parts with a dark fill, whose labels are white."""


def draw(memory: Sequence[StageMemory], device: Device | None) -> Picture:
    """Draw one row per pipeline rank.

    With a device, also draw its memory, the limit of the verdict "fits", and the limit above which a step thrashes.
    """
    limit = device.memory_bytes if device is not None else 0.0
    most = max(*(each.total for each in memory), limit)
    shown, wide = min(len(memory), MOST_ROWS), _INNER / most
    top = _LEGEND + (_LABELS if device is not None else 4)
    bottom = top + _ROW * shown
    elements = list(_legend())
    for tick in make_scale((0.0, most / GIB)).ticks(8):
        x = _LEFT + wide * tick * GIB
        elements += [upright(x, top - 4, bottom, "grid"), label(x, bottom + 15, tick_label(tick), "soft", "middle")]
    for rank in range(shown):
        elements += _bars(memory[rank], rank, top + _ROW * rank, wide)
    if device is not None:
        elements += _limits(device, wide, top, bottom)
    for rank in range(shown):
        elements += _labels(memory[rank], rank, top + _ROW * rank, wide, device)
    more = f"; {len(memory) - shown} more ranks are in the table" if len(memory) > shown else ""
    elements.append(label(_LEFT, bottom + 34, f"GiB of a rank at its fullest moment{more}", "soft"))
    totals = [each.total for each in memory]
    fullest = f"stage {totals.index(max(totals))} needs {max(totals) / GIB:.1f} GiB, the most of all"
    if device is not None:
        fullest += f" ({device.name} has {limit / GIB:.1f}: {verdict_of(max(totals) / limit)})"
    return Picture(
        "memory", "Memory", f"Parts of memory by rank of the pipeline: {fullest}", WIDTH, bottom + 42, elements
    )


def _legend() -> Iterator[str]:
    x = float(_LEFT)
    for part, name in PARTS.items():
        yield bar(x, 2, 12, 12, f"part {part}")
        yield label(x + 17, 12, name)
        x += 38 + CHAR * len(name)


def _bars(memory: StageMemory, rank: int, y: float, wide: float) -> Iterator[str]:
    x = float(_LEFT)
    for part, name in PARTS.items():
        size = getattr(memory, part)
        yield bar(x, y, wide * size, _BAR, f"part {part}", f"pipe {rank}, {name}: {size / GIB:.2f} GiB")
        x += wide * size


def _labels(memory: StageMemory, rank: int, y: float, wide: float, device: Device | None) -> Iterator[str]:
    yield label(_LEFT - 8, y + 16, f"pipe {rank}", anchor="end")
    x = float(_LEFT)
    for part, name in PARTS.items():
        width = wide * getattr(memory, part)
        if CHAR * len(name) + 8 < width:
            yield label(x + width / 2, y + 16, name, "n light" if part in _LIGHT_ON else "n", "middle")
        x += width
    needs = f"{memory.total / GIB:.1f} GiB"
    verdict = verdict_of(memory.total / device.memory_bytes) if device is not None else ""
    at = max(x, _LEFT + wide * device.memory_bytes if device is not None else 0.0) + 8
    css = "bad" if verdict == "does not fit" else "title"
    yield label(at, y + 16, f"{needs} {verdict}".rstrip(), css)


def _limits(device: Device, wide: float, top: float, bottom: float) -> Iterator[str]:
    for share, anchor, aside in ((COMFORTABLE, "end", -4), (AT_FULL_SPEED, "start", 4)):
        x = _LEFT + wide * device.memory_bytes * share
        yield upright(x, top - 16, bottom, "warning")
        yield label(x + aside, top - 9, f"{share:.0%}".replace("%", " %"), "soft", anchor)
    x = _LEFT + wide * device.memory_bytes
    yield upright(x, top - 30, bottom, "limit")
    yield label(x + 4, top - 24, f"{device.name}: {device.memory_bytes / GIB:.1f} GiB", "title")


def rows(memory: Sequence[StageMemory], device: Device | None) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows: the pipeline rank, each part and the sum in GiB.

    With a device, a row also has the share of the device's memory, and the verdict.
    """
    for rank, each in enumerate(memory):
        row = [f"{rank}", *(f"{getattr(each, part) / GIB:.2f}" for part in PARTS), f"{each.total / GIB:.2f}"]
        if device is not None:
            share = each.total / device.memory_bytes
            row += [f"{100 * share:.0f} %", verdict_of(share)]
        yield tuple(row)
