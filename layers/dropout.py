"""Dropout of sharded activations: equal masks where ranks hold equal copies, different ones elsewhere.

Each use draws one number from torch's default CPU generator, and seeds the mask with it and with the index of this
rank's piece. So masks need no state of their own: activation checkpointing, which restores the default generator for
the recomputation, repeats them, and whoever seeds that generator makes a run reproducible: the engine does so for each
layer and micro-batch of a step, whatever the schedule runs between them. All ranks of a tensor group must have it in
the same state, data replicas in different ones. (Megatron-LM keeps a second generator for sharded masks instead, and
has to teach its checkpointing about it.)
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
        """Any shape in, the same out: this rank's piece [batch/x, sequence, H/z] of the residual."""
        if not self.training or self.p == 0:
            return x
        with shard_rng(self.groups, placement.residual_cuts(self.groups.tensor), x.device):
            return functional.dropout(x, self.p)


@contextmanager
def shard_rng(groups: Groups, cuts: placement.Cuts, device: torch.device) -> Iterator[None]:
    """Seed torch's default generators, within, for this rank's piece of an activation that is cut by `cuts`."""
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
    """Seed torch's default generators, that of CPUs and the device's: what is drawn from here on depends on `seed`."""
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would seed all devices, ten times as slow
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed)


def seeded_generator(seed: int, device: torch.device) -> torch.Generator:
    """Return a generator for masks on a device; meta tensors, which hold no numbers, take a CPU's."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def shard_seed(groups: Groups, cuts: placement.Cuts) -> int:
    """Draw a new seed: equal on ranks where `cuts` leave equal copies, different on others."""
    number = int(torch.randint(2**62, ()))
    index, _ = placement.piece(groups.tensor, groups.coord, cuts.tokens + cuts.features)
    return stable_hash(number, index)
