"""To start an engine imports nothing that an op's compilation alone needs: setuptools takes each rank 0.1 s."""

from __future__ import annotations

import sys

from dslpar.schema import sections
from tests.support.engines import engine_of, job
from tests.support.ranks import on_ranks

OF_COMPILATION = ("torch.utils.cpp_extension", "setuptools")


def _imported(stage: int) -> list[str]:
    for name in [name for name in sys.modules if name.startswith(OF_COMPILATION)]:  # of other tests, in this fork
        del sys.modules[name]
    engine_of(job(1, zero=sections.Zero(stage=stage)))
    return [name for name in OF_COMPILATION if name in sys.modules]


def test_an_engine_starts_without_what_compiles_ops() -> None:
    assert on_ranks(1, _imported, 1, init="deepspeed") == [[]]


def _after_import() -> list[str]:
    for name in [name for name in sys.modules if name.startswith(OF_COMPILATION)]:
        del sys.modules[name]
    import torch.utils.cpp_extension  # noqa: F401

    return [name for name in OF_COMPILATION if name in sys.modules]


def test_the_names_are_those_that_a_compilation_imports() -> None:
    assert on_ranks(1, _after_import) == [[*OF_COMPILATION]]
