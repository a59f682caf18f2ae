"""Patches: changes that dslpar makes to DeepSpeed 0.19 at run time, one record each, with the fault that each removes.

    with during_initialize():          # of classes and settings that `deepspeed.initialize` reads
        ds_engine, *_ = deepspeed.initialize(...)
    apply_after(Built(job, groups, module, ds_engine, late, host_reads))

Most patches keep results from depending on the layout. Others avoid errors, hangs or lost time. The functions are in
`dslpar.distributed.deepspeed_patches`.

A program may use plain DeepSpeed in the same process. Most patches change only dslpar's own engine, or DeepSpeed's
classes only while that engine is built. The others hold for the whole process; their field `process_wide` says why they
change no result of other engines.

Comments elsewhere cite a patch by its number, such as M14. A patch's test fails as soon as DeepSpeed no longer needs
the patch, which can then be removed. `python tools/docs.py` writes the table of patches to docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from dslpar.distributed import deepspeed_patches
from dslpar.distributed.collectives import Axis
from dslpar.distributed.groups import Groups
from dslpar.engine.host_reads import HostReads
from dslpar.engine.vector_reduction import VectorReduction
from dslpar.layers.parameter import external_parameters
from dslpar.layout.deepspeed_config import overlaps_param_gather, overlaps_reduction
from dslpar.layout.resolve import Job


@dataclass(frozen=True)
class Built:
    """An engine that DeepSpeed has initialized, and the parts of its job that patches read."""

    job: Job
    groups: Groups
    module: Any
    ds_engine: Any
    late: Collection[int]
    """Ids of the vectors whose gradients are summed over tensor ranks once per step."""
    host_reads: HostReads

    @property
    def gathers_under_forward(self) -> bool:
        """True if weights are gathered from other ranks during a forward."""
        return overlaps_param_gather(self.job.spec) and self.groups.zero_axis.size > 1

    @property
    def zero_axes(self) -> tuple[Axis, Axis]:
        """The ranks over which ZeRO shards most parameters, and those over which it shards experts."""
        return self.groups.zero_axis, self.groups.expert_data_axis

    @property
    def expert_axis(self) -> Axis | None:
        """The data ranks that hold different experts, if experts are divided over data ranks."""
        return self.groups.axis("e") if self.groups.tensor.e > 1 else None

    @property
    def layers(self) -> list[nn.Module]:
        """The layers of this rank's stages in forward order; a tied layer runs twice and is listed once."""
        return list(dict.fromkeys(layer for _, layer in self.module.built_layers()))

    @property
    def has_no_norm(self) -> bool:
        """True if DeepSpeed computes no norm of the gradient."""
        return self.job.spec.zero.stage == 0 and self.job.spec.precision.dtype == "fp32"


BEFORE, DURING, AFTER = "before initialize", "during initialize", "after initialize"


class Patch(NamedTuple):
    """A patch: the fault in DeepSpeed, the condition and place of the patch, and the test that shows its need."""

    number: int
    """The number by which comments cite the patch: 14 is M14."""
    function: str
    """The function's name in `deepspeed_patches`."""
    wrong: str
    """The fault without the patch."""
    condition: str
    """The condition for the patch, in words; the function itself may check more."""
    where: str
    """BEFORE (until the process ends), DURING (undone afterwards), AFTER (of dslpar's engine alone), or the modules
    that call the function themselves, for an object of their own."""
    test: str
    """The file below tests/distributed that fails when the patch can be removed."""
    issue: str = "none known"
    """The issue at github.com/deepspeedai/DeepSpeed, or cases to file as one."""
    process_wide: str = ""
    """Why other engines in the process compute the same with the patch; empty if the patch does not reach them."""
    arguments: Callable[[Built], tuple[Any, ...]] = lambda built: ()
    """Returns the function's arguments; for AFTER."""
    applies: Callable[[Built], bool] = lambda built: True
    """Returns whether the function is called; for AFTER."""

    @property
    def apply(self) -> Callable[..., Any]:
        """The function itself; for DURING, it returns a context manager."""
        return getattr(deepspeed_patches, self.function)  # type: ignore[no-any-return]


