"""tools/docs.py: the generated pages are what the program prints today, and their links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT


def test_the_generated_pages_are_up_to_date() -> None:
    ran = subprocess.run([sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


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


def test_links_are_valid() -> None:
    """Of the pages that are generated, and of the index: files that are there, headings that are in them."""
    pages = [ROOT / "docs" / "README.md", *(ROOT / "docs" / "rules").glob("*.md")]
    checked = 0
    for page in pages:
        for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            linked = page.parent / path
            assert linked.is_file(), (page, target)
            assert not anchor or anchor in _anchors(linked), (page, target)
            checked += 1
    assert checked > 150


def _anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_index_shows_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/README.md has an example; it is run."""
    text = (ROOT / "docs" / "README.md").read_text()
    shown = re.search(r"```\n\$ dslpar (.*)\n((?:.*\n)*?)```", text)
    assert shown is not None
    ran = subprocess.run(
        [sys.executable, "-m", "dslpar.cli", *shown[1].split()], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.stdout == shown[2]
