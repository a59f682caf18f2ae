"""Write the tables of verified transformers models into the pages: `python -m tests.support.transformers_table`.

The first table is made from what tests run: families and layouts of tests/distributed/policies, and training through
DeepSpeed in rows of tests/properties/layouts and the record of tests/properties/families. The second table is that
record alone. Neither can contain anything that no test runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dslpar.layout.modes import cuboid_of
from tests.distributed.policies import test_families as families
from tests.distributed.policies import test_many_ranks as many_ranks
from tests.properties.families import record
from tests.properties.families.table import MODES, OF_SEQUENCES, ROWS, Row, refusal
from tests.properties.layouts.arrays import rows as rows_of_array
from tests.support.hugging_face import FAMILIES
from tests.support.layout_factors import FAMILIES as PROVED_FAMILIES
from tests.support.layouts import mode_of
from tests.support.paths import ROOT

PAGES: tuple[Path, ...] = (ROOT / "docs" / "transformers.md",)
COMMAND = "python -m tests.support.transformers_table"
_BEGIN, _END = f"<!-- Written by `{COMMAND}`. -->\n", "<!-- End of what is written. -->\n"
_BEGIN_TRAINED = f"<!-- Written by `{COMMAND}`, of the record. -->\n"
_COLUMNS: Mapping[str, str] = {
    "1d, replicated": "1d",
    "1d, sequence": "1d, sequence",
    "2d": "2d",
    "2.5d": "2.5d",
    "3d": "3d",
    "cuboid": "cuboid",
    "ring": "ring",
    "ulysses": "Ulysses",
}
"""Modes, as `tests.support.layouts.mode_of` names them -> column headings."""


def table() -> str:
    """Return the table: a row per class, with the numbers of ranks on which each mode is exact."""
    heads = ["class", *_COLUMNS.values(), "stages", "ZeRO"]
    rows = [heads, ["---"] * len(heads), *(_row(name, of) for name, of in _by_class().items())]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _by_class() -> dict[str, list[str]]:
    """Return the families of each class."""
    found: dict[str, list[str]] = {}
    for name, family in FAMILIES.items():
        found.setdefault(family.classes()[0].__name__, []).append(name)
    return found


def _row(cls: str, names: list[str]) -> list[str]:
    exact: dict[str, set[int]] = {mode: set() for mode in _COLUMNS}
    tensors = [
        families.LAYOUTS[layout]
        for layout in families.NAMES
        if not any(families.refusal(name, layout) for name in names)
        and any(families.is_compared(name, layout, True) for name in names)
    ]
    if set(names) & set(many_ranks.FAMILIES):
        tensors += map(cuboid_of, many_ranks.LAYOUTS.values())
    for tensor in tensors:
        mode = mode_of(tensor)
        if mode != "context":  # beside other modes, which have their own columns
            exact["ring" if mode == "zigzag" else mode].add(tensor.size)
    rows = [row for row in rows_of_array("prove") if _trains(row, cls)]
    seen = [ROWS[name] for name in record.read() if ROWS[name].family in names]
    stages = {row["pipe"] for row in rows} | {row.pipe for row in seen}
    zeros = {row["zero"] for row in rows} | {row.zero for row in seen}
    modes = [_numbers(sizes) or "refused" for sizes in exact.values()]
    return [f"`{cls}`", *modes, _numbers(stages - {1}), _numbers(zeros - {0})]


def _trains(row: Mapping[str, object], cls: str) -> bool:
    return PROVED_FAMILIES[str(row["family"])][0] == f"transformers.{cls}" and not row["adapters"]


def _numbers(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(found)))


def trained() -> str:
    """Return the table of training: a row per family, a cell per mode with ZeRO stages for 1 and 2 pipeline stages."""
    heads = ["family", *MODES, "runs", "loss", "weights"]
    seen = record.read()
    rows = [heads, ["---"] * len(heads)]
    for family in dict.fromkeys(row.family for row in ROWS.values()):
        own = {name: each for name, each in seen.items() if ROWS[name].family == family}
        cells = [_stages([ROWS[name] for name in own if ROWS[name].mode == mode], family, mode) for mode in MODES]
        worst = [f"{max(each[what] for each in own.values()):.0e}" for what in ("loss", "weights")]
        rows.append([family, *cells, f"{len(own)} of {sum(row.family == family for row in ROWS.values())}", *worst])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def _stages(rows: list[Row], family: str, mode: str) -> str:
    if mode in OF_SEQUENCES and refusal(Row(family, mode, 1, 1, 0, True, False, False)):
        return "refused"
    alone, piped = (_numbers({row.zero for row in rows if row.pipe == pipe}) for pipe in (1, 2))
    return f"{alone}; {piped}" if piped else alone


def rewritten(page: str) -> str:
    """Return the page with its current tables."""
    assert _BEGIN in page, f"no place for the table: {_BEGIN}"
    for begin, made in ((_BEGIN, table), (_BEGIN_TRAINED, trained)):
        marked = re.compile(f"{re.escape(begin)}.*?{re.escape(_END)}", re.DOTALL)
        if marked.search(page):
            written = f"{begin}\n{made()}\n{_END}"
            page = marked.sub(lambda _, written=written: written, page)
    return page


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewritten(path.read_text()))
