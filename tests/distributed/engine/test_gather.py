"""Gathering weights under the next forward: order, result, and who waits for it.

Most tests run with `late()`: data of another rank is NaN until somebody waits for it, however fast it came. So a layer
or other reader that does not wait is found every time, and not only on a slow network.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import utils
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn

import dslpar
from dslpar import checkpoint
from dslpar.distributed import collectives
from dslpar.distributed.collectives import Axis, Pending
from dslpar.distributed.parameter_gather import ParameterGather
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.models.layered import LayerSpec
from dslpar.schema import sections
from tests.properties.invariance.layouts import MODES, Layout, pipe, tensor
from tests.properties.invariance.run_and_reference import run_ranks
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.forked_training import start_program
from tests.support.plain_models import mlp, points, sgd, shares, written
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

BUCKET = 700
"""Elements: a block's matrices are several buckets, and all vectors are one. Some buckets contain the end of a rank's
part.
"""
PIPE = {"pipeline": sections.PipelineParallel(size=2)}
ONE_D = {"tensor": sections.TensorParallel(size=2, mode="1d")}
TWO_D = {"tensor": sections.TensorParallel(size=4, mode="2d")}


def trained(
    world: int,
    overlap: bool = True,
    stage: int = 1,
    accumulation: int = 1,
    dtype: str = "fp32",
    parallel: Mapping[str, Any] | None = None,
    zero: Mapping[str, Any] | None = None,
    **other: Any,
) -> Job:
    """Return the job of a GPT with tied embeddings, which the last layer uses as well."""
    gpt = section.GPT(num_layers=4, hidden_size=16, num_heads=4, vocab_size=VOCAB, max_seq_len=LENGTH)
    extra = ({"allgather_bucket_size": BUCKET} if overlap else {}) | dict(zero or {})
    return job(
        world,
        model=gpt,
        parallel=sections.Parallel(**parallel or {}),
        zero=sections.Zero(stage=stage, overlap_param_gather=overlap, extra=extra),
        batch=sections.Batch(global_size=24, accumulation=accumulation),
        precision=sections.Precision(dtype=dtype, extra=OVERFLOWS if dtype == "fp16" else {}),
        **{"train": sections.Train(clip_grad_norm=0.5)} | other,
    )


OVERFLOWS = {"initial_scale_power": 22, "hysteresis": 1}
"""A loss scale with which the first steps are skipped."""


def late() -> None:
    """Deliver other ranks' data when somebody waits for it; until then it is NaN.

    A rank sends its data as of the call's start: otherwise gloo's thread might read it after a later wait.
    """
    broadcast, all_gather = collectives.start_broadcast_, collectives.start_all_gather_
    gather = collectives.start_all_gather

    def late_broadcast(x: Tensor, axis: Axis, root: int) -> Pending:
        if axis.index == root:
            return broadcast(x, axis, root)
        pending = broadcast(torch.empty_like(x), axis, root)
        x.fill_(torch.nan)
        return pending._replace(finish=x.copy_)

    def late_all_gather(x: Tensor, axis: Axis) -> Pending:
        pending = all_gather(x.clone(), axis)
        own = x.view(axis.size, -1)[axis.index].clone()
        x.fill_(torch.nan)
        x.view(axis.size, -1)[axis.index] = own
        return pending._replace(finish=x.copy_)

    def prompt_gather(x: Tensor, *args: Any, **options: Any) -> Pending:
        return gather(x.clone(), *args, **options)

    collectives.start_broadcast_, collectives.start_all_gather_ = late_broadcast, late_all_gather
    collectives.start_all_gather = prompt_gather


# ---- order ----


def _log(made: Job) -> list[tuple[str, Any]]:
    """Return the events from the first step on: ("step", None), ("start" or "wait", call number), ("layer", name)."""
    engine = engine_of(made)
    log: list[tuple[str, Any]] = []
    numbers = iter(range(10**6))

    def logged(start: Callable[..., Pending]) -> Callable[..., Pending]:
        def started(*args: Any) -> Pending:
            number = next(numbers)
            log.append(("start", number))
            return start(*args)._replace(finish=lambda received: log.append(("wait", number)) or received)

        return started

    collectives.start_broadcast_ = logged(collectives.start_broadcast_)
    collectives.start_all_gather_ = logged(collectives.start_all_gather_)
    apply = LayerSpec.apply

    def logged_apply(spec: LayerSpec, module: nn.Module, x: Tensor) -> Tensor:
        log.append(("layer", spec.name))
        return apply(spec, module, x)

    LayerSpec.apply = logged_apply  # type: ignore[method-assign]
    step = engine.deepspeed.optimizer.step
    engine.deepspeed.optimizer.step = lambda *args: (log.append(("step", None)), step(*args))[1]
    for number in range(3):
        engine.train_batch(batches(made, engine.groups.coord["data"], number))
    return log[log.index(("step", None)) :]


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        pytest.param(2, {}, id="data 2"),
        pytest.param(4, PIPE, id="pipe 2, data 2"),
        pytest.param(4, ONE_D, id="1d 2, data 2", marks=pytest.mark.prove),
    ],
)
def test_the_first_layer_runs_while_the_last_bucket_is_in_flight(world: int, parallel: Mapping[str, Any]) -> None:
    for log in on_ranks(world, _log, trained(world, accumulation=3, parallel=parallel), init="deepspeed"):
        steps = [index for index, (event, _) in enumerate(log) if event == "step"]
        assert len(steps) == 3
        for begin, end in pairwise(steps):
            part = log[begin + 1 : end]
            starts, waits = ([number for event, number in part if event == which] for which in ("start", "wait"))
            assert part[: len(starts)] == [("start", number) for number in starts], "all are on their way at once"
            assert len(starts) >= 4
            assert sorted(waits) == starts, "each is waited for once, in the forward"
            layers = [index for index, (event, _) in enumerate(part) if event == "layer"]
            waited = [index for index, (event, _) in enumerate(part) if event == "wait"]
            assert layers[0] < waited[-1], "the first layer runs while the last bucket is in flight"
            # A pipeline's forward of all its layers comes before the second micro-batch's first layer.
            names = list(dict.fromkeys(name for event, name in part if event == "layer"))
            first = {name: part.index(("layer", name)) for name in names}
            between = [any(a < wait < b for wait in waited) for a, b in pairwise(first.values())]
            assert sum(between) >= (1 if parallel is PIPE else 2), (
                "several layers run, each before the next one's weights are waited for"
            )
            assert waited[-1] < first[names[-1]], "none is left behind the last layer"


def test_buckets_come_in_the_order_of_the_layers_and_hold_all_weights() -> None:
    for in_order, is_cut in on_ranks(2, _buckets, init="deepspeed"):
        assert in_order
        assert is_cut


def _buckets() -> tuple[bool, bool]:
    """Weights may have any order in memory."""
    engine = engine_of(trained(2, zero={"round_robin_gradients": True, "parameter_alignment": True}))
    zero, gather = engine.deepspeed.optimizer, engine.deepspeed.module.parameter_gather
    held = [{id(p) for p in layer.parameters()} for _, layer in engine.module.built_layers()]
    users = [
        min(index for index, ids in enumerate(held) if ids & {id(p) for p in bucket.params})
        for bucket in gather._buckets
    ]
    spans = sorted((bucket.group, bucket.begin, bucket.end) for bucket in gather._buckets)
    is_cut = True
    for group, flat in enumerate(zero.bit16_groups_flat):
        ends = [(begin, end) for of, begin, end in spans if of == group]
        is_cut &= ends[0][0] == 0 and ends[-1][1] == flat.numel() and all(a[1] == b[0] for a, b in pairwise(ends))
    for bucket in gather._buckets:
        flat = zero.bit16_groups_flat[bucket.group]
        at = [(p.data_ptr() - flat.data_ptr()) // flat.element_size() for p in bucket.params]
        is_cut &= all(
            bucket.begin <= begin and begin + p.numel() <= bucket.end
            for begin, p in zip(at, bucket.params, strict=True)
        )
    return users == sorted(users) and len(set(users)) > 2, is_cut


# ---- result ----

Run = tuple[list[tuple[Any, ...]], list[Tensor]]


def _run(made: Job, steps: int = 5) -> Run:
    """Return losses, norm and skip of each step, the final weights, and held-out losses in the middle."""
    late()
    engine = engine_of(made)
    rows = []
    for step in range(steps):
        fed = batches(made, engine.groups.coord["data"], step)
        loss = engine.train_batch(fed)
        held = engine.eval_batch(fed) if step % 2 else None
        rows.append((loss, engine.grad_norm, engine.skipped, held))
    return rows, [p.detach().clone() for _, p in engine.named_parameters()]


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    # name: (world, differences from one replica of ZeRO 1, fp32)
    "ZeRO 1": (2, {}),
    "ZeRO 1, accumulation 3": (2, {"accumulation": 3}),
    "ZeRO 2, accumulation 3, bf16": (2, {"stage": 2, "accumulation": 3, "dtype": "bf16"}),
    "ZeRO 2": (2, {"stage": 2}),
    "ZeRO 1, fp16": (2, {"dtype": "fp16"}),
    "ZeRO 2, fp16, not clipped": (2, {"stage": 2, "dtype": "fp16", "train": sections.Train()}),
    "ZeRO 1, four replicas, bf16": (4, {"dtype": "bf16"}),
    "ZeRO 1, three replicas": (3, {}),
    "pipe 2, data 2, accumulation 3, bf16": (4, {"parallel": PIPE, "accumulation": 3, "dtype": "bf16"}),
    "pipe 2, data 2": (4, {"parallel": PIPE}),
    "1d 2, data 2, ZeRO 2, bf16": (4, {"parallel": ONE_D, "stage": 2, "dtype": "bf16"}),
    "2d 4, data 2": (8, {"parallel": TWO_D}),
    "pipe 2, 1d 2, data 2, fp16": (8, {"parallel": PIPE | ONE_D, "dtype": "fp16", "accumulation": 3}),
    "recomputed": (2, {"activation_checkpoint": sections.ActivationCheckpoint(interval=2), "dtype": "bf16"}),
    "offloaded, bf16": (2, {"zero": {"offload_optimizer": {"device": "cpu"}}, "dtype": "bf16"}),
    "round robin, aligned": (2, {"stage": 2, "zero": {"round_robin_gradients": True, "parameter_alignment": True}}),
    "each parameter by itself": (2, {"zero": {"allgather_bucket_size": 0}}),
    "all in one bucket": (2, {"zero": {"allgather_bucket_size": 10**6}, "stage": 2}),
    "DeepSpeed reduces": (2, {"zero": {"overlap_comm": False}}),
    "SGD": (2, {"optimizer": sections.SGD(lr=0.1, momentum=0.9), "stage": 2}),
}
FEW = {
    "ZeRO 2, accumulation 3, bf16",
    "round robin, aligned",
}
"""test_every_family_that_has_replicas_waits_in_every_mode has a pipeline."""


@pytest.mark.parametrize("name", sampled(CASES, FEW))
def test_the_result_is_the_one_without_to_the_bit(name: str) -> None:
    """Data in transit is not computed with, so nothing may differ."""
    world, other = CASES[name]
    found, expected = (
        on_ranks(world, _run, trained(world, overlap, **other), init="deepspeed") for overlap in (True, False)
    )
    for (rows, weights), (expected_rows, expected_weights) in zip(found, expected, strict=True):
        assert rows == expected_rows
        assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))
        assert all(bool(torch.isfinite(weight).all()) for weight in weights)
        skipped = [row[2] for row in rows]
        assert skipped[-1] is False
        assert skipped[0] == (other.get("dtype") == "fp16"), "the loss scale begins too large, and comes down"


def _run_without_waiting(made: Job) -> bool:
    """Return whether a layer was seen to compute with missing weights."""
    ParameterGather.wait_for = lambda self, layer: None  # type: ignore[method-assign]
    late()
    engine = engine_of(made)
    fed = batches(made, engine.groups.coord["data"])
    engine.train_batch(fed)
    return engine.eval_batch(fed) != engine.eval_batch(fed)  # NaN


@pytest.mark.parametrize(("world", "parallel"), [(2, {}), (4, PIPE)], ids=["data 2", "pipe 2, data 2"])
def test_these_tests_fail_where_no_layer_waits(world: int, parallel: Mapping[str, Any]) -> None:
    assert on_ranks(world, _run_without_waiting, trained(world, parallel=parallel), init="deepspeed") == [True] * world


def _compiled(made: Job) -> Run:
    return _run(made, 3)


@pytest.mark.prove
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_layers_wait_too() -> None:
    train = sections.Train(compile=True, compile_backend="aot_eager")
    found, expected = (
        on_ranks(2, _compiled, trained(2, overlap, train=train), init="deepspeed") for overlap in (True, False)
    )
    for (rows, weights), (expected_rows, expected_weights) in zip(found, expected, strict=True):
        assert rows == expected_rows
        assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))


def _by_calls(made: Job) -> Run:
    """Run whole batches with accumulation, and single calls per micro-batch."""
    late()
    engine = engine_of(made)
    rank, rows = engine.groups.coord["data"], []
    for step in range(3):
        with engine.no_sync():
            engine.forward_backward(batches(made, rank, 2 * step))
        engine.forward_backward(batches(made, rank, 2 * step + 1))
        engine.step()
        losses = []
        for x, y in batches(made, rank, step):
            loss = engine.criterion(engine(x), y)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        rows.append((losses, engine.grad_norm))
    return rows, [p.detach().clone() for _, p in engine.named_parameters()]


def test_calls_of_single_micro_batches_wait_too() -> None:
    found, expected = (
        on_ranks(2, _by_calls, trained(2, overlap, accumulation=2), init="deepspeed") for overlap in (True, False)
    )
    for (rows, weights), (expected_rows, expected_weights) in zip(found, expected, strict=True):
        assert rows == expected_rows
        assert all(torch.equal(a, b) for a, b in zip(weights, expected_weights, strict=True))


GROUPS = {words: made("x") for words, made in MODES.items() if words != "3d 8"}
"""Tensor groups of up to four ranks, in each mode but 3d."""


def size_of(parallel: dict[str, Any]) -> int:
    return int(parallel["tensor"].size)


ROWS = {
    **{f"{words}, data 2": Layout(2 * size_of(made), made, zero=1) for words, made in GROUPS.items()},
    "Sequential, pipe 2, data 2": Layout(4, pipe(2), zero=1, ignoring=True, model="Sequential"),
    "Llama, pipe 2, data 2, recompute": Layout(4, pipe(2), zero=1, tied=False, recompute=1, model="Llama"),
    "data 2, ZeRO 2, offload": Layout(2, {}, zero=2, offload=("optimizer",)),
    "bf16, data 2, 1d 2, ZeRO 2": Layout(4, tensor("1d", 2), zero=2, dtype="bf16"),
    "RMSprop, data 2": Layout(2, {}, zero=1, optimizer="RMSprop"),
    "MoCo, data 2": Layout(2, {}, zero=1, model="MoCo", accumulation=1),
    "transformers' T5, pipe 2, data 2": Layout(4, pipe(2), zero=1, ignoring=True, model="transformers' T5"),
    "transformers' Llama, LoRA, data 2": Layout(2, {}, zero=1, model="transformers' Llama, LoRA"),
}
"""Readers of weights, and ZeRO's treatment of them."""
FEW_ROWS = {"Sequential, pipe 2, data 2"}


