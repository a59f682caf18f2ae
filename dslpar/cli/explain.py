"""`dslpar explain [CODE ...]`: pages of rules, by code, name or family; without any, the list of all rules."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dslpar.core import catalog
from dslpar.core.suggest import did_you_mean
from dslpar.linter import registry
from dslpar.linter.rule import Rule

Page = Rule | catalog.Page


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    hint = "code or name of a rule, or first letters of codes: TEN103, not-a-cube, PERF; left out: all are listed"
    parser.add_argument("codes", nargs="*", metavar="CODE", help=hint)
    parser.add_argument("--format", choices=("text", "json"), default="text", help="default: %(default)s")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints pages, or the list."""
    pages = list(dict.fromkeys(page for word in args.codes for page in _asked(word, parser))) or every_page()
    if args.format == "json":
        sys.stdout.write(_json(pages))
    elif args.codes:
        print("\n\n".join(f"{page.code} {page.name} ({page.severity})\n\n{page.text().rstrip()}" for page in pages))
    else:
        print("\n".join(f"{page.code:8} {page.severity:8} {page.name:36} {headline(page)}" for page in pages))
    return 0


def every_page() -> list[Page]:
    """All of them, by code."""
    return sorted(registry.pages(), key=lambda page: page.code)


def headline(page: Page) -> str:
    """The first sentence of a page."""
    return page.text().partition("\n\n")[0].replace("\n", " ")


def _asked(word: str, parser: argparse.ArgumentParser) -> Sequence[Page]:
    """The pages that a word means: a name, or the first letters of codes, as with `lint --select`."""
    pages = every_page()
    found = [page for page in pages if page.name == word.lower() or page.code.startswith(word.upper() or "-")]
    if not found:
        families = sorted({page.code[:-3] for page in pages})
        known = [*families, *(page.code for page in pages), *(page.name for page in pages)]
        hint = did_you_mean(word, known) or f"the families are {', '.join(families)}"
        parser.error(f"no rule {word!r}; {hint}")
    return found


def _json(pages: Sequence[Page]) -> str:
    import json

    records = [{"code": page.code, "name": page.name, "severity": page.severity, "page": page.text()} for page in pages]
    return json.dumps(records, indent=2) + "\n"
