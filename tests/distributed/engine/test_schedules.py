"""Running pipeline schedules: 1F1B equals DeepSpeed's, orders equal the simulation, dropout masks are equal."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor

from dslpar.checkpoint import full_state
from dslpar.distributed import collectives
from dslpar.engine.pipeline_executor import PipelineExecutor
from dslpar.layout.resolve import Job
from dslpar.layout.schedule import Action
from dslpar.models.gpt import section
from dslpar.planner import show
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import RankError, on_ranks
from tests.support.sampling import sampled

SCHEDULES = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("zero_bubble", 2)]


def trained(
    world: int, pipe: int, kind: str = "1f1b", chunks: int = 1, zero: int = 0, dtype: str = "fp32", **other: Any
) -> Job:
    sizes = {
        "num_layers": other.pop("num_layers", 4),
        "hidden_size": 16,
        "num_heads": 2,
        "vocab_size": VOCAB,
        "max_seq_len": LENGTH,
    }
    model = section.GPT(**sizes, dropout=other.pop("dropout", 0.0), tie_embeddings=other.pop("tied", True))
    parallel = {"pipeline": sections.PipelineParallel(size=pipe)} if pipe > 1 else {}
    if other.pop("tensor", 1) > 1:
        parallel["tensor"] = sections.TensorParallel(size=2, mode="1d")  # type: ignore[assignment]
    return job(
        world,
        model=model,
        parallel=sections.Parallel(**parallel),  # type: ignore[arg-type]
        zero=sections.Zero(stage=zero),
        precision=sections.Precision(dtype=dtype),
        optimizer=sections.SGD(lr=0.1, momentum=0.9),
        batch=sections.Batch(global_size=16, accumulation=4),
        train=sections.Train(clip_grad_norm=other.pop("clip", 0.5)),
        schedule=sections.PipelineSchedule(type=kind, num_model_chunks=chunks) if pipe > 1 else None,
        **other,
    )


# ---- 1F1B ----


HALVES_NEED_ZERO = [("fp32", 0), ("fp32", 1), ("bf16", 1), ("fp16", 1)]


def _both(made: Job, theirs: bool) -> tuple[list[Any], dict[str, Tensor]]:
    """Return losses, and the weights after two steps, by DeepSpeed's train_batch or by the executor."""
    engine = engine_of(made)
    rows = []
    for step in range(2):
        fed = batches(made, engine.groups.coord["data"], step)
        rows.append(engine.deepspeed.train_batch(iter(fed)).item() if theirs else engine.train_batch(fed))
    return rows, full_state(engine.module, engine.groups)


@pytest.mark.parametrize(
    ("dtype", "zero", "tensor"),
    sampled(
        [(dtype, zero, tensor) for dtype, zero in HALVES_NEED_ZERO for tensor in (1, 2)],
        {("bf16", 1, 1)},
    ),
)
def test_1f1b_is_deepspeed_s_own_to_the_bit(dtype: str, zero: int, tensor: int) -> None:
    made = trained(4 * tensor, 2, zero=zero, dtype=dtype, tensor=tensor)
    ours, theirs = (on_ranks(made.mesh.world_size, _both, made, each, init="deepspeed") for each in (False, True))
    for (losses, weights), (their_losses, their_weights) in zip(ours, theirs, strict=True):
        assert losses == their_losses
        assert all(torch.equal(weight, their_weights[name]) for name, weight in weights.items())


# ---- the run matches the simulation ----


def _trace(made: Job) -> tuple[list[Action], list[Action]]:
    """Return the actions of a rank in a step of training and of evaluation."""
    engine = engine_of(made)
    ran: list[Action] = []

    def logged(method: Callable[..., None]) -> Callable[..., None]:
        def run(self: Any, action: Action, *args: Any) -> None:
            ran.append(action)
            method(self, action, *args)

        return run

    for name in ("_forward", "_backward", "_weight_gradients"):
        setattr(PipelineExecutor, name, logged(getattr(PipelineExecutor, name)))
    fed = batches(made, engine.groups.coord["data"])
    engine.train_batch(fed)
    trained_with = list(ran)
    ran.clear()
    engine.eval_batch(fed)
    return trained_with, ran