@pytest.mark.parametrize("name", sampled(ROWS, FEW_ROWS))
def test_every_family_that_has_replicas_waits_in_every_mode(name: str) -> None:
    layout = ROWS[name]
    if layout.model.startswith("transformers'") and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    expected, found = run_ranks(layout), run_ranks(layout._replace(gather=True), late)
    for (losses, norms, weights), (expected_losses, expected_norms, expected_weights) in zip(
        found, expected, strict=True
    ):
        assert (losses, norms) == (expected_losses, expected_norms)
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


# ---- waiting ----


def _is_there(tensors: Any) -> bool:
    return all(bool(torch.isfinite(each).all()) for each in tensors)


READERS: dict[str, Callable[[Any, nn.Module], bool]] = {
    "engine.module": lambda engine, kept: _is_there(engine.module.parameters()),
    "engine.named_parameters": lambda engine, kept: _is_there(p for _, p in engine.named_parameters()),
    "engine.wait_for_weights": lambda engine, kept: (engine.wait_for_weights(), _is_there(kept.parameters()))[1],
    "a module's state_dict": lambda engine, kept: _is_there(kept.state_dict().values()),
    "a layer's state_dict": lambda engine, kept: all(_is_there(each.state_dict().values()) for each in kept.children()),
    "full_state": lambda engine, kept: _is_there(checkpoint.full_state(kept, engine.groups).values()),
    "DeepSpeed's module_state_dict": lambda engine, kept: _is_there(engine.deepspeed.module_state_dict().values()),
    "a call of a layer": lambda engine, kept: _is_there([kept.get_submodule("blocks.2")(torch.ones(2, LENGTH, 16))]),
    "evaluation": lambda engine, kept: _is_there([torch.tensor(engine.eval_batch(engine.fed))]),
    "DeepSpeed's update of weights": lambda engine, kept: (
        engine.deepspeed.optimizer.update_lp_params(),
        _is_there(kept.parameters()),
    )[1],
}


