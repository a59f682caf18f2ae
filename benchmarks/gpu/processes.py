"""Programs that end: by themselves, or at a limit, and then with all that they have started."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

ROOT = Path(__file__).parents[2]


class Ended(NamedTuple):
    """The end of a program."""

    status: int | None
    """None: it hung, and was killed."""
    output: str
    errors: str

    @property
    def text(self) -> str:
        """All that it said."""
        return self.errors + self.output

    @property
    def reason(self) -> str:
        """Why it failed, in a line: the first error that it names, for torchrun's own comes after a rank's; else what
        it said last."""
        lines = [line.strip() for line in (self.errors.strip() or self.output).splitlines()]
        named = [line for line in lines if _ERROR.search(line) and "[warning]" not in line]
        worded = [line for line in lines if any(map(str.isalpha, line))]
        return named[0] if named else worded[-1] if worded else f"nothing said, status {self.status}"


_ERROR = re.compile(r"^\S*(Error|Exception|Interrupt)\b|(^|\s)[A-Z]{3,4}\d{3} ")
"""Python's, and the codes of dslpar's own."""


def run(command: Sequence[str], limit_s: float, env: Mapping[str, str], cwd: Path = ROOT) -> Ended:
    """Run a program for at most so long.

    What it says goes to files: a pipe would stay open for as long as anything that it has started lives.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=cwd, env=env, stdout=output, stderr=errors)
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            kill(process)
        output.seek(0)
        errors.seek(0)
        return Ended(status, output.read(), errors.read())


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Kill a program that still runs, and what it has started; torchrun's workers are in sessions of their own."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in family:
        try:
            each.kill()  # psutil compares times of birth: a number that was given anew is not hit
        except psutil.NoSuchProcess:
            continue
    process.wait()
