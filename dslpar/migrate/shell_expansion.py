"""Expand words of a shell script as bash does: variables, arrays, arithmetic on whole numbers. Nothing is executed."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

from dslpar.migrate.shell_words import UNKNOWN, Text, Word, plain

MAX_LENGTH = 400_000
"""Maximum number of characters of all expanded variables and commands together."""


class TooLongError(Exception):
    """The expansion of a script is longer than MAX_LENGTH."""


_VARIABLE = re.compile(r"\$(?:(\w+)|\{(\w+)(?:\[[@*]\])?(?::?-([^}]*))?\}|\(\((.*?)\)\)|(.))", re.DOTALL)


def expanded(word: Word, variables: Mapping[str, list[Text]]) -> list[Text]:
    """Expand one word of the script to the words that the started program receives."""
    made: list[Text] = [[]]
    quoted = False
    for kind, text in word.pieces:
        if kind == "expand":
            parts = split(text_of((kind, text), variables))
            if not parts:
                continue
            made[-1] = made[-1] + parts[0]
            made += parts[1:]
        elif kind == "quoted" and (found := re.fullmatch(r"\$\{(\w+)\[@\]\}", plain(text))):
            items = variables.get(found[1], [[(UNKNOWN, text[0][1])]])
            made[-1] = made[-1] + (items[0] if items else [])
            made += items[1:]
        else:
            quoted = quoted or kind in ("quoted", "literal")
            made[-1] = made[-1] + text_of((kind, text), variables)
    return [item for item in made if item or quoted]


def text_of(piece: tuple[str, Text], variables: Mapping[str, list[Text]]) -> Text:
    """Expand the variables in one piece of a word (`Word.pieces`)."""
    kind, text = piece
    if kind in ("text", "literal"):
        return text
    shown, made, at = "".join(letter or "?" for letter, _ in text), list[tuple[str, int]](), 0
    if "`" in shown:
        return [(UNKNOWN, text[0][1])]
    for found in _VARIABLE.finditer(shown):
        made += text[at : found.start()]
        made += _value(found, text[found.start()][1], text, variables)
        at = found.end()
        if len(made) > MAX_LENGTH:
            raise TooLongError
    return made + text[at:]


def _value(found: re.Match[str], place: int, text: Text, variables: Mapping[str, list[Text]]) -> Text:
    """Return the expansion of one `$...`."""
    name, default, sum_ = found[1] or found[2], found[3], found[4]
    if sum_ is not None:
        number = _whole_number(sum_, variables)
        return [(UNKNOWN, place)] if number is None else [(letter, place) for letter in str(number)]
    if name in variables:
        items = variables[name]
        return [letter for index, item in enumerate(items) for letter in ([(" ", place)] if index else []) + item]
    if default is not None:
        return text[found.start(3) : found.end(3)]
    return [(UNKNOWN, place)]


def split(text: Text) -> list[Text]:
    """Split at blanks and backslashes: a continuation backslash, even within quotes, is not part of a word."""
    words: list[Text] = [[]]
    for letter, place in text:
        if letter and letter in " \t\n\\":
            words.append([])
        else:
            words[-1].append((letter, place))
    return [word for word in words if word]


_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def _whole_number(text: str, variables: Mapping[str, list[Text]]) -> int | None:
    """Evaluate arithmetic on whole numbers below 10**18; None for any other text."""

    def named(found: re.Match[str]) -> str:
        items = variables.get(found[1], [[]])
        return plain(items[0]) if UNKNOWN not in [letter for letter, _ in items[0]] else "?"

    arithmetic = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", named, text)
    if len(arithmetic) > 500 or not re.fullmatch(r"[\d\s+*/%()-]+", arithmetic):
        return None
    try:
        return _evaluated(ast.parse(arithmetic.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError):
        return None


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        value = node.value
    elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        value = _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = -_evaluated(node.operand)
    else:
        raise ValueError(ast.dump(node))
    if abs(value) >= 10**18:
        raise ValueError("too large")
    return value
