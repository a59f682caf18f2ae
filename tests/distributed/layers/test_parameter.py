"""Parameters of layers: they keep their placements, and invalid sizes and options are refused at once."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import MLP, Attention, Block, Embedding, LayerNorm, Linear, initialize, mark_owners, placement_of
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks

Replace = Callable[[nn.Module], nn.Module]


def assigned(layer: nn.Module) -> nn.Module:
    state = {name: p.detach().clone() for name, p in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    return layer


def from_meta(layer: nn.Module) -> nn.Module:
    return layer.to("meta").to_empty(device="cpu")


REPLACED: dict[str, Replace] = {
    "load_state_dict(assign=True)": assigned,
    "meta, then to_empty": from_meta,
    "deepcopy": copy.deepcopy,
    "another dtype": lambda layer: layer.double(),
}


def placements_of(what: str) -> bool:
    groups = Groups(Mesh(tensor=LAYOUTS["1d-sequence-2"]))
    same = True
    for make in (lambda: Block(groups, 24, 2), lambda: Embedding(groups, 17, 24)):
        before = {name: placement_of(p) for name, p in make().named_parameters()}
        after = REPLACED[what](make())
        same &= {
            name: placement_of(p) for name, p in after.named_parameters()
        } == before and None not in before.values()
        initialize(after, groups, seed=1, keep=False)
        mark_owners(after, groups)
    return same


@pytest.mark.parametrize("what", REPLACED)
def test_parameters_that_take_the_place_of_others_lie_where_those_did(what: str) -> None:
    assert on_ranks(2, placements_of, what) == [True, True]


def gradient_of_a_copy() -> tuple[float, ...]:
    groups = Groups(Mesh(tensor=LAYOUTS["1d-sequence-2"]))
    norm = assigned(copy.deepcopy(LayerNorm(groups, 8)))
    initialize(norm, groups, seed=1, keep=False)
    x = torch.full((1, 3, 8), float(groups.rank))
    norm(x).sum().backward()
    return tuple(norm.bias.grad.tolist())


def test_gradients_of_a_copy_are_whole() -> None:
    """Six tokens are split over both ranks. Without its placement, a rank's bias would have the gradient of its own
    three.
    """
    assert on_ranks(2, gradient_of_a_copy) == [(6.0,) * 8] * 2


def refusal(tensor: str, case: str) -> str:
    groups = Groups(Mesh(tensor=LAYOUTS[tensor]))
    cases = {
        "role": lambda: Linear(groups, 8, 8, role="col"),  # type: ignore[arg-type]
        "mlp": lambda: MLP(groups, 16, 31),
        "blocks": lambda: Linear(groups, 16, [16, 15], role="inward"),
        "tokens": lambda: Attention(groups, 16, 2)(torch.zeros(4, 16)),
    }
    try:
        cases[case]()
    except DslparError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("role", ["TEN224", "unknown role 'col'", "role='inward' or 'outward'"]),
        ("mlp", ["TEN227", "31 features", "splits them into 2", "30 or 32"]),
        ("blocks", ["TEN227", "15 features", "14 or 16"]),
        ("tokens", ["TEN226", "(4, 16)", "[batch, sequence, hidden]"]),
    ],
)
def test_a_wrong_size_or_option_is_refused_on_every_rank(case: str, words: list[str]) -> None:
    for text in on_ranks(2, refusal, "1d-2", case):
        assert all(word in text for word in words), text
