"""The installed version of torch, for features that older ones lack (`make versions`)."""

from __future__ import annotations

from importlib.metadata import version
from importlib.util import find_spec

import pytest

# from its metadata: importing torch takes a second, which tests without it need not pay
TORCH = tuple(map(int, version("torch").split(".")[:2]))


def needs_torch(minor: int, why: str) -> pytest.MarkDecorator:
    """Skip a test with a torch before 2.`minor`."""
    return pytest.mark.skipif((2, minor) > TORCH, reason=f"torch before 2.{minor}: {why}")


HAS_TRANSFORMERS = find_spec("transformers") is not None and TORCH >= (2, 6)
NO_TRANSFORMERS = "transformers needs torch 2.6"
