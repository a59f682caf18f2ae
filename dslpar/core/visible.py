r"""Escape control characters, invisible characters and CI workflow commands in text to print, as `repr` escapes.

File names, config keys, assert messages and manifests are untrusted text. Printed unchanged, an escape sequence clears
the screen or renames the window (CWE-150), a line break forges a line of the report, and a character that reverses the
writing direction hides the meaning of a line (CVE-2021-42574, "Trojan Source"). So all output of dslpar passes through
here as whole lines. Printable characters of any script stay unchanged, and escaping twice changes nothing.

    >>> print(visible("a.py\x1b[2J\n::error::all is well \u202e"))
    a.py\x1b[2J\n::error::all is well \u202e
    >>> print(visible("::error::all is well"))
    \x3a:error::all is well

The last is a workflow command of GitHub Actions, which it executes in any line of a log that begins so. `##[error]`
(GitHub, Azure) and `##teamcity[` work anywhere in a line.

This module imports neither torch nor other modules of dslpar, since guards load it.
"""

from __future__ import annotations

import re

_INVISIBLE = "\u034f\u115f\u1160\u17b4\u17b5\u2800\u3164\uffa0"
"""Printable to Python, but drawn as nothing: fillers of Hangul and Khmer, a joiner, Braille's empty cell."""
_NOT_ASCII_LINE = re.compile(r"[^ -~]")
"""A character that `_escape` must look at in a line."""
_NOT_ASCII_TEXT = re.compile(r"[^ -~\n\t]")
"""A character that `_escape` must look at in a text, whose line breaks and tabs stay."""
_COMMAND = re.compile(r"^([^\S\n]*):(?=:[A-Za-z])|#(?=#\w*\[)", re.MULTILINE)


def visible(text: object) -> str:
    """Return a text as one line, with commands and invisible characters escaped."""
    return _break_commands(_NOT_ASCII_LINE.sub(_escape, str(text)))


def visible_lines(text: str) -> str:
    """Escape a text of several lines (a traceback, a source) line by line; tabs stay."""
    return _break_commands(_NOT_ASCII_TEXT.sub(_escape, text))


def _escape(found: re.Match[str]) -> str:
    char = found[0]
    is_seen = char.isprintable() and char not in _INVISIBLE
    return char if is_seen else char.encode("unicode_escape").decode("ascii")


def _break_commands(text: str) -> str:
    return _COMMAND.sub(lambda found: r"\x23" if found[0] == "#" else rf"{found[1]}\x3a", text)


_LONE_SURROGATE = re.compile(r"(\\\\|\\ud[89ab]..\\ud[c-f]..)|\\(?=ud[89a-f])")


def json_text(value: object) -> str:
    r"""Return indented JSON for programs, in ASCII: any other character becomes a `\u` escape of JSON.

    Lone surrogates (bytes of a file name that are not UTF-8) become the text of their escape: no encoding has them, and
    strict parsers refuse them.
    """
    import json  # guards escape text, and start without it

    text = _LONE_SURROGATE.sub(lambda found: found[1] or r"\\", json.dumps(value, indent=2))
    return re.sub(r"#(?=#\w*\[)", r"\\u0023", text) + "\n"
