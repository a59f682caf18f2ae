"""Activation checkpointing: of a group of layers only the first one's input is stored (arXiv 1604.06174).

    x = run_layers([Step(embed), Step(block0, True), Step(block1, True), Step(norm)], x, interval=2)

The same function runs a whole model and a stage of a pipeline, where groups begin anew. The rest is computed again in
the backward by torch's own non-reentrant checkpoint, which restores torch's generator first: dropout repeats its masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint


class Step(NamedTuple):
    """One layer, built."""

    apply: Callable[[Tensor], Tensor]
    recomputable: bool = False
    """Whether it may run again in the backward."""


def run_layers(steps: Sequence[Step], x: Tensor, interval: int, offload: bool = False) -> Tensor:
    """Return the last layer's output. `interval` layers are a group; 0: everything is stored.

    With `offload` what is stored of a recomputed group waits for the backward in the host's memory.
    """
    for recomputed, group in recompute_groups(steps, interval if torch.is_grad_enabled() else 0):
        if not recomputed:
            x = _apply(group, x)
            continue
        # What the group saves inside is recomputed: its input alone comes to be stored, and goes to the host.
        with save_on_cpu(pin_memory=torch.cuda.is_available()) if offload else nullcontext():
            # torch's reentrant kind gives a group no gradients where its input needs none, as ids do.
            x = checkpoint(_apply, group, x, use_reentrant=False)
    return x


def recompute_groups(steps: Sequence[Step], interval: int) -> Iterator[tuple[bool, Sequence[Step]]]:
    """Yield (whether it is recomputed, layers that are a group), in order; `interval` 0: nothing is recomputed.

    >>> a, b = Step(abs), Step(abs, True)
    >>> [(recomputed, len(group)) for recomputed, group in recompute_groups([a, a, b, b, b, a], 2)]
    [(False, 2), (True, 2), (True, 1), (False, 1)]
    """
    for recomputed, neighbours in groupby(steps, lambda step: step.recomputable and interval > 0):
        run = list(neighbours)
        size = interval if recomputed else len(run)
        yield from ((recomputed, run[begin : begin + size]) for begin in range(0, len(run), size))


def _apply(group: Sequence[Step], x: Tensor) -> Tensor:
    for step in group:
        x = step.apply(x)
    return x
