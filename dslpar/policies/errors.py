"""Errors of transformers' code that runs on less than it was written for, as findings that name it.

A part of a model that is cut may be code that nobody has looked at: it fails with a shape, or an attribute, of which
its user knows nothing. What the machine has to say (memory, a network) is left as it is.
"""

from __future__ import annotations

import re
from contextlib import ContextDecorator

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError

_CODE = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
_MACHINE = re.compile(r"out of memory|gloo|nccl|cuda|hip|xpu|timed out|connection", re.IGNORECASE)


class as_findings(ContextDecorator):  # a class: a generator would cost more at every layer's call
    """Raise, for an error of code within, a finding that says of what: `what` fails, with the error's first line."""

    def __init__(self, what: str) -> None:
        self.what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        # Subclasses of RuntimeError are of memory and networks; shapes are RuntimeErrors themselves.
        is_shape = type(error) is RuntimeError and not _MACHINE.search(str(error))
        if isinstance(error, DslparError) or not (isinstance(error, _CODE) or is_shape):
            return
        said = str(error).strip().partition("\n")[0]
        message = f"{self.what} fails: {type(error).__name__}: {said}"
        hint = "report the model: it needs a rule of its own"
        raise DslparError([finding("TEN234", message, hint, key="model.type")]) from error
