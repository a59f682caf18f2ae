"""Record of initial values: detect which parameters the program has written since they were drawn.

    up = Linear(groups, 4, 8, role="inward")    # drawn now, as torch.nn's are: a layer works as soon as it is built
    up.load_state_dict(state)                   # written: dslpar.initialize keeps it
    up.bias.data.zero_()                        # so is this

A run draws each weight by its global name, so that weights depend neither on the mesh nor on the rank that builds a
layer. A layer does not know that name while it is built. So its weights are drawn twice: from torch's generator when
the layer is built, and by name when the engine is built, unless they have been written in between. Without this record,
the second drawing would silently overwrite loaded weights.

Two checks detect a write. In-place operations (`load_state_dict`, `nn.init`, `p.fill_`, an optimizer's step)
increment torch's version counter. A digest of the values detects writes through `p.data` or numpy, which the counter
misses. The digest alone is not enough: a program may load values that equal the initial ones, and means to keep them.

A parameter that replaces another one (`load_state_dict(assign=True)`, `layer.weight = ...`, `torch.load`) has no
record, and so counts as written. `copy.deepcopy`, `.to(...)` and `to_empty` keep the record: a copy of an unwritten
parameter is drawn by name, like the original.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn


class Source(Enum):
    """Origin of a parameter's values."""

    NOBODY = "nobody"
    """Not written yet: the parameter is NaN, or its memory was left unwritten (`skip_init`)."""
    LAYER = "layer"
    """Drawn when the layer was built. An engine draws the parameter anew, by name."""
    INITIALIZE = "initialize"
    """Drawn by `initialize`. An engine keeps the values, another `initialize` draws them anew."""
    WHOLE = "whole"
    """Written by the program from whole tensors, of which each rank cut its piece (`checkpoint.load_full_state`)."""
    PROGRAM = "program"
    """Written by the program in another way: loaded pieces, its own init, training."""


UNWRITTEN = frozenset({Source.NOBODY, Source.LAYER})
"""Origins of the values that an engine replaces by drawing by name."""
WRITTEN = frozenset({Source.WHOLE, Source.PROGRAM})
"""Origins of the values that `initialize` overwrites only with `keep=False`."""


NAN = b"nan"
"""Used instead of a digest if all elements are NaN, since an isnan check is ten times as fast as a hash."""


class InitialValues(NamedTuple):
    """Record of the values that a parameter was drawn with."""

    source: Source
    version: int
    """torch's version counter of in-place writes."""
    digest: bytes | None
    """Digest of the bytes. None: only `version` is compared. `NAN`: every element is NaN."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None, since a parameter that was read from a file counts as the program's."""
        return type(None), ()


def record(p: nn.Parameter, source: Source, *, digested: bool = True) -> None:
    """Record the values of `p` as its initial ones. Reads them once, at the speed of a hash (1 GB/s)."""
    p.initial_values = InitialValues(source, _version(p), digest(p) if digested else None)  # type: ignore[attr-defined]


def fill_with_nan(p: nn.Parameter) -> None:
    """Fill a parameter that has not been drawn yet with NaN."""
    with torch.no_grad():
        p.fill_(torch.nan)
    p.initial_values = InitialValues(Source.NOBODY, _version(p), NAN)  # type: ignore[attr-defined]


def forget(p: nn.Parameter) -> None:
    """Drop the record of `p`, so that its values count as the program's."""
    p.initial_values = None  # type: ignore[attr-defined]


def source_of(p: nn.Parameter) -> Source:
    """Return the origin of the values that `p` holds now."""
    initial = cast("InitialValues | None", getattr(p, "initial_values", None))
    if initial is None or initial.version != _version(p):
        return Source.PROGRAM
    if initial.digest == NAN:
        return initial.source if bool(p.isnan().all()) else Source.PROGRAM
    # On "meta" the digest is None, as there are no values to compare.
    if initial.digest is not None and initial.digest != digest(p):
        return Source.PROGRAM
    return initial.source


@contextmanager
def skip_init() -> Iterator[None]:
    """Have layers built within the context leave their parameters unwritten. The caller must draw them at once.

    The model families use it: they draw each layer by name as soon as it is built, so nothing is drawn twice.
    """
    before, _SKIPPING.active = _SKIPPING.active, True
    try:
        yield
    finally:
        _SKIPPING.active = before


def skips_init() -> bool:
    """Return whether layers built now leave their parameters unwritten (`skip_init`)."""
    return _SKIPPING.active


def holds_numbers(p: Tensor) -> bool:
    """Return whether `p` has memory that can be written and read: not on "meta", and no stand-in such as FakeTensor."""
    return p.device.type != "meta" and type(p.data) is Tensor


class _Skipping(threading.local):
    """Flag per thread: whether the thread is within `skip_init`."""

    active: bool = False


_SKIPPING = _Skipping()


def _version(p: Tensor) -> int:
    return 0 if p.is_inference() else p._version  # tensors of inference mode have no version counter


def digest(p: Tensor) -> bytes | None:
    """Return a hash of the bytes of `p`, equal in every process; None if it has no memory."""
    if not holds_numbers(p):
        return None
    values = p.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).digest()
