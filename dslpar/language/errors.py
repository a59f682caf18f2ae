"""Errors of the config language: the table of its codes, and the exceptions that become findings.

A broken rule of the language raises `ConfigError` where it is noticed; the evaluator makes a `Finding` of it, at the
expression's location, and goes on with `UNKNOWN` (see values.py).

    >>> from dslpar.core.errors import Location
    >>> finding("CFG010", Location("a.py"), "name 'x' is not defined").name
    'undefined-name'
"""

from __future__ import annotations

from dslpar.core.errors import Finding, Location, Severity
from dslpar.core.named_tuple import NamedTuple


class Code(NamedTuple):
    """The kebab-case name of a code, and the hint that stands where nothing more precise is known."""

    name: str
    hint: str
    severity: Severity = "error"


CODES = {
    "CFG001": Code("syntax-error", "write Python syntax (or YAML in a .yaml file)"),
    "CFG002": Code("unsupported-syntax", "write assignments of literals, dict(...), arithmetic, `if` and `for`"),
    "CFG003": Code("unsupported-call", "write the value itself, or L(Class)(...) for what is built later"),
    "CFG004": Code("evaluation-error", "correct the expression; Python itself would refuse it too"),
    "CFG005": Code("limit-exceeded", "write the value shorter; a config is evaluated within fixed bounds"),
    "CFG006": Code("import-not-found", "name a config file beside this one, as in `from .common import train`"),
    "CFG007": Code("import-cycle", "move what both files need into a third file, and import it from both"),
    "CFG008": Code("star-import", "name what you need: `from .common import train, optim`"),
    "CFG009": Code("unreadable-file", "give the path of a UTF-8 text file that may be read"),
    "CFG010": Code("undefined-name", "assign the name before it is used, or import it"),
    "CFG011": Code("bad-override", "write `key.subkey=value`, `key[0]=value`, or `~key.subkey` to delete"),
    "CFG012": Code("duplicate-key", "keep one of the two entries: the later one wins", "warning"),
    "CFG120": Code(
        "section-replaced", "change the keys one by one, as in `train.dist.tensor_parallel_size = 2`", "warning"
    ),
    "CFG122": Code("untrusted-target", "name a class of torch.nn, or a package that you trust"),
    "CFG013": Code("not-a-value", "assign None, a bool, a number, a string, a list, a tuple, a dict or L(Class)(...)"),
}


class ConfigError(Exception):
    """A rule of the language is broken; `location` is None where that of the expression is right."""

    def __init__(self, code: str, message: str, hint: str = "", location: Location | None = None) -> None:
        super().__init__(message)
        self.code, self.message, self.hint, self.location = code, message, hint, location


class UnknownError(Exception):
    """A value that could not be evaluated was used: what depends on it is unknown too, without a finding."""


class BudgetError(Exception):
    """The whole evaluation has used up its steps or its findings and ends here."""


# What Python raises for a mistake in an expression; RecursionError, a RuntimeError, is handled before.
PYTHON_ERRORS = (ArithmeticError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, StopIteration)


def finding(code: str, location: Location, message: str, hint: str = "", severity: Severity | None = None) -> Finding:
    """Make the finding of `code`, with the table's name, and its hint unless a better one is given."""
    row = CODES[code]
    return Finding(code, row.name, severity or row.severity, message, hint or row.hint, location)
