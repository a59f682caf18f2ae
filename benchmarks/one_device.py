"""Cost of dslpar's block on one rank over the same maths in torch.nn, forward and backward.

    python -m benchmarks.one_device         # also one of `python -m benchmarks`

On a GPU it runs in bf16 with hidden size 2048 and 4096 tokens or more, timed by the device's own events; the target is
at most 1.03. Without a GPU it runs a small size in fp32, timed by CPU time. The code path is the same, but the target
holds for a GPU, so that line is only informative. It needs torch and dslpar.layers, but no DeepSpeed and no process
group.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.blocks_by_hand import MLP
from benchmarks.measure import HEADER, Costs, Ratio, in_turns, ratio
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, initialize

TARGET = 1.03
WARM_UP = 3


class Size(NamedTuple):
    """Of a comparison."""

    hidden: int
    heads: int
    micro: int
    sequence: int
    steps: int
    """Steps a turn."""


ON_GPU = (Size(2048, 16, 4, 1024, 10), Size(2048, 16, 4, 2048, 10), Size(4096, 32, 2, 2048, 10))
ON_CPU = (Size(256, 4, 4, 128, 4),)

Run = Callable[[], Costs]


def ratios() -> Iterator[Ratio]:
    """One a size."""
    gpu = torch.cuda.is_available()
    torch.set_num_threads(torch.get_num_threads() if gpu else 1)
    device, dtype = (torch.device("cuda"), torch.bfloat16) if gpu else (torch.device("cpu"), torch.float32)
    for size in ON_GPU if gpu else ON_CPU:
        where = f"{size.micro * size.sequence} tokens" if gpu else "CPU (target: a GPU)"
        name = f"one rank / torch.nn, hidden {size.hidden}, {where}"
        yield ratio(name, compare(size, device, dtype), TARGET)


def compare(size: Size, device: torch.device, dtype: torch.dtype) -> list[float]:
    """The ratios of turns; first, that both have the same output and gradients."""
    ours = Block(Groups(Mesh()), size.hidden, size.heads)
    initialize(ours, ours.groups, seed=1)
    theirs = Plain(size.hidden, size.heads)
    theirs.load_state_dict(ours.state_dict())
    our_run, their_run = (run(block.to(device, dtype), size, device, dtype) for block in (ours, theirs))
    check_same(ours, theirs, dtype)
    return [seconds for (seconds,) in in_turns(our_run, their_run)]


def check_same(ours: nn.Module, theirs: nn.Module, dtype: torch.dtype) -> None:
    """Every gradient of the last warm-up step; both ran the same kernels, and may add in another order."""
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    expected = dict(theirs.named_parameters())
    for name, p in ours.named_parameters():
        grad = expected[name].grad
        assert p.grad is not None
        assert grad is not None
        off = ((p.grad - grad).abs().max() / grad.abs().max()).item()
        assert off <= tolerance, f"the gradient of {name} is off by {off}"


def run(block: nn.Module, size: Size, device: torch.device, dtype: torch.dtype) -> Run:
    """A turn of `block`, which is warm."""
    generator = torch.Generator().manual_seed(1)
    shape = (size.micro, size.sequence, size.hidden)
    x, y_grad = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    x.requires_grad_()

    def steps(count: int) -> None:
        for _ in range(count):
            block.zero_grad()
            x.grad = None
            block(x).backward(y_grad)

    steps(WARM_UP)
    return lambda: (seconds_of(lambda: steps(size.steps), device),)


def seconds_of(work: Callable[[], None], device: torch.device) -> float:
    """On a GPU from event to event; on the CPU this process's time."""
    if device.type == "cpu":
        began = time.process_time()
        work()
        return time.process_time() - began
    began_at, ended_at = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began_at.record()
    work()
    ended_at.record()
    torch.cuda.synchronize()
    return began_at.elapsed_time(ended_at) / 1e3  # type: ignore[no-any-return]


# The same in torch.nn, under the same names ---------------------------------------------------------------------


class Plain(nn.Module):
    """A pre-norm block."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = PlainAttention(hidden, heads)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = MLP(hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class PlainAttention(nn.Module):
    """Causal, of one projection."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] to the same."""
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


def main() -> int:
    """See the module."""
    print(HEADER)
    missed = 0
    for found in ratios():
        print(found, flush=True)
        missed += not found.passed
    return 1 if missed and torch.cuda.is_available() else 0


if __name__ == "__main__":
    sys.exit(main())
