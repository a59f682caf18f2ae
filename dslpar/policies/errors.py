"""Errors of transformers' code that runs on less than it was written for, as findings that name it.

A part of a model that is cut may be code that nobody has looked at: it fails with a shape, or an attribute, of which
its user knows nothing. What the machine has to say (memory, a network) is left as it is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from dslpar.core.catalog import finding
from dslpar.core.errors import DslparError

_CODE = (AttributeError, IndexError, KeyError, NotImplementedError, TypeError, ValueError)
_MACHINE = re.compile(r"out of memory|gloo|nccl|cuda|hip|xpu|timed out|connection", re.IGNORECASE)


@contextmanager
def as_findings(what: str) -> Iterator[None]:
    """Raise, for an error of code within, a finding that says of what: `what` fails, with the error's first line."""
    try:
        yield
    except DslparError:
        raise
    except (*_CODE, RuntimeError) as error:
        # Subclasses of RuntimeError are of memory and networks; shapes are RuntimeErrors themselves.
        if not isinstance(error, _CODE) and (type(error) is not RuntimeError or _MACHINE.search(str(error))):
            raise
        said = str(error).strip().partition("\n")[0]
        message = f"{what} fails: {type(error).__name__}: {said}"
        hint = "report the model: it needs a rule of its own"
        raise DslparError([finding("TEN234", message, hint, key="model.type")]) from error
