"""Embedding tables: the padding row, ids out of range, and the effect of a tied head on both.

tests/distributed/layers/cases/embedding_norm_loss.py compares values and gradients in every layout.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed.groups import Groups
from dslpar.layers import Embedding, PositionEmbedding, gather, initialize
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

VOCAB, HIDDEN = 17, 8


def table(tensor: Cuboid, padding_idx: int | None) -> torch.Tensor:
    """Return the full table as initialized."""
    groups = Groups(Mesh(tensor=tensor))
    layer = Embedding(groups, VOCAB, HIDDEN, padding_idx=padding_idx)
    initialize(layer, groups, seed=3, prefix="tokens.")
    return gather(layer.weight, layer.weight.placement, groups)


def test_the_row_of_padding_begins_as_zeros_and_changes_no_other() -> None:
    plain = table(Cuboid(), None)
    plain[VOCAB - 2] = 0
    for found in (table(Cuboid(), 15), *on_ranks(4, table, LAYOUTS["2d-4"], -2)):
        assert torch.equal(found, plain)


def head_gradient() -> torch.Tensor:
    """Return the gradient of a table that is also the head, with lookups that include padding."""
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    layer = Embedding(groups, VOCAB, HIDDEN, padding_idx=1)
    initialize(layer, groups, seed=3)
    layer(layer(torch.tensor([[1, 2, 1]]))).sum().backward()
    assert layer.weight.grad is not None
    return gather(layer.weight.grad, layer.weight.placement, groups)


def test_padding_has_a_gradient_as_a_row_of_the_head() -> None:
    """As in torch, if an Embedding and a Linear share the weight."""
    theirs = torch.nn.Embedding(VOCAB, HIDDEN, padding_idx=1)
    with torch.no_grad():
        theirs.weight.copy_(table(Cuboid(), 1))
    groups = Groups(Mesh())
    layer = Embedding(groups, VOCAB, HIDDEN, padding_idx=1)
    initialize(layer, groups, seed=3)
    with torch.no_grad():
        theirs.weight.copy_(layer.weight)
    torch.nn.functional.linear(theirs(torch.tensor([[1, 2, 1]])), theirs.weight).sum().backward()
    for found in on_ranks(2, head_gradient):
        torch.testing.assert_close(found, theirs.weight.grad)
        assert found[1].abs().max() > 0


def refused(tensor: Cuboid, number: int) -> str:
    groups = Groups(Mesh(tensor=tensor))
    layer = Embedding(groups, VOCAB, HIDDEN)
    with pytest.raises(DslparError) as raised:
        layer(torch.tensor([[0, 16, number]]))
    return str(raised.value)


@pytest.mark.parametrize("number", [17, -1, 1000])
def test_an_id_outside_the_vocabulary_is_refused_on_every_rank(number: int) -> None:
    """17 is the first padding row of the vocabulary, on the second rank."""
    for text in (refused(Cuboid(), number), *on_ranks(2, refused, LAYOUTS["1d-2"], number)):
        assert f"TEN222 outside-the-vocabulary: {number} among the ids" in text
        assert "17 entries, 0 to 16" in text


@pytest.mark.parametrize("padding_idx", [17, -18])
def test_a_padding_that_is_no_row_is_refused(padding_idx: int) -> None:
    with pytest.raises(DslparError, match=f"{padding_idx} among the padding_idx"):
        Embedding(Groups(Mesh()), VOCAB, HIDDEN, padding_idx=padding_idx)


def refused_shapes(tensor: Cuboid) -> list[str]:
    groups = Groups(Mesh(tensor=tensor))
    tokens, positions = Embedding(groups, VOCAB, HIDDEN), PositionEmbedding(groups, 2, HIDDEN)
    calls: list[Callable[[], torch.Tensor]] = [
        lambda: tokens(torch.zeros(2, 2, 2, dtype=torch.long)),
        lambda: tokens(torch.zeros(2, 3, dtype=torch.long)),
        lambda: positions(torch.zeros(2, 4 // tensor.y, HIDDEN)),
        lambda: positions(torch.zeros(2, HIDDEN)),
    ]
    texts = []
    for call in calls:
        with pytest.raises(DslparError) as raised:
            call()
        texts.append(str(raised.value))
    return texts


def test_ids_and_residuals_of_the_wrong_shape_are_refused() -> None:
    """Tokens without a sequence would get the positions of their features."""
    for ids, odd, long, flat in on_ranks(2, refused_shapes, LAYOUTS["1d-sequence-2"]):
        assert "TEN226 wrong-shape: ids of shape (2, 2, 2)" in ids
        assert "TEN221 activation-does-not-divide: dim 1 of the ids has 3 entries" in odd
        assert "TEN226 wrong-shape: a sequence has 4 tokens, but the table has 2 positions" in long
        assert "TEN226 wrong-shape: positions cannot be added to a residual of shape (2, 8)" in flat


def of_types() -> list[torch.Tensor]:
    groups = Groups(Mesh(tensor=LAYOUTS["1d-2"]))
    tokens = Embedding(groups, 256, HIDDEN)
    initialize(tokens, groups, seed=3)
    ids = torch.tensor([[0, 127, 128, 255]])
    return [tokens(ids.to(dtype)).detach() for dtype in (torch.int64, torch.int32, torch.uint8)]


def test_ids_may_be_of_any_whole_type() -> None:
    """In 8 bits, the vocabulary's 256 is 0."""
    for expected, *others in on_ranks(2, of_types):
        assert all(torch.equal(other, expected) for other in others)
