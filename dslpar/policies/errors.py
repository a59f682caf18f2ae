"""Report errors of transformers' code on a sharded model as findings that name the layer.

transformers' code was not written for shards of a model. If it fails, its error is about a shape or an attribute that
the user does not know. Errors of the machine (memory, network) are not changed.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from contextlib import ContextDecorator

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError

UNSPLIT = (
    "dslpar.initialize(config, model=..., criterion=...) without parallel.tensor and parallel.pipeline runs it whole"
)
"""Hint of findings about models that no config and no policy can split."""
NEEDS_OWN_CODE = f"{UNSPLIT}; dslpar needs code of its own to split it"
"""Hint of findings about models whose code does something that dslpar has no counterpart for."""

OF_ITSELF = "a config that transformers itself can build and run; `dslpar policy check` takes its values as key=value"
"""Hint of findings about errors of transformers' code on the whole model."""

_CODE = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError),
    *(NameError, NotImplementedError, StopIteration, TypeError, ValueError),
)
_MACHINE = re.compile(r"out of memory|gloo|nccl|cuda|hip|xpu|timed out|connection", re.IGNORECASE)


class as_findings(ContextDecorator):  # a class: a generator would cost more at every layer's call
    """Context that turns an error of its code into a finding: "`what` fails", with the error's first line."""

    def __init__(self, what: str, hint: str | Callable[[], str] = NEEDS_OWN_CODE) -> None:
        self.what, self.hint = what, hint

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # Wrong shapes raise RuntimeError itself; its subclasses are errors of memory and networks.
        is_shape = type(error) is RuntimeError and not _MACHINE.search(str(error))
        if error is None or isinstance(error, DslparError) or not (isinstance(error, _CODE) or is_shape):
            return
        said = str(error).strip().partition("\n")[0]
        message = f"{self.what} fails: {type(error).__name__}: {said or _place(error)}"
        hint = self.hint if isinstance(self.hint, str) else self.hint()
        hint = "install the package that it names" if isinstance(error, ImportError) else hint
        raise DslparError([finding("TEN234", message, hint, key="model.type")]) from error


def _place(error: BaseException) -> str:
    """Return the line of code that raised an error without a text, such as an assert."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.line} ({last.filename.rpartition('/')[2]}:{last.lineno})"
