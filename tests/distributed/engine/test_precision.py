"""fp16 loss scaling: on an overflow all ranks skip the step, the scale halves, and the run continues."""

from __future__ import annotations

import math
from contextlib import nullcontext
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dslpar.core.errors import DslparError
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.collectives import all_gather
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

STEPS = 8
PIPE = {"pipeline": sections.PipelineParallel(size=2)}
ONE_D = {"tensor": sections.TensorParallel(size=2, mode="1d")}
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
LAYOUTS: dict[str, tuple[int, int, dict[str, Any], dict[str, Any]]] = {
    # name: (world, ZeRO stage, parallel, ZeRO's other keys)
    "one process": (1, 1, {}, {}),
    "data 2, ZeRO 2": (2, 2, {}, {}),
    "data 2, ZeRO 3": (2, 3, {}, {}),
    "data 2, ZeRO 2, offload": (2, 2, {}, OFFLOAD),
    "1d 2": (2, 1, ONE_D, {}),
    "1d 2, ZeRO 2, offload": (2, 2, ONE_D, OFFLOAD),
    "1d 2, ZeRO 3": (2, 3, ONE_D, {}),
    "1d 2, ZeRO 3, offload": (2, 3, ONE_D, OFFLOAD),
    "pipe 2": (2, 1, PIPE, {}),
    "pipe 2, offload": (2, 1, PIPE, OFFLOAD),
    "pipe 2, 1d 2": (4, 1, PIPE | ONE_D, {}),
}


def half(name: str, dtype: str = "fp16", **scale: Any) -> Job:
    world, stage, parallel, extra = LAYOUTS[name]
    return job(
        world,
        parallel=sections.Parallel(**parallel),
        batch=sections.Batch(global_size=4, accumulation=2),
        zero=sections.Zero(stage=stage, extra=extra),
        optimizer=sections.SGD(lr=0.1, momentum=0.9),
        lr_scheduler=sections.LRScheduler(type="linear", warmup_steps=3),
        precision=sections.Precision(dtype=dtype, extra=scale),
        train=sections.Train(steps=STEPS),
    )


class Row(NamedTuple):
    """One step on one rank."""

    skipped: bool
    grad_norm: float
    lr: float
    scale: float
    """The scale before the step."""
    moved: bool
    """Whether a weight of this rank changed."""


def _steps(made: Job, broken: tuple[int, ...] = ()) -> list[Row]:
    """Return the steps. `broken`: steps in which one gradient of the last rank is infinite."""
    engine, now, rows = engine_of(made), -1, []
    if engine.groups.rank == made.mesh.world_size - 1:
        p = [p for p in engine.module.parameters() if p.requires_grad][-1]
        p.register_hook(lambda grad: grad * math.inf if now in broken else grad)
    weights = _weights(engine)
    for now in range(STEPS):
        scale = engine.deepspeed.optimizer.cur_scale
        engine.train_batch(batches(made, engine.groups.coord["data"], now))
        before, weights = weights, _weights(engine)
        rows.append(Row(engine.skipped, engine.grad_norm, engine.lr, scale, not torch.equal(before, weights)))
    return rows


