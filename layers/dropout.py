"""Dropout of sharded activations: equal masks for equal copies, different masks for different pieces.

Each call draws one number from torch's default CPU generator. The mask's seed is this number and the index of this
rank's piece, so masks need no state of their own. Activation checkpointing restores the default generator for the
recomputation and so repeats the masks. Seeding that generator makes a run reproducible: the engine does so for each
layer and micro-batch of a step, whatever the schedule runs between them. All ranks of a tensor group must have the
generator in the same state, data replicas in different states. (Megatron-LM keeps a second generator for sharded masks
instead, and needs its own activation checkpointing for it.)
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
    """Dropout of the stored residual with probability `p`."""

    __call__: Callable[..., Tensor]  # nn.Module's says Any

    def __init__(self, groups: Groups, p: float) -> None:
        super().__init__()
        self.groups, self.p = groups, p

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements of this rank's piece [batch/x, sequence, H/z] of the residual; any shape works."""
        if not self.training or self.p == 0:
            return x
        with shard_rng(self.groups, placement.residual_cuts(self.groups.tensor), x.device):
            return functional.dropout(x, self.p)


@contextmanager
def shard_rng(groups: Groups, cuts: placement.ActivationSharding, device: torch.device) -> Iterator[None]:
    """Within the context, seed torch's default generators for this rank's piece of an activation that `cuts` cut."""
    seed = shard_seed(groups, cuts)
    if device.type in ("cpu", "meta"):
        with torch.random.fork_rng(devices=()):
            torch.default_generator.manual_seed(seed)
            yield
    else:
        with torch.random.fork_rng([device], device_type=device.type):
            torch.get_device_module(device).manual_seed(seed)
            yield


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's default generators of the CPU and of `device`."""
    torch.default_generator.manual_seed(seed)  # torch.manual_seed seeds all devices, which takes ten times as long
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


def seeded_generator(seed: int, device: torch.device) -> torch.Generator:
    """Return a seeded generator for masks on `device`; for "meta", which has no generators, one on the CPU."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def shard_seed(groups: Groups, cuts: placement.ActivationSharding) -> int:
    """Draw a new seed, equal on ranks that hold equal copies under `cuts`, and different on other ranks."""
    number = int(torch.randint(2**62, ()))
    index, _ = placement.piece(groups.tensor, groups.coord, cuts.tokens + cuts.features)
    return stable_hash(number, index)
