"""What stands in place of transformers' modules: parameters that are lent, and linears that begin a region."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies.modules import Entrance, Slot, call_with


def test_a_module_reads_what_it_is_lent_during_its_call_alone() -> None:
    linear, x = nn.Linear(3, 2, bias=False), torch.ones(1, 3)
    own, lent = linear.weight, torch.full((2, 3), 2.0, requires_grad=True)
    y = call_with(linear, {"weight": lent}, x)
    assert y.tolist() == [[6.0, 6.0]]
    y.sum().backward()
    assert lent.grad is not None
    assert own.grad is None
    with pytest.raises(RuntimeError):
        call_with(linear, {"weight": lent}, torch.ones(1, 4))
    assert linear.weight is own


@pytest.mark.parametrize(("shares", "is_split"), [([1], False), ([1, 1], True)])
def test_a_regions_only_linear_is_not_split(shares: list[int], is_split: bool) -> None:
    """The backward of a split of one part would copy its gradient."""
    lengths = [8] * len(shares)
    entrance = Entrance(Groups(Mesh()), 4, lengths, shares, bias=False, sources={})
    nn.init.ones_(entrance.weight)
    slots = [Slot() for _ in shares]
    first = entrance.fill(torch.ones(2, 3, 4), slots)
    assert [slot(first).shape for slot in slots] == [(2, 3, 8)] * len(shares)
    assert ("Split" in type(first.grad_fn).__name__) is is_split
