"""Command lines that start ranks, and the constants that launchers share.

Guards (dslpar/watchdog) import this module through dslpar.cluster.launcher, and start in milliseconds. So this module
imports only the standard library and dslpar.core.visible, which itself imports only the standard library.
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
"""The port at which ranks connect to each other if no port is given and hosts cannot agree on one.

It is also every launcher's own default.
"""
FILES = "DSLPAR_FILES"
"""Placeholder in a command line for the folder with `Command.files`."""
NOTHING: Mapping[str, str] = MappingProxyType({})


class Command(NamedTuple):
    """The command line of a launcher, which starts ranks."""

    environ: Mapping[str, str]
    """Variables to add to the launcher's environment."""
    argv: tuple[str, ...]
    host: str = ""
    """The host whose ranks it starts; empty: all hosts."""
    files: Mapping[str, str] = NOTHING
    """Names and texts of files that the launcher reads. In `argv` and `environ`, DSLPAR_FILES stands for their folder.
    """

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
    """Quote a word for a shell. A word with invisible characters becomes $'...' with escapes (bash, POSIX 2024)."""
    if visible(word) == word:
        return shlex.quote(word)
    plain = (chr(byte) if 32 <= byte < 127 and byte not in b"'\\#:" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(plain)}'"
