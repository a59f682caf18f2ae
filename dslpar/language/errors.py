"""Errors of the config language: the table of its codes, and the exceptions that become findings.

Code that detects a broken rule of the language raises `ConfigError`. The evaluator turns it into a `Finding` at the
expression's location and continues with the value `UNKNOWN` (see values.py).

    >>> from dslpar.core.errors import Location
    >>> finding("CFG010", Location("a.py"), "name 'x' is not defined").name
    'undefined-name'
"""

from __future__ import annotations

from typing import NamedTuple

from dslpar.core.errors import Finding, Location, Severity


class Code(NamedTuple):
    """The kebab-case name of a code, and its default hint."""

    name: str
    hint: str
    severity: Severity = "error"


WRITE_VALUE = "write the value itself, or give it on the command line as key=value"
"""Hint for values that a config cannot compute: only its author knows them."""
CODES = {
    "CFG001": Code("syntax-error", "correct the syntax: Python's, or YAML's in a .yaml file"),
    "CFG002": Code("unsupported-syntax", "write assignments of literals, dict(...), arithmetic, `if` and `for`"),
    "CFG003": Code("unsupported-call", WRITE_VALUE),
    "CFG004": Code("evaluation-error", "correct the expression: Python itself would refuse it too"),
    "CFG005": Code("limit-exceeded", "choose a smaller value: a config is evaluated within fixed bounds"),
    "CFG006": Code(
        "import-not-found", "correct the name: `from .common import train` reads common.py beside this file"
    ),
    "CFG007": Code("import-cycle", "choose what both files need, move it into a third file, and import it from both"),
    "CFG008": Code("star-import", "write `from ... import ...` with the names that are needed"),
    "CFG009": Code("unreadable-file", "correct the path: it must name a readable text file in UTF-8"),
    "CFG010": Code("undefined-name", "choose a value: assign it to the name before this line, or import it"),
    "CFG011": Code("bad-override", "correct it: `key.subkey=value`, `key[0]=value`, or `~key.subkey` to delete"),
    "CFG012": Code("duplicate-key", "leave one of the two out: the later one wins", "warning"),
    "CFG120": Code("section-replaced", "choose the keys to change, and change them one by one", "warning"),
    "CFG122": Code("untrusted-target", "choose a class of torch.nn, or a package that you trust"),
    "CFG013": Code("not-a-value", "choose None, a bool, a number, a string, a list, a tuple, a dict or L(Class)(...)"),
}


class ConfigError(Exception):
    """A config breaks a rule of the language. `location` is None if the error is at the evaluated expression."""

    def __init__(self, code: str, message: str, hint: str = "", location: Location | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.location = code, message, hint, location


class UnknownError(Exception):
    """An expression uses a value that could not be evaluated. It becomes unknown too, without a further finding."""


class BudgetError(Exception):
    """The evaluation has used up its budget of steps, findings or text, and stops here."""


# The exceptions that Python raises for a mistake in an expression. RecursionError, a RuntimeError, is handled before.
PYTHON_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration)


def finding(code: str, location: Location, message: str, hint: str = "", severity: Severity | None = None) -> Finding:
    """Make the finding of `code`, with the name from the table. A given hint or severity replaces the table's."""
    row = CODES[code]
    return Finding(code, row.name, severity or row.severity, message, hint or row.hint, location)
