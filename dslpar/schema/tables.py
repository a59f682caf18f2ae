"""Tables of names that torch and DeepSpeed have: JSON files below data/, each read when a config first needs it."""

from __future__ import annotations

from functools import cache
from typing import Any


@cache
def load_table(name: str) -> dict[str, Any]:
    """The table in data/<name>.json."""
    import json
    from importlib import resources  # here, as json: most configs need no table

    text = resources.files("dslpar.schema").joinpath(f"data/{name}.json").read_text(encoding="utf-8")
    table: dict[str, Any] = json.loads(text)
    return table
