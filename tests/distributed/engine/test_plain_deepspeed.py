"""Programs of plain DeepSpeed compute the same beside dslpar, and something else only with a patch of their own engine.

`tests.support.plain_deepspeed` has the programs. Each is trained in a process without dslpar, and in one that has only
imported all modules of dslpar. Another process builds the program's engine, builds and trains an engine of dslpar of
the same kind, and then trains the first engine, and another that is built only now. Losses, norms and weights are
compared to the bit.

The same process applies dslpar's patches to a third engine of the program. Where a patch changes results, these differ:
the comparison would notice a patch that reaches engines of others.
"""

from __future__ import annotations

import pickle
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence, Set
from contextlib import nullcontext
from functools import cache
from types import MethodType
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dslpar.distributed import deepspeed_patches
from dslpar.distributed.collectives import Axis
from dslpar.engine.deepspeed_patch_table import BEFORE, PATCHES, during_initialize
from dslpar.layout.resolve import Job
from dslpar.schema import sections
from tests.support import plain_deepspeed
from tests.support.engines import batches, engine_of, job
from tests.support.plain_deepspeed import PROGRAMS, WORLD, Alone, Program, Result
from tests.support.ranks import on_ranks
from tests.support.runs import start

OP = "ZeRO 1, DeepSpeedCPUAdam"
EACH_TIME = ("ZeRO 2, bf16", "ZeRO 3, bf16", "pipeline, tied, ZeRO 1, bf16, offloaded")
"""Programs of `make test`: stages 1 to 3, both executors, and four patches; `make prove` trains all."""
REST = tuple(name for name in PROGRAMS if name not in (OP, *EACH_TIME))


# ---- the same programs in three processes ----


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Alone]:
    """Return a function that trains a program, and the others of its part, in a process without dslpar."""

    @cache
    def train(*names: str) -> Alone:
        path = tmp_path_factory.mktemp("alone") / "results"
        found = start([sys.executable, "-m", "tests.support.plain_deepspeed", str(path), *names], idle_s=120)
        assert found.status == 0, found.output
        return Alone(**pickle.loads(path.read_bytes()))

    return lambda name: train(*next(part for part in (EACH_TIME, REST, (OP,)) if name in part))


def _made(stage: int, dtype: str = "fp32", extra: Any = None, optimizer: Any = None, **axes: Any) -> Job:
    return job(
        WORLD,
        parallel=sections.Parallel(**axes),
        batch=sections.Batch(global_size=4, accumulation=2),
        zero=sections.Zero(stage=stage, extra=extra or {}),
        precision=sections.Precision(dtype=dtype),
        optimizer=optimizer or sections.AdamW(),
    )


_PIPE: dict[str, Any] = {"pipeline": sections.PipelineParallel(size=2)}
_TENSOR: dict[str, Any] = {"tensor": sections.TensorParallel(size=2, mode="1d")}
_OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
JOBS = {
    "fp32": _made(0, **_TENSOR),
    "ZeRO 1, fp32": _made(1, **_TENSOR),
    "ZeRO 2, fp32": _made(2),
    "ZeRO 3, fp32": _made(3, **_TENSOR),
    "ZeRO 1, bf16": _made(1, "bf16"),
    "ZeRO 2, bf16": _made(2, "bf16", **_TENSOR),
    "ZeRO 3, bf16": _made(3, "bf16"),
    "ZeRO 1, bf16, offloaded": _made(1, "bf16", _OFFLOAD),
    "ZeRO 2, bf16, offloaded, overflow": _made(2, "bf16", _OFFLOAD),
    OP: _made(1, "fp32", _OFFLOAD),
    "ZeRO 1, Adagrad in two groups": _made(1, optimizer=sections.OtherOptimizer(target="torch.optim.Adagrad", lr=0.1)),
    "ZeRO 3, parts of a sequence": _made(3, context=sections.ContextParallel(size=2)),
    "fp16": _made(1, "fp16"),
    "pipeline, tied, fp32": _made(0, **_PIPE),
    "pipeline, tied, ZeRO 1, fp32": _made(1, **_PIPE),
    "pipeline, tied, ZeRO 1, bf16, offloaded": _made(1, "bf16", _OFFLOAD, **_PIPE),
}
"""The job beside each program."""


class Beside(NamedTuple):
    """Results of a program in a process with an engine of dslpar."""

    built_before: Result
    built_after: Result
    patched: Result


