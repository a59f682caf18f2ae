"""Layout mistakes that a dry run must find: each a patch, with the expected place and message."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslpar.distributed import collectives
from dslpar.layers import linear, placement
from dslpar.layers.block import MLP, Block
from dslpar.layers.placement import Placement
from dslpar.layout.schedule import Action, Schedule
from dslpar.models.gpt.model import GPT
from dslpar.models.layered import LayerSpec

Mistake = Callable[[], Any]


@contextmanager
def _every_rank_holds_the_first_piece() -> Iterator[None]:
    piece = placement.piece
    with patch.object(placement, "piece", lambda tensor, coord, letters: (0, piece(tensor, coord, letters)[1])):
        yield


@contextmanager
def _a_placement_of_the_last_rank() -> Iterator[None]:
    """The last rank takes a weight's gradient to be a partial sum."""
    original = placement.outward_weight

    def outward_weight(*args: Any) -> Placement:
        made = original(*args)
        is_last = dist.is_initialized() and dist.get_rank() % 2 == 1
        return replace(made, partial=("y",)) if is_last else made

    with patch.object(placement, "outward_weight", outward_weight):
        yield


@contextmanager
def _two_dims_over_one_axis() -> Iterator[None]:
    original = placement.position_table

    def position_table(tensor: Any, rows: int, features: int) -> Placement:
        return replace(original(tensor, rows, features), cuts=(("y",), ("y",)))

    with patch.object(placement, "position_table", position_table):
        yield


@contextmanager
def _plain_parameter() -> Iterator[None]:
    original = MLP.__init__

    def init(self: MLP, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        self.scale = nn.Parameter(torch.ones(3))

    with patch.object(MLP, "__init__", init):
        yield


@contextmanager
def _layers(change: Callable[[LayerSpec], LayerSpec]) -> Iterator[None]:
    original = GPT.layers
    with patch.object(GPT, "layers", lambda self, groups: [change(each) for each in original(self, groups)]):
        yield


def _wider_blocks(spec: LayerSpec) -> LayerSpec:
    """Change the hidden size from the seventh block on."""

    def build() -> nn.Module:
        block = spec.build()
        wide = linear.Linear(cast("Any", block.groups), 128, 128, role="outward")
        block.mlp = wide
        return block

    return replace(spec, build=build) if spec.name in ("blocks.6", "blocks.7") else spec


def _half_the_batch(spec: LayerSpec) -> LayerSpec:
    """A stage passes on half of its input batch."""
    halved = lambda module, x: spec.apply(module, x)[: len(x) // 2]  # noqa: E731
    return replace(spec, forward=halved) if spec.name == "blocks.3" else spec


@contextmanager
def _every_layer_halves() -> Iterator[None]:
    """Every layer has the same wrong shape: its output differs from its input, so none may stand for the others."""
    original = Block.forward
    with patch.object(Block, "forward", lambda self, x, mask=None: original(self, x, mask)[: len(x) // 2]):
        yield


def _in_another_type(spec: LayerSpec) -> LayerSpec:
    return replace(spec, forward=lambda module, x: spec.apply(module, x).double()) if spec.name == "blocks.1" else spec


def _one_more_sum(last: bool) -> Callable[[], Any]:
    """A rank of a tensor group sums once more, or a tensor of another shape."""

    @contextmanager
    def patched() -> Iterator[None]:
        original = MLP.forward

        def forward(self: MLP, *args: Any) -> Tensor:
            y = original(self, *args)
            axis = self.groups.axis("y")
            if axis.index != axis.size - 1 or last:
                return y + collectives.all_reduce(y.detach()[:, : 32 - last * axis.index], axis).sum()
            return y

        with patch.object(MLP, "forward", forward):
            yield

    return patched


def _order(change: Callable[[list[Action]], None], pipe: int) -> Callable[[], Any]:
    @contextmanager
    def patched() -> Iterator[None]:
        original = Schedule.order

        def order(self: Schedule, rank: int) -> list[Action]:
            actions = original(self, rank)
            if rank == pipe:
                change(actions)
            return actions

        with patch.object(Schedule, "order", order):
            yield

    return patched


def _swap(actions: list[Action]) -> None:
    actions[0], actions[1] = actions[1], actions[0]


def _backward_first(actions: list[Action]) -> None:
    actions.insert(0, actions.pop(next(at for at, action in enumerate(actions) if action.kind == "B")))


def _forget_one(actions: list[Action]) -> None:
    actions.pop()


MISTAKES: dict[str, tuple[Mistake, str, str]] = {
    "every rank holds the first piece": (_every_rank_holds_the_first_piece, "tiling", "indices are on no rank"),
    "a placement that differs": (_a_placement_of_the_last_rank, "tiling", ": two placements"),
    "two dims over one axis": (_two_dims_over_one_axis, "layers", "embedding.positions"),
    "a plain parameter": (_plain_parameter, "tiling", "a plain parameter: each of 2 tensor ranks would hold all of it"),
    "a layer of another size": (lambda: _layers(_wider_blocks), "boundary", "'blocks.6' cannot take fp32[8, 32, 64]"),
    "half a batch": (lambda: _layers(_half_the_batch), "boundary", "sends fp32[4, 32, 64], and not fp32[8, 32, 64]"),
    "half of a half": (_every_layer_halves, "boundary", "sends fp32[2, 32, 64], and not fp32[8, 32, 64]"),
    "another type": (lambda: _layers(_in_another_type), "boundary", "sends fp64[8, 32, 64], and not fp32[8, 32, 64]"),
    "one more sum": (_one_more_sum(last=False), "collectives", "and none on rank"),
    "sums of two shapes": (_one_more_sum(last=True), "collectives", "and all_reduce of fp32[8, 31, 64] over y on rank"),
    "swapped": (_order(_swap, 1), "messages", "message 0 is sent for F of stage 1, micro-batch 0"),
    "a deadlock": (_order(_backward_first, 3), "messages", "the orders wait for each other"),
    "left out": (
        _order(_forget_one, 2),
        "messages",
        "1 of 16 actions are missing, such as B of stage 2, micro-batch 7",
    ),
}
