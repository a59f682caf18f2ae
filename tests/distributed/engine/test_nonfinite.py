"""Non-finite values: the first one is reported at the layer that made it, under every schedule."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

VOCAB, LENGTH = 32, 8
SCHEDULES = {
    "one process": ("", 1),
    "1F1B": ("1f1b", 1),
    "interleaved 2": ("interleaved", 2),
    "zero bubble 1": ("zero_bubble", 1),
    "zero bubble 2": ("zero_bubble", 2),
}
PLACES = {
    "one process": "stage 0 (pipe 0, data 0, tensor 0)",
    "1F1B": "stage 1 (pipe 1, data 0, tensor 0)",
    "interleaved 2": "stages 0 and 2 (pipe 0, data 0, tensor 0)",
    "zero bubble 1": "stage 1 (pipe 1, data 0, tensor 0)",
    "zero bubble 2": "stages 0 and 2 (pipe 0, data 0, tensor 0)",
}
"""Places of block 2 of four."""


def job_of(schedule: str) -> Job:
    kind, num = SCHEDULES[schedule]
    spec = sections.Spec(
        # Without biases, the gradients of norms' gains come in B before those of the block's matrices.
        model=section.GPT(num_layers=4, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, bias=False),
        parallel=sections.Parallel(pipeline=sections.PipelineParallel(size=2) if kind else None),
        batch=sections.Batch(global_size=8, accumulation=4),
        schedule=sections.PipelineSchedule(type=kind, num_model_chunks=num) if kind else None,
    )
    return resolve(spec, 2 if kind else 1, "nonfinite.py")


def batches() -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCAB, (4, 2, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    return [(each[:, :-1], each[:, 1:]) for each in tokens]


def first_nonfinite(schedule: str, what: str) -> str:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine
    from dslpar.engine.nonfinite import find_first_nonfinite

    job = job_of(schedule)
    engine = build_engine(job, Groups(job.mesh, num_chunks=job.chunks.num), all_counted=True)
    for name, p in engine.named_parameters():
        if what == "weight" and name == "blocks.2.mlp.up.weight":
            p.data[0, 0] = torch.inf
    for block in spoiled(engine.module):
        if what == "output":
            block.mlp.up.register_forward_hook(lambda module, inputs, output: output * torch.inf)
        elif what == "gradient":
            block.register_forward_hook(spoil_gradient)
    return find_first_nonfinite(engine, batches())


def spoiled(module: Any) -> Iterator[Any]:
    """Yield block 2 on the rank that has it."""
    for spec, layer in module.built_layers():
        if spec.name == "blocks.2":
            yield layer


def spoil_gradient(module: nn.Module, inputs: Any, output: Tensor) -> None:
    """Make the backward of a block begin with infinities."""
    output.register_hook(lambda gradient: gradient * torch.inf)


FIRST = {
    "weight": "the weight blocks.2.mlp.up.weight",
    "output": "the output of blocks.2.mlp.up (Linear)",
    "gradient": "the gradient of blocks.2.mlp.down.weight",
}


EACH_TIME = set(zip(SCHEDULES, cycle(FIRST), strict=False))
"""Every schedule, and every possible first non-finite value."""


@pytest.mark.parametrize(("schedule", "what"), sampled(product(SCHEDULES, FIRST), EACH_TIME))
def test_the_first_is_named_with_its_stage_and_rank(schedule: str, what: str) -> None:
    """In the backward, earlier stages get non-finite gradients, too, and so do gains before W."""
    world = 1 if schedule == "one process" else 2
    first, *others = on_ranks(world, first_nonfinite, schedule, what, init="deepspeed")
    assert others == [first] * (world - 1)
    assert first.startswith(FIRST[what]), first
    assert ", stage 2, on rank 0 " in first or SCHEDULES[schedule][1] == 1, first
    assert re.search(rf", on rank \d of {world} on .*, {re.escape(PLACES[schedule])}", first), first
