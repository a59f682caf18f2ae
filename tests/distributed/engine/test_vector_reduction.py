"""Gradients of vectors: summed over tensor ranks once per step, for any number of layers and micro-batches."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

from dslpar.distributed import collectives
from dslpar.engine import build, vector_reduction
from dslpar.engine.vector_reduction import VectorReduction
from dslpar.layers.parameter import ONES, defer_sums, deferred_vectors, gather, parameter, placement_of
from dslpar.layers.placement import residual_vector
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.layouts import LAYOUTS as LAYOUTS_BY_NAME
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

SEQUENCE = sections.TensorParallel(size=2, mode="1d", sequence=True)
TWO_D = sections.TensorParallel(size=4, mode="2d")
THREE_D = sections.TensorParallel(size=8, mode="3d")
MODES = {"sequence": (2, SEQUENCE), "2d": (4, TWO_D), "3d": (8, THREE_D)}

Gradients = dict[str, torch.Tensor]


def trained(
    tensor: sections.TensorParallel, data: int = 1, pipe: int = 1, stage: int = 0, dtype: str = "fp32", **other: Any
) -> Job:
    gpt = section.GPT(num_layers=4, hidden_size=16, num_heads=4, vocab_size=VOCAB, max_seq_len=LENGTH)
    return job(
        tensor.size * data * pipe,
        model=gpt,
        parallel=sections.Parallel(pipeline=sections.PipelineParallel(size=pipe), tensor=tensor),
        zero=sections.Zero(stage=stage, extra=other.pop("zero", {})),
        batch=sections.Batch(global_size=16, accumulation=4),
        precision=sections.Precision(dtype=dtype, extra={"initial_scale_power": 6} if dtype == "fp16" else {}),
        optimizer=sections.SGD(lr=1.0),
        **other,
    )


# ---- number of reductions ----


def _count(made: Job) -> tuple[int, int, int]:
    """Return a step's all-reduces of vectors in backwards and at the end, and the number of axis sets that need one."""
    calls: Counter[str] = Counter()
    in_backward = collectives._CopyToGroupCoalesced.backward
    at_once = collectives.start_all_reduce_coalesced_

    def counted_backward(ctx: Any, *grads: Any) -> Any:
        calls["backward"] += 1
        return in_backward(ctx, *grads)

    def counted_at_once(*args: Any, **kwargs: Any) -> Any:
        calls["once"] += 1
        return at_once(*args, **kwargs)

    engine = engine_of(made)
    collectives._CopyToGroupCoalesced.backward = staticmethod(counted_backward)
    collectives.start_all_reduce_coalesced_ = counted_at_once
    engine.train_batch(batches(made, engine.groups.coord["data"]))
    return calls["backward"], calls["once"], len(deferred_vectors(engine.module))


@pytest.mark.parametrize(
    ("mode", "stage"), sampled([(mode, stage) for mode in MODES for stage in (0, 1)], {("sequence", 1), ("2d", 0)})
)
def test_one_sum_a_step_for_all_vectors_of_the_same_axes(mode: str, stage: int) -> None:
    world, tensor = MODES[mode]
    for in_backwards, at_once, sets in on_ranks(world, _count, trained(tensor, stage=stage), init="deepspeed"):
        assert in_backwards == 0
        assert at_once == sets > 0


@pytest.mark.parametrize(
    ("stage", "zero"),
    [
        (2, {}),
        pytest.param(3, {}, marks=pytest.mark.prove),
        (1, {"overlap_comm": False}),
        (1, {"offload_optimizer": {"device": "cpu"}}),
    ],
    ids=["2", "3", "1 as DeepSpeed reduces", "1 offloaded"],
)
def test_a_rank_that_keeps_no_whole_gradient_sums_in_each_backward(stage: int, zero: dict[str, Any]) -> None:
    for in_backwards, at_once, sets in on_ranks(2, _count, trained(SEQUENCE, stage=stage, zero=zero), init="deepspeed"):
        assert in_backwards >= 4 * 4, "of four blocks and four micro-batches"
        assert at_once == sets == 0


# ---- result ----


