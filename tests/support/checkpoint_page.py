"""Run docs/checkpoints.md on a real checkpoint. `python -m tests.support.checkpoint_page` rewrites its outputs.

A console block of the page has a command and its output. Numbers of bytes are not compared, since torch.save's file of
the random states depends on torch's version. The blocks `text changes` and `text refused` are what a resume prints.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import dslpar
from dslpar import checkpoint
from dslpar.checkpoint import folder
from dslpar.cli.main import main
from dslpar.core.errors import DslparError
from tests.support.paths import ROOT

PAGE = ROOT / "docs" / "checkpoints.md"
_BLOCK = re.compile(r"^```(\S+)(?: (\S+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = Path("outputs", "gpt")


def blocks(page: str) -> Iterator[tuple[str, str, str]]:
    """Yield (language, name, text) of each block with output."""
    found = (match.groups(default="") for match in _BLOCK.finditer(page))
    yield from (block for block in found if block[0] == "console" or block[1] in ("changes", "refused"))


def printed(page: str, run: Path, here: Path) -> list[str]:
    """Return the current output of each block, from commands run in `here` with a copy of the run under outputs."""
    for language, name, text in (match.groups(default="") for match in _BLOCK.finditer(page)):
        if language == "python":
            (here / name).write_text(text)
    shutil.copytree(run, here / RUN)
    with _inside(here):
        return [_made(*block) for block in blocks(page)]


@contextlib.contextmanager
def _inside(path: Path) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def _made(language: str, name: str, text: str) -> str:
    if language == "text":
        return {"changes": _changes, "refused": _refused}[name]()
    if name == "damaged":
        return _damaged(text)
    return _run(text)


def _run(text: str) -> str:
    command, out = text.partition("\n")[0], io.StringIO()
    with contextlib.redirect_stdout(out):
        main(shlex.split(command.removeprefix("$ dslpar ")))
    return f"{command}\n{out.getvalue()}"


def _damaged(text: str) -> str:
    """Flip one bit of a file inside the `with`."""
    spoilt = next(RUN.rglob("00001.safetensors"))
    whole = spoilt.read_bytes()
    spoilt.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    made = _run(text)
    spoilt.write_bytes(whole)
    return made


def _stored() -> folder.Checkpoint:
    return folder.open_checkpoint(next((RUN / "checkpoints").glob("step_*")))


def _changes() -> str:
    return "".join(f"{line}\n" for line in checkpoint.changes(_stored(), dslpar.resolve("wider.py", 4)))


def _refused() -> str:
    config = dslpar.load("wider.py", ["model.hidden_size=32", "train.seed=7"])
    try:
        checkpoint.check(_stored(), dslpar.resolve(config, 4), "text")
    except DslparError as error:
        return f"{error}\n"
    raise AssertionError("it was not refused")


def rewritten(page: str, run: Path, here: Path) -> str:
    """Return the page with its outputs as printed now."""
    made = iter(printed(page, run, here))
    told = {"changes", "refused"}

    def block(match: re.Match[str]) -> str:
        language, name, _ = match.groups(default="")
        if language != "console" and name not in told:
            return match[0]
        return f"```{language}{' ' * bool(name)}{name}\n{next(made)}```"

    return _BLOCK.sub(block, page)


def without_bytes(text: str) -> str:
    """Remove the sizes of files, and the padding of their columns."""
    return re.sub(r" +[\d,]+(?= bytes|  intact)", " N", re.sub(r"(?m)^(name +samples +bytes) +", r"\1 ", text))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as here:
        PAGE.write_text(rewritten(PAGE.read_text(), Path(sys.argv[1]), Path(here)))
