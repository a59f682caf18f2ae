"""Replacements of transformers' modules: lent parameters, and linears that begin a region."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies.probe import Norm
from dslpar.policies.replacement_modules import Entrance, InnerNorm, Slot, call_with
from dslpar.policies.weights import Part


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
    """The backward of a split in one part would copy its gradient."""
    lengths = [8] * len(shares)
    entrance = Entrance(Groups(Mesh()), 4, lengths, shares, biased=[False] * len(shares), sources={})
    nn.init.ones_(entrance.weight)
    slots = [Slot() for _ in shares]
    first = entrance.fill(torch.ones(2, 3, 4), slots)
    assert [slot(first).shape for slot in slots] == [(2, 3, 8)] * len(shares)
    assert ("Split" in type(first.grad_fn).__name__) is is_split


@torch.no_grad()
def test_linears_of_one_product_may_have_a_bias_or_none() -> None:
    """SwinV2's query and value have one, its key has none."""
    entrance = Entrance(Groups(Mesh()), 4, [2, 3, 2], [1, 1, 1], biased=[True, False, True], sources={})
    nn.init.zeros_(entrance.weight)
    assert entrance.bias is not None
    entrance.bias.copy_(torch.arange(1.0, 5.0))
    slots = [Slot() for _ in range(3)]
    first = entrance.fill(torch.ones(1, 4), slots)
    assert [slot(first).tolist() for slot in slots] == [[[1.0, 2.0]], [[0.0] * 3], [[3.0, 4.0]]]


@pytest.mark.parametrize("one_plus", [False, True])
def test_the_gain_of_a_norm_over_a_region(one_plus: bool) -> None:
    """Gemma's is 1 + weight."""
    norm = InnerNorm(Groups(Mesh()), 6, Norm(centred=False, one_plus=one_plus, eps=1e-6, bias=False), sources={})
    weight, x = torch.linspace(-1.0, 2.0, 6), torch.linspace(1.0, 3.0, 12).view(2, 6)
    with torch.no_grad():
        norm.weight.copy_(weight)
    expected = nn.functional.rms_norm(x, (6,), weight + one_plus, 1e-6)
    torch.testing.assert_close(norm(x), expected)


def test_a_tensor_is_read_out_of_the_parameter_that_has_it() -> None:
    """From a fused linear [6, 2], one part's rows; from transformers' Conv1D, transposed, as it is stored."""
    full = torch.arange(12.0).view(6, 2)
    assert torch.equal(Part("w", (6, 2), row=2).read(lambda _: full, (3, 2)), full[2:5])
    assert torch.equal(Part("w", (6, 2), row=2, transposed=True).read(lambda _: full, (2, 3)), full[2:5].t())
