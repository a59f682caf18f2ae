"""Run docs/mistakes.md: `python -m tests.support.mistakes_page` writes lint's output of each example into the page.

A section of the page has the files of the mistake, a console block with the command and its output, and the corrected
files, for which the same command prints nothing. A file's name follows the language of its block. The page is the
test's table, as in rustc's error index and Go's testable examples.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dslpar.cli.main import main as dslpar
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "mistakes.md"
_BLOCK = re.compile(r"^```(\S+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class Example(NamedTuple):
    """One section of the page."""

    title: str
    mistake: dict[str, str]
    """Files by name."""
    command: str
    printed: str
    right: dict[str, str]
    """The files that change."""


def examples(page: str) -> Iterator[Example]:
    """Yield every section of the page with a console block."""
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        title, blocks = section.partition("\n")[0], _BLOCK.findall(section)
        (console,) = (number for number, (language, _, _) in enumerate(blocks) if language == "console")
        command, _, printed = blocks[console][2].partition("\n")
        mistake, right = ({name: text for _, name, text in part} for part in (blocks[:console], blocks[console + 1 :]))
        yield Example(title, mistake, command.removeprefix("$ "), printed, right)


def run(command: str, files: dict[str, str]) -> tuple[int, str]:
    """Return the exit status and output of a command, in a folder with only these files."""
    name, *words = shlex.split(command)
    assert name == "dslpar", command
    here, out = os.getcwd(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        for path, text in files.items():
            Path(folder, path).write_text(text)
        os.chdir(folder)
        try:
            with contextlib.redirect_stdout(out):
                status = dslpar(words)
        finally:
            os.chdir(here)
    return status, out.getvalue()


def rewritten(page: str) -> str:
    """Return the page with the commands' current output."""
    for example in examples(page):
        _, printed = run(example.command, example.mistake)
        console = f"```console\n$ {example.command}\n"
        before, _, after = page.partition(f"## {example.title}\n")
        after = after.replace(f"{console}{example.printed}```", f"{console}{printed}```", 1)
        page = f"{before}## {example.title}\n{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rewritten(PAGE.read_text()))
    sys.stdout.write(f"{PAGE} is up to date\n")
