"""Lint rules about a ResMLP's keys: none besides those about all image models (`dslpar.linter.rules.images`)."""

from __future__ import annotations

RULES = ()
