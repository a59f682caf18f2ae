"""Dropout on activations in pieces: equal masks where ranks hold equal copies, different ones elsewhere.

Each use draws one number from torch's default CPU generator, and seeds the mask with it and with the index of this
rank's piece. So masks need no state of their own: activation checkpointing, which restores the default generator for
the recomputation, repeats them, and whoever seeds that generator each step makes a run reproducible. All ranks of a
tensor group must have it in the same state, data replicas in different ones. (Megatron-LM keeps a second generator for
sharded masks instead, and has to teach its checkpointing about it.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.parameter import stable_hash


class Dropout(nn.Module):
    """Dropout with probability `p` of the stored residual."""

    __call__: Callable[..., Tensor]  # nn.Module's says Any

    def __init__(self, groups: Groups, p: float) -> None:
        super().__init__()
        self.groups, self.p = groups, p

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        if not self.training or self.p == 0:
            return x
        with random_of_piece(self.groups, placement.residual_cuts(self.groups.tensor), x.device):
            return functional.dropout(x, self.p)


@contextmanager
def random_of_piece(groups: Groups, cuts: placement.Cuts, device: torch.device) -> Iterator[None]:
    """Within, torch's default generators give numbers of this rank's piece of an activation cut by `cuts`."""
    seed = seed_of_piece(groups, cuts)
    if device.type == "cpu":
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng([device], device_type=device.type):
            torch.get_device_module(device).manual_seed(seed)
            yield


def seed_of_piece(groups: Groups, cuts: placement.Cuts) -> int:
    """A new seed at each call: equal where `cuts` leave equal copies, different elsewhere."""
    number = int(torch.randint(2**62, ()))
    index, _ = placement.piece(groups.tensor, groups.coord, cuts.tokens + cuts.features)
    return stable_hash(number, index)
