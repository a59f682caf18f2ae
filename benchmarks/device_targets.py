"""Targets of benchmarks.device_counts, the earlier counts, and the limits of each row.

FIGURES are the targets. A row that misses one is always printed as MISSED, even if KNOWN has the reason. The limits in
device_limits.json are each row's counts when they were written, so a count above its limit is a regression. They hold
for one version of torch, since operations change with versions, and are checked with that version alone.

    python -m benchmarks.device_counts --write-limits      # after a change that is worth its cost
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

Counts = Mapping[str, float]
"""A row: column -> number."""
Found = Mapping[tuple[str, str], Counts]
"""(table, row) -> counts."""


class Figure(NamedTuple):
    """A target of a column."""

    what: str
    table: str
    column: str
    was: str
    asked: float
    """Upper bound."""
    applies: Callable[[str], bool] = lambda row: "plain torch" not in row

    def rows(self, found: Found) -> dict[str, float]:
        """Return the column's value of each row with this target."""
        return {
            row: counts[self.column]
            for (table, row), counts in found.items()
            if table == self.table and self.column in counts and self.applies(row)
        }


def _is_sequence(row: str) -> bool:
    return "sequence" in row


def _is_overlapped_sequence(row: str) -> bool:
    return row.endswith("sequence, overlap")


FIGURES = (
    Figure("synchronize, a step", "step", "synchronize", "8", 0),
    Figure("reads of the host, a step", "step", "reads", "7", 1),
    Figure("copies from the host, a step", "step", "copies from the host", "-", 0),
    Figure("exposed, 1d with sequence and overlap", "block", "exposed", "6 of 8", 2, _is_overlapped_sequence),
    Figure("exposed share, a layer with overlap", "block", "exposed share", "6 of 8", 2 / 8),
    Figure("graph breaks, a block", "block", "graph breaks", "13 to 19", 0),
    Figure("clones, a block with sequence", "block", "clones", "8", 2, _is_sequence),
    Figure("all copies, a block with sequence", "block", "copies", "-", 2, _is_sequence),
    Figure("bytes a logit, the loss", "bytes", "bytes a logit", "64", 16),
    # The gradient is read in bf16, its sum read and written in float32. On CUDA the product itself adds to the sum.
    Figure("bytes a parameter, a gradient's sum", "bytes", "bytes a parameter", "18", 10),
)


class Known(NamedTuple):
    """A figure that some rows are known to miss, and the reason."""

    column: str
    applies: Callable[[str], bool]
    why: str


KNOWN = (
    Known(
        "bytes a logit",
        lambda row: row == "the loss",
        "torch's softmax makes a copy of bfloat16 in float32 first; compiled (train.compile_components) it does not",
    ),
    Known(
        "copies",
        _is_sequence,
        "beside clones: what q, k and v get back is joined, as in plain torch; so are vectors, rotary halves, a ring",
    ),
)


class Miss(NamedTuple):
    """A row that misses a figure."""

    figure: Figure
    row: str
    seen: float
    why: str | None
    """The reason of a known miss."""

    def __str__(self) -> str:
        text = f"MISSED {self.figure.what}: {self.row}: {self.seen:g}, asked at most {self.figure.asked:g}"
        return f"{text} (known: {self.why})" if self.why else text


def misses(found: Found) -> list[Miss]:
    """Return all rows that miss a figure."""
    return [
        Miss(figure, row, seen, next((known.why for known in _known(figure, row)), None))
        for figure in FIGURES
        for row, seen in figure.rows(found).items()
        if seen > figure.asked
    ]


def _known(figure: Figure, row: str) -> list[Known]:
    return [known for known in KNOWN if known.column == figure.column and known.applies(row)]


def wrong(found: Found) -> list[str]:
    """Return problems: unknown misses, known misses that are gone, counts above limits."""
    missed = misses(found)
    return [str(miss) for miss in missed if not miss.why] + _met_again(found, missed) + list(_above(found))


def _met_again(found: Found, missed: list[Miss]) -> list[str]:
    still = {(miss.figure, miss.row) for miss in missed}
    return [
        f"{row} meets '{figure.what}' again: take it out of KNOWN"
        for figure in FIGURES
        for row in figure.rows(found)
        if _known(figure, row) and (figure, row) not in still
    ]


# ---- limits ----

LIMITS = Path(__file__).with_name("device_limits.json")
LIMITED = ("kernels", "copies", "KB moved", "collectives", "exposed")


def torch_version() -> str:
    """Return torch's version without the patch number, such as 2.13."""
    return ".".join(torch.__version__.split(".")[:2])


def are_of_this_torch() -> bool:
    """Return whether the limits were written with this version of torch."""
    return bool(_read()["torch"] == torch_version())


def _read() -> dict[str, Any]:
    return cast("dict[str, Any]", json.loads(LIMITS.read_text()))


def _above(found: Found) -> Iterator[str]:
    if not are_of_this_torch():
        return
    limits = _read()
    for (table, row), counts in found.items():
        limit = limits.get(table, {}).get(row)
        for column in LIMITED if "kernels" in counts else ():
            if limit is None:
                yield f"{table}, {row}: no limits; python -m benchmarks.device_counts --write-limits"
                break
            if counts[column] > limit[column]:
                yield f"{table}, {row}: {column} {counts[column]:g}, limit {limit[column]:g}"


def write_limits(found: Found, keep_others: bool = False) -> None:
    """Write the counts as the limits, a row per line, so that a diff shows the changed rows."""
    limits: dict[str, dict[str, Counts]] = _read() if keep_others else {}
    for (table, row), counts in found.items():
        if "kernels" in counts:
            limits.setdefault(table, {})[row] = {column: counts[column] for column in LIMITED}
    limits.pop("torch", None)
    lines = [f'"torch": "{torch_version()}"']
    for table, rows in limits.items():
        lines.append(
            f'"{table}": {{\n' + ",\n".join(f"  {json.dumps(row)}: {json.dumps(rows[row])}" for row in rows) + "\n}"
        )
    LIMITS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


# ---- the report ----


def report(found: Found) -> list[str]:
    """Print the targets beside the earlier and current counts, and all misses. Return what is wrong."""
    print(f"\n{'asked':42}     was  at most   seen")
    for figure in FIGURES:
        rows = figure.rows(found)
        if rows:
            worst = max(rows.values())
            verdict = "ok" if worst <= figure.asked else "MISSED"
            print(f"{figure.what:42}{figure.was:>8} {figure.asked:8g} {worst:6g}  {verdict}")
    for line in _by_reason(misses(found)):
        print(line)
    if not are_of_this_torch():
        print(f"limits are of another torch than {torch_version()}, and are not judged")
    problems = wrong(found)
    print("\n".join(problems) or "nothing else is missed, and no count is above its limit")
    return problems


def _by_reason(missed: list[Miss]) -> list[str]:
    """Return a line per missed figure and reason, with its rows."""
    rows: dict[tuple[str, str | None], list[str]] = {}
    for miss in missed:
        rows.setdefault((miss.figure.what, miss.why), []).append(f"{miss.row} {miss.seen:g}")
    return [
        f"MISSED {what} ({f'known: {why}' if why else 'not known'}): {'; '.join(each)}"
        for (what, why), each in rows.items()
    ]