def _read(made: Job, reader: str) -> tuple[bool, bool]:
    """Return whether weights were missing after a step, and whether the reader saw no missing ones."""
    late()
    engine = engine_of(made)
    kept = engine.module
    engine.fed = batches(made, engine.groups.coord["data"])
    engine.train_batch(engine.fed)
    return not _is_there(kept.parameters()), READERS[reader](engine, kept)


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_weights_waits_for_them(reader: str) -> None:
    assert on_ranks(2, _read, trained(2), reader, init="deepspeed") == [(True, True)] * 2


PROGRAM = """
batch = dict(global_size=16, accumulation=2)
zero = dict(stage=1{overlap})
train = dict(steps=4, clip_grad_norm=0.5, output_dir={folder!r})
parallel = dict(data=2)
"""
OVERLAP = ", overlap_param_gather=True, allgather_bucket_size=8"


def _saving(path: str, until: int) -> tuple[list[Any], dict[str, Tensor]]:
    """Run a program that evaluates, saves after every second step, and resumes from an existing checkpoint."""
    late()
    engine = dslpar.initialize(path, model=mlp(), optimizer=sgd).engine
    resumed = engine.resume()
    rows: list[Any] = [resumed and resumed.name]
    while engine.steps_done < until:
        fed = shares(engine, *points(engine.steps_done))
        rows += [engine.train_batch(fed), engine.eval_batch(fed), engine.train_batch(fed), engine.grad_norm]
        engine.save()
    return rows, {name: p.detach().clone() for name, p in engine.named_parameters()}


def test_a_program_that_saves_and_resumes_is_the_one_without(tmp_path: Path) -> None:
    paths = []
    for overlap in (OVERLAP, ""):
        folder = tmp_path / ("with" if overlap else "without")
        folder.mkdir()
        paths.append(written(folder, PROGRAM.format(folder=str(folder / "out"), overlap=overlap)))
    for until in (2, 4):
        found, expected = (on_ranks(2, _saving, path, until, init="deepspeed") for path in paths)
        for (rows, weights), (expected_rows, expected_weights) in zip(found, expected, strict=True):
            assert rows == expected_rows
            assert rows[0] == (None if until == 2 else "step_000002")
            assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())


TRAIN = """
model = dict(type='GPT', num_layers=2, hidden_size=32, num_heads=4, vocab_size=256, max_seq_len=16)
parallel = dict(data=2)
batch = dict(global_size=8, accumulation=2)
precision = 'bf16'
zero = dict(stage=2{overlap})
train = dict(steps=6, eval_interval=2, eval_steps=2, save_interval=2, async_save={is_async}, output_dir={folder!r})
"""


@pytest.mark.prove  # `make test` has test_a_program_that_saves_and_resumes_is_the_one_without
@pytest.mark.parametrize("is_async", [True, False])
def test_a_run_of_train_py_that_saves_under_way_is_the_one_without(tmp_path: Path, is_async: bool) -> None:
    """Without overlap the run goes to its end at once. With it, four steps are followed by a resume and two more."""

    def run(overlap: str, *argv: str) -> list[list[Any]]:
        folder = tmp_path / ("with" if overlap else "without")
        folder.mkdir(exist_ok=True)
        path = written(folder, TRAIN.format(overlap=overlap, is_async=is_async, folder=str(folder / "out")))

        def program() -> int:
            from dslpar.training.main import main

            late()
            return main(["--config", path, *argv])

        said = folder / "said.txt"
        with start_program(2, program, said) as ranks:
            assert ranks.wait(120) == [0, 0], said.read_text()
        records = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        return [[record.get(key) for key in ("step", "loss", "grad_norm", "eval_loss")] for record in records]

    whole = run("")
    assert len(whole) == 6
    assert run(OVERLAP, "train.steps=4")[:3] == whole[:3]
    assert run(OVERLAP, "--resume") == whole


# ---- when it is on ----


def _gathers(made: Job) -> bool:
    return isinstance(engine_of(made).deepspeed.module.parameter_gather, ParameterGather)


@pytest.mark.parametrize(
    ("world", "overlap", "stage", "expected"),
    [(2, True, 1, True), (2, True, 2, True), (2, False, 1, False), (2, True, 3, False), (1, True, 1, False)],
)
def test_it_is_on_where_the_author_says_so_and_there_are_replicas(
    world: int, overlap: bool, stage: int, expected: bool
) -> None:
    made = trained(world, overlap, stage)
    assert on_ranks(world, _gathers, made, init="deepspeed") == [expected] * world


# ---- DeepSpeed's behaviour: when this fails, the patch of its number in deepspeed_patches can go ----


def test_m16_deepspeed_still_waits_for_the_gathers() -> None:
    step = inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.step)
    assert step.count("all_gather_dp_groups(") == 1
    assert step.index("self._optimizer_step(i)") < step.index("all_gather_dp_groups(")
    for function in (utils.all_gather_dp_groups, utils.all_gather_into_tensor_dp_groups):
        assert "async_op" not in inspect.getsource(function)
