"""Choices that a capacity drops: those of the definition, in every layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.distributed import collectives
from dslpar.distributed.groups import Groups
from dslpar.layers import Mixture, MixtureBlock, gather, initialize, placement
from dslpar.layers.distinct_tokens import DistinctTokens
from dslpar.layers.expert_capacity import ExpertCapacity, capacity_of, first_of_each
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

EXPERTS, TOP_K, HIDDEN = 5, 2, 8
CHOICES = st.integers(2, EXPERTS).flatmap(
    lambda num: st.lists(
        st.lists(st.tuples(st.integers(0, num - 1), st.integers(0, 3)), min_size=6, max_size=6), min_size=1, max_size=3
    )
)
"""Rows of (expert, weight); four weights, so that many are equal."""


def kept_by_definition(experts: Tensor, weights: Tensor, most: int) -> Tensor:
    """Return which choices are kept, row by row and expert by expert."""
    kept = torch.zeros_like(experts, dtype=torch.bool)
    for row, (chosen, of_row) in enumerate(zip(experts.tolist(), weights.tolist(), strict=True)):
        for expert in set(chosen):
            own = [place for place, each in enumerate(chosen) if each == expert]
            kept[row, sorted(own, key=lambda place: -of_row[place])[:most]] = True
    return kept


@given(CHOICES, st.integers(0, 6))
def test_the_choices_of_largest_weight_are_kept(rows: list[list[tuple[int, int]]], most: int) -> None:
    experts = torch.tensor([[expert for expert, _ in row] for row in rows])
    weights = torch.tensor([[float(weight) for _, weight in row] for row in rows])
    assert torch.equal(first_of_each(experts, weights, most, EXPERTS), kept_by_definition(experts, weights, most))


@pytest.mark.parametrize(("factor", "expected"), [(1.0, 4), (1.25, 4), (1.26, 5), (0.01, 1), (9.0, 29)])
def test_a_capacity_is_a_multiple_of_the_even_share_rounded_up(factor: float, expected: int) -> None:
    assert capacity_of(factor, 2, 8, EXPERTS) == expected  # the even share is 3.2


def test_a_capacity_is_rounded_as_in_megatron_lm() -> None:
    assert capacity_of(1.1, 1, 1000, 10) == 111  # ceil(1000 / 10 * 1.1), where 1.1 * 1000 / 10 is 110


# ---- over ranks ----

FORMS = ["1d-4", "1d-sequence-2", "2d-4", "3d-8", "ring-2-zigzag", "cuboid-1-2-2-hidden"]


def form(name: str) -> TensorMesh:
    return TensorMesh(y=2, z=2, mode="cuboid", residual="hidden") if name == FORMS[-1] else LAYOUTS[name]


def choices(samples: int, length: int) -> tuple[Tensor, Tensor]:
    """Return the choices and weights of a micro-batch's tokens, [samples, length, k]; many weights are equal."""
    draw = torch.Generator().manual_seed(1)
    scores = torch.rand(samples, length, EXPERTS, generator=draw)
    weights = torch.randint(1, 4, (samples, length, TOP_K), generator=draw) / 4
    return scores.argsort(-1)[..., :TOP_K], weights.double()


def errors(name: str, shape: tuple[int, int], flat: bool) -> tuple[int, int]:
    """Return how many of this rank's own choices are kept, and how many otherwise than by the definition.

    flat: the residual is [tokens, H], one sequence.
    """
    groups, (experts, weights) = Groups(Mesh(tensor=form(name))), choices(*shape)
    if flat:
        experts, weights = experts.flatten(0, 1), weights.flatten(0, 1)
    sequences, tokens = (1, len(experts)) if flat else shape
    most = capacity_of(1.0, TOP_K, tokens, EXPERTS)
    expected = kept_by_definition(experts.reshape(sequences, -1), weights.reshape(sequences, -1), most)
    split = DistinctTokens(groups)

    def own(whole: Tensor) -> Tensor:
        """Cut a tensor like the residual, whose features every rank has, and take this rank's tokens."""
        at = placement.residual(groups.tensor, *whole.shape)
        at = replace(at, cuts=(*at.cuts[:-1], ()))
        return split.part(at.cut(whole, groups.coord).flatten(0, -2))

    stored = placement.residual(groups.tensor, *experts.shape[:-1], HIDDEN).local_shape
    kept = ExpertCapacity(groups, EXPERTS, 1.0).kept(own(experts), own(weights), stored)
    return int(kept.sum()), int((kept != own(expected.view(experts.shape))).sum())


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("flat", [False, True])
def test_what_is_kept_depends_on_the_sequence_alone(name: str, flat: bool) -> None:
    found = on_ranks(form(name).size, errors, name, (4, 8), flat)
    assert {wrong for _, wrong in found} == {0}
    total, most = 4 * 8 * TOP_K, (1 if flat else 4) * EXPERTS * capacity_of(1.0, TOP_K, 32 if flat else 8, EXPERTS)
    assert 0 < sum(kept for kept, _ in found) < min(total, most)


