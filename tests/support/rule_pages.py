"""The sections of a rule's page."""

from __future__ import annotations

from dslpar.core.catalog import split_page
from dslpar.linter.rule import Rule


def sections(rule: Rule) -> dict[str, str]:
    """Return a page's sections: heading -> text."""
    return {heading: body + "\n" for heading, body in split_page(rule.text())[1].items()}
