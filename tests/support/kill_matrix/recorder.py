"""Record the mutants that a process and its forks meet: each mutant writes its name to a file.

install_recorder(mutants, Path("met"))
...
met(Path("met"))                # names
"""

from __future__ import annotations

import builtins
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType

from tests.support.maths_mutants import mistakes
from tests.support.maths_mutants.mutant import Mutant, met_by


@cache
def _reporting(mutants: tuple[Mutant, ...]) -> list[tuple[FunctionType, CodeType]]:
    return list(met_by(mutants))


def prepare(mutants: Sequence[Mutant]) -> None:
    """Compile the functions of `install_recorder` once for all forks of this process."""
    _reporting(tuple(mutants))


def install_recorder(mutants: Sequence[Mutant], path: Path) -> None:
    """Have the functions of the mutants report to a file, in this process and in its children."""
    file, seen = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), set[str]()

    def report(name: str) -> None:
        if name not in seen:
            seen.add(name)
            os.write(file, f"{name}\n".encode())  # one call: lines of several processes do not mix

    builtins.maths_mutant_met = report  # type: ignore[attr-defined]
    for function, code in _reporting(tuple(mutants)):
        function.__globals__.setdefault("mistakes", mistakes)  # `when` may use it
        function.__code__ = code


def met(path: Path) -> set[str]:
    """Return the mutants that were met."""
    return set(path.read_text().splitlines()) if path.exists() else set()
