"""Files that `dslpar import` recognises and does not convert: those of other frameworks, and programs."""

from __future__ import annotations

from dslpar.core.errors import Finding, Location
from dslpar.language.tree import Node
from dslpar.linter import check
from dslpar.linter.registry import rule_finding
from dslpar.migrate.sources import JSON_ENDINGS, programs_in, without_comments
from dslpar.schema import frameworks, other_frameworks
from dslpar.schema.python_programs import message_of, program_in


def finding_about(text: str, path: str) -> Finding | None:
    """Return lint's finding about such a file; None for a config that may be converted."""
    is_data = path.endswith((".yaml", ".yml", *JSON_ENDINGS))
    shown = path if not path.endswith(".hjson") else f"{path}.json"
    loaded = (
        check.load_text(without_comments(text) if path.endswith(JSON_ENDINGS) else text, shown) if is_data else None
    )
    values = {} if loaded is None else loaded.root.plain()
    framework = other_frameworks.recognise(values, text, path)
    root = Node({}, Location(path)) if loaded is None else loaded.root
    known = frameworks.recognise(root, path, (), text) if framework is not None and framework.yields else None
    if framework is not None and not (known and other_frameworks.comes_first(known.also, path)):
        message = f"this is a file of {framework.title}, which dslpar cannot convert"
        return rule_finding("CFG128", message, framework.advice, Location(path))
    program = program_in(text, path, ())
    if program is not None and program.is_certain and not programs_in(text, path):
        return rule_finding("CFG129", *message_of(program, path), program.location)
    return None
