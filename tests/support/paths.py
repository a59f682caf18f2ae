"""Paths: the root of the checkout, and the acceptance tables."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tests" / "support" / "tables"
