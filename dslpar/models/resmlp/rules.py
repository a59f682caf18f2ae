"""Lint rules of a ResMLP's keys: none beyond the rules of all image models (`dslpar.linter.rules.images`)."""

from __future__ import annotations

RULES = ()
