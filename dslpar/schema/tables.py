"""Tables of names in torch, DeepSpeed and transformers: JSON files in data/, each read when a config first needs it."""

from __future__ import annotations

import json
from functools import cache
from importlib import resources
from typing import Any


@cache
def load_table(name: str) -> dict[str, Any]:
    """Return the table in data/<name>.json."""
    text = resources.files("dslpar.schema").joinpath(f"data/{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
