"""Patterns of a shell: `*`, `?` and `[...]`, as in `case` and `${NAME##*/}`. A backslash escapes."""

from __future__ import annotations

import re

_ELEMENT = re.compile(r"\\.|\[[!^]?\]?(?:\[:\w+:\]|[^\]])*\]|.", re.DOTALL)
_CLASSES = {"alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "space": r"\s", "upper": "A-Z", "lower": "a-z"}


def escaped(text: str) -> str:
    """Return a pattern that matches only this text."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def has_star(pattern: str) -> bool:
    """Return whether a pattern matches texts of any length."""
    return "*" in _ELEMENT.findall(pattern)


def as_regex(pattern: str) -> str:
    """Return the regular expression that matches what a pattern matches as a whole."""
    parts = [""]
    for element in _ELEMENT.findall(pattern):
        if element == "*":
            parts.append("")
        else:
            parts[-1] += _element(element)
    first, *between = parts
    if not between:
        return first
    # The shortest match before each next part is enough, and is not tried again: the time stays linear in the text.
    skipped = (f"(?=(?P<_{number}>.*?{part}))(?P=_{number})" for number, part in enumerate(between[:-1]) if part)
    return f"{first}{''.join(skipped)}.*{between[-1]}"


def _element(element: str) -> str:
    """Return the regular expression of one element that is not `*`."""
    if element == "?":
        return "."
    if len(element) > 2 and element[0] == "[":
        negated = element[1] in "!^"
        return f"[{'^' if negated else ''}{_members(element[1 + negated : -1])}]"
    return re.escape(element[1:] if len(element) == 2 and element[0] == "\\" else element)


def _members(text: str) -> str:
    """Return the members of a bracket expression as a regular expression has them."""
    parts = re.split(r"\[:(\w+):\]", text)
    names = [_CLASSES.get(name, "") for name in parts[1::2]]
    plain = [re.sub(r"([\\\]\[^&~|])", r"\\\1", part) for part in parts[::2]]
    return plain[0] + "".join(name + part for name, part in zip(names, plain[1:], strict=True))


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches a whole text."""
    return re.compile(as_regex(pattern), re.DOTALL).fullmatch(text) is not None
