"""Where DeepSpeed 0.19 does other than a layout-independent run needs, and how we mend it: all of it in this package.

Each mend has a number. Without it happens what stands under "symptom"; its test fails as soon as DeepSpeed no longer
does that, and the mend can then go (M9: when its test passes without the mend).

===  ==============================  =================================================  =========================
M    function                        symptom                                            test
===  ==============================  =================================================  =========================
1    `skip_shm_op`                   on a CPU, 30 s of compiling an op that ignores its  engine/test_engine.py
                                     group; issue #7625 asks for a way around it
2    `ignore_deprecated_names`       a FutureWarning a rank: collectives by old names   engine/test_engine.py
3    `allow_fp16_on_cpus`            fp16 is refused on CPUs where torch computes it    engine/test_precision.py
4    `disown_tied_copies`            without ZeRO, norms count tied weights twice       engine/test_engine.py
5    `tied_gradients`                ZeRO 1 in half precision: tied weights go apart    engine/test_precision.py
6    `shard_gradients_of_bf16`       ZeRO 1 in bf16 all-reduces whole gradients, and    engine/test_precision.py
                                     raises on a rank that owns no parameter
7    `reduce_norms_of_all_groups`    ZeRO 1 hangs where a stage has fewer groups        models/test_sequential.py
8    `drop_overflowed_gradients`     offloaded ZeRO 1 and 2: after one overflow every   engine/test_precision.py
                                     later step is skipped
9    `register_external_parameters`  ZeRO 3: another module's parameter is empty after    checkpoint/test_resume.py
                                     a checkpoint was loaded
10   `without_eager_state`           ZeRO makes Adagrad anew in one group of defaults   engine/test_optimizers.py
11   `compute_norm_without_zero`     without ZeRO in fp32 the gradient norm is None     engine/test_engine.py
12   `read_norms_once`               the host waits for the device five times a step,   engine/test_host_reads.py,
                                     with offload once a parameter, and begins kernels  engine/test_offload.py
                                     for each of a norm's gradients
14   `overlap_reduction`             ZeRO 1 and 2 reduce gradients while nothing else   engine/test_reduction.py
                                     is computed
15   `accumulate_without_copies`     ZeRO 1 in half precision copies each gradient in   engine/test_reduction.py
                                     fp32 before it adds it
16   `overlap_param_gather`          ZeRO 1 and 2 gather weights while nothing else is  engine/test_gather.py
                                     computed
17   `reduce_by_stages`              without ZeRO too, gradients of all of a rank's     engine/test_schedules.py
                                     stages are reduced after the last backward
18   `call_before_reduction`         a layer can sum its vectors' gradients over        engine/test_vector_reduction.py
                                     tensor ranks in each backward alone
19   `build_ops_alone`               after a start that was killed while it compiled    engine/test_offloaded_adam.py
                                     an op, every later one waits for ever
20   `correct_bias_exactly`          DeepSpeedCPUAdam: a run that goes on after a       engine/test_offloaded_adam.py
                                     checkpoint takes other bits
21   `sum_over_sequence`             ZeRO 3 averages gradients over sequence parallel   engine/test_zero_over_d.py
                                     ranks, each of which has a part of them
===  ==============================  =================================================  =========================

`start` has what is called before an engine is built; the others are named after what they mend. Tests are below
tests/distributed, named test_m<number>_.... The issue is of github.com/deepspeedai/DeepSpeed; of the
other symptoms no upstream issue is known.
"""

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
from dslpar.distributed.deepspeed_patches.start import (
    allow_fp16_on_cpus,
    build_ops_alone,
    ignore_deprecated_names,
    skip_shm_op,
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
    "reduce_norms_of_all_groups",
    "register_external_parameters",
    "shard_gradients_of_bf16",
    "skip_shm_op",
    "sum_over_sequence",
    "tied_gradients",
    "without_eager_state",
]