def _beside(name: str) -> Beside:
    program = PROGRAMS[name]
    first = program.build()
    ours = engine_of(JOBS[name])
    for step in range(2):
        ours.train_batch(batches(ours.job, ours.groups.coord["data"], step))
    patched = SHOWN[name].train(program)
    return Beside(program.train(first), program.train(program.build()), patched)


def _differing(found: Result, expected: Result) -> set[str]:
    """Return the keys of other values: by their text, in which each float has all its bits, and nan equals nan."""
    return {key for key in found | expected if repr(found.get(key)) != repr(expected.get(key))}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[pytest.mark.prove] * (name not in EACH_TIME)
            + [pytest.mark.skipif(not shutil.which("g++"), reason="g++ compiles the op")] * (name == OP),
        )
        for name in PROGRAMS
    ],
)
def test_a_plain_program_computes_the_same_beside_dslpar(name: str, alone: Callable[[str], Alone]) -> None:
    expected, imported = alone(name).results[name], alone(name).results_after_import[name]
    found: list[Beside] = on_ranks(WORLD, _beside, name, init="deepspeed")
    for rank, (before, after, patched) in enumerate(found):
        assert _differing(imported[rank], expected[rank]) == set(), "dslpar was imported"
        assert _differing(before, expected[rank]) == set(), "built before dslpar's engine"
        assert _differing(after, expected[rank]) == set(), "built after dslpar's engine"
        differing, shown = _differing(patched, expected[rank]), SHOWN[name]
        assert shown.differs <= differing <= shown.differs | shown.rounds


# ---- what a patch changes ----


class Shown(NamedTuple):
    """Patches that are applied to a program's engine."""

    patches: tuple[int, ...]
    train: Callable[[Program], Result]
    differs: Set[str] = frozenset()
    """The keys of the result that the patches change."""
    rounds: Set[str] = frozenset()
    """The keys of numbers that the patches may round differently."""


def _data(engine: Any) -> Axis:
    """Return the data ranks: a pipeline's stages are all ranks, so that each is alone."""
    return Axis() if engine.pipeline_parallelism else Axis(WORLD, dist.get_rank(), (0, 1), dist.group.WORLD)


def _read(norms: Sequence[Tensor]) -> list[Tensor]:
    return list(norms)


def _count_all(model: nn.Module) -> None:
    for p in model.parameters():
        p.tensor_model_parallel = True  # type: ignore[attr-defined]


def _with_norm(program: Program) -> Result:
    engine = program.build(change_model=_count_all)
    deepspeed_patches.compute_norm_without_zero(engine, Axis(), None, _read)
    return program.train(engine)


def _with_overlap(program: Program) -> Result:
    engine = program.build()
    deepspeed_patches.overlap_reduction(engine, _data(engine), _data(engine))
    if not engine.pipeline_parallelism:
        deepspeed_patches.call_before_reduction(engine, lambda: None)
        deepspeed_patches.overlap_param_gather(engine, _data(engine), _data(engine), list(engine.module))
    deepspeed_patches.read_norms_once(engine, _data(engine), Axis(), _read)
    return program.train(engine)


def _with_norms_read_once(program: Program) -> Result:
    engine = program.build()
    deepspeed_patches.read_norms_once(engine, _data(engine), Axis(), _read)
    return program.train(engine)


def _with_sharded_gradients(program: Program) -> Result:
    with deepspeed_patches.shard_gradients_of_bf16():
        return program.train(program.build())


def _without_copies(program: Program) -> Result:
    engine = program.build()
    assert engine.optimizer.use_grad_accum_attribute
    deepspeed_patches.accumulate_without_copies(engine)
    return program.train(engine)


def _with_dropped_gradients(program: Program) -> Result:
    engine = program.build()
    deepspeed_patches.drop_overflowed_gradients(engine)
    return program.train(engine)


def _with_exact_correction(program: Program) -> Result:
    engine = program.build()
    deepspeed_patches.correct_bias_exactly(engine)
    return program.train(engine)


def _with_lazy_state(program: Program) -> Result:
    return program.train(program.build(change_optimizer=deepspeed_patches.without_eager_state))


def _with_sums_over_the_sequence(program: Program) -> Result:
    engine = program.build()
    deepspeed_patches.sum_over_sequence(engine)
    return program.train(engine)


def _with_fp16(program: Program) -> Result:
    with deepspeed_patches.allow_fp16_on_cpus():
        return program.train(program.build())


