"""CFG001 to CFG013, CFG120: the config language; `dslpar.language` finds these mistakes while it evaluates the file."""

from __future__ import annotations

from collections.abc import Iterator

from dslpar.core.errors import Finding
from dslpar.linter.context import Context
from dslpar.linter.rule import rule


@rule("CFG001", "syntax-error")
def syntax_error(cx: Context) -> Iterator[Finding]:
    """The file cannot be parsed as Python (or, by its ending, as YAML or JSON)."""
    yield from cx.language("CFG001")


@rule("CFG002", "unsupported-syntax")
def unsupported_syntax(cx: Context) -> Iterator[Finding]:
    """Python syntax is outside the config language: `while`, `def`, `class`, `try`, `with`, `lambda`, `:=` ..."""
    yield from cx.language("CFG002")


@rule("CFG003", "unsupported-call")
def unsupported_call(cx: Context) -> Iterator[Finding]:
    """A call of a function outside the config language."""
    yield from cx.language("CFG003")


@rule("CFG004", "evaluation-error")
def evaluation_error(cx: Context) -> Iterator[Finding]:
    """An expression fails, as it would in Python: a missing key, a division by zero, a failed `assert`."""
    yield from cx.language("CFG004")


@rule("CFG005", "limit-exceeded")
def limit_exceeded(cx: Context) -> Iterator[Finding]:
    """A value is too large, an expression is nested too deeply, or the evaluation takes too many steps."""
    yield from cx.language("CFG005")


@rule("CFG006", "import-not-found")
def import_not_found(cx: Context) -> Iterator[Finding]:
    """An imported config file does not exist, or lacks the imported name."""
    yield from cx.language("CFG006")


@rule("CFG007", "import-cycle")
def import_cycle(cx: Context) -> Iterator[Finding]:
    """Config files import each other in a cycle."""
    yield from cx.language("CFG007")


@rule("CFG008", "star-import")
def star_import(cx: Context) -> Iterator[Finding]:
    """`import *` in a config."""
    yield from cx.language("CFG008")


@rule("CFG009", "unreadable-file")
def unreadable_file(cx: Context) -> Iterator[Finding]:
    """A file cannot or may not be read: missing, a folder or device, not UTF-8, outside the search path."""
    yield from cx.language("CFG009")


@rule("CFG010", "undefined-name")
def undefined_name(cx: Context) -> Iterator[Finding]:
    """An undefined name."""
    yield from cx.language("CFG010")


@rule("CFG011", "bad-override")
def bad_override(cx: Context) -> Iterator[Finding]:
    """A `key=value` on the command line is malformed, or its key cannot exist."""
    yield from cx.language("CFG011")


@rule("CFG012", "duplicate-key", "warning")
def duplicate_key(cx: Context) -> Iterator[Finding]:
    """A duplicate key in a dict (in YAML and JSON, an error)."""
    yield from cx.language("CFG012")


@rule("CFG120", "section-replaced", "warning")
def section_replaced(cx: Context) -> Iterator[Finding]:
    """update() replaces a dict with one that has fewer keys."""
    yield from cx.language("CFG120")


@rule("CFG013", "not-a-value")
def not_a_value(cx: Context) -> Iterator[Finding]:
    """A name has a value that a config cannot hold: an iterator, or a `LazyCall` that is not called."""
    yield from cx.language("CFG013")


RULES = (
    syntax_error,
    unsupported_syntax,
    unsupported_call,
    evaluation_error,
    limit_exceeded,
    import_not_found,
    import_cycle,
    star_import,
    unreadable_file,
    undefined_name,
    bad_override,
    duplicate_key,
    not_a_value,
    section_replaced,
)
