"""ColossalAI's logger: Python's `logging`, with the ranks that a message is for.

logger = get_dist_logger()
logger.info("loss 3.2", ranks=[0])                            # on the first rank of all
logger.info("stage 1", ParallelMode.PIPELINE, ranks=[1])      # on the ranks of the second stage
logger.log_to_file("logs")                                    # logs/rank_0.log, ...
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from dslpar.compat.context import ParallelMode, global_context

_FORMAT = logging.Formatter("colossalai - %(name)s - %(levelname)s: %(message)s")
_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


class DistributedLogger:
    """Logger of one name; `get_dist_logger` returns it."""

    def __init__(self, name: str) -> None:
        self.name, self._logger = name, logging.getLogger(name)
        if not self._logger.handlers:
            self._logger.addHandler(_StandardError())
            self._logger.setLevel(logging.INFO)
            self._logger.propagate = False  # the root logger may have a handler of the program's

    def set_level(self, level: str) -> None:
        """Set the least level that is logged: 'DEBUG', 'INFO', 'WARNING' or 'ERROR'."""
        self._logger.setLevel(_checked(level))

    def log_to_file(self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None) -> None:
        """Also write this rank's messages to `path/rank_N.log`, or `path/rank_N_SUFFIX.log`."""
        rank = global_context.get_global_rank() if global_context.is_initialized() else 0
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank_{rank}{'' if suffix is None else f'_{suffix}'}.log", mode)
        handler.setLevel(_checked(level))
        handler.setFormatter(_FORMAT)
        self._logger.addHandler(handler)

    def info(
        self, message: object, parallel_mode: ParallelMode = ParallelMode.GLOBAL, ranks: Sequence[int] | None = None
    ) -> None:
        """Log for information, on the given ranks of this rank's group; default: on every rank."""
        self._log(logging.INFO, message, parallel_mode, ranks)

    def warning(
        self, message: object, parallel_mode: ParallelMode = ParallelMode.GLOBAL, ranks: Sequence[int] | None = None
    ) -> None:
        """Log a warning."""
        self._log(logging.WARNING, message, parallel_mode, ranks)

    def debug(
        self, message: object, parallel_mode: ParallelMode = ParallelMode.GLOBAL, ranks: Sequence[int] | None = None
    ) -> None:
        """Log for debugging."""
        self._log(logging.DEBUG, message, parallel_mode, ranks)

    def error(
        self, message: object, parallel_mode: ParallelMode = ParallelMode.GLOBAL, ranks: Sequence[int] | None = None
    ) -> None:
        """Log an error."""
        self._log(logging.ERROR, message, parallel_mode, ranks)

    def _log(self, level: int, message: object, mode: ParallelMode, ranks: Sequence[int] | None) -> None:
        if ranks is None or global_context.get_local_rank(mode) in ranks:
            self._logger.log(level, "%s", message)


class _StandardError(logging.StreamHandler):  # type: ignore[type-arg]
    """Writes to the standard error of the moment, which a program or a test may replace."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self.setFormatter(_FORMAT)

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


_loggers: dict[str, DistributedLogger] = {}


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """Return the logger of a name, always the same object."""
    return _loggers.setdefault(name, DistributedLogger(name))


def disable_existing_loggers(include: Sequence[str] | None = None, exclude: Sequence[str] = ("colossalai",)) -> None:
    """Set the loggers in `include`, or all but those in `exclude`, to warnings."""
    for name in logging.root.manager.loggerDict:
        if (name in include) if include is not None else (name not in exclude):
            logging.getLogger(name).setLevel(logging.WARNING)


def _checked(level: str) -> str:
    if level not in _LEVELS:
        raise ValueError(f"unknown level {level!r}: one of {', '.join(_LEVELS)}")
    return level
