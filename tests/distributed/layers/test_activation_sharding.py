"""Activation conversions in a user's model: equal to one process, what they refuse, and what they send.

tests/distributed/layers/cases/embedding_norm_loss.py tests each conversion alone, in every layout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, LayerNorm, from_inner, from_residual, initialize, placement, to_inner, to_residual
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.traffic_counter import counting

HIDDEN = 8


class Pictures(nn.Module):
    """A classifier of one-colour patches, [batch, sequence, 3], into 5 classes: torch layers at both ends, dslpar's
    between.
    """

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        self.patches, self.classes = nn.Linear(3, HIDDEN), nn.Linear(HIDDEN, 5)
        self.norm, self.mlp = LayerNorm(groups, HIDDEN), MLP(groups, HIDDEN, 16)

    def forward(self, pictures: Tensor) -> Tensor:
        x = to_residual(self.groups, self.patches(pictures))
        x = x + self.mlp(self.norm(x))
        return self.classes(from_residual(self.groups, x).mean(1))


def trained(tensor: Cuboid) -> dict[str, Tensor]:
    """Return the loss, and the gradients of the layers at both ends."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    groups = Groups(Mesh(tensor=tensor))
    model = Pictures(groups)
    initialize(model, groups, seed=1)
    pictures = torch.randn(4, 4, 3, generator=torch.Generator().manual_seed(2))
    loss = nn.functional.cross_entropy(model(pictures), torch.arange(4))
    loss.backward()
    ends = {name: p.grad for name, p in model.named_parameters() if name.startswith(("patches", "classes"))}
    return {"loss": loss.detach(), **ends}


@pytest.mark.parametrize("name", ["2d-4", "1d-sequence-2", "cuboid-1-2-2-sequence-batch"])
def test_a_model_with_its_own_ends(name: str) -> None:
    expected = on_ranks(1, trained, Cuboid())[0]
    for found in on_ranks(LAYOUTS[name].size, trained, LAYOUTS[name]):
        for what, value in found.items():
            assert (value - expected[what]).abs().max() <= 1e-13 * expected[what].abs().max() + 1e-16, what


def refused() -> list[str]:
    groups = Groups(Mesh(tensor=LAYOUTS["2d-4"]))
    texts = []
    for enter, shape in ((to_residual, (5, 3, 7)), (to_inner, (1, 8)), (to_residual, (4, 3, 8))):
        try:
            enter(groups, torch.zeros(shape))
            texts.append("")
        except DslparError as error:
            texts.append(str(error))
    return texts


def test_what_does_not_divide_is_refused_with_every_dim() -> None:
    for both, batch, nothing in on_ranks(4, refused):
        assert "TEN221 activation-does-not-divide: dim 0 of an activation has 5 entries" in both
        assert "dim 2 of an activation has 7 entries, but mode '2d' splits it into 4 shards" not in both
        assert "dim 2 of an activation has 7 entries" in both
        assert "help: 4 or 6 entries" in both
        assert "dim 0 of an activation has 1 entries, but mode '2d' splits it into 2 shards\nhelp: 2 entries" in batch
        assert nothing == ""


@pytest.mark.parametrize("shape", [(8,), (2, 2, 4, 8)])
@pytest.mark.parametrize("convert", [to_residual, from_residual, to_inner, from_inner])
def test_what_is_neither_a_sequence_nor_tokens_is_refused(convert: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(DslparError, match="TEN226 wrong-shape: an activation of shape"):
        convert(Groups(Mesh()), torch.zeros(shape))


def sent(tensor: Cuboid) -> list[int]:
    """Return elements, forward and backward, of the residual's conversions in and out, and of the inner ones."""
    groups = Groups(Mesh(tensor=tensor))
    counts = []
    for enter, leave, at in (
        (to_residual, from_residual, placement.residual(tensor, 12, 12, 24)),
        (to_inner, from_inner, placement.inner(tensor, 12, 12, 24)),
    ):
        whole = torch.zeros(at.shape, requires_grad=True)
        for convert, x in ((enter, whole), (leave, at.cut(whole.detach(), groups.coord).requires_grad_())):
            with counting(groups) as forward:
                y = convert(groups, x)
            with counting(groups) as backward:
                y.backward(torch.zeros_like(y))
            counts += [round(sum(found.elements.values())) for found in (forward, backward)]
    return counts


def test_what_is_sent() -> None:
    """A gather of E elements in n pieces, one way; over y and z of one or two dims, as in one step."""
    tensor = LAYOUTS["cuboid-1-2-2-sequence-batch"]
    elements = 12 * 12 * 24 * 3 // 4
    assert on_ranks(4, sent, tensor) == [[0, elements, elements, 0] * 2] * 4
