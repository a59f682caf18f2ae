"""ZeRO over the ranks of d, which hold equal weights: steps, states, traffic and checkpoints as over replicas."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as Cuboid
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.engine.whole_gradients import share_whole_gradients
from dslpar.forecast.model_states import states
from dslpar.layers import Linear
from dslpar.layout.deepspeed_config import ds_config
from dslpar.layout.resolve import Job, with_zero
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.distributed.engine.test_state_memory import TOLERANCE, _held, model, workload
from tests.distributed.engine.test_zero_traffic import counted, trained
from tests.support.engines import LENGTH, VOCAB, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import VOCAB as VOCAB_OF_RUN
from tests.support.resumed_runs import job_of, run, same
from tests.support.sampling import sampled


def context(size: int, impl: str = "ring", tensor: sections.TensorParallel | None = None) -> sections.Parallel:
    return sections.Parallel(context=sections.ContextParallel(size=size, impl=impl), tensor=tensor)


SEQUENCE = sections.TensorParallel(size=2, mode="1d", sequence=True)
DEEP = sections.Parallel(tensor=sections.TensorParallel(size=2, mode="2.5d", depth=2))
LAYOUTS: dict[str, tuple[int, sections.Parallel]] = {
    "context 2": (2, context(2)),
    "context 4, data 2": (8, context(4, "ulysses")),
    "context 2 beside sequence": (4, context(2, tensor=SEQUENCE)),
    "2.5d 2, data 2": (4, DEEP),
    "2.5d 8": (8, sections.Parallel(tensor=sections.TensorParallel(size=8, mode="2.5d", depth=2))),
    "context 3": (3, context(3)),
}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
KEYS: dict[str, tuple[int, dict[str, Any]]] = {
    "1": (1, {}),
    "1 as DeepSpeed reduces": (1, {"overlap_comm": False}),
    "1, all-reduced": (1, {"use_multi_rank_bucket_allreduce": True}),
    "1, offloaded": (1, OFFLOADED),
    "2": (2, {"reduce_bucket_size": 500}),
    "2 as DeepSpeed reduces": (2, {"overlap_comm": False}),
    "2, offloaded": (2, OFFLOADED),
    "3": (3, {"stage3_param_persistence_threshold": 0}),
    "3 in one buffer": (3, {"reduce_scatter": False}),
    "3, offloaded": (3, OFFLOADED),
}


def made(layout: str, zero: str = "1", heads: int = 4, dtype: str = "fp32", **other: Any) -> Job:
    world, parallel = LAYOUTS[layout]
    stage, extra = KEYS[zero]
    return job(
        world,
        model=section.GPT(num_layers=2, hidden_size=24, num_heads=heads, vocab_size=VOCAB, max_seq_len=24),
        parallel=parallel,
        zero=sections.Zero(stage=stage, extra=extra),
        batch=sections.Batch(global_size=8, accumulation=2),
        optimizer=sections.SGD(lr=1.0, momentum=0.9),
        precision=sections.Precision(dtype=dtype, extra={"initial_scale_power": 6} if dtype == "fp16" else {}),
        train=sections.Train(clip_grad_norm=0.1),
        **other,
    )


# ---- the steps ----


def fed(of: Job, data_rank: int, step: int) -> list[tuple[Tensor, Tensor]]:
    """Return random micro-batches of the global batch."""
    tokens = torch.randint(0, VOCAB, (8, 25), generator=torch.Generator().manual_seed(step))
    micro, data = of.batch.micro_size, of.mesh.data
    rows = [slice((a * data + data_rank) * micro, (a * data + data_rank + 1) * micro) for a in range(2)]
    return [(tokens[row, :-1], tokens[row, 1:]) for row in rows]


def steps(of: Job) -> list[tuple[float, float]]:
    """Return losses and norms of three steps, each of which changes the loss by half."""
    engine = engine_of(of)
    data_rank = engine.groups.coord["data"]
    return [(engine.train_batch(fed(of, data_rank, step)), engine.grad_norm) for step in range(3)]


@cache
def alone(heads: int = 4) -> list[tuple[float, float]]:
    of = made("context 2", "1", heads)
    of = replace(of, spec=replace(of.spec, parallel=sections.Parallel()), mesh=Mesh())
    return on_ranks(1, steps, of, init="deepspeed")[0]  # type: ignore[no-any-return]


EACH = (
    [(layout, "1") for layout in LAYOUTS]
    + [("context 4, data 2", zero) for zero in KEYS]
    + [
        ("context 3", "2"),
        ("context 3", "3"),
        ("2.5d 8", "3"),
        ("context 2 beside sequence", "2"),
    ]
)
FEW = {("2.5d 2, data 2", "1"), ("context 3", "2"), ("context 3", "3")}


@pytest.mark.parametrize(("layout", "zero"), sampled(dict.fromkeys(EACH), FEW))
def test_steps_are_those_of_one_process(layout: str, zero: str) -> None:
    heads = 6 if layout == "context 3" else 4
    of = made(layout, zero, heads)
    assert of.mesh.tensor.zero_over_d
    expected = alone(heads)
    for told in on_ranks(of.mesh.world_size, steps, of, init="deepspeed"):
        # sums of float32 in other orders
        assert told == [pytest.approx(each, rel=1e-6) for each in expected]


@pytest.mark.prove  # 8 ranks: `make test` has fp16 in tests/distributed/engine/test_precision.py, and fp32 here
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_half_precision_is_about_that_of_one_process(stage: int) -> None:
    """fp16 has 11 bits; an error of a tenth of a step's change would be seen."""
    of = made("context 4, data 2", str(stage), dtype="fp16")
    assert ds_config(of)["seq_parallel_communication_data_type"] == "fp16"
    for told in on_ranks(8, steps, of, init="deepspeed"):
        assert told == [pytest.approx(each, rel=1e-2) for each in alone()]


