"""Random edits of a config, as an author makes them: keys typed one by one, lines cut, copied and broken off.

for text in edited(text, random.Random(0)): ...
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

_TYPED = "(),='\"[]{}#: \n0123456789abcdefgtz_."
"""What is typed: the characters that configs have."""


def edited(text: str, rng: Random) -> Iterator[str]:
    """Yield texts, each one edit from the last. One edit in eight goes back to the first text, which is legal."""
    now = text
    while True:
        now = text if rng.random() < 1 / 8 else _edit(now, rng)
        yield now


def _edit(text: str, rng: Random) -> str:
    at = rng.randrange(len(text) + 1)
    lines = text.splitlines(keepends=True) or [""]
    line = rng.randrange(len(lines))
    match rng.randrange(5):
        case 0:
            return text[:at] + rng.choice(_TYPED) + text[at:]
        case 1:
            return text[:at] + text[at + rng.randrange(1, 6) :]
        case 2:
            return "".join(lines[:line] + lines[line + 1 :])
        case 3:
            return "".join([*lines[:line], lines[rng.randrange(len(lines))], *lines[line:]])
        case _:
            broken = lines[line][: rng.randrange(len(lines[line]) + 1)]
            return "".join([*lines[:line], broken + "\n", *lines[line + 1 :]])