def _weights(engine: Any) -> torch.Tensor:
    """Return everything that this rank holds, with ZeRO-3 shards gathered."""
    import deepspeed

    parameters = list(engine.module.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return torch.cat([p.detach().flatten() for p in parameters])


@pytest.mark.parametrize("name", sampled(LAYOUTS, {"one process", "1d 2, ZeRO 2, offload"}))
def test_too_large_a_scale_halves_until_it_fits(name: str) -> None:
    """2**19 is too large for gradients of 0.2 and more in a dtype that ends at 65504."""
    ranks = on_ranks(LAYOUTS[name][0], _steps, half(name, initial_scale_power=19, hysteresis=1), init="deepspeed")
    assert all(rows == ranks[0] for rows in ranks), "all ranks skip, and count, alike"
    rows = ranks[0]
    skips = [row.skipped for row in rows].index(False)
    assert 1 <= skips <= 5
    assert [row.skipped for row in rows] == [True] * skips + [False] * (STEPS - skips)
    assert [row.scale for row in rows] == [2.0 ** (19 - min(step, skips)) for step in range(STEPS)]
    assert [row.moved for row in rows] == [not row.skipped for row in rows]
    assert all(math.isinf(row.grad_norm) == row.skipped for row in rows)
    # The LR scheduler counts applied steps, so its warm-up begins once the scale fits.
    assert [row.lr for row in rows[skips : skips + 3]] == pytest.approx([0.1 / 3, 0.2 / 3, 0.1])
    assert {row.lr for row in rows[:skips]} == {rows[skips].lr}


SCALES = {"static": {"loss_scale": 64.0}, "dynamic": {"initial_scale_power": 6, "hysteresis": 1}}
FEW = ("data 2, ZeRO 3", "1d 2, ZeRO 2, offload", "pipe 2, 1d 2")
"""Layouts that `make test` runs; `make prove` runs the others, too."""


@pytest.mark.parametrize("name", sampled((name for name in LAYOUTS if name != "one process"), FEW))
@pytest.mark.parametrize("kind", sampled(SCALES, {"dynamic"}))
def test_one_rank_s_overflow_is_everyone_s(name: str, kind: str) -> None:
    ranks = on_ranks(LAYOUTS[name][0], _steps, half(name, **SCALES[kind]), (2, 5), init="deepspeed")
    assert all(rows == ranks[0] for rows in ranks)
    rows = ranks[0]
    assert [step for step, row in enumerate(rows) if row.skipped] == [2, 5]
    assert [step for step, row in enumerate(rows) if not row.moved] == [2, 5]
    halved = kind == "dynamic"
    assert [row.scale for row in rows] == [64.0] * 3 + [32.0 if halved else 64.0] * 3 + [16.0 if halved else 64.0] * 2


def _norms(made: Job) -> list[float]:
    engine = engine_of(made)
    norms = []
    for step in range(2):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
        norms.append(engine.grad_norm)
    return norms


@pytest.mark.parametrize("name", sampled(LAYOUTS, FEW))
def test_the_norm_is_of_the_unscaled_gradient(name: str) -> None:
    """The mantissa has 11 bits: 5e-4 per number, and less in a norm over thousands."""
    exact = on_ranks(1, _norms, half("one process", "fp32"), init="deepspeed")[0]
    found = on_ranks(LAYOUTS[name][0], _norms, half(name, loss_scale=1024.0), init="deepspeed")
    assert all(norms == pytest.approx(exact, rel=1e-3) for norms in found)


def _skips(made: Job) -> list[bool]:
    return [row.skipped for row in _steps(made, (2, 5))]


@pytest.mark.parametrize(
    ("name", "dtype"),
    sampled(
        [("data 2, ZeRO 2, offload", "fp32"), ("pipe 2, offload", "bf16"), ("pipe 2", "bf16")],
        {("data 2, ZeRO 2, offload", "fp32"), ("pipe 2", "bf16")},
    ),
)
def test_without_a_scale_a_run_goes_on_after_it_too(name: str, dtype: str) -> None:
    skips = on_ranks(2, _skips, half(name, dtype), init="deepspeed")
    assert skips == [[step in (2, 5) for step in range(STEPS)]] * 2


class _Scans(TorchDispatchMode):
    """Records, while active, the kernels that search more than a scalar for non-finite values."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        self.found += [name] if name in ("amax", "amin", "isinf", "isnan") and args[0].numel() > 1 else []
        return func(*args, **(kwargs or {}))


def _scans(made: Job) -> list[str]:
    """Return the scans of a step that is not skipped."""
    engine = engine_of(made)
    engine.train_batch(batches(made, 0, 0))
    with _Scans() as scans:
        engine.train_batch(batches(made, 0, 1))
    assert not engine.skipped
    return scans.found


@pytest.mark.parametrize("dtype", sampled(["fp32", "bf16", "fp16"], {"fp16"}))
@pytest.mark.parametrize("extra", [{}, OFFLOAD], ids=["", "offload"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_an_overflow_is_known_by_the_norm_alone(stage: int, extra: dict[str, Any], dtype: str) -> None:
    """DeepSpeed would scan all gradients once more: as they are, or as they leave for the CPU."""
    scale = {"initial_scale_power": 6} if dtype == "fp16" else {}
    made = job(
        1,
        batch=sections.Batch(global_size=4, accumulation=2),
        zero=sections.Zero(stage=stage, extra=extra),
        precision=sections.Precision(dtype=dtype, extra=scale),
    )
    assert on_ranks(1, _scans, made, init="deepspeed") == [[]]


def _tied(made: Job) -> torch.Tensor:
    engine = engine_of(made)
    for step in range(2):
        engine.train_batch(batches(made, 0, step))
    return next(p.detach() for name, p in engine.named_parameters() if name == "embedding.tokens.weight").clone()


@pytest.mark.parametrize(("name", "dtype"), [("pipe 2", "fp16"), ("pipe 2, offload", "bf16")])
def test_tied_copies_stay_equal(name: str, dtype: str) -> None:
    first, last = on_ranks(2, _tied, half(name, dtype), init="deepspeed")
    assert torch.equal(first, last)


# ---- DeepSpeed's behaviour: when one of these fails, the patch of its number in deepspeed_patches can go ----


def _skips_of_deepspeed(made: Job) -> list[bool]:
    deepspeed_patches.drop_overflowed_gradients = lambda runner: None
    return [row.skipped for row in _steps(made, (2,))]


def test_m8_an_overflow_is_still_kept_where_the_optimizer_is_offloaded() -> None:
    skips = on_ranks(2, _skips_of_deepspeed, half("data 2, ZeRO 2, offload", loss_scale=64.0), init="deepspeed")
    assert skips == [[False] * 2 + [True] * (STEPS - 2)] * 2


def _wrapper_of_deepspeed(made: Job) -> str:
    deepspeed_patches.shard_gradients_of_bf16 = nullcontext
    deepspeed_patches.overlap_reduction = lambda *_: None  # of the optimizer that it gets with the patch
    return type(engine_of(made).deepspeed.optimizer).__name__


def test_m6_bf16_still_gets_an_optimizer_that_all_reduces() -> None:
    """And it raises if a rank owns no parameter."""
    made = half("one process", "bf16")
    assert on_ranks(1, _wrapper_of_deepspeed, made, init="deepspeed") == ["BF16_Optimizer"]


def _summed_by_deepspeed(made: Job) -> bool:
    from deepspeed.pipe import PipelineModule

    engine = engine_of(made)
    type(engine.module).get_tied_weights_and_groups = PipelineModule.get_tied_weights_and_groups
    engine.train_batch(batches(made, 0))
    weight = next(p for name, p in engine.named_parameters() if name == "embedding.tokens.weight").detach()
    return torch.equal(*all_gather(weight[None], engine.groups.axis("pipe")))


def test_m5_tied_gradients_that_add_up_in_fp32_are_still_forgotten() -> None:
    assert on_ranks(2, _summed_by_deepspeed, half("pipe 2", loss_scale=64.0), init="deepspeed") == [False, False]


def test_m3_deepspeed_still_has_no_fp16_on_cpus_without_the_instruction() -> None:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("this CPU has it")
    assert not CPU_Accelerator().is_fp16_supported()
    assert deepspeed_patches.before_engine._cpu_computes(torch.float16)


def _refused(made: Job) -> str:
    deepspeed_patches.before_engine._cpu_computes = lambda dtype: False  # a torch without fp16 on CPUs, as before 2.0
    with pytest.raises(DslparError) as refused:
        engine_of(made)
    return refused.value.findings[0].concise()


def test_where_torch_has_no_fp16_either_it_is_refused() -> None:
    if torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("DeepSpeed asks the CPU, which has it")
    (said,) = on_ranks(1, _refused, half("one process"), init="deepspeed")
    assert said.startswith("cfg.py:1:1: PRE201 no-such-precision-here: DeepSpeed has no fp16 on this device (cpu)")


# ---- dropout, through the engine ----


def _masks(made: Job) -> list[torch.Tensor]:
    """Return the masks of the embedding's dropout on this rank, of two steps with two micro-batches each."""
    engine = engine_of(made)
    drop = next(module for name, module in engine.module.named_modules() if name.endswith("positions.dropout"))
    masks: list[torch.Tensor] = []
    drop.register_forward_hook(lambda _, __, y: masks.append(y.detach() == 0))
    for step in range(2):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
    return masks


@pytest.mark.parametrize("sequence", sampled([False, True], {True}))
def test_dropout_is_equal_on_replicas_different_on_shards_and_repeats(sequence: bool) -> None:
    """1d keeps equal copies of the residual on its ranks, and with `sequence` a piece each; samples differ over data
    ranks.
    """
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, dropout=0.5)
    parallel = sections.Parallel(tensor=sections.TensorParallel(size=2, mode="1d", sequence=sequence))
    made = job(4, model=gpt, parallel=parallel, batch=sections.Batch(global_size=8, accumulation=2))
    ranks = on_ranks(4, _masks, made, init="deepspeed")
    again = on_ranks(4, _masks, made, init="deepspeed")
    for masks, repeated in zip(ranks, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(masks, repeated, strict=True)), "the same run again"
        assert len(masks) == 4
        assert not any(torch.equal(a, b) for a, b in combinations(masks, 2)), "steps and micro-batches differ"
    for drawn in zip(*ranks, strict=True):
        first, second, third, _ = drawn
        assert torch.equal(first, second) == (not sequence), "tensor ranks: copies are equal, pieces are not"
        assert not torch.equal(first, third), "data ranks hold other samples"
        assert 0.35 < first.double().mean() < 0.65  # at least 128 draws: 0.15 is more than 3 standard deviations