def _stepped(made: Job, once: bool) -> tuple[Gradients, float]:
    """Return full weights after two SGD steps, and the last norm: with `once` as usual, without it by the layers."""
    if not once:
        build.defer_vectors = lambda *args: []  # type: ignore[assignment]
    engine = engine_of(made)
    for step in range(2):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
    whole = {
        name: gather(p, placement_of(p), engine.groups)  # type: ignore[arg-type]
        for name, p in engine.named_parameters()
        if placement_of(p) is not None
    }
    return {name: p.float() for name, p in whole.items()}, engine.grad_norm


LAYOUTS = {
    "sequence, data 2": dict(tensor=SEQUENCE, data=2),
    "2d": dict(tensor=TWO_D),
    "2d, data 2": dict(tensor=TWO_D, data=2),
    "3d": dict(tensor=THREE_D),
    "sequence, pipe 2": dict(tensor=SEQUENCE, pipe=2),
    "sequence, pipe 2, data 2": dict(tensor=SEQUENCE, pipe=2, data=2),
}


@pytest.mark.parametrize(
    ("layout", "stage"),
    sampled([(layout, stage) for layout in LAYOUTS for stage in (0, 1)], {("sequence, data 2", 1)}),
)
def test_the_step_is_that_of_sums_in_each_backward(layout: str, stage: int) -> None:
    """The same numbers are added in another order, and differ by some ulps of fp32."""
    made = trained(**LAYOUTS[layout], stage=stage)  # type: ignore[arg-type]
    world = made.mesh.world_size
    now, before = (on_ranks(world, _stepped, made, once, init="deepspeed") for once in (True, False))
    for (weights, norm), (expected, expected_norm) in zip(now, before, strict=True):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-6)


CHUNKS = sections.PipelineSchedule(type="interleaved", num_model_chunks=2)


@pytest.mark.prove
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_is_reduced_early_leaves_its_vectors_to_the_end(stage: int) -> None:
    made = trained(SEQUENCE, pipe=2, data=2, stage=stage, schedule=CHUNKS)
    now, before = (on_ranks(8, _stepped, made, once, init="deepspeed") for once in (True, False))
    for (weights, norm), (expected, expected_norm) in zip(now, before, strict=True):
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-6)


HALF = [(0, "bf16"), (1, "bf16"), (0, "fp16"), (1, "fp16")]


@pytest.mark.parametrize(("stage", "dtype"), sampled(HALF, HALF[2:3]))
def test_in_half_precision_too(stage: int, dtype: str) -> None:
    """A gradient rounds to 2^-8 (bf16) or 2^-11 of itself in either case, before or after the sum of two ranks; weights
    of about 1 are then stored with half of that. Without ZeRO, fp16 fails on a CPU without M24: DeepSpeed refuses it.
    """
    made = trained(SEQUENCE, stage=stage, dtype=dtype)
    now, before = (on_ranks(2, _stepped, made, once, init="deepspeed") for once in (True, False))
    ulp = 2**-8 if dtype == "bf16" else 2**-11
    for (weights, norm), (expected, expected_norm) in zip(now, before, strict=True):
        assert norm == pytest.approx(expected_norm, rel=4 * ulp)
        for name in expected:
            torch.testing.assert_close(weights[name], expected[name], rtol=2 * ulp, atol=2 * ulp)


def _in_two_batches(made: Job) -> tuple[Gradients, float]:
    """Take a step in which `no_sync` keeps back the gradients of the first half."""
    engine = engine_of(made)
    fed = batches(made, engine.groups.coord["data"])
    half = lambda logits, labels: engine._loss_fn(logits, labels) / 2  # noqa: E731
    with engine.no_sync():
        engine.forward_backward(fed, criterion=half)
    engine.forward_backward(fed, criterion=half)
    engine.step()
    return {}, engine.grad_norm


@pytest.mark.parametrize(("pipe", "stage"), sampled([(1, 0), (1, 1), (2, 0), (2, 1)], {(2, 0)}))
def test_no_sync_keeps_the_sum_for_the_end(stage: int, pipe: int) -> None:
    """Two halves of the mean over the same batch give its gradient, and not twice one half."""
    made = trained(SEQUENCE, pipe=pipe, stage=stage)
    halves = on_ranks(made.mesh.world_size, _in_two_batches, made, init="deepspeed")
    whole = on_ranks(made.mesh.world_size, _first_norm, made, init="deepspeed")
    assert [norm for _, norm in halves] == pytest.approx(whole, rel=1e-6)


