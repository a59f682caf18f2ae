"""Catalogue of findings that only a run can make: about a machine, a class, or how ranks were started.

A finding is raised by its code. Its name, severity and page are in the file `CODE.md` in this folder, which is read
when the finding is made or explained, never at start-up. To add a finding, write its file and raise it::

    raise_finding("CKP211", "another run writes to 'outputs/gpt'", "name another folder", config.at(key), key)

Codes start at 201, except TEN110 and TEN111. The codes of lint rules are in `dslpar.linter.rules`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple, NoReturn, get_args

from dslpar.core.errors import WORLD, DslparError, Finding, Location, Severity


class Page(NamedTuple):
    """Catalogue entry of a finding, with the page that `dslpar explain` prints."""

    code: str
    name: str
    severity: Severity
    page: str

    def text(self) -> str:
        """Return the page, which has the same headings as a rule's page."""
        return self.page


def finding(
    code: str,
    message: str,
    hint: str = "",
    location: Location | str = WORLD,
    key: str = "",
    details: Sequence[str] = (),
) -> Finding:
    """Make the finding `code`; its name and severity come from the catalogue.

    `location` may be only the path of a file, or WORLD if no file is concerned. `key` is the config key that the
    finding is about. `details` are lines below the message.
    """
    page = read_page(code)
    place = Location(location) if isinstance(location, str) else location
    return Finding(code, page.name, page.severity, message, hint, place, key, details=tuple(details))


def raise_finding(
    code: str,
    message: str,
    hint: str = "",
    location: Location | str = WORLD,
    key: str = "",
    details: Sequence[str] = (),
) -> NoReturn:
    """Raise `finding(...)` as an error.

    Raises:
        DslparError: always. It hides an exception that is being handled: the message has all that the user must know.
    """
    raise DslparError([finding(code, message, hint, location, key, details)]) from None


def split_page(text: str) -> tuple[str, dict[str, str]]:
    """Split a page of the catalogue or of a rule into its summary and the dedented text below each heading."""
    from textwrap import dedent  # compiles patterns, and lint reads no page

    summary, *parts = re.split(r"^(\w[\w ]+)::?$", text, flags=re.MULTILINE)
    return summary.strip(), {
        heading: dedent(body.strip("\n")).rstrip() for heading, body in zip(parts[::2], parts[1::2], strict=True)
    }


def read_page(code: str) -> Page:
    """Read the page of a code. Raises FileNotFoundError if the catalogue has no such code."""
    from importlib.resources import files  # as long to import as all of the config language

    return _parse((files(__name__) / f"{code}.md").read_text(encoding="utf-8"))


def read_pages() -> list[Page]:
    """Read all pages in the order of their codes."""
    from importlib.resources import files

    names = sorted(file.name for file in files(__name__).iterdir() if file.name.endswith(".md"))
    return [read_page(name.removesuffix(".md")) for name in names]


def _parse(text: str) -> Page:
    """Parse a file whose first line is `# CODE name (severity)`; the page follows after an empty line."""
    heading, _, page = text.partition("\n\n")
    code, name, in_brackets = heading.removeprefix("# ").split()
    severity: Severity = next(word for word in get_args(Severity) if in_brackets == f"({word})")
    return Page(code, name, severity, page.rstrip())
