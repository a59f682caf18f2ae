"""Summing bf16 gradients over replicas in fp32, unless `communication_data_type` is set.

Rank 0 has gradients of 1, rank 1 of 2**-9. bf16 keeps 8 bits, so it holds each, and rounds their mean to 0.5.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

GRADIENTS = (1.0, 2.0**-9)
MEANS = {"fp32": 0.5 + 2.0**-10, "bf16": 0.5}
LAYOUTS: dict[str, tuple[int, sections.Parallel]] = {
    "data 2": (2, sections.Parallel()),
    "pipe 2, data 2": (4, sections.Parallel(pipeline=sections.PipelineParallel(size=2))),
}


def summed(layout: str, stage: int, **deepspeed: str) -> Job:
    world, parallel = LAYOUTS[layout]
    # Untied: otherwise a table's gradient on two stages would be the sum of both.
    gpt = section.GPT(
        num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, tie_embeddings=False
    )
    return job(
        world,
        model=gpt,
        parallel=parallel,
        batch=sections.Batch(global_size=4, accumulation=1),
        zero=sections.Zero(stage=stage),
        precision=sections.Precision(dtype="bf16"),
        train=sections.Train(clip_grad_norm=None),
        deepspeed=deepspeed,
    )


def gradients(made: Job) -> tuple[set[torch.dtype], int, float]:
    """Return the dtypes of this rank's gradients, their number of elements, and the norm of all."""
    engine, dtypes = engine_of(made), set[torch.dtype]()
    value = GRADIENTS[engine.groups.coord["data"]]

    def replace(gradient: torch.Tensor) -> torch.Tensor:
        dtypes.add(gradient.dtype)
        return torch.full_like(gradient, value)

    parameters: list[Any] = list(engine.module.parameters())
    for p in parameters:
        p.register_hook(replace)
    engine.train_batch(batches(made, engine.groups.coord["data"]))
    return dtypes, sum(getattr(p, "ds_numel", p.numel()) for p in parameters), engine.grad_norm


CASES = [
    (layout, stage, dtype)
    for layout, stages in {"data 2": (1, 2, 3), "pipe 2, data 2": (1,)}.items()
    for stage in stages
    for dtype in ("", "fp32", "bf16")
]
EACH_TIME = {("data 2", 1, ""), ("data 2", 1, "bf16"), ("data 2", 3, "")}


@pytest.mark.parametrize(("layout", "stage", "dtype"), sampled(CASES, EACH_TIME))
def test_the_sum_over_replicas_has_the_type_of_communication(layout: str, stage: int, dtype: str) -> None:
    made = summed(layout, stage, **({"communication_data_type": dtype} if dtype else {}))
    ranks = on_ranks(made.mesh.world_size, gradients, made, init="deepspeed")
    numel = sum(own for _, own, _ in ranks) // made.mesh.data
    for dtypes, _, norm in ranks:
        assert dtypes == {torch.bfloat16}
        assert norm / math.sqrt(numel) == pytest.approx(MEANS[dtype or "fp32"], rel=1e-6)
