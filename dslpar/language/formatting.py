"""Formatting of values: f-strings, `str.format`, `%` and `str()`. Every width and precision is checked before use.

`str.format` is reimplemented on `string.Formatter`. Its fields may take items but never attributes, since Python's own
`str.format` reaches `__class__` from any value, and everything else from there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from dslpar.language.errors import WRITE_VALUE, ConfigError
from dslpar.language.limits import MAX_TEXT, Budget, check_length, in_fixed_order, limit_error
from dslpar.language.tree import Reference
from dslpar.language.values import Value, require_known

MAX_WIDTH = 1_000
SHOWN = (type(None), bool, int, float, str, list, tuple, dict, set, range)
CONVERSIONS = {-1: None, 115: str, 114: repr, 97: ascii}
"""Functions by `ast.FormattedValue.conversion`: none, `!s`, `!r`, `!a`."""


def to_text(value: Value, budget: Budget, convert: Value = str) -> str:
    """Evaluate `str(value)`, `repr(value)` or `ascii(value)`."""
    _check_shown(value, budget)
    made: str = convert(value)
    check_length(len(made))
    return made


def formatted(value: Value, spec: str, budget: Budget) -> str:
    """Evaluate `format(value, spec)`."""
    _check_shown(value, budget)
    _check_widths(spec)
    made = format(value, spec)
    check_length(len(made))
    return made


def percent(template: str, values: Value, budget: Budget) -> str:
    """Evaluate `template % values`."""
    count = _check_conversions(template)
    budget.spend(count * 2 + len(template) // 64)
    items = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
    longest = 0
    for item in items:
        budget.spend(2)
        _check_shown(item, budget)
        longest = max(longest, len(item) if isinstance(item, str) else len(to_text(item, budget)))
    if isinstance(values, dict) and count * longest > 10 * MAX_TEXT:  # one item may be used many times
        check_length(count * longest)
    made: str = template % values
    return made


def _check_conversions(template: str) -> int:
    """Count the conversions such as `%(name)-10.3f`, and check their widths."""
    count, at = 0, template.find("%")
    while at >= 0:
        count, at = count + 1, _after_key(template, at + 1)
        end = at
        while end < len(template) and template[end] in "-+ #.0123456789":
            end += 1
        if template[end : end + 1] == "*":
            raise ConfigError("CFG003", "`*` as a width is not part of the config language", "write `f'...'`")
        _check_widths(template[at:end])
        at = template.find("%", end + 1)
    return count


def _after_key(template: str, at: int) -> int:
    """Return the index after a `(key)`; nested parentheses are counted as Python counts them."""
    if template[at : at + 1] != "(":
        return at
    depth = 0
    for index in range(at, len(template)):
        depth += (template[index] == "(") - (template[index] == ")")
        if depth == 0:
            return index + 1
    return len(template)


def format_method(template: str, args: Sequence[Value], kwargs: Mapping[str, Value], budget: Budget) -> str:
    """Evaluate `template.format(*args, **kwargs)`."""
    made: str = _formatter(budget).vformat(template, args, kwargs)
    return made


def _formatter(budget: Budget) -> Value:
    # Imported here: `string` compiles regular expressions at import, and few configs call format().
    import string

    class Formatter(string.Formatter):
        """`string.Formatter` with bounds and without attributes."""

        length = 0

        def get_field(self, field_name: str, args: Value, kwargs: Value) -> Value:
            budget.spend(10)
            if "." in re.sub(r"\[[^\]]*\]?", "", field_name):
                raise ConfigError("CFG003", f"the format field {{{field_name}}} takes an attribute", "write `f'...'`")
            return super().get_field(field_name, args, kwargs)

        def get_value(self, key: Value, args: Value, kwargs: Value) -> Value:
            if isinstance(key, int) and key >= len(args):
                raise IndexError(f"Replacement index {key} out of range for positional args tuple")
            return super().get_value(key, args, kwargs)

        def format_field(self, value: Value, format_spec: str) -> str:
            made = formatted(value, format_spec, budget)
            self.length += len(made)
            check_length(self.length)
            return made

        def convert_field(self, value: Value, conversion: Value) -> Value:
            if conversion is None:
                return value
            if conversion not in ("s", "r", "a"):
                raise ValueError(f"unknown conversion specifier {conversion!r}")
            return to_text(value, budget, {"s": str, "r": repr, "a": ascii}[conversion])

    return Formatter()


def _check_shown(value: Value, budget: Budget) -> None:
    require_known(value)
    if isinstance(value, Reference):
        raise ConfigError("CFG003", f"the value of {value.name} is not known in a config", WRITE_VALUE)
    if not isinstance(value, SHOWN):
        raise ConfigError(
            "CFG004", f"cannot format a {type(value).__name__}, whose text is not fixed", "write `list(...)` around it"
        )
    budget.weigh(value)
    budget.spend(len(value) // 64 if isinstance(value, str) else 0)
    _check_sets(value)


def _check_sets(value: Value) -> None:
    in_fixed_order(value)
    if isinstance(value, dict):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return
    for item in value:
        if isinstance(item, (list, tuple, dict, set)):
            _check_sets(item)


def _check_widths(spec: str) -> None:
    for digits in re.findall(r"\d+", spec):
        if len(digits) > 9 or int(digits) > MAX_WIDTH:
            raise limit_error(f"a width or precision of more than {MAX_WIDTH:,}")
