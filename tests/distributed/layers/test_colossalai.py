"""ColossalAI's layer names: they check the tensor mode, and take the arguments of Linear."""

from __future__ import annotations

import inspect

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Linear, Linear1D, Linear2D, Linear2p5D, Linear3D, initialize
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks


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


def use_all_arguments() -> tuple[torch.Size, bool]:
    """Return the output shape of a fused linear with gathered output, and whether Linear's is equal."""
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    outputs = []
    for kind in (Linear, Linear1D):
        layer = kind(groups, 8, [16, 4, 4], role="inward", bias=False, gather_output=True)
        initialize(layer, groups, seed=1)
        outputs.append(layer(torch.ones(2, 3, 8)))
    return outputs[0].shape, torch.equal(*outputs)


def test_a_name_takes_what_linear_takes() -> None:
    assert on_ranks(2, use_all_arguments) == [(torch.Size([2, 3, 24]), True)] * 2
    for kind in (Linear1D, Linear2D, Linear2p5D, Linear3D):
        assert inspect.signature(kind) == inspect.signature(Linear)


def test_layers_without_groups_are_told_what_comes_first() -> None:
    """ColossalAI's layers find their groups in a global context."""
    for kind in (Linear1D, Linear2D, Linear2p5D, Linear3D):
        with pytest.raises(TypeError, match=f"{kind.__name__} takes the process groups first, not 64: write .*role="):
            kind(64, 128)  # type: ignore[arg-type, call-arg]
