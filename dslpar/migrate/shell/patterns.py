"""Patterns of a shell: `*`, `?` and `[...]`, as in `case` and `${NAME##*/}`."""

from __future__ import annotations

import re


def escaped(text: str) -> str:
    """Return a pattern that matches only this text."""
    return re.sub(r"([*?\[\]\\])", r"\\\1", text)


def as_regex(pattern: str) -> str:
    """Return the regular expression of a pattern. Backslashes escape."""
    made, at = "", 0
    while at < len(pattern):
        letter = pattern[at]
        at += 1
        if letter == "\\" and at < len(pattern):
            made += re.escape(pattern[at])
            at += 1
        elif letter == "*":
            made += ".*"
        elif letter == "?":
            made += "."
        elif letter == "[" and (found := re.compile(r"([!^]?)(\]?(?:\[:\w+:\]|[^\]])*)\]").match(pattern, at)):
            made += f"[{'^' if found[1] else ''}{_members(found[2])}]"
            at = found.end()
        else:
            made += re.escape(letter)
    return made


_CLASSES = {"alpha": "a-zA-Z", "digit": "0-9", "alnum": "a-zA-Z0-9", "space": r"\s", "upper": "A-Z", "lower": "a-z"}


def _members(text: str) -> str:
    """Return the members of a bracket expression as a regular expression has them."""
    text = re.sub(
        r"([\\\]^&~|])", r"\\\1", re.sub(r"\[:(\w+):\]", lambda found: f"\0{found[1]}\0", text).replace("[", r"\[")
    )
    return re.sub("\0(\\w+)\0", lambda found: _CLASSES.get(found[1], ""), text)


def matches(pattern: str, text: str) -> bool:
    """Return whether a pattern matches a whole text."""
    return re.compile(as_regex(pattern), re.DOTALL).fullmatch(text) is not None