PATCHES = (
    Patch(
        3,
        "allow_fp16_on_cpus",
        "fp16 is refused on CPUs on which torch computes it",
        "CPUs",
        DURING,
        "engine/test_precision.py",
        "docs/upstream/m03_fp16_on_cpus.py",
    ),
    Patch(
        1,
        "skip_shm_op",
        "on a CPU, 30 s to compile an op whose all-reduce ignores its group",
        "always",
        BEFORE,
        "engine/test_engine.py",
        "#7625",
        process_wide="a process has one backend, and of its collectives only inference_all_reduce uses the op",
    ),
    Patch(
        19,
        "build_ops_alone",
        "after a start is killed while it compiles an op, every later start waits forever",
        "always",
        BEFORE,
        "engine/test_offloaded_adam.py",
        "docs/upstream/m19_build_lock.py",
        process_wide="ops are the same; only their compilation waits for another lock",
    ),
    Patch(
        2,
        "ignore_deprecated_names",
        "a FutureWarning per rank for old names of collectives",
        "always",
        BEFORE,
        "engine/test_engine.py",
        process_wide="only two warnings are not printed",
    ),
    Patch(
        6,
        "shard_gradients_of_bf16",
        "ZeRO 1 in bf16 all-reduces whole gradients, and raises on a rank that counts no gradient",
        "ZeRO 1 in bf16",
        DURING,
        "engine/test_precision.py",
        "docs/upstream/m06_bf16_zero1.py",
    ),
    Patch(
        22,
        "restore_mpu",
        "an engine that is built later without an mpu takes its data ranks from the engine before it, or raises",
        "always",
        DURING,
        "engine/test_plain_deepspeed.py",
        "docs/upstream/m22_mpu_of_another_engine.py",
    ),
    # ---- called where a part of the engine is made ----
    Patch(
        4,
        "disown_tied_copies",
        "without ZeRO, norms count tied weights twice if both copies are marked as tensor parallel",
        "pipelines",
        "engine/pipeline_module.py",
        "engine/test_engine.py",
        "docs/upstream/m04_tied_norm.py",
    ),
    Patch(
        5,
        "tied_gradients",
        "ZeRO 1 in half precision: the copies of tied weights drift apart",
        "pipelines",
        "engine/pipeline_module.py",
        "engine/test_precision.py",
        "docs/upstream/m05_tied_gradients.py",
    ),
    Patch(
        10,
        "without_eager_state",
        "ZeRO recreates Adagrad with one parameter group of default settings",
        "Adagrad",
        "engine/optimizers.py, engine/build.py",
        "engine/test_optimizers.py",
        "docs/upstream/m10_adagrad_groups.py",
    ),
    Patch(
        17,
        "reduce_by_stages",
        "without ZeRO, gradients of all stages of a rank are reduced after the last backward",
        "several stages per rank, without ZeRO",
        "engine/pipeline_executor.py",
        "engine/test_schedules.py",
    ),
    # ---- applied to the initialized engine, in this order ----
    Patch(
        23,
        "reduce_over_own_mpu",
        "gradients are averaged over the data ranks of the engine that was built last",
        "no ZeRO; in a pipeline only if data ranks hold different experts",
        AFTER,
        "engine/test_plain_deepspeed.py",
        "docs/upstream/m23_mpu_of_last_engine.py",
        arguments=lambda built: (built.ds_engine,),
        applies=lambda built: (
            built.job.spec.zero.stage == 0 and (built.job.mesh.pipe == 1 or built.job.mesh.tensor.e > 1)
        ),
    ),
    Patch(
        24,
        "reduce_fp16_on_cpus",
        "gradients in fp16 are refused on CPUs on which torch computes fp16",
        "fp16 on CPUs, no ZeRO",
        AFTER,
        "engine/test_vector_reduction.py",
        arguments=lambda built: (built.ds_engine,),
        applies=lambda built: built.job.spec.zero.stage == 0 and built.job.spec.precision.dtype == "fp16",
    ),
    Patch(
        20,
        "correct_bias_exactly",
        "DeepSpeedCPUAdam: a resumed run differs in its last bits",
        "DeepSpeedCPUAdam",
        AFTER,
        "engine/test_offloaded_adam.py",
        "docs/upstream/m20_cpu_adam_resume.py",
        arguments=lambda built: (built.ds_engine,),
    ),
    Patch(
        8,
        "drop_overflowed_gradients",
        "offloaded ZeRO 1 and 2: after one overflow every later step is skipped",
        "ZeRO 1 and 2 with the optimizer on the CPU",
        AFTER,
        "engine/test_precision.py",
        "docs/upstream/m08_offload_overflow.py",
        arguments=lambda built: (built.ds_engine,),
    ),
    Patch(
        21,
        "sum_over_sequence",
        "ZeRO 3 averages partial gradients over sequence parallel ranks instead of summing them",
        "ZeRO 3 over sequence parallel ranks",
        AFTER,
        "engine/test_zero_over_d.py",
        "docs/upstream/m21_sequence_parallel_sum.py, #6841",
        arguments=lambda built: (built.ds_engine,),
    ),
    Patch(
        15,
        "accumulate_without_copies",
        "ZeRO 1 in half precision copies each gradient to fp32 before adding it",
        "ZeRO 1 in half precision",
        AFTER,
        "engine/test_reduction.py",
        "docs/upstream/m15_gradient_copies.py",
        arguments=lambda built: (built.ds_engine,),
    ),
    Patch(
        14,
        "overlap_reduction",
        "ZeRO 1 and 2 reduce gradients while nothing else is computed",
        "ZeRO 1 and 2 that overlap",
        AFTER,
        "engine/test_reduction.py",
        arguments=lambda built: (built.ds_engine, *built.zero_axes, built.late),
        applies=lambda built: overlaps_reduction(built.job.spec),
    ),
    Patch(  # after M14, whose reduction begins once it has run
        18,
        "call_before_reduction",
        "a layer can sum its vectors' gradients over tensor ranks only in each backward",
        "vectors that are summed once per step",
        AFTER,
        "engine/test_vector_reduction.py",
        arguments=lambda built: (built.ds_engine, VectorReduction(built.ds_engine, built.groups).reduce),
        applies=lambda built: bool(built.late),
    ),
    Patch(
        16,
        "overlap_param_gather",
        "ZeRO 1 and 2 gather weights while nothing else is computed",
        "ZeRO 1 and 2 that gather under a forward",
        AFTER,
        "engine/test_gather.py",
        arguments=lambda built: (built.ds_engine, *built.zero_axes, built.layers),
        applies=lambda built: built.gathers_under_forward,
    ),
    Patch(
        7,
        "reduce_norms_of_all_groups",
        "ZeRO 1 hangs if a stage has fewer parameter groups",
        "ZeRO 1 in a pipeline",
        AFTER,
        "models/test_sequential.py",
        "docs/upstream/m07_norm_hangs.py",
        arguments=lambda built: (built.ds_engine, built.groups.weight_axis),
    ),
    Patch(  # after M7: it reads what that returns
        12,
        "read_norms_once",
        "a host waits for its device five times per step, with offload once per parameter, and launches kernels for "
        "each gradient of a norm",
        "ZeRO 1 to 3",
        AFTER,
        "engine/test_host_reads.py",
        "docs/upstream/m12_host_reads.py",
        arguments=lambda built: (
            *(built.ds_engine, built.groups.zero_axis, built.groups.weight_axis, built.host_reads.read),
        ),
    ),
    Patch(
        11,
        "compute_norm_without_zero",
        "without ZeRO in fp32, the gradient norm is None, and a pipeline is clipped by the norm of its first stage",
        "no ZeRO, fp32",
        AFTER,
        "engine/test_engine.py",
        "docs/upstream/m11_norm_is_none.py, docs/upstream/m11_norm_of_first_stage.py",
        arguments=lambda built: (built.ds_engine, built.groups.weight_axis, built.expert_axis, built.host_reads.read),
        applies=lambda built: built.has_no_norm,
    ),
    Patch(
        9,
        "register_external_parameters",
        "ZeRO 3: another module's parameter is empty after a checkpoint is loaded",
        "ZeRO 3",
        AFTER,
        "checkpoint/test_resume.py",
        "docs/upstream/m09_external_parameter.py",
        arguments=lambda built: (external_parameters(built.module),),
        applies=lambda built: built.job.spec.zero.stage == 3,
    ),
)
"""All patches, in the order in which they are applied."""


@contextmanager
def during_initialize() -> Iterator[None]:
    """Apply the patches of classes and settings that `deepspeed.initialize` reads; undo, at the end, those of DURING.

    Contexts may be nested, and one may follow another.
    """
    with ExitStack() as applied:
        for patch in PATCHES:
            if patch.where == BEFORE:
                patch.apply()
            elif patch.where == DURING:
                applied.enter_context(patch.apply())
        yield


def apply_after(built: Built) -> None:
    """Apply to an initialized engine the patches that its job needs. All ranks must call it together."""
    for patch in PATCHES:
        if patch.where == AFTER and patch.applies(built):
            patch.apply(*patch.arguments(built))
