"""Patterns of a shell match what bash's match."""

from __future__ import annotations

import subprocess
import time

import pytest

from dslpar.migrate.shell.patterns import escaped, matches

PATTERNS = [
    "a*",
    "*b*",
    "a?c",
    "[a-c]x",
    "[!a]x",
    "[^a]x",
    "*.txt",
    "a*b*c",
    "[[:digit:]]*",
    r"\*",
    "[]a]",
    "**",
    "a**b",
    "[x",
]
TEXTS = ["", "a", "abc", "ax", "bx", "x.txt", "aXbYc", "7z", "*", "]", "ab", "[x", "b"]


def test_patterns_match_as_in_bash() -> None:
    lines = [f"case '{text}' in {pattern}) echo 1;; *) echo 0;; esac" for pattern in PATTERNS for text in TEXTS]
    ended = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    ours = [str(int(matches(pattern, text))) for pattern in PATTERNS for text in TEXTS]
    assert ours == ended.stdout.split()


@pytest.mark.parametrize("text", [*TEXTS, "a\\b", "[!a]", "?"])
def test_escaped_text_matches_itself_alone(text: str) -> None:
    assert [other for other in [*TEXTS, "a\\b", "[!a]", "?"] if matches(escaped(text), other)] == [text]


def test_many_stars_take_no_exponential_time() -> None:
    started = time.process_time()
    assert not matches("*a" * 20 + "b", "a" * 2000)
    assert time.process_time() - started < 1
