"""The pictures of Neovim in docs/editors.md are what its screen shows."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.support.neovim import LACKS, NVIM, version
from tests.support.paths import ROOT

FOLDER = ROOT / "docs" / "pictures" / "neovim"
PAGE = (ROOT / "docs" / "editors.md").read_text(encoding="utf-8")
MOST_BYTES = 40_000
NAMES = ["finding", "fixes", "hints", "keys", "layout", "sizes"]
RECORDED = (0, 7)
"""Version of the Neovim whose screens they are, but for hints."""


@pytest.mark.skipif(NVIM is None, reason=LACKS)
@pytest.mark.skipif(find_spec("pygls") is None, reason="pygls is not installed (extra lsp)")
@pytest.mark.skipif(find_spec("pyte") is None, reason="pyte is not installed (extra docs)")
def test_the_session_draws_these_screens_again() -> None:
    if version() != RECORDED:
        pytest.skip(f"the pictures are of Neovim {RECORDED}")
    ran = subprocess.run(
        [sys.executable, "tools/neovim_pictures.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_the_page_shows_all_pictures() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == NAMES
    assert [name for name in NAMES if f"](pictures/neovim/{name}.svg)" not in PAGE] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_picture_is_small_and_needs_nothing_else(name: str) -> None:
    text = (FOLDER / f"{name}.svg").read_text(encoding="utf-8")
    assert len(text.encode()) < MOST_BYTES
    assert "href" not in text
    assert "url(" not in text
    root = ElementTree.fromstring(text)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} == {
        "svg",
        "title",
        "desc",
        "style",
        "rect",
        "text",
    }


@pytest.mark.skipif(find_spec("pyte") is None, reason="pyte is not installed (extra docs)")
def test_a_changed_picture_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    from neovim_pictures import stale  # type: ignore[import-not-found]

    made = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.iterdir()}
    assert stale(made) == []
    (tmp_path / "keys.svg").write_text(made["keys.svg"].replace("num_heads", "heads"), encoding="utf-8")
    assert stale({"keys.svg": made["keys.svg"], "fixes.svg": made["fixes.svg"]}, tmp_path) == ["keys.svg", "fixes.svg"]


@pytest.mark.skipif(find_spec("pyte") is None, reason="pyte is not installed (extra docs)")
def test_a_screen_as_svg(monkeypatch: pytest.MonkeyPatch) -> None:
    """Colours, bold and underlined text, reverse video and the cursor, with places in cells."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import pyte
    from terminal_svg import HEIGHT, WIDTH, svg  # type: ignore[import-not-found]

    screen = pyte.Screen(20, 5)
    pyte.Stream(screen).feed("a <b> \x1b[31mred\x1b[0m \x1b[1;4mbold\x1b[0m\r\n  \x1b[7mback\x1b[0m\x1b[3;3H")
    text = svg(screen, "Title", "a & b")
    x, y = 12 + 6 * WIDTH, 12 + 13
    assert f'<text x="{x:g}" y="{y}" textLength="{3 * WIDTH:g}" fill="var(--red)">red</text>' in text
    assert 'class="bold" text-decoration="underline">bold</text>' in text
    assert f'y="{12 + HEIGHT}" width="{4 * WIDTH:g}" height="{HEIGHT}" fill="var(--ink)"/>' in text
    assert 'fill="var(--paper)">back</text>' in text
    assert f'<rect x="{12 + 2 * WIDTH:g}" y="{12 + 2 * HEIGHT}" width="{WIDTH:g}"' in text, "the cursor"
    assert "a &lt;b&gt;" in text
    assert '<desc id="description">a &amp; b</desc>' in text
    assert "--red:#b3261e" in text
    assert "--red:#ff8f85" in text
    assert "--green" not in text
    assert ElementTree.fromstring(text).get("height") == str(3 * HEIGHT + 24), "without the empty rows"