def _without_the_patch(of: Job) -> float:
    deepspeed_patches.sum_over_sequence = lambda ds_engine: None  # in this rank alone
    engine = engine_of(of)
    engine.train_batch(fed(of, engine.groups.coord["data"], 0))
    return float(engine.grad_norm)


def test_m21_deepspeed_still_averages_over_a_context_at_zero_3() -> None:
    norm = alone()[0][1]
    assert on_ranks(2, _without_the_patch, made("context 2", "3"), init="deepspeed") == [pytest.approx(norm / 2)] * 2


# ---- memory and traffic of ranks ----


@pytest.mark.parametrize(("stage", "dtype"), sampled([(1, "bf16"), (2, "bf16"), (3, "fp32")], {(1, "bf16")}))
def test_states_are_sharded_over_d(stage: int, dtype: str) -> None:
    keys = {"reduce_bucket_size": 40_000} | ({"stage3_param_persistence_threshold": 500} if stage == 3 else {})
    of = job(
        4,
        model=model(),
        parallel=sections.Parallel(tensor=sections.TensorParallel(size=2, mode="2.5d", depth=2)),
        zero=sections.Zero(stage=stage, extra=keys),
        precision=sections.Precision(dtype=dtype),
        batch=sections.Batch(micro_size=2, accumulation=3),
    )
    held = states(workload(of), 0)
    for found in on_ranks(4, _held, of, init="deepspeed"):
        assert found["resting"] == pytest.approx(held.resting, rel=TOLERANCE)
    over_replicas = replace(of, mesh=replace(of.mesh, tensor=replace(of.mesh.tensor, zero_over_d=False)))
    assert states(workload(over_replicas), 0).optimizer == 2 * held.optimizer


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_are_sent_once_a_step(accumulation: int) -> None:
    """As with two replicas, they are reduced to the rank that steps them, and weights are gathered; no backward sends
    more.
    """
    of = trained(2, 1, accumulation)
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=32, max_seq_len=LENGTH)
    deep = job(
        2, model=gpt, parallel=DEEP, zero=of.spec.zero, batch=sections.Batch(global_size=8, accumulation=accumulation)
    )
    found, calls = counted(deep)
    assert found == pytest.approx(2, rel=1e-12), calls