def _first_norm(made: Job, patched: bool = True) -> float:
    if not patched:
        build.deepspeed_patches.call_before_reduction = lambda ds_engine, first: None  # type: ignore[assignment]
    engine = engine_of(made)
    engine.train_batch(batches(made, engine.groups.coord["data"]))
    return engine.grad_norm  # type: ignore[no-any-return]


@pytest.mark.parametrize("stage", sampled([0, 1], {1}))
def test_m18_deepspeed_has_no_place_for_the_sum(stage: int) -> None:
    """Without the patch, gradients stay partial sums."""
    made = trained(SEQUENCE, stage=stage)
    whole, parts = (on_ranks(2, _first_norm, made, patched, init="deepspeed") for patched in (True, False))
    assert whole[0] == whole[1]
    assert abs(parts[0] - whole[0]) > 1e-3 * whole[0]


def _frozen(made: Job) -> tuple[int, bool]:
    engine = engine_of(made)
    frozen = [p for vectors in deferred_vectors(engine.module).values() for p in vectors[::2]]
    before = [p.detach().clone() for p in frozen]
    for p in frozen:
        p.requires_grad_(False)
    engine.train_batch(batches(made, 0))
    return len(frozen), all(map(torch.equal, before, frozen))


def test_what_is_frozen_later_is_left_alone() -> None:
    for count, same in on_ranks(2, _frozen, trained(SEQUENCE), init="deepspeed"):
        assert count > 4
        assert same


def _unused(made: Job, dtype: torch.dtype) -> list[tuple[float, float]]:
    """Return the first vector's gradient before and after the sum, after rank 0 has lost its part."""
    engine = engine_of(made)
    (vectors, *_) = deferred_vectors(engine.module).values()
    with engine.no_sync():
        engine.forward_backward(batches(made, 0))
    zero = engine.deepspeed.optimizer
    name = "grad_accum" if getattr(zero, "use_grad_accum_attribute", False) else "grad"
    own = getattr(vectors[0], name).clone()
    if engine.groups.rank == 0:  # as if its samples had not used it
        setattr(vectors[0], name, None)
    VectorReduction(engine.deepspeed, engine.groups).reduce()
    found = getattr(vectors[0], name)
    assert found.dtype is dtype
    return [(float(own.abs().sum()), float(found.abs().sum()))]


@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16")])
def test_a_rank_whose_samples_have_not_used_a_vector_sends_zeros(stage: int, dtype: str) -> None:
    ((_, first),), ((own, second),) = on_ranks(
        2, _unused, trained(SEQUENCE, stage=stage, dtype=dtype), torch.float32, init="deepspeed"
    )
    assert first == second == own > 0


def _another_stage(made: Job) -> tuple[int, int]:
    engine = engine_of(made)
    before = len(deferred_vectors(engine.module))
    spec = dataclasses.replace(made.spec, zero=sections.Zero(stage=2))
    vector_reduction.defer_vectors(engine.module, engine.groups, spec)
    return before, len(deferred_vectors(engine.module))


def test_modules_that_go_on_at_zero_2_sum_in_each_backward_again() -> None:
    for before, after in on_ranks(2, _another_stage, trained(SEQUENCE), init="deepspeed"):
        assert before > 0
        assert after == 0


def test_a_module_that_is_no_layer_sums_its_own_vectors() -> None:
    own = torch.nn.Module()
    own.gain = parameter(residual_vector(LAYOUTS_BY_NAME["1d-sequence-2"], 8), ONES)
    defer_sums(own)
    assert deferred_vectors(own) == {}


def test_one_process_a_replica_defers_nothing() -> None:
    assert on_ranks(1, _count, trained(sections.TensorParallel(size=1)), init="deepspeed") == [(0, 0, 0)]
    assert vector_reduction.deferred_ids(torch.nn.Linear(2, 2)) == []
