"""ColossalAI's `colossalai.tensor`, of which only the process group is here."""

from __future__ import annotations

from dslpar.compat.gemini import ProcessGroup
from dslpar.compat.missing import names_of

__all__ = ["ProcessGroup"]

__path__: list[str] = []
__getattr__ = names_of(__name__)
