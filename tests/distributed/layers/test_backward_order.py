"""Order of communication and computation in a linear's backward, for each choice of kept panels.

The second gather of X runs during dgrad's product, and the reduction of dX during wgrad's: neither is waited for before
the product that hides it (docs/architecture.md). test_linear.py checks the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.device_counter import PRODUCTS
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.groups import Groups
from dslpar.layers import Linear, initialize, placement
from tests.support.fake_world import on_last_ranks
from tests.support.layouts import kept

BATCH, SEQUENCE, IN, OUT = 4, 20, 48, 96

AGAIN = ["start all_gather", "dgrad", "start reduce_scatter", "wait all_gather", "wgrad"]
KEPT = ["dgrad", "start reduce_scatter", "wgrad"]
ENDS = ["wait reduce_scatter"]
ORDERS = {"x": KEPT, "w": AGAIN, "both": KEPT, "none": AGAIN}
"""Start of the backward by `keep`: "w" and "none" gather X again."""
REDUCES_W = ["start reduce_scatter", "wait reduce_scatter"]
"""Modes that shard weights over q reduce dW after its product."""


class _Products(TorchDispatchMode):
    """Logs matrix products by their result: the gradient of this rank's weight, or else of X."""

    def __init__(self, log: list[str], panel: tuple[int, int]) -> None:
        super().__init__()
        self.log, self.shape = log, panel

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.rpartition("::")[2] in PRODUCTS:
            self.log.append("wgrad" if result.shape == self.shape else "dgrad")
        return result


@contextmanager
def _logged_collectives(log: list[str]) -> Iterator[None]:
    originals = {name: getattr(collectives, f"start_{name}") for name in ("all_gather", "reduce_scatter")}

    def logged(name: str, start: Callable[..., Pending]) -> Callable[..., Pending]:
        def begin(x: Tensor, axis: Axis, *args: Any, **kwargs: Any) -> Pending:
            pending = start(x, axis, *args, **kwargs)
            if axis.size == 1:
                return pending
            log.append(f"start {name}")
            return Pending(x, finish=lambda _: log.append(f"wait {name}") or pending.wait())

        return begin

    for name, start in originals.items():
        setattr(collectives, f"start_{name}", logged(name, start))
    try:
        yield
    finally:
        for name, start in originals.items():
            setattr(collectives, f"start_{name}", start)


def events(tensor: mesh.TensorMesh) -> list[str]:
    """Return the events in the backward of a linear that reads the residual stream."""
    groups, log = Groups(Mesh(tensor=tensor)), list[str]()
    layer = Linear(groups, IN, OUT, role="inward")
    initialize(layer, groups, seed=1)
    x = torch.ones(placement.residual(tensor, BATCH, SEQUENCE, IN).local_shape, requires_grad=True)
    y = layer(x)
    panel = (OUT // tensor.y, IN // tensor.z)
    with _logged_collectives(log), _Products(log, panel):
        y.backward(torch.ones_like(y))
    return log


LAYOUTS = {
    **dict.fromkeys(("1d-sequence-2", "1d-sequence-4", "cuboid-1-2-2-sequence-batch"), ENDS),
    **dict.fromkeys(("2d-4", "3d-8", "3d-8-sequence-heads"), REDUCES_W + ENDS),
}
"""End of the backward by layout."""


def test_both_collectives_of_x_lie_under_products_whatever_is_kept() -> None:
    layouts = kept(list(LAYOUTS))
    found = dict(zip(layouts, on_last_ranks(events, list(layouts.values())), strict=True))
    assert found == {
        f"{name}-keep-{keep}": order + ends for name, ends in LAYOUTS.items() for keep, order in ORDERS.items()
    }
