"""The sections of a rule's page, and its examples as they are linted."""

from __future__ import annotations

import re

from dslpar.core.catalog import split_page
from dslpar.linter.rule import Rule
from dslpar.linter.rules.hosts import RULES as HOST_RULES
from tests.support.helps import Linted
from tests.support.lint import MODEL, PATH

TWO = "parallel = dict(tensor=dict(size=2, mode='1d'))\n"


def sections(rule: Rule) -> dict[str, str]:
    """Return a page's sections: heading -> text."""
    return {heading: body + "\n" for heading, body in split_page(rule.text())[1].items()}


def path_of(example: str) -> str:
    """Return the file name in the first line of an example that is no Python; else that of all others."""
    found = re.match(r"# (\S+\.yaml)\n", example)
    return found[1] if found else PATH


def example_of(rule: Rule) -> Linted:
    """Return a page's example, as tests/unit/linter/test_rule_pages.py lints it."""
    example = sections(rule)["Example"]
    if rule in HOST_RULES:
        flags = re.findall(r"(--(?:in|ex)clude) (\S+)", example)
        world = 8 if "--world-size 8" in example else None
        return Linted(MODEL + TWO, world, hostfile=example, hosts=flags[0] if flags else ("", ""))
    path = path_of(example)
    text = example if path != PATH or re.search(r"^model\b", example, re.MULTILINE) else MODEL + example
    world = None if "dslpar lint FILE\n" in example else 8
    return Linted(text, world, tuple(re.findall(r"^# override: (.*)$", text, re.MULTILINE)), path=path)
