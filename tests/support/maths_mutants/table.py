"""Format of the mutant tables: a module, and rows (name, kind, function, old, new, mistake[, when])."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.maths_mutants.mutant import Kind, Mutant

Row = tuple[str, Kind, str, str, str, str] | tuple[str, Kind, str, str, str, str, str]
"""The optional last field is `when`."""


def of_module(module: str, rows: Sequence[Row]) -> list[Mutant]:
    """Return the mutants of a module of dslpar, named after it: 'layers.norm: mean-of-own-piece'."""
    return [Mutant(f"{module}: {name}", kind, f"dslpar.{module}", *rest) for name, kind, *rest in rows]  # type: ignore[arg-type]
