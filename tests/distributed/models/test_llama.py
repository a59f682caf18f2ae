"""GPT in Llama's form through DeepSpeed, in a pipeline and under ZeRO-3, against one process.

In float32 with SGD, other orders of summation differ by some 1e-7. The tolerance is 1e-6 for losses, norms and weights.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar.distributed.groups import Groups
from dslpar.layers import gather, placement_of
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

VOCAB, LENGTH = 30, 12
MODEL = section.GPT(
    num_layers=2,
    hidden_size=24,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=60,
    vocab_size=VOCAB,
    max_seq_len=LENGTH,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=True,
    init_std=0.2,
)


def job(world: int, zero: int = 0, **parallel: Any) -> Job:
    made = sections.Spec(
        model=MODEL,
        parallel=sections.Parallel(**parallel),
        optimizer=sections.SGD(lr=0.2, momentum=0.9),
        zero=sections.Zero(stage=zero, extra={"stage3_param_persistence_threshold": 0} if zero == 3 else {}),
        batch=sections.Batch(global_size=8, accumulation=2),
        train=sections.Train(clip_grad_norm=0.5),
    )
    return resolve(made, world, "cfg.py")


def run(made: Job) -> tuple[list[float], dict[str, Tensor]]:
    """Return losses and norms of three steps, and this rank's final weights in full."""
    import deepspeed

    from dslpar.engine.build import build_engine

    groups = Groups(made.mesh)
    engine = build_engine(made, groups, all_counted=True)
    rows: list[float] = []
    for step in range(3):
        ids = torch.randint(VOCAB, (8, LENGTH + 1), generator=torch.Generator().manual_seed(step))
        parts = ids.chunk(2 * made.mesh.data)[groups.coord["data"] :: made.mesh.data]
        rows += [engine.train_batch([(part[:, :-1], part[:, 1:]) for part in parts]), engine.grad_norm]
    weights = {}
    for name, p in engine.named_parameters():
        with deepspeed.zero.GatheredParameters([p]):
            at = placement_of(p)
            assert at is not None
            weights[name] = gather(p.detach().clone(), at, groups)
    return rows, weights


ONE_D = sections.TensorParallel(size=2, mode="1d")
RING = sections.TensorParallel(size=2, mode="sequence")
JOBS = {
    "pipe 2": job(2, pipeline=sections.PipelineParallel(size=2)),
    "pipe 2, ring 2, ZeRO 1": job(4, zero=1, pipeline=sections.PipelineParallel(size=2), tensor=RING),
    "data 2, 1d 2, ZeRO 3": job(4, zero=3, tensor=ONE_D),
}


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], dict[str, Tensor]]:
    found: tuple[list[float], dict[str, Tensor]] = on_ranks(1, run, job(1), init="deepspeed")[0]
    return found


@pytest.mark.parametrize("name", sampled(JOBS, lambda name: "ZeRO" not in name))
def test_equals_one_process(name: str, alone: tuple[list[float], dict[str, Tensor]]) -> None:
    rows, weights = alone
    assert rows[-2] < rows[0], "it learns nothing"
    seen = set()
    for found, own in on_ranks(JOBS[name].mesh.world_size, run, JOBS[name], init="deepspeed"):
        assert found == pytest.approx(rows, rel=1e-6)
        seen |= own.keys()
        for weight, value in own.items():
            assert (value - weights[weight]).abs().max() <= 1e-6 * weights[weight].abs().max(), weight
    assert seen == weights.keys()
