"""This process as one rank of a world of which no other rank is there, on tensors without memory.

    with fake_rank(mesh, rank=1023) as groups:
        ...

torch's fake process group ("fake", of its own tests) answers every collective at once: shapes are right, and there are
no numbers. The groups are those that the rank makes in a real job: it makes only the ones that it belongs to, so a
world of 10,240 ranks costs it milliseconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups

_FAKE = "fake"
_COMPILER = "torch._dynamo"
_DISABLED = "__dynamo_disable"
"""Where torch keeps, on a function that its compiler must not see, the version that it calls."""


@contextmanager
def fake_rank(mesh: Mesh, rank: int) -> Iterator[Groups]:
    """Make this process a rank of the mesh, and its groups.

    Raises:
        RuntimeError: the process is a rank of some world already.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run takes the place of a rank, and this process is one already")
    # torch looks up the tensor's device where it sends and receives in one batch.
    with patch.dict(dist.Backend.backend_capability, {_FAKE: [*dist.Backend.backend_capability[_FAKE], "meta"]}):
        excepthook = sys.excepthook  # torch has its own, which names the rank
        dist.init_process_group(_FAKE, store=FakeStore(), rank=rank, world_size=mesh.world_size)
        try:
            groups = Groups(mesh)
            with eager_only():
                yield groups
        finally:
            dist.destroy_process_group()
            sys.excepthook = excepthook


@contextmanager
def eager_only() -> Iterator[None]:
    """Run what is within without torch's compiler, where nobody has imported it yet: a second of CPU time.

    torch imports it to have it pass over functions that must not be compiled, which many of the meta device's are.
    Where nothing is compiled there is nothing to pass over. Who wants more of it, as who makes process groups does,
    gets the real one; afterwards all is as it was.
    """
    passed_over: list[Any] = []

    def disable(fn: Callable[..., Any], *_: object, **__: object) -> Callable[..., Any]:
        passed_over.append(fn)
        return fn

    def from_real_one(name: str) -> Any:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]
        return getattr(import_module(_COMPILER), name)

    stand_in = _stand_in_for(_COMPILER, from_real_one)
    config = _stand_in_for(f"{_COMPILER}.config", lambda name: getattr(from_real_one("config"), name))
    vars(config).update(error_on_nested_fx_trace=True)  # its default, which activation checkpointing reads
    vars(stand_in).update(disable=disable, config=config)
    sys.modules.setdefault(_COMPILER, stand_in)
    try:
        yield
    finally:
        if sys.modules.get(_COMPILER) is stand_in:
            del sys.modules[_COMPILER]
        for fn in passed_over:
            fn.__dict__.pop(_DISABLED, None)


def _stand_in_for(name: str, others: Callable[[str], Any]) -> ModuleType:
    """Return a module that is empty, and asks `others` for what it has not."""
    module = ModuleType(name)
    vars(module).update(__getattr__=others)
    return module
