"""What tests that compile layers let torch do: its own tracing does what torch warns of."""

from __future__ import annotations

import pytest

TORCH_S_OWN_WARNINGS = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    # torch keeps it from being printed, but not from being raised.
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]
