"""The site of `make docs`: it builds without a warning, and in a browser every link leads somewhere.

A link within the site is followed to its page and its anchor, a picture is drawn. Links to other sites are checked for
their form alone: a test needs no network.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urldefrag, urlsplit

import pytest

from tests.support.chromium import Browser, executable
from tests.support.paths import ROOT

pytestmark = pytest.mark.prove  # the build takes 15 seconds
chromium = pytest.mark.skipif(executable() is None, reason="no Chromium on PATH (Debian: apt-get install chromium)")

PICTURES = """Promise.all([...document.images].map(async (each) => {
    each.loading = 'eager'
    await each.decode().catch(() => null)
    return [each.currentSrc || each.src, each.naturalWidth]
}))"""
SEEN = """({
    links: [...document.links].map((each) => each.href),
    anchors: [...document.querySelectorAll('[id]:not(svg *)')].map((each) => each.id)
})"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the site, built as by `make docs`."""
    pytest.importorskip("sphinx", reason="the site is made with Sphinx: pip install dslpar[docs]")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "--conf-dir", "docs"]
    built = subprocess.run([*command, ".", str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_the_site_has_the_reference(site: Path) -> None:
    for module, name in (("dslpar", "initialize"), ("layers", "Linear2p5D"), ("checkpoint", "load_full_state")):
        text = (site / "docs" / "api" / f"{module}.html").read_text()
        assert len(re.findall(rf"<h2>{name}<", text)) == 1, "described once"
    assert not [str(page) for page in site.rglob("*.html") if str(ROOT) in page.read_text()]


class Page(NamedTuple):
    """A page as the browser shows it."""

    links: list[str]
    anchors: set[str]
    pictures: dict[str, int]
    """Width in pixels of each picture by its address; 0: it cannot be drawn."""
    problems: list[str]


def visit(browser: Browser, path: Path) -> Page:
    """Load a page, and return what is on it."""
    browser.problems.clear()
    browser.open(path)
    seen = browser.evaluate(SEEN)
    return Page(seen["links"], set(seen["anchors"]), dict(browser.evaluate(PICTURES)), list(browser.problems))


def dead(pages: dict[str, Page], folder: Path) -> list[str]:
    """Return `page: fault` for dead links, malformed addresses, pictures that are not drawn, and errors."""
    found = []
    for address, page in pages.items():
        faults = [f"{link}: {fault}" for link in dict.fromkeys(page.links) if (fault := fault_of(link, pages, folder))]
        faults += [f"{picture}: not drawn" for picture, width in page.pictures.items() if not width]
        found += [f"{address}: {fault}" for fault in (*faults, *page.problems)]
    return found


def fault_of(link: str, pages: dict[str, Page], folder: Path) -> str:
    """Return what is wrong with a link; empty: nothing."""
    if not link.startswith("file:"):
        parts = urlsplit(link)
        well_formed = parts.scheme in ("http", "https") and re.fullmatch(r"[\w-]+(\.[\w-]+)+", parts.netloc)
        return "" if well_formed and re.fullmatch(r"[!-~]+", link) else "malformed"
    address, anchor = urldefrag(link)
    path = Path(unquote(urlsplit(address).path))
    if not path.is_relative_to(folder):
        return "outside the site"
    if address not in pages:
        return "" if path.is_file() else "no such file"
    return "" if not anchor or unquote(anchor) in pages[address].anchors else "no such anchor"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as made:
        yield made


@chromium
def test_every_link_leads_somewhere_and_every_picture_is_drawn(browser: Browser, site: Path) -> None:
    pages = {path.resolve().as_uri(): visit(browser, path) for path in sorted(site.rglob("*.html"))}
    assert dead(pages, site.resolve()) == []
    links = [link for page in pages.values() for link in page.links]
    assert len(pages) > 50
    assert sum(link.startswith("file:") and "#" in link for link in links) > 1000
    assert sum(link.startswith("https:") for link in links) > 50
    assert sum(len(page.pictures) for page in pages.values()) >= 2


@chromium
def test_a_dead_link_would_be_seen(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "there.html").write_text("<p id=part>")
    (tmp_path / "text.txt").touch()
    (tmp_path / "page.html").write_text(
        "<a href=there.html#part></a><a href=there.html#gone></a><a href=gone.html></a><a href=text.txt></a>"
        "<a href='#top'></a><p id=top></p><a href=../elsewhere.html></a><a href=https://example></a>"
        "<a href='https://example.org/a b'></a><a href=https://example.org/page#part></a><img src=gone.svg>"
        '<img src=\'data:image/svg+xml,<svg xmlns="http://www.w3.org/2000/svg" width="7" height="7"/>\'>'
    )
    pages = {path.as_uri(): visit(browser, path) for path in (tmp_path / "page.html", tmp_path / "there.html")}
    here, page = tmp_path.as_uri(), (tmp_path / "page.html").as_uri()
    found = dead(pages, tmp_path)
    assert found == [
        f"{page}: {here}/there.html#gone: no such anchor",
        f"{page}: {here}/gone.html: no such file",
        f"{page}: {tmp_path.parent.as_uri()}/elsewhere.html: outside the site",
        f"{page}: https://example/: malformed",
        f"{page}: {here}/gone.svg: not drawn",
        f"{page}: Failed to load resource: net::ERR_FILE_NOT_FOUND",
    ]
