r"""Lines of a text as the protocol, Python and lint count them: they end at \r\n, \n and \r alone.

    lines_of("a\r\nb\x0cc\n")     # ("a", "b\x0cc", "")

`str.splitlines`, which pygls uses, splits at form feeds, U+0085 and U+2028 too. Places after them would be off.
"""

from __future__ import annotations

import re
from functools import lru_cache

_END = re.compile(r"\r\n|\n|\r")


@lru_cache(maxsize=4)
def lines_of(text: str) -> tuple[str, ...]:
    """Return the lines without their ends; the last one is empty if the text ends with a line's end."""
    return tuple(_END.split(text))
