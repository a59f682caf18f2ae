"""ColossalAI's `colossalai.logging`."""

from __future__ import annotations

from dslpar.compat.dist_logger import DistributedLogger, disable_existing_loggers, get_dist_logger
from dslpar.compat.missing import names_of

__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