def _drawn(made: Job) -> list[list[Action]]:
    """Return each row of the schedule's picture, from left to right."""
    rows: dict[str, list[tuple[float, Action]]] = {}
    box = r'<rect class="box" x="([\d.]+)" y="(\d+)"[^>]*><title>(\w) of stage (\d+), micro-batch (\d+)</title>'
    picture = show.schedule_picture(made)
    assert picture is not None
    for x, y, kind, stage, micro in re.findall(box, picture.standalone()):
        rows.setdefault(y, []).append((float(x), Action(kind, int(stage), int(micro))))
    return [[action for _, action in sorted(rows[y])] for y in sorted(rows, key=int)]


@pytest.mark.parametrize(
    ("pipe", "kind", "chunks"),
    sampled([(pipe, *schedule) for pipe in (2, 4) for schedule in SCHEDULES], lambda row: row[0] == 2),
)
def test_each_rank_runs_the_order_that_is_shown(pipe: int, kind: str, chunks: int) -> None:
    made = trained(pipe, pipe, kind, chunks, num_layers=pipe * chunks)
    drawn = _drawn(made)
    assert len(drawn) == pipe
    for rank, (ran, evaluated) in enumerate(on_ranks(pipe, _trace, made, init="deepspeed")):
        assert ran == made.schedule.order(rank)
        assert ran == drawn[rank]
        assert evaluated == made.schedule.forward_order(rank)


# ---- dropout ----


def _dropped(made: Job) -> tuple[list[float], dict[str, Tensor]]:
    engine = engine_of(made)
    losses = [engine.train_batch(batches(made, engine.groups.coord["data"], step)) for step in range(2)]
    return losses, full_state(engine.module, engine.groups)


DROPPED = {
    "data 2": lambda: trained(2, 1, dropout=0.2),
    "data 2, recomputed": lambda: trained(
        2, 1, dropout=0.2, activation_checkpoint=sections.ActivationCheckpoint(interval=1)
    ),
    **{
        f"pipe 2, {kind} {chunks}": lambda kind=kind, chunks=chunks: trained(4, 2, kind, chunks, dropout=0.2)
        for kind, chunks in SCHEDULES
    },
    "pipe 2, zero_bubble 2, recomputed": lambda: trained(
        4, 2, "zero_bubble", 2, dropout=0.2, activation_checkpoint=sections.ActivationCheckpoint(interval=1)
    ),
    "pipe 4": lambda: trained(8, 4, dropout=0.2),
}


@pytest.mark.parametrize("name", sampled(list(DROPPED)[1:], {"pipe 2, zero_bubble 2, recomputed"}))
def test_masks_are_those_of_the_whole_model_in_every_schedule_and_cut(name: str) -> None:
    """The tolerance is fp32 noise: another mask, or none, changes the loss by a hundredth."""
    reference, made = DROPPED["data 2"](), DROPPED[name]()
    losses, weights = on_ranks(2, _dropped, reference, init="deepspeed")[0]
    undropped = on_ranks(2, _dropped, trained(2, 1), init="deepspeed")[0][0]
    assert abs(undropped[0] - losses[0]) > 1e-3
    for theirs, held in on_ranks(made.mesh.world_size, _dropped, made, init="deepspeed"):
        assert theirs == pytest.approx(losses, rel=1e-6)
        for weight_name, weight in held.items():
            expected = weights[weight_name]
            assert (weight - expected).abs().max() <= 1e-6 * expected.abs().max(), weight_name


# ---- skipped steps ----


def _skips(made: Job, poison: bool) -> tuple[list[Any], bool]:
    """Return skip, loss and norm of three steps, and whether the first one left the weights unchanged."""
    engine = engine_of(made)
    before = full_state(engine.module, engine.groups)
    hook = None
    if poison and engine.groups.coord["pipe"] == 0:
        hook = next(p for p in engine.module.parameters() if p.dim() > 1).register_hook(lambda grad: grad * torch.nan)
    rows = []
    for step in range(3):
        loss = engine.train_batch(batches(made, engine.groups.coord["data"], step))
        rows.append((engine.skipped, loss, engine.grad_norm))
        if step == 0:
            after = full_state(engine.module, engine.groups)
            unchanged = all(torch.equal(weight, after[name]) for name, weight in before.items())
            if hook is not None:
                hook.remove()
    return rows, unchanged


