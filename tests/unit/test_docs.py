"""tools/docs.py: the generated pages are current, and their links resolve."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.paths import ROOT


def test_the_generated_pages_are_up_to_date() -> None:
    ran = subprocess.run([sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.prove
def test_a_stale_page_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import docs  # type: ignore[import-not-found]

    docs.write(tmp_path)
    assert docs.stale(tmp_path) == []
    page = tmp_path / "rules" / "PAR.md"
    (tmp_path / "api" / "layers.md").write_text("as it was\n")
    (tmp_path / "api" / "README.md").write_text("by hand\n")
    (tmp_path / "pictures" / "gone.svg").touch()
    page.write_text(page.read_text() + "more\n")
    (tmp_path / "rules" / "GONE.md").write_text("# a family of once\n")
    (tmp_path / "config.md").unlink()
    assert docs.stale(tmp_path) == [
        "api/layers.md",
        "config.md",
        "pictures/gone.svg",
        "rules/GONE.md",
        "rules/PAR.md",
    ]


PAGES = [
    path
    for folder in (".", "docs", "docs/api", "docs/rules", "docs/tutorials", "docs/upstream", "layers", "tests")
    for path in sorted((ROOT / folder).glob("*.md"))
]


def links(page: Path) -> list[str]:
    """Return a page's links, without other sites and without code."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]


def test_links_are_valid() -> None:
    """All pages are checked: files exist, and headings are in them."""
    checked = 0
    for page in PAGES:
        for target in links(page):
            path, _, anchor = target.partition("#")
            linked = (page.parent / path).resolve() if path else page
            assert linked.exists(), (page, target)
            assert not anchor or anchor in _anchors(linked), (page, target)
            checked += 1
    assert checked > 250


def _anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_a_dead_anchor_would_be_seen() -> None:
    assert _anchors(ROOT / "docs" / "running.md") >= {"resume", "choose-a-tensor-mode"}
    assert "nowhere" not in _anchors(ROOT / "docs" / "running.md")
    assert "file" not in links(ROOT / "README.md")


@pytest.fixture
def api_pages(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module that writes docs/api."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("api_pages")


def test_docstrings_become_markdown(api_pages: ModuleType) -> None:
    assert doctest.testmod(api_pages).attempted
    assert doctest.testmod(api_pages).failed == 0
    shown = api_pages.markdown("Adds.\n\n>>> 1 + 1\n2\n\nReturns:\n    2 * x, a `2 * x`")
    assert list(shown) == ["Adds.", "", "```pycon", ">>> 1 + 1", "2", "```", "", "Returns:", "", "2 \\* x, a `2 * x`"]


@pytest.mark.prove
def test_every_public_name_is_described_once(api_pages: ModuleType) -> None:
    """Each has a docstring, and a heading on the page that its own page links to."""
    headings = {module: _headings(page) for module, page in api_pages.MODULES.items()}
    assert "dslpar.layers" in headings
    for module in map(importlib.import_module, headings):
        for name in module.__all__:
            value = getattr(module, name)
            assert not callable(value) or inspect.getdoc(value), (module.__name__, name)
            same = [other for other in headings if _public(other, name) is value]
            described = [other for other in same if name in headings[other]]
            assert len(described) == (not inspect.ismodule(value)), (module.__name__, name, described)


def _public(module: str, name: str) -> object:
    """Return what a module has under a name; None for a name of ColossalAI's of which it says what to use instead."""
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _headings(page: str) -> list[str]:
    return re.findall(r"^## (.*)$", (ROOT / "docs" / "api" / f"{page}.md").read_text(), re.MULTILINE)


def test_a_signature_is_shown_as_written(api_pages: ModuleType) -> None:
    def made(first: int, /, second: str = "b", *, third: object = object) -> list[int]:
        return [first]

    def long(
        name_of_the_first: Sequence[int], name_of_the_second: Mapping[str, int], *rest: int, **more: str
    ) -> None: ...

    assert list(api_pages._code("def made", inspect.signature(made))) == [
        "```python",
        "def made(first: int, /, second: str = 'b', *, third: object = <class 'object'>) -> list[int]",
        "```",
        "",
    ]
    assert list(api_pages._code("def long", inspect.signature(long)))[1:-2] == [
        "def long(",
        "    name_of_the_first: Sequence[int],",
        "    name_of_the_second: Mapping[str, int],",
        "    *rest: int,",
        "    **more: str,",
        ") -> None",
    ]
    assert api_pages._default(lambda: None) == "...", "an address differs in every process"


def test_the_index_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The example in docs/README.md is run."""
    text = (ROOT / "docs" / "README.md").read_text()
    shown = re.search(r"```\n\$ dslpar (.*)\n((?:.*\n)*?)```", text)
    assert shown is not None
    ran = subprocess.run(
        [sys.executable, "-m", "dslpar.cli", *shown[1].split()], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout == shown[2]
