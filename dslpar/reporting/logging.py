"""Who says what where: rank 0 to the terminal and to log.txt, the other ranks only in error.

What other ranks would have said before processes meet is kept, for the case that they alone cannot run. DeepSpeed's
lines, its prints among them, go to log.txt and not to the terminal.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dslpar.core.errors import Finding
from dslpar.linter.report import text as report_text
from dslpar.reporting.run_dir import LOG

log = logging.getLogger("dslpar")


def say(findings: Sequence[Finding], sources: Mapping[str, str]) -> None:
    """Findings, as lint prints them."""
    if findings:
        sys.stderr.write(report_text.text(findings, sources))


@contextlib.contextmanager
def of_rank(rank: int) -> Iterator[io.StringIO]:
    """Rank 0 speaks, since the others say the same; what they would have said is kept."""
    unsaid = io.StringIO()
    if rank == 0:
        yield unsaid
        return
    with contextlib.redirect_stderr(unsaid), contextlib.redirect_stdout(unsaid):
        yield unsaid


@contextlib.contextmanager
def logging_to(folder: Path | None, rank: int) -> Iterator[None]:
    """Our lines to the terminal and to log.txt; DeepSpeed's and Python's warnings to log.txt alone; all by rank 0.

    Without a folder, to the terminal alone.
    """
    theirs = [logging.getLogger("DeepSpeed"), logging.getLogger("py.warnings")]
    for logger in theirs:
        logger.handlers, logger.propagate = [], False
    logging.captureWarnings(True)
    log.propagate = False
    file = _file(folder) if rank == 0 and folder else logging.NullHandler()
    for logger in (log, *theirs):
        logger.setLevel(logging.INFO)
        logger.addHandler(file)
    if rank == 0:
        log.addHandler(_Terminal())
    try:
        yield
    finally:
        file.close()


def _file(folder: Path) -> logging.Handler:
    file = _File(folder / LOG, encoding="utf-8")
    file.setFormatter(logging.Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
    return file


class _File(logging.FileHandler):
    """log.txt: a full disk is told by what must be written, metrics and checkpoints, and once."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """A line that cannot be written is left out."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Terminal(logging.Handler):
    """Lines above the progress bar, if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        from tqdm import tqdm

        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def progress(steps: int, done: int, shown: bool) -> Any:
    """A bar on a terminal; nothing elsewhere."""
    from tqdm import tqdm

    return tqdm(total=steps, initial=done, unit="step", disable=not (shown and sys.stderr.isatty()), leave=False)


@contextlib.contextmanager
def set_aside(folder: Path | None) -> Iterator[None]:
    """What DeepSpeed prints goes to log.txt, where there is one."""
    with open(folder / LOG if folder else os.devnull, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield
