"""`train.check_replicas`: finds a flipped bit in any state, names ranks and step, and is silent otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema.sections import (
    Batch,
    ContextParallel,
    Parallel,
    PipelineParallel,
    PipelineSchedule,
    Precision,
    TensorParallel,
    Train,
    Zero,
)
from dslpar.training.replica_check import Difference, ReplicaCheck, _minority
from dslpar.training.replicated_state import Copies, Item, _ParameterCopies, replicated_state
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled


class Layout(NamedTuple):
    """Sections of a config, and the number of ranks."""

    world: int
    sections: dict[str, Any]


def _tensor(size: int, mode: str, **options: Any) -> Parallel:
    return Parallel(tensor=TensorParallel(size=size, mode=mode, **options))


def _pipe(**more: Any) -> Parallel:
    return Parallel(pipeline=PipelineParallel(size=2), **more)


BF16, FP16 = {"precision": Precision(dtype="bf16")}, {"precision": Precision(dtype="fp16")}
SEQUENCE = _tensor(2, "1d", sequence=True)
SIX, EIGHT = {"batch": Batch(global_size=6)}, {"batch": Batch(global_size=8, accumulation=2)}
LAYOUTS = {
    "data 2": Layout(2, {}),
    "data 3": Layout(3, SIX),
    "data 3, ZeRO 1, bf16": Layout(3, {"zero": Zero(stage=1), **BF16, **SIX}),
    "data 3, ZeRO 2": Layout(3, {"zero": Zero(stage=2), **SIX}),
    "data 3, ZeRO 3": Layout(3, {"zero": Zero(stage=3), **SIX}),
    "data 2, ZeRO 2, fp16": Layout(2, {"zero": Zero(stage=2), **FP16}),
    "data 2, ZeRO 1": Layout(2, {"zero": Zero(stage=1)}),
    "data 2, ZeRO 1, gathers overlapped": Layout(2, {"zero": Zero(stage=1, overlap_param_gather=True)}),
    "data 2, ZeRO 3, bf16": Layout(2, {"zero": Zero(stage=3), **BF16}),
    "data 2, ZeRO 3, nothing gathered": Layout(
        2, {"zero": Zero(stage=3, extra={"stage3_param_persistence_threshold": 0})}
    ),
    "data 2, ZeRO 1, offload": Layout(
        2, {"zero": Zero(stage=1, extra={"offload_optimizer": {"device": "cpu"}}), **BF16}
    ),
    "1d, data 2": Layout(4, {"parallel": _tensor(2, "1d"), **EIGHT}),
    "1d sequence, data 2, ZeRO 1, bf16": Layout(4, {"parallel": SEQUENCE, "zero": Zero(stage=1), **BF16}),
    "1d sequence, data 3, ZeRO 1": Layout(6, {"parallel": SEQUENCE, "zero": Zero(stage=1), **SIX}),
    "1d sequence, data 3, ZeRO 2": Layout(6, {"parallel": SEQUENCE, "zero": Zero(stage=2), **SIX}),
    "1d sequence, ZeRO 3": Layout(4, {"parallel": SEQUENCE, "zero": Zero(stage=3)}),
    "2d": Layout(4, {"parallel": _tensor(4, "2d")}),
    "2d, data 2, ZeRO 1": Layout(8, {"parallel": _tensor(4, "2d"), "zero": Zero(stage=1)}),
    "2.5d, ZeRO 1": Layout(8, {"parallel": _tensor(8, "2.5d", depth=2), "zero": Zero(stage=1)}),
    "3d": Layout(8, {"parallel": _tensor(8, "3d")}),
    "context 2": Layout(2, {"parallel": Parallel(context=ContextParallel(size=2))}),
    "context 2, data 2, ZeRO 1": Layout(
        4, {"parallel": Parallel(context=ContextParallel(size=2)), "zero": Zero(stage=1)}
    ),
    "pipe 2": Layout(2, {"parallel": _pipe()}),
    "pipe 2, data 2": Layout(4, {"parallel": _pipe(), **EIGHT}),
    "pipe 2, data 2, ZeRO 1, bf16": Layout(4, {"parallel": _pipe(), "zero": Zero(stage=1), **BF16}),
    "pipe 2, data 3": Layout(6, {"parallel": _pipe(), **SIX}),
    "pipe 2, interleaved, data 2": Layout(
        4, {"parallel": _pipe(), "schedule": PipelineSchedule(type="interleaved", num_model_chunks=2), **EIGHT}
    ),
    "pipe 2, 1d sequence": Layout(4, {"parallel": _pipe(tensor=TensorParallel(size=2, mode="1d", sequence=True))}),
    "pipe 2, context 2, ZeRO 1": Layout(4, {"parallel": _pipe(context=ContextParallel(size=2)), "zero": Zero(stage=1)}),
}
STEPS = 4


def _job(name: str, dropout: float = 0.1, **train: Any) -> Job:
    layout = LAYOUTS[name]
    gpt = section.GPT(num_layers=4, hidden_size=16, num_heads=4, vocab_size=32, max_seq_len=8, dropout=dropout)
    return job(layout.world, gpt, train=Train(**{"steps": 1000, "check_replicas": 1} | train), **layout.sections)


def _step(engine: Any, step: int) -> None:
    engine.train_batch(batches(engine.job, engine.groups.coord["data"], step))


# ---- clean runs ----


def _clean(made: Job) -> tuple[list[str], int]:
    """Return what a run's comparisons found, and how many items each compared."""
    engine = engine_of(made)
    check = ReplicaCheck(engine)
    found: list[str] = []
    for step in range(STEPS):
        _step(engine, step)
        difference = check.after_step()
        found += [] if difference is None else [difference.message]
    assert check.last_equal_step == STEPS, "that of the last step is known at once"
    return found, len(list(replicated_state(engine)))


EACH_TIME = {"data 3, ZeRO 3", "1d sequence, data 2, ZeRO 1, bf16", "2d", "pipe 2, data 2"}


@pytest.mark.parametrize("name", sampled(LAYOUTS, {"1d sequence, data 2, ZeRO 1, bf16", "pipe 2, data 2"}))
def test_nothing_is_found_in_a_clean_run(name: str) -> None:
    """Every step is compared, with dropout. The number of compared items is checked here, and by the tests below."""
    made = _job(name, steps=STEPS)
    for found, count in on_ranks(LAYOUTS[name].world, _clean, made, init="deepspeed"):
        assert found == []
        assert count >= 7


# ---- copies on ranks ----


def _copies(made: Job) -> dict[tuple[str, str], Copies]:
    engine = engine_of(made)
    _step(engine, 0)
    return {(item.kind, item.name.partition("[")[0]): item.copies for item in replicated_state(engine)}


NORM, QKV, TABLE = "blocks.0.norm1.weight", "blocks.0.attention.qkv.weight", "embedding.tokens.weight"
EXPECTED: list[tuple[str, dict[tuple[str, str], Copies | None]]] = [
    (
        "data 3",
        {
            ("weight", NORM): Copies(("data",)),
            ("exp_avg", QKV): Copies(("data",)),
            ("step", QKV): Copies(("data",)),
            ("counter", "global_steps"): Copies(("data",)),
            ("random state", "of torch, CPU"): None,
        },
    ),
    (
        "data 3, ZeRO 1, bf16",
        {("weight", NORM): Copies(("data",)), ("master weight", NORM): None, ("exp_avg", NORM): None},
    ),
    (
        "1d sequence, data 2, ZeRO 1, bf16",
        {
            ("weight", NORM): Copies(("data", "y")),
            ("weight", QKV): Copies(("data",)),
            ("master weight", QKV): None,
            ("random state", "of torch, CPU"): Copies(("y",)),
            ("optimizer's", "settings of group 0"): Copies(("data", "y")),
        },
    ),
    (
        "1d sequence, ZeRO 3",
        {
            ("gathered weight", NORM): Copies(("data", "y")),
            ("gathered weight", QKV): Copies(("data",)),
            ("weight", QKV): None,
        },
    ),
    ("data 2, ZeRO 3, nothing gathered", {("gathered weight", NORM): None, ("weight", NORM): None}),
    ("2d", {("weight", NORM): Copies(("q",)), ("weight", QKV): None}),
    (
        "3d",
        {
            ("weight", NORM): Copies(("q", "y")),
            ("weight", "blocks.0.mlp.up.bias"): Copies(("q", "z")),
            ("weight", QKV): None,
        },
    ),
    ("context 2, data 2, ZeRO 1", {("weight", QKV): Copies(("data", "d")), ("master weight", QKV): None}),
    ("pipe 2, context 2, ZeRO 1", {("weight", QKV): Copies(("d",)), ("master weight", QKV): Copies(("d",))}),
    (
        "pipe 2, data 2",
        {
            ("weight", TABLE): Copies(("data",), (0, 1)),
            ("exp_avg", TABLE): Copies(("data",), (0, 1)),
            ("weight", QKV): Copies(("data",)),
            ("counter", "global_steps"): Copies(("pipe", "data")),
            ("optimizer's", "settings of group 0"): Copies(("data",)),
        },
    ),
    # Each stage sums its gradients over replicas in its own buckets, in another order if there are three replicas.
    ("pipe 2, data 3", {("weight", TABLE): Copies(("data",))}),
]


