"""Logging: rank 0 to the terminal and to log.txt, the other ranks only in error.

Before the process group exists, the output of other ranks is kept in memory, so that it can be shown if only such a
rank fails. DeepSpeed's log lines and prints go to log.txt, and not to the terminal.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, TextIO

from tqdm import tqdm

from dslpar.core.errors import Finding
from dslpar.core.visible import visible, visible_lines
from dslpar.linter.report import text as report_text
from dslpar.reporting.run_dir import LOG

log = logging.getLogger("dslpar")
_ONLY_IN_FILE = "only_in_file"

NO_SOURCES: Mapping[str, str] = MappingProxyType({})


def print_findings(findings: Sequence[Finding], sources: Mapping[str, str] = NO_SOURCES) -> None:
    """Print findings to stderr like `dslpar lint`; `sources` has the texts of files, whose lines are quoted."""
    if findings:
        sys.stderr.write(report_text.text(findings, sources))


@contextlib.contextmanager
def muted_unless_rank_0(rank: int) -> Iterator[io.StringIO]:
    """On ranks other than 0, redirect output to the yielded buffer, since rank 0 prints the same."""
    kept = io.StringIO()
    if rank == 0:
        yield kept
        return
    with contextlib.redirect_stderr(kept), contextlib.redirect_stdout(kept):
        yield kept


def warn_on_rank_0(rank: int) -> None:
    """Make DeepSpeed warn once, not once per rank."""
    if rank:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)


@contextlib.contextmanager
def log_to_run_folder(folder: Path | None, rank: int) -> Iterator[None]:
    """Set up logging for the body, and restore all loggers afterwards.

    On rank 0, dslpar's lines go to the terminal and to log.txt. DeepSpeed's lines and Python's warnings go to log.txt
    alone. A repeated warning is logged once. Without a folder there is no log.txt. Other ranks log nothing.
    """
    external = [logging.getLogger("DeepSpeed"), logging.getLogger("py.warnings")]
    before = [(logger, logger.handlers, logger.propagate, logger.level) for logger in (log, *external)]
    file: logging.Handler = logging.NullHandler()
    if rank == 0 and folder:
        file = _LogFile(folder / LOG, encoding="utf-8")
        file.setFormatter(_Formatter("%(asctime)s %(name)s %(levelname)s %(message)s"))
        file.addFilter(_RepeatedWarnings())
    for logger in (log, *external):
        logger.handlers, logger.propagate = [file], False
        logger.setLevel(logging.INFO)
    if rank == 0:
        log.addHandler(_Terminal())
    logging.captureWarnings(True)
    try:
        yield
    finally:
        file.close()
        logging.captureWarnings(False)
        for logger, handlers, propagate, level in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def log_to_file(text: str, level: int = logging.ERROR) -> None:
    """Log a line to log.txt alone; somebody else shows it on the terminal, such as the code that raises an error."""
    log.log(level, text, extra={_ONLY_IN_FILE: True})  # no argument: those are escaped, and lose their line breaks


class _RepeatedWarnings(logging.Filter):
    """Pass each warning once, by its text: DeepSpeed repeats some of its own at every step."""

    def __init__(self) -> None:
        super().__init__()
        self._logged: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno != logging.WARNING:
            return True
        text = record.getMessage()
        is_new = text not in self._logged
        self._logged.add(text)
        return is_new


class _Formatter(logging.Formatter):
    """Formatter that escapes control characters in arguments, and indents all lines of a record after the first."""

    def format(self, record: logging.LogRecord) -> str:
        if isinstance(args := record.args, tuple):
            record = copy.copy(record)
            texts = (str, os.PathLike, BaseException)
            record.args = tuple(visible(arg) if isinstance(arg, texts) else arg for arg in args)
        return visible_lines(super().format(record)).replace("\n", "\n  ")


class _LogFile(logging.FileHandler):
    """Handler for log.txt that ignores write errors. Writers of metrics and checkpoints report a full disk."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # logging's name
        """Drop the line that cannot be written."""

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


class _Terminal(logging.Handler):
    """Handler that prints lines above the progress bar, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        if getattr(record, _ONLY_IN_FILE, False):
            return

        tqdm.write(self.format(record), file=sys.stdout)
        sys.stdout.flush()


def progress_bar(steps: int, done: int, shown: bool) -> tqdm[NoReturn]:
    """Return a progress bar over `steps` steps, of which `done` are done.

    It is visible only if `shown` is True and stderr is a terminal.
    """
    return tqdm(total=steps, initial=done, unit="step", disable=not (shown and sys.stderr.isatty()), leave=False)


@contextlib.contextmanager
def prints_to_log(folder: Path | None) -> Iterator[None]:
    """Send DeepSpeed's prints in the body to log.txt, or discard them without a folder."""
    path = folder / LOG if folder else os.devnull
    with open(path, "a", encoding="utf-8") as file, contextlib.redirect_stdout(_VisibleWriter(file)):
        yield


class _VisibleWriter(io.TextIOBase):
    """File that escapes control characters and writes the text to another file."""

    def __init__(self, file: TextIO) -> None:
        self.file = file

    def write(self, text: str) -> int:
        self.file.write(visible_lines(text))
        return len(text)

    def flush(self) -> None:
        self.file.flush()
