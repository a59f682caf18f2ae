"""Cost of tensor parallelism: CPU time of a training step of dslpar's blocks in `1d`, against other implementations.

Four pre-norm blocks on 2 ranks over gloo, micro-batches of 4 samples of 64 tokens, fp32: forward, backward, and a step
of SGD. The references are in blocks_by_hand.py: torch DTensor with its column- and row-wise plan, as torchtitan writes
it (separate projections for q, k and v) and with one projection for all three, which is cheaper; and Megatron-LM's pair
of functions by hand. Both sides must give the same losses over some steps, from the same weights, before anything is
timed.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import blocks_by_hand as others
from benchmarks.measure import Ratio, in_turns, ratio
from benchmarks.sides import side
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, gather, initialize, placement, placement_of

LAYERS, HEADS, MICRO, SEQUENCE = 4, 4, 4, 64
STEPS = 3
"""Steps per turn."""
PLAIN = mesh.TensorMesh(y=others.WORLD, mode="1d")
IN_PIECES = mesh.TensorMesh(y=others.WORLD, mode="1d", residual="sequence")

Step = Callable[[], float]


def ratios() -> Iterator[Ratio]:
    """Measure against DTensor, with whole and with sharded sequences, and against the pair by hand."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name, hidden, tensor, theirs, target in COMPARISONS:
        yield compare(f"{name}, hidden {hidden}", hidden, tensor, theirs, target)


Build = Callable[[int, mesh.TensorMesh], Step]


def compare(name: str, hidden: int, tensor: mesh.TensorMesh, theirs: Build, target: float) -> Ratio:
    """Return the CPU time ratio of a step, after checking that both take the same steps."""
    with side(partial(check_same, hidden, tensor, theirs), others.WORLD):
        pass
    build_ours, build_theirs = partial(of_ours, hidden, tensor), partial(theirs, hidden, tensor)
    with side(build_ours, others.WORLD, STEPS) as ours, side(build_theirs, others.WORLD, STEPS) as reference:
        return ratio(name, [cpu for (cpu,) in in_turns(ours, reference)], target)


def check_same(hidden: int, tensor: mesh.TensorMesh, theirs: Build) -> Step:
    """Return a step that checks the losses of three steps; fp32 sums in other orders differ by some 1e-7."""
    losses = [[step() for _ in range(3)] for step in (of_ours(hidden, tensor), theirs(hidden, tensor))]
    torch.testing.assert_close(*map(torch.tensor, losses), rtol=1e-5, atol=0)
    assert len(set(losses[0])) == 3, "no step was taken"
    return lambda: 0.0


# The sides ------------------------------------------------------------------------------------------------------


def of_ours(hidden: int, tensor: mesh.TensorMesh) -> Step:
    """Build the step with dslpar.layers."""
    groups = Groups(Mesh(tensor=tensor))
    return training(blocks(groups, hidden), tensor)


def of_dtensor(hidden: int, tensor: mesh.TensorMesh) -> Step:
    """Build the step with torch.distributed.tensor.parallel and separate projections."""
    model = nn.Sequential(*(others.apart(block) for block in plain(hidden)))
    return training(others.over_dtensor(model, sequence=tensor.residual == "sequence"), tensor)


def of_dtensor_fused(hidden: int, tensor: mesh.TensorMesh) -> Step:
    """Build the same with one projection."""
    return training(others.over_dtensor(nn.Sequential(*plain(hidden)), sequence=tensor.residual == "sequence"), tensor)


def by_hand(hidden: int, tensor: mesh.TensorMesh) -> Step:
    """Build the step with Megatron-LM's f and g."""
    model = nn.Sequential(*(others.by_hand(block, dist.get_rank()) for block in plain(hidden)))
    return training(model, tensor)


COMPARISONS = (
    ("1d / DTensor", 256, PLAIN, of_dtensor, 0.80),
    ("1d / DTensor", 128, PLAIN, of_dtensor, 0.48),
    ("1d with sequence / DTensor", 256, IN_PIECES, of_dtensor, 0.60),
    ("1d with sequence / DTensor", 128, IN_PIECES, of_dtensor, 0.60),
    ("1d / DTensor, q k v in one", 256, PLAIN, of_dtensor_fused, 0.80),
    ("1d with sequence / DTensor, q k v in one", 256, IN_PIECES, of_dtensor_fused, 0.70),
    ("1d / column and row by hand", 256, PLAIN, by_hand, 1.05),
    ("1d / column and row by hand", 128, PLAIN, by_hand, 1.05),
)
"""Name, hidden size, dslpar's layout, the other side, target: CPU time per step of both ranks."""


def blocks(groups: Groups, hidden: int) -> nn.Sequential:
    """Return dslpar's blocks, with the common weights."""
    model = nn.Sequential(*(Block(groups, hidden, HEADS) for _ in range(LAYERS)))
    initialize(model, groups, seed=1234)
    return model


def plain(hidden: int) -> list[others.Block]:
    """Return unsharded plain torch blocks with the same weights."""
    groups = Groups(Mesh(tensor=PLAIN))
    return [
        others.load(
            others.Block(hidden, HEADS),
            {name: _whole(p, groups) for name, p in block.named_parameters()},
        )
        for block in blocks(groups, hidden)
    ]


def _whole(p: nn.Parameter, groups: Groups) -> Tensor:
    at = placement_of(p)
    assert at is not None, "blocks place all parameters"
    return gather(p, at, groups)


def training(model: nn.Module, tensor: mesh.TensorMesh) -> Step:
    """Return steps of SGD towards a fixed target, on this rank's shard of one micro-batch; each returns its loss."""
    hidden = next(model.parameters()).shape[-1]
    coord = Mesh(tensor=tensor).coord(dist.get_rank())
    at = placement.residual(tensor, MICRO, SEQUENCE, hidden)
    x, target = (at.cut(numbers, coord) for numbers in _numbers(2, *at.shape))
    optimizer, num_elements = torch.optim.SGD(model.parameters(), lr=0.01), math.prod(at.shape)

    def step() -> float:
        optimizer.zero_grad()
        loss: Tensor = (model(x) - target).square().sum() / num_elements
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _numbers(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))