@pytest.mark.parametrize(("name", "expected"), sampled(EXPECTED, lambda row: row[0] in EACH_TIME))
def test_copies_follow_from_placement_stage_of_zero_and_ties(
    name: str, expected: dict[tuple[str, str], Copies | None]
) -> None:
    found = on_ranks(LAYOUTS[name].world, _copies, _job(name), init="deepspeed")[0]
    assert {key: found.get(key) for key in expected} == expected


def _copies_over_tensor_axes(made: Job) -> dict[str, tuple[Copies, Copies]]:
    """Return a vector's copies as on CPUs, whose sums have a fixed order, and as on an accelerator; trained, frozen."""
    engine = engine_of(made)
    vector = dict(engine.named_parameters())[NORM]
    found = {}
    for kind in ("cpu", "cuda"):
        engine.deepspeed.device = torch.device(kind)
        copies = _ParameterCopies(engine)
        frozen = torch.nn.Parameter(vector.detach(), requires_grad=False)
        frozen.placement = vector.placement  # type: ignore[attr-defined]
        found[kind] = copies.of(vector, sharded=False), copies.of(frozen, sharded=False)
    return found


def test_on_accelerators_with_three_replicas_trained_copies_are_compared_over_data_alone() -> None:
    """NCCL may sum each data group's gradients in its own order; two terms have only one order."""
    for name, over_tensor in (("1d sequence, data 3, ZeRO 1", False), ("1d, data 2", True)):
        found = on_ranks(LAYOUTS[name].world, _copies_over_tensor_axes, _job(name), init="deepspeed")[0]
        own, frozen = found["cuda"]
        assert "y" in found["cpu"][0].axes
        assert ("y" in own.axes) == over_tensor
        assert "y" in frozen.axes
        assert "data" in own.axes


# ---- one flipped bit ----


