"""Run programs with a time limit, and kill them with everything they started."""

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
        """All output."""
        return self.errors + self.output

    @property
    def reason(self) -> str:
        """Return the reason of a failure in one line: the first error, since torchrun's own follows a rank's, or else
        the last line of output.
        """
        lines = [line.strip() for line in (self.errors.strip() or self.output).splitlines()]
        named = [line for line in lines if _ERROR.search(line) and "[warning]" not in line]
        worded = [line for line in lines if any(map(str.isalpha, line))]
        return named[0] if named else worded[-1] if worded else f"nothing said, status {self.status}"


_ERROR = re.compile(r"^\S*(Error|Exception|Interrupt)\b|(^|\s)[A-Z]{3,4}\d{3} ")
"""Python's errors, and the codes of dslpar's own."""


def run(command: Sequence[str], limit_s: float, env: Mapping[str, str], cwd: Path = ROOT) -> Ended:
    """Run a program with a time limit.

    Output goes to files, since a pipe would stay open as long as any descendant lives.
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
    """Kill a running program and everything it started; torchrun's workers are in their own sessions."""
    if process.poll() is not None:
        return
    family = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for each in family:
        try:
            each.kill()  # psutil compares creation times, so that a reused pid is not killed
        except psutil.NoSuchProcess:
            continue
    process.wait()
