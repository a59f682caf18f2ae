"""Which parameters still hold what their layer was built with, and which a program has written.

    up = Linear(groups, 4, 8, role="inward")    # drawn now, as torch.nn's are: a layer works as soon as it is built
    up.load_state_dict(state)                   # written: dslpar.initialize keeps it
    up.bias.data.zero_()                        # so is this

A run draws each weight by its global name, so that weights depend neither on the mesh nor on the rank that builds a
layer. A layer does not know that name while it is built. So it is drawn twice: when it is built, from torch's
generator; and, where nobody has written it since, when the engine is built, by name. A loaded weight that was drawn
again would be lost without a word, hence this record.

A write is seen by torch's version counter, which in-place operations raise (`load_state_dict`, `nn.init`, `p.fill_`,
an optimizer's step), and by a digest of the values, since what goes through `p.data` or numpy raises no counter. The
counter alone is not enough, and neither is the digest: a program may load the very values that are there, and means to
keep them.

What takes a parameter's place has no record (`load_state_dict(assign=True)`, `layer.weight = ...`, `torch.load`), and
so counts as written. `copy.deepcopy`, `.to(...)` and `to_empty` keep the record: a copy of what nobody wrote is drawn
by name, as the layer itself is.
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
    """Who has given a parameter its values."""

    NOBODY = "nobody"
    """Nobody yet: it is NaN, or was left unwritten (`skip_init`)."""
    LAYER = "layer"
    """The layer, when it was built: an engine draws them anew, by name."""
    INITIALIZE = "initialize"
    """`initialize`: an engine keeps them, and another `initialize` draws them anew."""
    WHOLE = "whole"
    """A program, from a tensor of which each rank has cut its piece (`checkpoint.load_full_state`)."""
    PROGRAM = "program"
    """A program: a load of pieces, an init of its own, training."""


UNWRITTEN = frozenset({Source.NOBODY, Source.LAYER})
"""What an engine draws by name."""
WRITTEN = frozenset({Source.WHOLE, Source.PROGRAM})
"""What `initialize` does not draw unasked."""


NAN = b"nan"
"""In place of a digest: a look at the values is ten times as fast."""


class InitialValues(NamedTuple):
    """What a parameter held when it was drawn."""

    source: Source
    version: int
    """torch's count of in-place writes."""
    digest: bytes | None
    """Of its bytes; None: only the count is compared, as nothing can have been written otherwise; `NAN`: all is NaN."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """Pickle as None: what comes out of a file was loaded, and is the program's."""
        return type(None), ()


def record(p: nn.Parameter, source: Source, *, digested: bool = True) -> None:
    """Remember what `p` holds as its initial values; reads them once, at the speed of a hash (1 GB/s)."""
    p.initial_values = InitialValues(source, _version(p), digest(p) if digested else None)  # type: ignore[attr-defined]


def fill_with_nan(p: nn.Parameter) -> None:
    """Make a parameter that nobody has drawn yet NaN throughout."""
    with torch.no_grad():
        p.fill_(torch.nan)
    p.initial_values = InitialValues(Source.NOBODY, _version(p), NAN)  # type: ignore[attr-defined]


def forget(p: nn.Parameter) -> None:
    """Take what `p` holds for the program's from now on."""
    p.initial_values = None  # type: ignore[attr-defined]


def source_of(p: nn.Parameter) -> Source:
    """Return who has given `p` the values that it holds now."""
    initial = cast("InitialValues | None", getattr(p, "initial_values", None))
    if initial is None or initial.version != _version(p):
        return Source.PROGRAM
    if initial.digest == NAN:
        return initial.source if bool(p.isnan().all()) else Source.PROGRAM
    # On "meta" there are no values, and none to compare.
    if initial.digest is not None and initial.digest != digest(p):
        return Source.PROGRAM
    return initial.source


@contextmanager
def skip_init() -> Iterator[None]:
    """Have layers, within, leave their parameters' memory unwritten: who builds them so draws them at once.

    The model families build so, whose layers are drawn by name as soon as they are built: nothing is drawn twice.
    """
    before, _SKIPPING.active = _SKIPPING.active, True
    try:
        yield
    finally:
        _SKIPPING.active = before


def skips_init() -> bool:
    """Whether layers are left unwritten here."""
    return _SKIPPING.active


def holds_numbers(p: Tensor) -> bool:
    """Whether `p` has memory that can be written and read: not on "meta", and no stand-in such as FakeTensor."""
    return p.device.type != "meta" and type(p.data) is Tensor


class _Skipping(threading.local):
    """Whether this thread builds layers whose parameters are drawn by whoever builds them."""

    active: bool = False


_SKIPPING = _Skipping()


def _version(p: Tensor) -> int:
    return 0 if p.is_inference() else p._version  # a tensor of inference mode counts no writes


def digest(p: Tensor) -> bytes | None:
    """Return a hash of the bytes of `p`, equal in every process; None where it has none."""
    if not holds_numbers(p):
        return None
    values = p.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).digest()
