"""ColossalAI's `colossalai.trainer`."""

from __future__ import annotations

from dslpar.compat import hooks
from dslpar.compat.missing import names_of
from dslpar.compat.trainer import Trainer

__all__ = ["Trainer", "hooks"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
