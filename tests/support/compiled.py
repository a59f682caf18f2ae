"""Warnings of torch's own tracing that tests of compiled layers ignore."""

from __future__ import annotations

import pytest

TORCH_S_OWN_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # torch suppresses the printing of this warning, but not the raising
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
