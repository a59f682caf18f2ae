"""Variables across files: every place that means a variable, and no other, is renamed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.core.errors import Fix
from dslpar.linter import check, fixes
from dslpar.lsp.names import Names, RefusedError, Symbol

COMMON = "heads = 4\nother = 2\n"
MODEL = "model = dict(type='GPT', num_layers=4, hidden_size=48, num_heads={}, vocab_size=256, max_seq_len=64)\n"
READERS = [
    "from .common import heads\n" + MODEL.format("heads"),
    "from .common import heads as n\n" + MODEL.format("n"),
    "from . import common\n" + MODEL.format("common.heads"),
    "from . import common as c\n" + MODEL.format("c.heads"),
    "if True:\n    from .common import heads\n" + MODEL.format("heads"),
    "from .common import heads\nx = [heads for heads in range(heads)]\n" + MODEL.format("len(x)"),
    "from .common import heads\nx = {heads: 1 for _ in range(2)}\n" + MODEL.format("heads"),
]


def renamed(folder: Path, reader: str, to: str) -> dict[str, str]:
    """Write two files, rename `heads`, and return the files' texts."""
    texts = {folder / "common.py": COMMON, folder / "cfg.py": reader}
    for path, text in texts.items():
        path.write_text(text)
    names = Names([str(folder)], {})
    places = names.rename(Symbol(str(folder / "common.py"), "heads"), to)
    return {
        path.name: fixes.apply(text, [Fix(at, to) for at in places if at.path == str(path)])
        for path, text in texts.items()
    }


@pytest.mark.parametrize("reader", READERS)
def test_a_rename_changes_no_value(reader: str, tmp_path: Path) -> None:
    folder = tmp_path.resolve()
    made = renamed(folder, reader, "width")
    before = check.load(str(folder / "cfg.py"))
    assert before.findings == ()
    for name, text in made.items():
        (folder / name).write_text(text)
    after = check.load(str(folder / "cfg.py"))
    assert after.findings == ()
    assert after.root.get("model").plain() == before.root.get("model").plain()  # type: ignore[union-attr]
    assert made["common.py"] == COMMON.replace("heads", "width")


@pytest.mark.parametrize(
    "reader", ["from .common import heads, other as width\n", "from .common import heads\nwidth = 3\n"]
)
def test_a_name_that_a_reader_has_is_refused(reader: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="has 'width' already"):
        renamed(tmp_path.resolve(), reader, "width")


def test_a_text_that_is_no_python_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path.resolve() / "common.py"
    path.write_text(COMMON)
    names = Names([], {str(path): COMMON, str(tmp_path / "notes.yaml"): "heads: [\n"})
    assert len(names.rename(Symbol(str(path), "heads"), "width")) == 1