def _with_tied_copies_counted_once(program: Program) -> Result:
    return program.train(program.build(change_model=deepspeed_patches.disown_tied_copies))


def _with_tied_gradients(program: Program) -> Result:
    def change(model: Any) -> None:
        pairs = type(model).get_tied_weights_and_groups
        model.get_tied_weights_and_groups = MethodType(
            lambda self: deepspeed_patches.tied_gradients(pairs(self)), model
        )

    return program.train(program.build(change_model=change))


_CPU_HAS_FP16 = bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
"""Whether DeepSpeed computes in fp16 here without M3."""
_ALL = {"losses", "norms", "skipped", "weights", "optimizer", "rates"}
SHOWN = {
    "fp32": Shown((11,), _with_norm, {"norms"}, {"losses", "weights"}),
    "ZeRO 1, fp32": Shown((12, 14, 16, 18), _with_overlap),
    "ZeRO 2, fp32": Shown((12, 14, 16), _with_overlap),
    "ZeRO 3, fp32": Shown((12,), _with_norms_read_once),
    "ZeRO 1, bf16": Shown((6,), _with_sharded_gradients, {"optimizer"}, {"losses", "norms", "weights"}),
    "ZeRO 2, bf16": Shown((12, 14, 16), _with_overlap),
    "ZeRO 3, bf16": Shown((12,), _with_norms_read_once),
    "ZeRO 1, bf16, offloaded": Shown((15,), _without_copies),
    "ZeRO 2, bf16, offloaded, overflow": Shown(
        (8,), _with_dropped_gradients, {"losses", "norms", "skipped", "weights"}
    ),
    OP: Shown((20,), _with_exact_correction, {"weights"}, {"losses", "norms"}),
    "ZeRO 1, Adagrad in two groups": Shown((10,), _with_lazy_state, {"error"} | _ALL),
    "ZeRO 3, parts of a sequence": Shown((21,), _with_sums_over_the_sequence, {"norms"}, {"losses", "weights"}),
    "fp16": Shown((3,), _with_fp16, set() if _CPU_HAS_FP16 else {"error"} | _ALL),
    "pipeline, tied, fp32": Shown((4,), _with_tied_copies_counted_once, {"losses", "weights"}),
    "pipeline, tied, ZeRO 1, fp32": Shown((14,), _with_overlap),
    "pipeline, tied, ZeRO 1, bf16, offloaded": Shown((5,), _with_tied_gradients, {"losses", "norms", "weights"}),
}
"""The patches of each program, applied to an engine of its own."""


def test_each_patch_is_shown_or_cannot_be() -> None:
    """A patch that is not shown here has a test of its own, which the table names."""
    shown = {number for program in SHOWN.values() for number in program.patches}
    silent = {1, 2, 19}  # process-wide: an op, warnings and a compiler's lock, which no engine's results depend on
    hangs_or_raises = {7, 9, 24}
    of_other_schedules = {17}
    of_two_engines = {22, 23}
    assert shown | silent | hangs_or_raises | of_other_schedules | of_two_engines == {p.number for p in PATCHES}


# ---- what stays in the process ----


def test_importing_dslpar_patches_nothing(alone: Callable[[str], Alone]) -> None:
    found = alone(EACH_TIME[0])
    assert found.num_modules > 400
    assert found.changed_by_import == set()
    assert [each for each in found.new_filters if "torch.distributed" in each] == []


def test_the_table_says_which_patches_are_process_wide() -> None:
    assert {patch.number for patch in PATCHES if patch.process_wide} == {1, 2, 19}
    assert all(bool(patch.process_wide) == (patch.where == BEFORE) for patch in PATCHES)


class Changed(NamedTuple):
    """Functions and classes that are other objects than before, by name."""

    during: set[str]
    """Those while an engine of dslpar is built."""
    afterwards: set[str]
    """Those once engines of several kinds were trained."""
    new_filters: list[str]


def _changed() -> Changed:
    PROGRAMS["ZeRO 3, fp32"].build()  # DeepSpeed itself replaces torch.nn.functional.linear for ZeRO 3, for good
    before, filters = plain_deepspeed.callables(), list(warnings.filters)
    with during_initialize():
        during = plain_deepspeed.changed(before)
    for name in ("fp32", "ZeRO 2, bf16", "ZeRO 3, fp32", "fp16", "pipeline, tied, fp32"):
        ours = engine_of(JOBS[name])
        ours.train_batch(batches(ours.job, ours.groups.coord["data"], 0))
    added = [repr(each) for each in warnings.filters if each not in filters]
    return Changed(during, plain_deepspeed.changed(before), added)