def test_tokens_that_do_not_divide_over_the_ranks() -> None:
    """The last rank has none."""
    assert {wrong for _, wrong in on_ranks(4, errors, "1d-4", (1, 6), False)} == {0}


# ---- the layer ----


def of_seed(groups: Groups, factor: float | None) -> Mixture:
    mixture = Mixture(groups, HIDDEN, 16, num_experts=EXPERTS, top_k=TOP_K, capacity_factor=factor)
    initialize(mixture, groups, seed=1)
    return mixture.double()


def test_a_dropped_choice_adds_nothing_and_evaluation_drops_none() -> None:
    groups = Groups(Mesh())
    mixture, whole = of_seed(groups, 0.5), of_seed(groups, None)
    x = torch.randn(3, 7, HIDDEN, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y, routing = mixture.run(x)
    most = capacity_of(0.5, TOP_K, 7, EXPERTS)
    kept = kept_by_definition(routing.experts.reshape(3, -1), routing.weights.reshape(3, -1), most).view(-1, TOP_K)
    each = torch.einsum("nh,efh->nef", x.view(-1, HIDDEN), mixture.up)
    each = torch.einsum("nef,ehf->neh", mixture.activation(each), mixture.down)
    weights = torch.zeros(21, EXPERTS, dtype=x.dtype).scatter(1, routing.experts, routing.weights * kept)
    torch.testing.assert_close(y, torch.einsum("ne,neh->nh", weights, each).view(x.shape), rtol=1e-12, atol=1e-15)
    *chosen, dropped, tokens = mixture.expert_load.take().tolist()
    assert (sum(chosen), dropped, tokens) == (42, int((~kept).sum()), 21)
    assert 0 < dropped < 42
    torch.testing.assert_close(mixture.eval()(x), whole.eval()(x), rtol=0, atol=0)


def results(name: str, data: int, chunks: int = 1) -> Sequence[Tensor]:
    """Return the output, and the gradients of the input, the router and the experts, all whole."""
    torch.set_default_dtype(torch.float64)
    tensor = replace(form(name) if name else TensorMesh(), e=data, exchanges_tokens=True)
    groups = Groups(Mesh(data=data, tensor=replace(tensor, expert_chunks=chunks)))
    mixture = of_seed(groups, 0.75)
    full = torch.randn(4, 8, HIDDEN, generator=torch.Generator().manual_seed(3))
    data = groups.axis("data")
    own = full.chunk(data.size)[data.index]
    at = placement.residual(groups.tensor, *own.shape)
    x = at.cut(own, groups.coord).requires_grad_()
    y = mixture(x)
    (y * at.cut(own.sin(), groups.coord)).sum().backward()
    assert x.grad is not None
    of_tokens = [collectives.all_gather(gather(each, at, groups), data) for each in (y.detach(), x.grad)]
    of_weights = []
    for p in (mixture.router, mixture.up, mixture.down):
        assert isinstance(p, torch.nn.Parameter)
        assert p.grad is not None
        if p is mixture.router:
            of_weights.append(collectives.all_reduce(p.grad, data))
        else:
            whole = collectives.all_reduce(p.grad, groups.expert_data_axis)
            of_weights.append(collectives.all_gather(whole, groups.axis("expert"))[:EXPERTS])
    return [*of_tokens, *of_weights]


@pytest.mark.parametrize(
    ("name", "data", "chunks"),
    [("", 2, 1), ("1d-2", 2, 3), ("2d-4", 2, 1), ("ring-2-zigzag", 1, 1), ("3d-8", 1, 1)],
)
def test_a_mixture_with_a_capacity_is_that_of_one_process(name: str, data: int, chunks: int) -> None:
    """Float64: sums of some hundred terms in another order, as for all layers."""
    (expected,) = on_ranks(1, results, "", 1)
    size = form(name).size if name else 1
    for found in on_ranks(data * size, results, name, data, chunks):
        for own, of_one in zip(found, expected, strict=True):
            torch.testing.assert_close(own, of_one, rtol=1e-12, atol=1e-14)


def test_chunks_of_a_sequence_are_refused() -> None:
    groups = Groups(Mesh())
    block = MixtureBlock(groups, HIDDEN, 2, mixture=Mixture(groups, HIDDEN, 16, num_experts=4, capacity_factor=1.0))
    block.mlp_chunks = 2
    with pytest.raises(DslparError, match=r"TEN224 .*capacity_factor selects among all its tokens"):
        block(torch.zeros(1, 4, HIDDEN))
