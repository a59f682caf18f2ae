"""Trees of config files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write files by relative path, with `__` for the slash and INIT for __init__. Return the path of the last."""

    def run(**files: str) -> str:
        path = tmp_path
        for name, text in files.items():
            path = tmp_path / (name.replace("__", "/").replace("INIT", "__init__") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(dedent(text))
        return str(path)

    return run