def test_an_engine_leaves_only_process_wide_patches_behind() -> None:
    left = {"deepspeed.comm.torch.build_shm_op", "deepspeed.ops.op_builder.builder.OpBuilder.jit_load"}  # M1, M19
    undone = {"deepspeed.runtime.engine.DeepSpeedEngine._do_optimizer_sanity_check"}  # M6
    if not _CPU_HAS_FP16:
        undone.add("accelerator.is_fp16_supported")  # M3
    for during, afterwards, filters in on_ranks(WORLD, _changed, init="deepspeed"):
        assert during == left | undone
        assert afterwards == left
        assert len(filters) == 2, "M2"
        assert all("is deprecated" in each for each in filters)


def _after_zero_3(by_dslpar: bool) -> Result:
    if by_dslpar:
        engine_of(JOBS["ZeRO 3, bf16"])
    else:
        PROGRAMS["ZeRO 3, bf16"].build()
    program = PROGRAMS["ZeRO 2, bf16"]
    return program.train(program.build())


def test_zero_3_replaces_torch_s_linear_as_deepspeed_itself_does() -> None:
    """The replacement rounds a bias in bf16 otherwise, in every engine of the process, and it stays."""
    beside_dslpar, beside_deepspeed = (on_ranks(WORLD, _after_zero_3, by, init="deepspeed") for by in (True, False))
    for found, expected in zip(beside_dslpar, beside_deepspeed, strict=True):
        assert _differing(found, expected) == set()


# ---- the mpu, which DeepSpeed keeps once per process ----


class _Mpu:
    """An mpu of data parallel ranks: of all, or of each rank alone, which then trains a model of its own."""

    def __init__(self, together: bool) -> None:
        self._alone = [dist.new_group([rank]) for rank in range(WORLD)][dist.get_rank()]
        self._data = dist.group.WORLD if together else self._alone

    def get_model_parallel_group(self) -> Any:
        return self._alone

    def get_model_parallel_rank(self) -> int:
        return 0

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_data_parallel_group(self) -> Any:
        return self._data

    def get_data_parallel_rank(self) -> int:
        return dist.get_rank(self._data)

    def get_data_parallel_world_size(self) -> int:
        return dist.get_world_size(self._data)


def _data_ranks_of_a_later_engine(restores: bool) -> int:
    with deepspeed_patches.restore_mpu() if restores else nullcontext():
        Program({}, mpu=lambda: _Mpu(together=False)).build()
    return int(Program({}).build().dp_world_size)


def test_m22_a_later_engine_still_takes_the_mpu_of_the_one_before() -> None:
    assert on_ranks(WORLD, _data_ranks_of_a_later_engine, False, init="deepspeed") == [1, 1]
    assert on_ranks(WORLD, _data_ranks_of_a_later_engine, True, init="deepspeed") == [2, 2]


def _weights_of_an_earlier_engine(has_own: bool) -> Any:
    program = Program({}, mpu=lambda: _Mpu(together=False))
    engine = program.build()
    if has_own:
        deepspeed_patches.reduce_over_own_mpu(engine)
    Program({}, mpu=lambda: _Mpu(together=True)).build()
    return program.train(engine)["weights"]


def test_m23_an_earlier_engine_still_reduces_over_the_mpu_of_the_last() -> None:
    """Each rank has other data: its weights are its own unless gradients are averaged."""
    weights, others = on_ranks(WORLD, _weights_of_an_earlier_engine, False, init="deepspeed")
    assert weights == others
    weights, others = on_ranks(WORLD, _weights_of_an_earlier_engine, True, init="deepspeed")
    assert weights != others


def _weights_beside_another_engine(built_later: bool) -> list[Any]:
    """Return the weights of a job of two data ranks without ZeRO."""
    ours = engine_of(_made(0))
    if built_later:
        Program({}, mpu=lambda: _Mpu(together=False)).build()
    ours.train_batch(batches(ours.job, ours.groups.coord["data"]))
    return [p.detach().tolist() for p in ours.module.parameters()]


def test_an_engine_of_dslpar_trains_the_same_beside_a_plain_one() -> None:
    with_other, without = (on_ranks(WORLD, _weights_beside_another_engine, n, init="deepspeed") for n in (True, False))
    assert with_other == without
    assert without[0] == without[1], "the gradients are averaged"
