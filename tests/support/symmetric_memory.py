"""torch's fused products on CPUs, by the stand-ins of torch's own tests: collectives around plain products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed import _symmetric_memory

from dslpar.layers import symmetric_memory

STAND_INS: dict[str, Callable[..., Any]] = {
    "fused_all_gather_matmul": _symmetric_memory._fused_all_gather_matmul_fallback,
    "fused_matmul_reduce_scatter": _symmetric_memory._fused_matmul_reduce_scatter_fallback,
}


@contextmanager
def fused_products_on_cpus() -> Iterator[Counter[str]]:
    """Let CPUs compute fused products inside the `with`, and count the calls by name."""
    calls: Counter[str] = Counter()

    def counted(name: str) -> Callable[..., Any]:
        def product(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return STAND_INS[name](*args, **options)

        return product

    with (
        torch.library._scoped_library("symm_mem", "IMPL") as library,
        patch.object(symmetric_memory, "is_reached", lambda x: not x.is_meta),
    ):
        for name in STAND_INS:
            library.impl(name, counted(name), "CPU")
        yield calls
