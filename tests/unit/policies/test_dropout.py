"""Dropout by torch's function, in code that dslpar does not write."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional

from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.policies.dropout import FunctionalDropout, SampleDropout, Stream, drops_samples, take_functions

GROUPS = Groups.without_processes(Mesh(tensor=TensorMesh(y=2, mode="1d")))


def _helper(x: torch.Tensor, training: bool) -> torch.Tensor:
    return functional.dropout(x, 0.5, training)


class Dropping(nn.Module):
    """A block with functional dropout."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _helper(x, self.training)


def masks(rank: int, *, is_inner: bool) -> torch.Tensor:
    groups = Groups.without_processes(Mesh(tensor=TensorMesh(y=2, mode="1d")), rank=rank)
    stream = Stream()
    stream.is_inner = is_inner
    torch.manual_seed(5)
    with FunctionalDropout(groups, stream):
        return functional.dropout(torch.ones(64), 0.5)


def test_masks_are_equal_on_copies_and_differ_on_pieces() -> None:
    assert torch.equal(masks(0, is_inner=False), masks(1, is_inner=False))
    assert not torch.equal(masks(0, is_inner=True), masks(1, is_inner=True))
    assert 0 < masks(0, is_inner=True).count_nonzero() < 64


def test_in_place() -> None:
    x = torch.ones(64)
    with FunctionalDropout(GROUPS, Stream()):
        assert functional.dropout(x, 0.5, inplace=True) is x
        assert functional.dropout(x, 0.5, training=False) is x
    assert 0 < x.count_nonzero() < 64


@pytest.mark.parametrize(("p", "world", "taken"), [(0.1, 2, True), (0.0, 2, False), (0.1, 1, False)])
def test_functions_are_taken_where_something_drops(p: float, world: int, taken: bool) -> None:
    part = Dropping()
    groups = GROUPS if world == 2 else Groups(Mesh())
    take_functions(part, groups, Stream(), SimpleNamespace(hidden_dropout=p, use_dropout=True))
    assert ("forward" in vars(part)) is taken


def test_code_that_calls_no_dropout_runs_as_it_is() -> None:
    part = nn.Linear(2, 2)
    take_functions(part, GROUPS, Stream(), SimpleNamespace(dropout=0.1))
    assert "forward" not in vars(part)


class DroppingSamples(nn.Module):
    """Stochastic depth, as in image models."""

    def __init__(self, p: float, shape: tuple[int, ...] = (-1, 1, 1)) -> None:
        super().__init__()
        self.drop_prob, self.shape = p, shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = torch.rand(x.shape)[(slice(None), *[slice(0, length) for length in self.shape[1:]])] >= self.drop_prob
        return x * kept / (1 - self.drop_prob)


def test_what_drops_samples_is_found_by_trying() -> None:
    assert drops_samples(DroppingSamples(0.3))
    assert not drops_samples(DroppingSamples(0.3, (-1, 2, 3)))  # it drops elements
    assert not drops_samples(DroppingSamples(0.0))
    assert not drops_samples(nn.Dropout(0.3))


def test_a_sample_is_dropped_in_all_its_pieces() -> None:
    """2d shards samples and features: ranks with the same samples drop the same ones, and other ranks draw others."""
    tensor = TensorMesh(q=2, y=2, mode="2d", residual="hidden")
    seen = {}
    for rank in range(4):
        groups = Groups.without_processes(Mesh(tensor=tensor), rank=rank)
        torch.manual_seed(5)
        y = SampleDropout(groups, DroppingSamples(0.5), Stream())(torch.ones(64, 2, 3))
        assert torch.equal(y, y[:, :1, :1].expand_as(y))
        seen.setdefault(groups.coord["q"], []).append(y)
    assert all(torch.equal(*pair) for pair in seen.values())
    assert not torch.equal(seen[0][0], seen[1][0])
