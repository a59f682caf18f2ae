"""Functions that patch DeepSpeed 0.19. Each docstring begins with the patch's number, and describes the fault.

`dslpar.engine.deepspeed_patch_table` lists all patches: the jobs that need each one, and the test that fails when
DeepSpeed no longer needs it. `start` has the functions that are called before an engine is built. The other modules are
named after the part of DeepSpeed that they patch.
"""

from dslpar.distributed.deepspeed_patches.before_engine import (
    allow_fp16_on_cpus,
    build_ops_alone,
    ignore_deprecated_names,
    reduce_fp16_on_cpus,
    skip_shm_op,
)
from dslpar.distributed.deepspeed_patches.mpu import reduce_over_own_mpu, restore_mpu
from dslpar.distributed.deepspeed_patches.norms import (
    ReadNorms,
    compute_norm_without_zero,
    owned_square_norm,
    read_norms_once,
    reduce_norms_of_all_groups,
)
from dslpar.distributed.deepspeed_patches.optimizers import (
    correct_bias_exactly,
    drop_overflowed_gradients,
    shard_gradients_of_bf16,
    sum_over_sequence,
    without_eager_state,
)
from dslpar.distributed.deepspeed_patches.overlap import (
    accumulate_without_copies,
    call_before_reduction,
    overlap_param_gather,
    overlap_reduction,
    reduce_by_stages,
)
from dslpar.distributed.deepspeed_patches.shared_parameters import (
    disown_tied_copies,
    register_external_parameters,
    tied_gradients,
)

__all__ = [
    "ReadNorms",
    "accumulate_without_copies",
    "allow_fp16_on_cpus",
    "build_ops_alone",
    "call_before_reduction",
    "compute_norm_without_zero",
    "correct_bias_exactly",
    "disown_tied_copies",
    "drop_overflowed_gradients",
    "ignore_deprecated_names",
    "overlap_param_gather",
    "overlap_reduction",
    "owned_square_norm",
    "read_norms_once",
    "reduce_by_stages",
    "reduce_fp16_on_cpus",
    "reduce_norms_of_all_groups",
    "reduce_over_own_mpu",
    "register_external_parameters",
    "restore_mpu",
    "shard_gradients_of_bf16",
    "skip_shm_op",
    "sum_over_sequence",
    "tied_gradients",
    "without_eager_state",
]
