"""swiglu's hand-written backward against the composition of torch's functions, and the memory both keep."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Block, Form
from dslpar.layers.block import swiglu
from tests.support.compare_dense import numbers

TOKENS, FEATURES = 7, 16


def composed(gate_and_up: Tensor) -> Tensor:
    gate, up = gate_and_up.chunk(2, -1)
    return functional.silu(gate) * up


def gradient(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(function(x), x, numbers((*x.shape[:-1], FEATURES), 2).to(x.dtype))
    return grad


def test_swiglu_equals_its_composition() -> None:
    """Bitwise equal forward; backward within a unit of float64."""
    x = numbers((2, TOKENS, 2 * FEATURES), 1)
    assert torch.equal(swiglu(x), composed(x))
    assert torch.allclose(gradient(swiglu, x), gradient(composed, x), rtol=1e-14, atol=1e-15)
    assert gradient(swiglu, x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize(
    "build",
    [
        lambda groups: MLP(groups, 8, 16, activation="relu"),
        lambda groups: Block(groups, 8, 2, form=Form(norm="batchnorm")),
    ],
)
def test_unknown_options(build: Callable[[Groups], Block | MLP]) -> None:
    with pytest.raises(DslparError, match=r"TEN224.*unknown (activation|norm) '(relu|batchnorm)'"):
        build(Groups(Mesh()))


def kept(function: Callable[[Tensor], Tensor]) -> int:
    """Return the elements of distinct storages that are kept for the backward."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes() // x.element_size()
        return x

    x = numbers((TOKENS, 2 * FEATURES), 1).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        y = function(x)
    assert y.requires_grad
    return sum(storages.values())


def test_swiglu_keeps_its_input_alone() -> None:
    assert kept(swiglu) == 2 * TOKENS * FEATURES
    assert kept(composed) == 3 * TOKENS * FEATURES
