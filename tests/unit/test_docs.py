"""tools/docs.py: the generated pages are current, and their links resolve."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

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
    page.write_text(page.read_text() + "more\n")
    (tmp_path / "rules" / "GONE.md").write_text("# a family of once\n")
    (tmp_path / "config.md").unlink()
    assert docs.stale(tmp_path) == ["config.md", "rules/GONE.md", "rules/PAR.md"]


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


MODULES = re.findall(r"^.. public:: (.*)$", "".join(path.read_text() for path in PAGES), re.MULTILINE)


@pytest.mark.prove
def test_every_public_name_has_a_docstring() -> None:
    """The API reference (docs/api) is made from them."""
    assert "dslpar.layers" in MODULES
    for module in map(importlib.import_module, MODULES):
        for name in module.__all__:
            value = getattr(module, name)
            assert not callable(value) or inspect.getdoc(value), (module.__name__, name)


def test_docstrings_become_restructured_text(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx", reason="the reference is made with Sphinx: pip install dslpar[docs]")
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import site_reference  # type: ignore[import-not-found]

    assert doctest.testmod(site_reference).attempted
    assert doctest.testmod(site_reference).failed == 0


@pytest.mark.prove
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """As with `make docs`: links, anchors and docstrings."""
    pytest.importorskip("sphinx", reason="the site is made with Sphinx: pip install dslpar[docs]")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", "docs"]
    built = subprocess.run([*command, ".", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    for module, name in (("dslpar", "initialize"), ("layers", "Linear2p5D"), ("checkpoint", "load_full_state")):
        assert name in (tmp_path / "docs" / "api" / f"{module}.html").read_text()
    assert str(ROOT) not in (tmp_path / "docs" / "api" / "colossalai.html").read_text()


def test_the_index_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """The example in docs/README.md is run."""
    text = (ROOT / "docs" / "README.md").read_text()
    shown = re.search(r"```\n\$ dslpar (.*)\n((?:.*\n)*?)```", text)
    assert shown is not None
    ran = subprocess.run(
        [sys.executable, "-m", "dslpar.cli", *shown[1].split()], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout == shown[2]
