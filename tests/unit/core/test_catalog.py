"""The catalogue: each runtime finding has one data file, and is raised by its code alone."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dslpar.core import catalog
from dslpar.core.errors import WORLD, DslparError, Location
from tests.support.paths import ROOT

PAGES = {page.code: page for page in catalog.read_pages()}
FOLDER = Path(catalog.__file__).parent
SOURCES = sorted({*(ROOT / "dslpar").rglob("*.py"), *(ROOT / "layers").rglob("*.py")})


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Yield (name, call) of each call of a plain name."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id, node


def codes_raised(source: str) -> set[str]:
    """Return the codes that a module passes to `finding` and `raise_finding`."""
    if "from dslpar.core.catalog import" not in source:
        return set()
    imports = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom))
    bound = {
        alias.asname or alias.name
        for node in imports
        if node.module == "dslpar.core.catalog"
        for alias in node.names
        if alias.name in ("finding", "raise_finding")
    }
    named = [call.args[0] for name, call in calls(source) if name in bound]
    return {code.value for code in named if isinstance(code, ast.Constant)}


def test_every_code_that_is_raised_has_its_page() -> None:
    raised = set().union(*(codes_raised(path.read_text()) for path in SOURCES))
    assert len(raised) > 70
    assert raised - set(PAGES) == set()


def test_every_page_is_raised_somewhere() -> None:
    source = "\n".join(path.read_text() for path in SOURCES)
    # in quotes, or at the beginning of a text that a dying rank prints unchanged
    raised = {quoted or first for quoted, first in re.findall(r'"([A-Z]+\d+)"|^([A-Z]+\d+) ', source, re.MULTILINE)}
    assert [code for code in PAGES if code not in raised] == []


def test_no_site_repeats_what_the_catalogue_says() -> None:
    """The catalogue or a rule makes each finding. The watchdog of a dying process reads no file, so its text is
    compared.
    """
    by_hand = {
        path.relative_to(ROOT).as_posix()
        for path in SOURCES
        if "Finding" in (source := path.read_text())
        for name, _ in calls(source)
        if name == "Finding"
    }
    assert by_hand == {"dslpar/core/catalog/__init__.py", "dslpar/language/errors.py", "dslpar/linter/rule.py"}
    reports = (ROOT / "dslpar" / "watchdog" / "failure_reports.py").read_text()
    names = re.findall(r"(?m)^([A-Z]{3}\d{3}) ([\w-]+): ", reports)
    assert dict(names) == {code: PAGES[code].name for code in ("HST230", "HST232", "CKP230")}


def test_a_code_without_a_page_would_be_seen() -> None:
    assert codes_raised('from dslpar.core.catalog import raise_finding\nraise_finding("XYZ201", "so")') == {"XYZ201"}
    with pytest.raises(FileNotFoundError):
        catalog.finding("XYZ201", "so")


@pytest.mark.parametrize("page", PAGES.values(), ids=lambda page: page.code)
def test_page(page: catalog.Page) -> None:
    assert (FOLDER / f"{page.code}.md").read_text() == f"# {page.code} {page.name} ({page.severity})\n\n{page.text()}\n"
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", page.name)
    assert re.findall(r"^(\w[\w ]+):$", page.text(), re.MULTILINE) == ["What it does", "Why", "Use instead"]


def test_a_finding_has_name_and_severity_of_its_page() -> None:
    found = catalog.finding("CKP210", "message", "hint", Location("a.py", 3), "checkpoint.resume_from")
    assert found[:3] == ("CKP210", "resume-from-unused", "warning")
    assert found[3:] == ("message", "hint", Location("a.py", 3), "checkpoint.resume_from", None, (), ())
    assert catalog.finding("CKP210", "message", location="a.py").location == Location("a.py")
    assert catalog.finding("CKP210", "message").location == Location(WORLD)


def test_the_error_stands_alone() -> None:
    """The handled exception is not shown beside it, since the message has what the user must know."""
    try:
        raise OSError("no space")
    except OSError:
        with pytest.raises(DslparError) as error:
            catalog.raise_finding("CKP230", "cannot write")
    assert error.value.__suppress_context__
    assert [finding.code for finding in error.value.findings] == ["CKP230"]


def test_pages_are_read_only_when_needed() -> None:
    program = "import sys, dslpar.core.catalog; sys.exit('importlib.resources' in sys.modules)"
    assert subprocess.run([sys.executable, "-S", "-c", program], cwd=ROOT, check=False).returncode == 0
