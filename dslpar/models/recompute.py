"""Activation checkpointing: store only the input of each group of layers (arXiv 1604.06174).

    x = run_layers([Step(embed), Step(block0, True), Step(block1, True), Step(norm)], x, interval=2)

`run_layers` runs a whole model or one pipeline stage; groups start anew at each stage. torch's non-reentrant checkpoint
recomputes the other activations in the backward. It restores torch's generator first, so dropout repeats its masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


class Step(NamedTuple):
    """One layer of a forward, as a function of its input."""

    apply: Callable[[Any], Any]
    recomputable: bool = False
    """Whether the layer may run again in the backward."""


def run_layers(steps: Sequence[Step], x: Any, interval: int, offload: bool = False) -> Any:
    """Return the last layer's output. A group has up to `interval` layers; 0: everything is stored.

    `x` and the outputs of layers are tensors, or tuples of several tensors.

    With `offload`, the stored inputs of recomputed groups stay in host memory until the backward.
    """
    for recomputed, group in recompute_groups(steps, interval if torch.is_grad_enabled() else 0):
        if not recomputed:
            x = _apply(group, x)
            continue
        # checkpoint discards what the group saves inside, so only the group's input is stored, and goes to the host.
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
            # torch's reentrant kind gives a group no gradients if its input needs none, as with ids. torch saves only
            # tensors that are arguments themselves, and would keep those in a tuple on the device.
            x = checkpoint(_apply_to, group, *(x if isinstance(x, tuple) else (x,)), use_reentrant=False)
    return x


def recompute_groups(steps: Sequence[Step], interval: int) -> Iterator[tuple[bool, Sequence[Step]]]:
    """Yield (whether the group is recomputed, its layers) in order; `interval` 0: nothing is recomputed.

    >>> a, b = Step(abs), Step(abs, True)
    >>> [(recomputed, len(group)) for recomputed, group in recompute_groups([a, a, b, b, b, a], 2)]
    [(False, 2), (True, 2), (True, 1), (False, 1)]
    """
    for recomputed, neighbours in groupby(steps, lambda step: step.recomputable and interval > 0):
        run = list(neighbours)
        size = interval if recomputed else len(run)
        yield from ((recomputed, run[begin : begin + size]) for begin in range(0, len(run), size))


def _apply_to(group: Sequence[Step], *values: Tensor) -> Any:
    return _apply(group, values if len(values) > 1 else values[0])


def _apply(group: Sequence[Step], x: Any) -> Any:
    for step in group:
        x = step.apply(x)
    return x
