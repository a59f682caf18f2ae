"""How the tables of mutants are written: a module, and rows of (name, kind, function, old, new, what it stands for)."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.maths_mutants.mutant import Kind, Mutant

Row = tuple[str, Kind, str, str, str, str] | tuple[str, Kind, str, str, str, str, str]
"""The last one is `when`."""


def of_module(module: str, rows: Sequence[Row]) -> list[Mutant]:
    """Return the mutants of a module of dslpar, named after it: 'layers.norm: mean-of-own-piece'."""
    return [Mutant(f"{module}: {name}", kind, f"dslpar.{module}", *rest) for name, kind, *rest in rows]  # type: ignore[arg-type]
