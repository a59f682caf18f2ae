"""Which models of transformers are proven in what: `python -m tests.support.transformers_table` writes it into pages.

The table is made of the tables that tests run: families and layouts of tests/distributed/policies, and the rows of
tests/properties/invariance, which train through DeepSpeed. What no test runs cannot stand in it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from dslpar.layout.modes import cuboid_of
from tests.distributed.policies import test_families as families
from tests.distributed.policies import test_many_ranks as many_ranks
from tests.properties.invariance.layouts import LAYOUTS, MODELS, Layout
from tests.support.hugging_face import FAMILIES
from tests.support.layouts import mode_of
from tests.support.paths import ROOT

PAGES: tuple[Path, ...] = (ROOT / "README.md", ROOT / "docs" / "transformers.md")
COMMAND = "python -m tests.support.transformers_table"
_BEGIN, _END = f"<!-- Written by `{COMMAND}`. -->\n", "<!-- End of what is written. -->\n"
_MARKED = re.compile(f"{re.escape(_BEGIN)}.*?{re.escape(_END)}", re.DOTALL)
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
"""Modes, as `tests.support.layouts.mode_of` names them -> heads of columns."""


def table() -> str:
    """Return the table: a row a class, the numbers of ranks in which each mode is exact."""
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
    ]
    if set(names) & set(many_ranks.FAMILIES):
        tensors += map(cuboid_of, many_ranks.LAYOUTS.values())
    for tensor in tensors:
        exact[mode_of(tensor)].add(tensor.size)
    trained = [row for row in LAYOUTS.values() if _trains(row, cls)]
    stages = {row.parallel["pipeline"].size for row in trained if "pipeline" in row.parallel}
    modes = [_numbers(sizes) or "refused" for sizes in exact.values()]
    return [f"`{cls}`", *modes, _numbers(stages), _numbers({row.zero for row in trained} - {0})]


def _trains(row: Layout, cls: str) -> bool:
    model = MODELS[row.model](row.tied)
    return getattr(model, "target", "") == f"transformers.{cls}" and model.lora is None


def _numbers(found: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(found)))


def rewritten(page: str) -> str:
    """Return the page with the table as it is now."""
    assert _MARKED.search(page), f"no place for the table: {_BEGIN}"
    return _MARKED.sub(lambda _: f"{_BEGIN}\n{table()}\n{_END}", page)


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(rewritten(path.read_text()))
