"""`dslpar explain [CODE ...]`: print the pages of rules, by code, name or family. Without a code, list all rules."""

from __future__ import annotations

import argparse

from dslpar.cli import arguments
from dslpar.core import catalog
from dslpar.core.suggest import did_you_mean
from dslpar.linter import registry
from dslpar.linter.rule import Rule

Page = Rule | catalog.Page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    help = "a rule's code or name, or a prefix of codes: TEN103, not-a-cube, PERF; default: list all rules"
    parser.add_argument("codes", nargs="*", metavar="CODE", help=help)
    arguments.add_format(parser)


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Print pages, or the list of rules."""
    pages = list(dict.fromkeys(page for query in args.codes for page in _matching(query, parser))) or all_pages()
    if args.format == "json":
        arguments.print_json(
            [{"code": page.code, "name": page.name, "severity": page.severity, "page": page.text()} for page in pages]
        )
    elif args.codes:
        texts = [f"{page.code} {page.name} ({page.severity})\n\n{page.text().rstrip()}" for page in pages]
        print("\n\n".join(texts))
    else:
        lines = [f"{page.code:8} {page.severity:8} {page.name:36} {headline(page)}" for page in pages]
        print("\n".join(lines))
    return 0


def all_pages() -> list[Page]:
    """Return all rules' pages in the order of their codes."""
    return sorted(registry.pages(), key=lambda page: page.code)


def headline(page: Page) -> str:
    """Return a page's first paragraph as one line."""
    return page.text().partition("\n\n")[0].replace("\n", " ")


def _matching(query: str, parser: argparse.ArgumentParser) -> list[Page]:
    """Return the pages whose name is `query`, or whose code begins with `query`; exit with a usage error if none does.

    `lint --select` takes the same names and codes.
    """
    pages = all_pages()
    found = [page for page in pages if page.name == query.lower() or page.code.startswith(query.upper() or "-")]
    if not found:
        families = sorted({page.code[:-3] for page in pages})
        known = [*families, *(page.code for page in pages), *(page.name for page in pages)]
        hint = did_you_mean(query, known) or f"the families are {', '.join(families)}"
        parser.error(f"unknown rule {query!r}; {hint}")
    return found
