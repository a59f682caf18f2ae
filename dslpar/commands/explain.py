"""`dslpar explain CODE`: the page of a rule."""

from __future__ import annotations

import argparse

from dslpar.linter.book import codes, page_of
from dslpar.reading import did_you_mean


def arguments(parser: argparse.ArgumentParser) -> None:
    """Its flags."""
    parser.add_argument("code", metavar="CODE", help="code or name of a rule, such as PAR101")


def run(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    """Prints the page."""
    page = page_of(args.code)
    if page is None:
        fix = did_you_mean(args.code, codes()) or f"the codes are {', '.join(codes())}"
        parser.error(f"no rule {args.code!r}; {fix}")
    print(f"{page.code} {page.name} ({page.severity})\n\n{page.text()}")
    return 0
