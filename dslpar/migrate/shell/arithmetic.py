"""Evaluate a shell's arithmetic on whole numbers of 64 bits: `$((GPUS * NODES / 2))`.

Letters: the grammar of C without assignments, by precedence climbing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

MAX_LENGTH = 500
"""Maximum number of characters of an expression."""
_TOKEN = re.compile(
    r"\s*(?:(0[xX][0-9a-fA-F]+|\d+)|([A-Za-z_]\w*)|(\*\*|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%<>&|^!~?:()]))"
)


class ArithmeticError_(Exception):  # noqa: N818
    """The text is no arithmetic, or depends on something unknown."""


def evaluate(text: str, value_of: Callable[[str], int]) -> int:
    """Evaluate an expression; `value_of` returns a variable's number. Raises ArithmeticError_."""
    if len(text) > MAX_LENGTH:
        raise ArithmeticError_("too long")
    return _Expression(text, value_of).value()


def _divide(left: int, right: int) -> int:
    """Divide towards zero, as C does."""
    if right == 0:
        raise ArithmeticError_("division by zero")
    quotient = abs(left) // abs(right)
    return quotient if (left < 0) == (right < 0) else -quotient


def _power(left: int, right: int) -> int:
    if not 0 <= right < 64:
        raise ArithmeticError_("exponent")
    return int(left**right)


_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: int(bool(a) or bool(b))),
    "&&": (2, lambda a, b: int(bool(a) and bool(b))),
    "|": (3, lambda a, b: a | b),
    "^": (4, lambda a, b: a ^ b),
    "&": (5, lambda a, b: a & b),
    "==": (6, lambda a, b: int(a == b)),
    "!=": (6, lambda a, b: int(a != b)),
    "<": (7, lambda a, b: int(a < b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">": (7, lambda a, b: int(a > b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, lambda a, b: a << b if 0 <= b < 63 else _divide(1, 0)),
    ">>": (8, lambda a, b: a >> b if 0 <= b < 63 else _divide(1, 0)),
    "+": (9, lambda a, b: a + b),
    "-": (9, lambda a, b: a - b),
    "*": (10, lambda a, b: a * b),
    "/": (10, _divide),
    "%": (10, lambda a, b: a - b * _divide(a, b)),
    "**": (11, _power),
}
"""Precedence and function of each operator; all but `**` group from left to right."""


class _Expression:
    def __init__(self, text: str, value_of: Callable[[str], int]) -> None:
        self.value_of = value_of
        self.tokens: list[str] = []
        at = 0
        while at < len(text.rstrip()):
            found = _TOKEN.match(text, at)
            if found is None:
                raise ArithmeticError_(text[at:])
            self.tokens.append(found[0].strip())
            at = found.end()
        self.at = 0

    def value(self) -> int:
        if not self.tokens:
            return 0  # as `$(( ))` is
        made = self.choice()
        if self.at < len(self.tokens):
            raise ArithmeticError_(self.tokens[self.at])
        return made

    def take(self, token: str) -> bool:
        taken = self.at < len(self.tokens) and self.tokens[self.at] == token
        self.at += taken
        return taken

    def choice(self) -> int:
        condition = self.binary(1)
        if not self.take("?"):
            return condition
        then = self.choice()
        if not self.take(":"):
            raise ArithmeticError_("`:` expected")
        otherwise = self.choice()
        return then if condition else otherwise

    def binary(self, least: int) -> int:
        left = self.unary()
        while self.at < len(self.tokens) and self.tokens[self.at] in _BINARY:
            operator = self.tokens[self.at]
            precedence, function = _BINARY[operator]
            if precedence < least:
                break
            self.at += 1
            left = _bounded(function(left, self.binary(precedence if operator == "**" else precedence + 1)))
        return left

    def unary(self) -> int:
        for operator, function in (
            ("-", lambda a: -a),
            ("+", lambda a: a),
            ("!", lambda a: int(not a)),
            ("~", lambda a: ~a),
        ):
            if self.take(operator):
                return _bounded(function(self.unary()))
        return self.primary()

    def primary(self) -> int:
        if self.take("("):
            made = self.choice()
            if not self.take(")"):
                raise ArithmeticError_("`)` expected")
            return made
        if self.at >= len(self.tokens):
            raise ArithmeticError_("a value expected")
        token = self.tokens[self.at]
        self.at += 1
        if token[0].isdigit():
            return _bounded(number(token))
        if token[0].isalpha() or token[0] == "_":
            return self.value_of(token)
        raise ArithmeticError_(token)


def number(text: str) -> int:
    """Return the value of a whole number as C writes it. Raises ArithmeticError_."""
    text = text.strip()
    sign, digits = (-1, text[1:]) if text.startswith("-") else (1, text.removeprefix("+"))
    base = 16 if digits[:2] in ("0x", "0X") else 8 if digits.startswith("0") else 10
    try:
        return sign * int(digits, base) if digits.isalnum() and digits.isascii() else _fail(text)
    except ValueError:
        return _fail(text)


def _fail(text: str) -> int:
    raise ArithmeticError_(text)


def _bounded(value: int) -> int:
    return value if -(2**63) <= value < 2**63 else _fail("overflow")