@contextmanager
def _damaged(engine: Any, item: Item) -> Iterator[None]:
    """Flip one bit of an item, or replace its value, inside the `with`."""
    if isinstance(item.value, torch.Tensor) and item.kind != "random state":
        bits = item.value.detach().view(-1).view(torch.uint8)
        bits[len(bits) // 2] ^= 4
        yield
        bits[len(bits) // 2] ^= 4
        return
    if item.kind == "random state":
        state = torch.get_rng_state()
        torch.rand(1)
        yield
        torch.set_rng_state(state)
        return
    owner, name = _PLAIN[item.title](engine)
    values = owner if isinstance(owner, dict) else vars(owner)
    before = values[name]
    values[name] = before + 1
    yield
    values[name] = before


_PLAIN: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "counter global_samples": lambda engine: (engine.deepspeed, "global_samples"),
    "counter skipped_steps": lambda engine: (engine.deepspeed, "skipped_steps"),
    "loss scaler's cur_scale": lambda engine: (engine.deepspeed.optimizer.loss_scaler, "cur_scale"),
    "LR scheduler's state": lambda engine: (engine.deepspeed.lr_scheduler, "last_epoch"),
    "optimizer's settings of group 0": lambda engine: (engine.deepspeed.optimizer.param_groups[0], "lr"),
    "seed of the last micro-batch": lambda engine: (vars(engine.deepspeed.module), "micro_batch_seed"),
}
"""Locations of the plain values of some items, without the count of finished steps, which drives the loop."""


def _flips(made: Job) -> list[tuple[str, Copies, Difference | None]]:
    """Damage one item after another on the last rank: the first possible one of each kind and each kind of copies.

    The bit is flipped while a step's comparison begins, and restored before the next step, so the run continues clean.
    """
    from dslpar.distributed import collectives

    engine = engine_of(made)
    check, world = ReplicaCheck(engine), engine.groups.axis("pipe", "data", "tensor")
    _step(engine, 0)
    check.after_step()
    targets: dict[tuple[str, Copies], Item] = {}
    for item in replicated_state(engine):
        if (isinstance(item.value, torch.Tensor) and item.value.numel()) or item.title in _PLAIN:
            targets.setdefault((item.kind, item.copies), item)
    titles = collectives.gather_objects([(item.title, item.copies) for item in targets.values()], world)[-1]
    is_victim, rows = world.index == world.size - 1, []
    for step, (title, copies) in enumerate(titles, 1):
        _step(engine, step)
        item = next(each for each in replicated_state(engine) if each.title == title) if is_victim else None
        if item is None:
            found = check.after_step()
        else:
            with _damaged(engine, item):
                found = check.after_step()
        if step > 1:
            rows[-1] = (*rows[-1][:2], found)
        rows.append((title, copies, None))
    rows[-1] = (*rows[-1][:2], check.finish())
    return rows


def _holders(made: Job, rank: int, copies: Copies) -> tuple[int, ...]:
    """Return the ranks that share all other coordinates with a rank, by the mesh alone."""
    mesh, own = made.mesh, made.mesh.coord(rank)
    free = {*copies.axes} | ({"pipe"} if copies.stages else set())
    coords = {other: mesh.coord(other) for other in range(mesh.world_size)}
    return tuple(
        other for other, coord in coords.items() if all(coord[axis] == own[axis] for axis in coord if axis not in free)
    )


KINDS = {
    "data 3": {"weight", "exp_avg", "exp_avg_sq", "step", "counter", "LR scheduler's", "optimizer's"},
    "data 2, ZeRO 2, fp16": {"weight", "loss scaler's", "counter", "LR scheduler's", "optimizer's"},
    "1d sequence, data 2, ZeRO 1, bf16": {
        *("weight", "master weight", "exp_avg", "exp_avg_sq", "counter", "optimizer's", "random state", "seed"),
        "LR scheduler's",
    },
    "1d sequence, ZeRO 3": {
        *("weight", "gathered weight", "master weight", "exp_avg", "exp_avg_sq", "counter", "optimizer's"),
        *("LR scheduler's", "random state", "seed"),
    },
    "2d": {
        *("weight", "exp_avg", "exp_avg_sq", "step", "counter", "LR scheduler's", "optimizer's", "random state"),
        "seed",
    },
    "context 2": {
        *("weight", "exp_avg", "exp_avg_sq", "step", "counter", "LR scheduler's", "optimizer's", "random state"),
        "seed",
    },
    "pipe 2, data 2": {"weight", "exp_avg", "exp_avg_sq", "step", "counter", "LR scheduler's", "optimizer's"},
    "pipe 2, context 2, ZeRO 1": {
        *("weight", "master weight", "exp_avg", "exp_avg_sq", "counter", "LR scheduler's", "optimizer's"),
        *("random state", "seed"),
    },
}


@pytest.mark.parametrize("name", sampled(KINDS, {"1d sequence, data 2, ZeRO 1, bf16", "pipe 2, data 2"}))
def test_one_flipped_bit_of_each_kind_of_state_is_named_with_ranks_and_step(name: str) -> None:
    made = _job(name)
    world = LAYOUTS[name].world
    every = on_ranks(world, _flips, made, init="deepspeed")
    assert all(rows == every[0] for rows in every), "all ranks know the same"
    assert {*map(_kind_of, every[0])} == KINDS[name]
    for step, (title, copies, found) in enumerate(every[0], 2):
        assert found is not None, title
        assert (found.title, found.step) == (title, step)
        assert found.ranks == _holders(made, world - 1, copies)
        assert found.unlike == ((world - 1,) if len(found.ranks) > 2 else ())
        assert found.others == ()


def _kind_of(row: tuple[str, Copies, Difference | None]) -> str:
    kinds = {kind for each in KINDS.values() for kind in each}
    return max((kind for kind in kinds if row[0].startswith(f"{kind} ")), key=len)


def _late(made: Job, flipped_after: int) -> list[tuple[int, Difference]]:
    """Return the differences by the step after which they were known; a weight's bit flips permanently on rank 1."""
    engine = engine_of(made)
    check, found = ReplicaCheck(engine), []
    for step in range(8):
        _step(engine, step)
        if (difference := check.after_step()) is not None:
            found.append((engine.steps_done, difference))
        if engine.steps_done == flipped_after and engine.groups.rank == 1:
            weight = dict(engine.named_parameters())[QKV]
            weight.detach().view(-1).view(torch.int32)[5] ^= 1 << 20
    return found


@pytest.mark.parametrize("flipped_after", sampled([2, 3, 5], {3}))
def test_a_flip_is_found_within_the_interval_and_known_a_step_later(flipped_after: int) -> None:
    """A step from wrong weights sends wrong gradients to all ranks, so moments stay equal, and the weight does not."""
    due = {2: 3, 3: 6, 5: 6}[flipped_after]
    made = _job("data 3", check_replicas=3)
    for found in on_ranks(3, _late, made, flipped_after, init="deepspeed"):
        known_after, first = found[0]
        assert (first.step, known_after, first.last_equal_step) == (due, due + 1, due - 3 or None)
        assert first.message.endswith("they were equal after step 3" if due > 3 else "this is the first comparison")
        assert (first.title, first.ranks, first.unlike) == (f"weight {QKV}", (0, 1, 2), (1,))


def test_the_majority_is_more_than_half() -> None:
    assert _minority([7, 7, 8], (0, 4, 8)) == (8,)
    assert _minority([7, None, 7], (0, 4, 8)) == (4,), "a rank that has no such state at all"
    assert _minority([7, 8], (0, 1)) == ()
    assert _minority([7, 7, 8, 8], (0, 1, 2, 3)) == ()
    assert _minority([7, 7, 8, 9], (0, 1, 2, 3)) == ()


def _sent(made: Job) -> tuple[list[str], list[str]]:
    """Return the additional collectives of a step that begins a comparison, and of the step that reads it."""
    from unittest.mock import patch

    from dslpar.distributed import collectives

    engine = engine_of(made)
    check, sent = ReplicaCheck(engine), list[str]()
    names = ("start_all_gather", "gather_objects", "all_gather", "all_reduce", "broadcast_object")
    real = {name: getattr(collectives, name) for name in names}
    counted = {
        name: (lambda *args, _name=name, **kw: (sent.append(_name), real[_name](*args, **kw))[1]) for name in names
    }
    rows = []
    for step in range(6):
        _step(engine, step)
        with patch.multiple(collectives, **counted):
            check.after_step()
        rows.append(list(sent))
        sent.clear()
    return rows[3], rows[4]


def _waits(made: Job) -> Any:
    """Return the waits of a step, of the comparison after it, and of the next step."""
    from benchmarks.device_counter import count_waits

    engine = engine_of(made)
    check = ReplicaCheck(engine)
    for step in range(2):  # the first makes the optimizer's states, the second finds them
        _step(engine, step)
        check.after_step()
    fed = batches(made, engine.groups.coord["data"], 2)
    with count_waits() as waits:
        engine.train_batch(fed)
        assert check.after_step() is None
        engine.train_batch(fed)
        assert check.after_step() is None
    return waits.reads, waits.copies, waits.synchronizations


def test_the_host_waits_for_the_device_once_a_step_as_without_comparisons() -> None:
    for reads, copies, synchronizations in on_ranks(2, _waits, _job("data 2, ZeRO 1", dropout=0.0), init="deepspeed"):
        assert len(reads) == 2, reads
        assert all("host_reads.py" in read for read in reads)
        assert (copies, synchronizations) == ([], [])


def test_a_comparison_is_one_all_gather_of_a_few_numbers() -> None:
    """In the first comparison, ranks also tell each other what they have copies of."""
    made = _job("1d sequence, data 2, ZeRO 1, bf16", check_replicas=2)
    assert on_ranks(4, _sent, made, init="deepspeed") == [(["start_all_gather"], [])] * 4
