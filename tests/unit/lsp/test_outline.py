"""The outline of a config: sections, keys, and their places."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from dslpar.lsp.analysis import analysed
from dslpar.lsp.outline import Entry, outline


def names(entries: Iterable[Entry]) -> list[object]:
    return [[each.name, names(each.children)] if each.children else each.name for each in entries]


def test_sections_and_keys_of_the_file_alone(tmp_path: Path) -> None:
    (tmp_path / "common.py").write_text("optimizer = dict(lr=1e-3)\n")
    path = str(tmp_path / "cfg.py")
    text = "from .common import optimizer\nheads = 4\nmodel = dict(type='GPT', num_heads=heads)\nparallel = dict()\n"
    made = outline(analysed(path, {os.path.realpath(path): text}))
    assert names(made) == ["heads", ["model", ["type", "num_heads"]], "parallel"]
    assert [each.is_section for each in made] == [False, True, True]


def test_an_entry_contains_its_key_if_a_variable_above_holds_the_value(tmp_path: Path) -> None:
    path = str(tmp_path / "cfg.py")
    text = "heads = 4\nmodel = dict(num_heads=heads)\n"
    model = outline(analysed(path, {os.path.realpath(path): text}))[1]
    (heads,) = model.children
    assert (heads.key.line, heads.key.column, heads.key.end_column) == (2, 14, 23)
    assert (heads.whole.line, heads.whole.column, heads.whole.end_line, heads.whole.end_column) == (2, 14, 2, 23)
    assert (model.whole.line, model.whole.end_line) == (2, 2)
