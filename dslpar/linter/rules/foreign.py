"""CFG123 and following: files that are no configs of dslpar: another framework's, or a program.

If one of these rules finds something, nothing else is reported: each key of another framework would be a finding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dslpar.core.errors import Location
from dslpar.linter.context import Context
from dslpar.linter.problem import Problem
from dslpar.linter.rule import rule
from dslpar.schema.sections import Model

if TYPE_CHECKING:
    from dslpar.schema.frameworks import Framework
    from dslpar.schema.python_programs import PythonProgram


@rule("CFG123", "foreign-config")
def foreign_config(cx: Context) -> Iterator[Problem]:
    """The file is a config of another framework."""
    if not _may_be_foreign(cx) or any(True for _ in config_not_judged.findings(cx)):
        return
    program, found = _program(cx), _framework(cx)
    if found is not None and not (program and program.is_certain):
        message = f"this is a config of {found.title}, which `dslpar import` converts"
        by_program = "or --program (if a program passes the model to dslpar.initialize)"
        more = "" if cx.config.has("model") else f"; {by_program}"
        yield Problem(Location(cx.config.path), message, f"dslpar import {cx.config.path} -o FILE{more}")


@rule("CFG128", "config-not-judged")
def config_not_judged(cx: Context) -> Iterator[Problem]:
    """The file is a config of a framework that dslpar recognises, and cannot judge or convert."""
    if not _may_be_foreign(cx):
        return
    from dslpar.schema import other_frameworks  # few configs get here

    found = other_frameworks.recognise(cx.config.root.plain(), _text(cx), cx.config.path)
    known = _framework(cx) if found is not None and found.yields else None
    if found is not None and not (known and other_frameworks.comes_first(known.also, cx.config.path)):
        message = f"this is a file of {found.title}, which dslpar cannot judge"
        yield Problem(Location(cx.config.path), message, found.advice)


@rule("CFG129", "python-program")
def python_program(cx: Context) -> Iterator[Problem]:
    """The file is a Python program, and not a config."""
    program = _program(cx) if _may_be_foreign(cx) else None
    if program is not None and (program.is_certain or _framework(cx) is None):
        from dslpar.schema.python_programs import message_of

        yield Problem(program.location, *message_of(program, cx.config.path))


def _program(cx: Context) -> PythonProgram | None:
    from dslpar.schema.python_programs import program_in  # few configs get here

    mappings = [str(name) for name, node in cx.config.root.value.items() if node.is_mapping]
    return program_in(_text(cx), cx.config.path, mappings)


def _text(cx: Context) -> str:
    return cx.config.sources.get(cx.config.path, "")


def _may_be_foreign(cx: Context) -> bool:
    """Return whether a config has mistakes, and no model of dslpar's own families."""
    model = cx.reading.spec.model
    ours = isinstance(model, Model) or model.target == "Sequential"
    return not ours and bool(cx.reading.misreads or cx.config.findings)


def _framework(cx: Context) -> Framework | None:
    """Return the framework that the config was written for; None for a dslpar config, with or without mistakes.

    A config is foreign if it imports a framework's packages or sets that framework's keys. A Python config must set two
    such keys, since a single one may be the author's own variable. If a program passes the model, the config is never
    foreign.
    """
    if cx.model.by_program:
        return None
    from dslpar.schema import frameworks  # few configs get here

    path, root = cx.config.path, cx.config.root
    is_python = path.endswith(".py")
    imported = set(frameworks.imported_packages(_text(cx), path)) if is_python else set()
    is_script = not path.endswith((".py", ".yaml", ".yml", ".json"))
    found = None if "dslpar" in imported else frameworks.recognise(root, path, imported, _text(cx) if is_script else "")
    if found is None or not imported.isdisjoint(found.packages) or not is_python:
        return found
    return found if len(list(frameworks.names_in(root, found))) > 1 else None


RULES = (foreign_config, config_not_judged, python_program)
"""Their codes are `dslpar.linter.engine.FOREIGN`."""
