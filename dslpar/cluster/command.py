"""A command line that starts ranks, and what all of them share.

Guards start in milliseconds, and import this by way of dslpar.cluster.launcher: the standard library alone, and
dslpar.core.visible, which does the same.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from dslpar.core.visible import visible

if TYPE_CHECKING:
    from pathlib import Path

MODULE = "dslpar.training"
"""What every rank runs, unless a request says otherwise."""
LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 29500
"""Where ranks meet if no port is given and none can be agreed on: every launcher's own default."""
FILES = "DSLPAR_FILES"
"""Stands in a command line for the folder of its files."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Command(NamedTuple):
    """One process to start, which starts the ranks."""

    environ: Mapping[str, str]
    """Added to this process's."""
    argv: tuple[str, ...]
    host: str = ""
    """Whose ranks it starts; empty: those of all hosts."""
    files: Mapping[str, str] = NOTHING
    """Name to text of files that it reads, in a folder that argv and environ call DSLPAR_FILES."""

    def shell(self) -> str:
        """A line for a shell, to copy and paste."""
        settings = [f"{name}={_quote(value)}" for name, value in self.environ.items()]
        line = " ".join([*settings, *map(_quote, self.argv)])
        if not self.files:
            return line
        lines = {name: " ".join(map(_quote, text.splitlines())) for name, text in self.files.items()}
        written = "".join(f"printf '%s\\n' {text} > \"$D\"/{name}; " for name, text in lines.items())
        return f"D=$(mktemp -d); {written}" + line.replace(FILES, '"$D"')

    def with_files_in(self, folder: Path) -> Command:
        """Write the files into `folder`; return the command that finds them there."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        environ = {name: value.replace(FILES, str(folder)) for name, value in self.environ.items()}
        return Command(environ, tuple(word.replace(FILES, str(folder)) for word in self.argv), self.host)


def _quote(word: str) -> str:
    """Quote a word for a shell; one that is not all visible as bash and POSIX 2024 do, $'...', byte by byte."""
    if visible(word) == word:
        return shlex.quote(word)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\#:" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(plain)}'"