# ---- gradients that are not sharded ----


def test_what_is_computed_alike_on_all_ranks_gives_its_share() -> None:
    cuboid = Cuboid(d=4, mode="2.5d", zero_over_d=True)
    module = nn.Sequential(Linear(Groups.without_processes(Mesh(tensor=cuboid)), 4, 4, role="inward"), nn.Linear(4, 4))
    share_whole_gradients(module, Groups.without_processes(Mesh(tensor=cuboid)))
    for p in module.parameters():
        p.sum().backward()
    of_layer, of_torch = ([float(p.grad.flatten()[0]) for p in part.parameters()] for part in module)  # type: ignore[union-attr]
    assert (of_layer, of_torch) == ([1, 1], [0.25, 0.25])


# ---- when it applies ----


def test_not_in_a_pipeline_nor_with_experts_nor_without_zero() -> None:
    cuboid, gpt = Cuboid(d=2, mode="sequence", split="sequence"), made("context 2").spec.model
    mixtral = sections.OtherModel(target="transformers.MixtralForCausalLM", args={"config": {"num_local_experts": 4}})
    assert with_zero(cuboid, gpt, 1, 1).zero_over_d
    assert not with_zero(cuboid, gpt, 0, 1).zero_over_d
    assert not with_zero(cuboid, gpt, 1, 2).zero_over_d
    assert not with_zero(cuboid, mixtral, 1, 1).zero_over_d
    assert not with_zero(Cuboid(y=2, mode="1d"), gpt, 1, 1).zero_over_d
    flagged = with_zero(cuboid, gpt, 1, 1)
    assert with_zero(flagged, gpt, 0, 1) == cuboid


# ---- checkpoints ----


def of_run(folder: Path, layout: tuple[sections.Parallel, int, int]) -> Job:
    parallel, world, stage = layout
    # without dropout, since ranks of d draw their own masks
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB_OF_RUN, max_seq_len=LENGTH)
    return job_of(folder, world, model=gpt, parallel=parallel, zero=sections.Zero(stage=stage))


def lines(of: Job, until: int) -> list[Any]:
    """Return a run's steps; it continues from the newest checkpoint in its folder."""
    return on_ranks(of.mesh.world_size, run, of, until, init="deepspeed")[0][0]  # type: ignore[no-any-return]


NONE = sections.Parallel()


@pytest.mark.parametrize(
    ("first", "then"),
    sampled(
        [((DEEP, 4, 1), (NONE, 2, 1)), ((NONE, 2, 2), (DEEP, 4, 1)), ((DEEP, 4, 3), (DEEP, 2, 2))],
        [((DEEP, 4, 1), (NONE, 2, 1))],
    ),
)
def test_another_layout_resumes(first: Any, then: Any, tmp_path: Path) -> None:
    whole = lines(of_run(tmp_path / "whole", first), 10)
    lines(of_run(tmp_path / "two", first), 5)
    found = lines(of_run(tmp_path / "two", then), 10)
    assert [each[:3] for each in found] == [pytest.approx(each[:3], rel=1e-5) for each in whole[5:]]


@pytest.mark.prove
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_it_resumes_to_the_bit(stage: int, tmp_path: Path) -> None:
    whole, two = (of_run(tmp_path / name, (DEEP, 4, stage)) for name in ("whole", "two"))
    expected = on_ranks(4, run, whole, 10, init="deepspeed")
    lines(two, 5)
    for one, other in zip(expected, on_ranks(4, run, two, 10, init="deepspeed"), strict=True):
        assert same((one[0][5:], one[1]), other) == []