@pytest.mark.parametrize(
    ("kind", "chunks", "dtype", "zero"),
    sampled(
        [(*schedule, *how) for schedule in SCHEDULES[1:] for how in (("fp16", 1), ("fp32", 0), ("fp32", 1))],
        {("zero_bubble", 2, "fp16", 1)},
    ),
)
def test_steps_are_skipped_as_in_1f1b_on_all_ranks(kind: str, chunks: int, dtype: str, zero: int) -> None:
    """The cause is an overflow from too large a loss scale, or a NaN gradient on one stage."""
    scaled = {"precision": sections.Precision(dtype="fp16", extra={"initial_scale_power": 24, "hysteresis": 1})}
    made, reference = (
        dataclasses.replace(each, spec=dataclasses.replace(each.spec, **(scaled if dtype == "fp16" else {})))
        for each in (trained(4, 2, kind, chunks, zero=zero, dtype=dtype), trained(4, 2, zero=zero, dtype=dtype))
    )
    ranks, theirs = (on_ranks(4, _skips, each, dtype == "fp32", init="deepspeed") for each in (made, reference))
    for (rows, unchanged), (expected, _) in zip(ranks, theirs, strict=True):
        assert unchanged
        assert rows[0][0], "the first step is skipped"
        assert [skipped for skipped, *_ in rows] == [skipped for skipped, *_ in expected]
        assert [loss for _, loss, _ in rows] == pytest.approx([loss for _, loss, _ in expected], rel=1e-6)
        assert [norm for *_, norm in rows] == pytest.approx([norm for *_, norm in expected], rel=1e-6)


# ---- stages are reduced while others continue ----


def _log(made: Job) -> list[str]:
    """Return a rank's events in its second step: actions, reductions of a stage over replicas, and waits for them."""
    engine = engine_of(made)
    fed = batches(made, engine.groups.coord["data"])
    engine.train_batch(fed)
    log: list[str] = []
    backward = PipelineExecutor._backward

    def logged(self: Any, action: Action, completes: bool) -> None:
        log.append(f"B{action.stage}.{action.micro}")
        backward(self, action, completes)

    start, reduce_rest = collectives.start_all_reduce_, DeepSpeedEngine.allreduce_bucket

    def started(x: Tensor, axis: Any, op: str = "sum") -> Any:
        if x.numel() == 1:  # a loss, or a norm
            return start(x, axis, op)
        log.append("start")
        return start(x, axis, op)._replace(finish=lambda received: log.append("wait") or received)

    def rest(self: Any, bucket: list[Tensor], *args: Any, **kwargs: Any) -> Tensor:
        log.append("rest")
        return reduce_rest(self, bucket, *args, **kwargs)

    PipelineExecutor._backward, collectives.start_all_reduce_ = logged, started  # type: ignore[method-assign]
    DeepSpeedEngine.allreduce_bucket = rest
    engine.train_batch(fed)
    return log


def test_m17_without_zero_a_stage_is_reduced_under_the_backwards_of_another() -> None:
    log = on_ranks(4, _log, trained(4, 2, "interleaved", 2), init="deepspeed")[0]
    assert " ".join(log) == "B2.0 B2.1 B0.0 B0.1 B2.2 B2.3 start B0.2 B0.3 rest wait"
    alone = on_ranks(2, _log, trained(2, 2, "interleaved", 2), init="deepspeed")[0]
    assert not {"start", "wait"} & {*alone}, "one replica has nothing to reduce"
    whole = on_ranks(4, _log, trained(4, 2), init="deepspeed")[0]
    assert not {"start", "wait"} & {*whole}, "the last backward of one stage is the last of all"


def test_deepspeed_still_reduces_all_stages_at_the_end() -> None:
    """M17 patches this: the engine reduces by one call, which takes all parameters that are not frozen."""
    source = inspect.getsource(DeepSpeedEngine._get_gradients_for_reduction)
    assert "self.module.parameters()" in source
    assert "requires_grad" in source


# ---- shapes ----


def _changed(made: Job) -> None:
    engine = engine_of(made)
    fed = batches(made, engine.groups.coord["data"])
    engine.train_batch(fed)
    engine.eval_batch([(ids[:, :4], labels[:, :4]) for ids, labels in fed])


def test_samples_that_change_their_length_are_told() -> None:
    """The sending rank reports it, since the receiver would wait for data that never comes."""
    message = r"PIP213 .*the output of stage 0 changed from float32\[4, 8, 16\] to float32\[4, 4, 16\]"
    with pytest.raises(RankError, match=message):
        on_ranks(2, _changed, trained(2, 2), init="deepspeed")
