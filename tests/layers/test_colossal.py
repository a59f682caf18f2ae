"""ColossalAI's names of layers check the mode."""

from __future__ import annotations

import pytest

from dslpar.errors import DslparError
from dslpar.groups import Groups
from dslpar.layers import Linear, Linear1D, Linear2D
from dslpar.mesh import Mesh
from tests.layouts import LAYOUTS
from tests.ranks import on_ranks


def use_two_names() -> tuple[bool, str]:
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    right = Linear1D(groups, 24, 48, role="inward")
    with pytest.raises(DslparError) as raised:
        Linear2D(groups, 24, 48, role="inward")
    return isinstance(right, Linear), str(raised.value)


def test_a_name_of_another_mode_is_refused() -> None:
    is_linear, text = on_ranks(2, use_two_names)[0]
    assert is_linear
    assert "Linear2D in a run with tensor mode '1d'" in text
    assert "help: use Linear, which is right in every mode" in text
