"""Command lines that start ranks, and the constants that launchers share.

Guards start in milliseconds, and import this module through dslpar.cluster.launcher. So it imports only the standard
library and dslpar.core.visible, which does the same.
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
"""The module that every rank runs, unless the request names another one."""
LOCALHOST = "127.0.0.1"
DEFAULT_PORT = 29500
"""The port at which ranks meet if none is given and hosts cannot agree on one. It is every launcher's own default."""
FILES = "DSLPAR_FILES"
"""Placeholder in a command line for the folder of its files."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Command(NamedTuple):
    """A launcher process to start, which starts ranks."""

    environ: Mapping[str, str]
    """Variables to add to this process's environment."""
    argv: tuple[str, ...]
    host: str = ""
    """The host whose ranks it starts; empty: all hosts."""
    files: Mapping[str, str] = NOTHING
    """Names and texts of files that it reads. `argv` and `environ` call their folder DSLPAR_FILES."""

    def shell(self) -> str:
        """Return the command as a line to paste into a shell."""
        settings = [f"{name}={_quote(value)}" for name, value in self.environ.items()]
        line = " ".join([*settings, *map(_quote, self.argv)])
        if not self.files:
            return line
        lines = {name: " ".join(map(_quote, text.splitlines())) for name, text in self.files.items()}
        written = "".join(f"printf '%s\\n' {text} > \"$D\"/{name}; " for name, text in lines.items())
        return f"D=$(mktemp -d); {written}" + line.replace(FILES, '"$D"')

    def with_files_in(self, folder: Path) -> Command:
        """Write the files to `folder`; return the command with that folder in place of DSLPAR_FILES."""
        for name, text in self.files.items():
            (folder / name).write_text(text, encoding="utf-8")
        environ = {name: value.replace(FILES, str(folder)) for name, value in self.environ.items()}
        return Command(environ, tuple(word.replace(FILES, str(folder)) for word in self.argv), self.host)


def _quote(word: str) -> str:
    """Quote a word for a shell. A word with invisible characters becomes $'...' (bash, POSIX 2024), byte by byte."""
    if visible(word) == word:
        return shlex.quote(word)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\#:" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(plain)}'"
