"""Lint rules of a ResMLP's keys: those of every model of images (`dslpar.linter.rules.images`) are all it needs."""

from __future__ import annotations

RULES = ()
