"""Fake rank: this process acts as one rank of a mesh without other processes, on tensors without memory.

    with fake_rank(mesh, rank=1023) as groups:
        ...

torch's process group "fake", used in torch's own tests, completes every collective at once, with the right shapes and
no numbers. The process creates the groups that the rank belongs to, as it would in a real job, and no others. A world
of 10,240 ranks therefore costs milliseconds.
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
"""Attribute of a function that torch's compiler must skip; holds the wrapper that torch calls."""


@contextmanager
def fake_rank(mesh: Mesh, rank: int) -> Iterator[Groups]:
    """Turn this process into a rank of the mesh, and yield the rank's groups.

    Raises:
        RuntimeError: torch.distributed is already initialized in this process.
    """
    if dist.is_initialized():
        raise RuntimeError("a dry run stands in for a rank, but this process already is one")
    # Batched sends and receives fail if the backend does not list the tensors' device, so list "meta" for "fake".
    with patch.dict(dist.Backend.backend_capability, {_FAKE: [*dist.Backend.backend_capability[_FAKE], "meta"]}):
        excepthook = sys.excepthook  # torch installs its own, which names the rank
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
    """Run the body without importing torch's compiler (`torch._dynamo`), which saves a second of CPU time.

    torch imports its compiler to mark functions that it must skip, such as many functions of the meta device. Without
    compilation the marks are not needed. The body therefore sees a stand-in module whose `disable` does nothing. Code
    that needs another attribute of the compiler, such as the creation of process groups, causes the real import.
    Afterwards the stand-in and its marks are removed. If the compiler was imported before, nothing changes.
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
    """Return an empty module that calls `others(name)` for missing attributes."""
    module = ModuleType(name)
    vars(module).update(__getattr__=others)
    return module
