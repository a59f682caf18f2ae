"""ColossalAI's names of linear layers, for code ported from it. Each is a `Linear` that checks the tensor mode.

ColossalAI has separate 1D, 2D, 2.5D and 3D layers. Here they are one class, and a name with a mode refuses other modes.
The table in README.md beside this file maps ColossalAI's other names.
"""

from __future__ import annotations

import inspect
from typing import Any, ClassVar

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers.linear import Linear


class _OfMode(Linear):
    """`Linear` that requires one tensor mode; it takes `Linear`'s arguments.

    Raises:
        DslparError: the run has another tensor mode.
        TypeError: the first argument is not `Groups`. ColossalAI's layers find theirs in a global context.
    """

    mode: ClassVar[str]
    __signature__: ClassVar[inspect.Signature] = inspect.signature(Linear)

    def __init__(self, groups: Groups | Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(groups, Groups):
            name, run = type(self).__name__, "groups = dslpar.start(config).groups"
            wanted = f"{name}(groups, in_features, out_features, role='inward' or 'outward'), with {run}"
            raise TypeError(f"{name} takes the process groups first, not {groups!r}: write {wanted}")
        if groups.tensor.mode != self.mode:
            message = f"{type(self).__name__} in a run with tensor mode {groups.tensor.mode!r}"
            hint = f"use Linear, which is right in every mode, or tensor=dict(mode={self.mode!r}, ...)"
            raise_finding("TEN110", message, hint, key="parallel.tensor.mode")
        super().__init__(groups, *args, **kwargs)


class Linear1D(_OfMode):
    """Megatron-LM's column- (inward) and row-parallel (outward) linear."""

    mode = "1d"


class Linear2D(_OfMode):
    """Optimus' linear: both dims of weights and activations are cut."""

    mode = "2d"


class Linear2p5D(_OfMode):
    """Tesseract's linear: `depth` copies of a 2D layout."""

    mode = "2.5d"


class Linear3D(_OfMode):
    """Linear by Agarwal's 3D matrix product on a cube of ranks."""

    mode = "3d"
