"""Exact findings on both sides of each rule's boundary: each row is a config next to a boundary.

A row has the changes of the model, the rest of the config, the world (or the hostfile, or both), and each finding as
`CODE line message; help`. The mutants of tests/properties/mutation/__main__.py show where a row is missing.
"""

from __future__ import annotations

import pytest

from tests.support.lint import TOO_SMALL, findings

Where = int | str | None | tuple[int, str]
Row = tuple[str, str, Where, list[str]]
SIZES = {"num_layers": "8", "hidden_size": "96", "num_heads": "24", "vocab_size": "256", "max_seq_len": "96"}
RESMLP = (
    "model = dict(type='ResMLP', num_layers=2, hidden_size={}, num_classes=8, image_size={}, patch_size={})\n"
    "data = dict(type='images', path='.')\n"
)

CASES: list[Row] = [
    (
        "",
        "parallel = dict(pipeline=3, tensor=dict(size=2, mode='1d'))",
        8,
        [
            (
                "PAR101 2 a world of 8 is not a multiple of pipeline 3 * tensor 2 = 6; start 6 or 12 ranks; or "
                "choose sizes whose product divides 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(pipeline=3, tensor=dict(size=2, mode='1d'))",
        12,
        [],
    ),
    (
        "",
        "parallel = dict(pipeline=3)",
        8,
        [
            (
                "PAR101 2 a world of 8 is not a multiple of pipeline 3; start 6 or 9 ranks; or choose sizes "
                "whose product divides 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=3, mode='1d'))",
        8,
        [
            (
                "PAR101 2 a world of 8 is not a multiple of tensor 3; start 6 or 9 ranks; or choose sizes whose "
                "product divides 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(pipeline=8)\nbatch = dict(accumulation=64)",
        8,
        [],
    ),
    (
        "",
        "parallel = dict(pipeline=8)\nbatch = dict(accumulation=64)",
        4,
        [
            (
                "PAR102 2 one replica needs pipeline 8 ranks, but the world has 4; start at least 8 ranks; or "
                "choose smaller sizes"
            )
        ],
    ),
    (
        "",
        "parallel = dict(pipeline=8)\nbatch = dict(accumulation=64)",
        15,
        [
            (
                "PAR101 2 a world of 15 is not a multiple of pipeline 8; start 8 or 16 ranks; or choose sizes "
                "whose product divides 15"
            )
        ],
    ),
    (
        "",
        "parallel = dict(data=3, pipeline=2)",
        16,
        ["PAR103 2 data is 16 / 2 = 8, not 3; write 8, or leave it out, or start 6 ranks"],
    ),
    (
        "",
        "parallel = dict(data=2, pipeline=3)",
        8,
        [
            (
                "PAR101 2 a world of 8 is not a multiple of pipeline 3; start 6 ranks; or choose sizes whose "
                "product divides 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(pipeline=4)\ntrain = dict(dist=dict(pipeline_parallel_size=2))",
        8,
        [
            (
                "PAR104 3 train.dist.pipeline_parallel_size is 2, but `parallel` has 4; keep one of "
                "train.dist.pipeline_parallel_size and parallel.pipeline"
            )
        ],
    ),
    (
        "",
        (
            "parallel = dict(tensor=dict(size=4, mode='2d'))\ntrain = dict(dist=dict(tensor_parallel_size=4))\n"
            "batch = dict(micro_size=16)"
        ),
        8,
        [
            (
                "PAR104 3 train.dist.tensor_parallel_size means mode '1d', but `parallel` has '2d'; keep one of "
                "train.dist.tensor_parallel_size and parallel.tensor"
            )
        ],
    ),
    (
        "",
        "parallel = dict(data=4)\ntrain = dict(dist=dict(tensor_parallel_size=2))",
        8,
        [],
    ),
    (
        "",
        "parallel = dict(pipeline=2)\ntrain = dict(dist=dict(custom_pipeline_stage_id=[0]*3+[1]*5))",
        8,
        [
            (
                "PAR104 3 train.dist.custom_pipeline_stage_id partitions the layers differently from "
                "`parallel.pipeline`; leave train.dist.custom_pipeline_stage_id out, or write it under "
                "parallel.pipeline.stage_ids"
            )
        ],
    ),
    (
        "",
        (
            "parallel = dict(pipeline=dict(size=2, stage_ids=[0]*3+[1]*5))\ntrain = "
            "dict(dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id=[0]*3+[1]*5))"
        ),
        8,
        [],
    ),
    (
        "",
        "",
        "a slots=5\nb slots=3\nc slots=4\n",
        [
            "HST103 2 b has 3 slots, but a has 5; slots=3 on each",
            "HST103 3 c has 4 slots, but a has 5; slots=3 on each",
        ],
    ),
    (
        "",
        "",
        "a slots=0\nb slots=3\nc slots=4\n",
        [
            "HST104 1 a has no slots; choose slots=N of 1 or more, or leave the host out",
            "HST103 3 c has 4 slots, but b has 3; slots=3 on each",
        ],
    ),
    (
        "",
        "",
        "a slots=4\nb slots=0\nc slots=4\n",
        ["HST104 2 b has no slots; choose slots=N of 1 or more, or leave the host out"],
    ),
    (
        "",
        "",
        (8, "a slots=3\nb slots=3\n"),
        ["HST105 2 6 slots in all, but the world size is 8; --world-size 6; or choose 8 slots in all"],
    ),
    (
        "",
        "",
        (6, "a slots=3\nb slots=3\n"),
        [],
    ),
    (
        "",
        "",
        "# none\n",
        ["HST104 1 the hostfile has no hosts; one host per line: NAME slots=N"],
    ),
    (
        "",
        "",
        "a slots=4\nxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx x xxxxxxxxxxxxxxxxxxxxxx\n",
        ["HST101 2 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' is not a host; one host per line: NAME slots=N"],
    ),
    (
        "",
        "",
        "a slots=4\na slots=4\n",
        ["HST102 2 duplicate host a, already on line 1; choose one line for this host, with all of its slots"],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='1d'))",
        "a slots=2\nb slots=2\n",
        [
            (
                "PERF101 2 tensor groups of 4 ranks on hosts of 2 slots: ranks 0 to 3 are on a to b; "
                "parallel.tensor.size=2"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='1d', sequence=True, comm_overlap='symmetric_memory'))",
        "a slots=2\nb slots=2\n",
        [
            (
                "PERF101 2 tensor groups of 4 ranks on hosts of 2 slots: ranks 0 to 3 are on a to b; "
                "comm_overlap='symmetric_memory' needs GPUs that share memory, on one host (HST234); "
                "parallel.tensor.size=2"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='cuboid', shape=(2, 2, 1), residual='sequence', "
        "comm_overlap='symmetric_memory'))",
        "a slots=2\nb slots=2\n",
        [
            (
                "PERF101 2 tensor groups of 4 ranks on hosts of 2 slots: ranks 0 to 3 are on a to b; "
                "parallel.tensor.size=2"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=2, mode='1d'))",
        "a slots=3\nb slots=3\n",
        [
            (
                "PERF101 2 tensor groups of 2 ranks on hosts of 3 slots: ranks 2 to 3 are on a to b; "
                "parallel.tensor.size=3"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='1d'))",
        "a slots=4\nb slots=2\nc slots=2\n",
        [
            "PERF101 2 tensor groups of 4 ranks on hosts of 2 slots: some groups cross hosts; parallel.tensor.size=2",
            "HST103 2 b has 2 slots, but a has 4; slots=2 on each",
            "HST103 3 c has 2 slots, but a has 4; slots=2 on each",
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=6, mode='1d'))",
        "a slots=4\nb slots=4\nc slots=4\n",
        [
            (
                "PERF101 2 tensor groups of 6 ranks on hosts of 4 slots: ranks 0 to 5 are on a to b; "
                "parallel.tensor.size=2 or 4"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=2, mode='1d'))",
        "a slots=1\nb slots=1\n",
        [
            (
                "PERF101 2 tensor groups of 2 ranks on hosts of 1 slots: ranks 0 to 1 are on a to b; "
                "parallel.tensor.size=1"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=2, mode='1d'))",
        "a slots=4\n",
        [],
    ),
    (
        "",
        "zero = dict(stage=0, offload_optimizer='cpu')",
        8,
        [
            (
                "ZER104 2 offload_optimizer has no effect at ZeRO stage 0; zero.stage=1 or more, or leave "
                "zero.offload_optimizer out"
            )
        ],
    ),
    (
        "",
        "zero = dict(stage=1, offload_optimizer='cpu')",
        8,
        [],
    ),
    (
        "",
        "zero = dict(stage=2, offload_param='cpu')",
        8,
        ["ZER104 2 offload_param has no effect at ZeRO stage 2; zero.stage=3, or leave zero.offload_param out"],
    ),
    (
        "",
        "zero = dict(stage=3, offload_param='cpu')",
        8,
        [],
    ),
    (
        "",
        "optimizer = dict(type='DeepSpeedCPUAdam')",
        8,
        [
            (
                "ZER105 2 DeepSpeedCPUAdam runs on the CPU, but zero.offload_optimizer is off; zero.stage=1 with "
                "zero.offload_optimizer='cpu', or optimizer.type='AdamW'"
            )
        ],
    ),
    (
        "",
        "optimizer = dict(type='DeepSpeedCPUAdam')\nzero = 3",
        8,
        [
            (
                "ZER105 2 DeepSpeedCPUAdam runs on the CPU, but zero.offload_optimizer is off; "
                "zero.offload_optimizer='cpu', or optimizer.type='AdamW'"
            )
        ],
    ),
    (
        "",
        "zero = dict(stage=2, offload_optimizer=dict(device='cpu', ratio=1.0))",
        8,
        [],
    ),
    (
        "",
        "zero = dict(stage=3, offload_optimizer=dict(device='cpu', ratio=0.5))",
        8,
        [("ZER107 2 offload_optimizer.ratio needs ZeRO stage 3 and the optimizer 'DeepSpeedCPUAdam'; leave ratio out")],
    ),
    (
        "",
        (
            "optimizer = dict(type='DeepSpeedCPUAdam')\nzero = dict(stage=2, "
            "offload_optimizer=dict(device='cpu', ratio=0.5))"
        ),
        8,
        [("ZER107 3 offload_optimizer.ratio needs ZeRO stage 3 and the optimizer 'DeepSpeedCPUAdam'; leave ratio out")],
    ),
    (
        "",
        "data = dict(seq_len=95)\nparallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
        8,
        ["TEN204 2 sequences of 95 tokens cannot be split evenly over 2 ranks; nearest legal: 94 or 96"],
    ),
    (
        "max_seq_len=95",
        "parallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
        8,
        ["TEN204 1 sequences of 95 tokens cannot be split evenly over 2 ranks; nearest legal: 94 or 96"],
    ),
    (
        "max_seq_len=95",
        "data = dict(seq_len=95)\nparallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
        8,
        ["TEN204 2 sequences of 95 tokens cannot be split evenly over 2 ranks; nearest legal: 94"],
    ),
    (
        "",
        "data = dict(seq_len=96)\nparallel = dict(tensor=dict(size=2, mode='1d', sequence=True))",
        8,
        [],
    ),
    (
        "hidden_size=120, num_kv_heads=8, positions='rotary'",
        "",
        8,
        [
            (
                "TEN209 1 a head has 5 features, and rotary positions rotate pairs of them; nearest legal: "
                "hidden_size=96 or 144"
            )
        ],
    ),
    (
        "hidden_size=100, positions='rotary'",
        "",
        8,
        ["TEN205 1 hidden_size 100 is not a multiple of num_heads 24; nearest legal: hidden_size=96 or 144"],
    ),
    (
        "num_heads=6, num_kv_heads=3",
        "parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=32)",
        8,
        ["TEN206 1 num_kv_heads 3 is not a multiple of y = 2 in mode '2d'; nearest legal: num_kv_heads=2 or 6"],
    ),
    (
        "hidden_size=24, num_heads=8, num_kv_heads=2",
        "parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=32)",
        8,
        [
            (
                "TEN208 1 num_kv_heads 2 has 6 features, not a multiple of y * q = 4 in mode '2d'; nearest "
                "legal: num_kv_heads=4"
            )
        ],
    ),
    (
        "",
        "batch = dict(global_size=12, micro_size=1)",
        8,
        [("BAT101 2 global_size 12 is not micro_size 1 * accumulation ? * data 8; global_size=8 or global_size=16")],
    ),
    (
        "",
        "batch = dict(global_size=12, micro_size=2, accumulation=1)",
        8,
        ["BAT101 2 global_size 12 is not micro_size 2 * accumulation 1 * data 8; global_size=16"],
    ),
    (
        "",
        "batch = dict(global_size=3)",
        8,
        ["BAT101 2 global_size 3 is not micro_size ? * accumulation ? * data 8; global_size=8"],
    ),
    (
        "",
        "batch = dict(global_size=3)",
        2**31,
        [
            (
                "BAT101 2 global_size 3 is not micro_size ? * accumulation ? * data 2147483648; choose fewer ranks, or "
                "more ranks per replica"
            )
        ],
    ),
    (
        "",
        "batch = dict(global_size=32, micro_size=2, accumulation=4)",
        8,
        [
            (
                "BAT101 2 global_size 32 is not micro_size 2 * accumulation 4 * data 8; global_size=64 or "
                "accumulation=2 or micro_size=1"
            )
        ],
    ),
    (
        "",
        "batch = dict(global_size=48, micro_size=2)\nschedule = dict(num_microbatches=2)",
        8,
        [
            (
                "BAT101 2 global_size 48 is not micro_size 2 * accumulation 2 * data 8; global_size=32 or "
                "schedule.num_microbatches=3 or micro_size=3"
            )
        ],
    ),
    (
        "",
        "data = dict(seq_len=96)",
        8,
        [],
    ),
    (
        "vocab_size=255",
        "",
        8,
        ["BAT104 1 vocab_size is 255, and byte-level text has 256 tokens; vocab_size=256 or more"],
    ),
    (
        "",
        "lr_scheduler = dict(type='cosine', warmup_steps=100)\ntrain = dict(steps=100)",
        8,
        [],
    ),
    (
        "",
        "lr_scheduler = dict(type='cosine', warmup_steps=101)\ntrain = dict(steps=100)",
        8,
        ["BAT105 2 101 steps of warm-up in a run of 100 steps; at most 100, or train.steps=101"],
    ),
    (
        "",
        "lr_scheduler = dict(type='WarmupLR')\ntrain = dict(steps=999)",
        8,
        [
            (
                "BAT105 2 1000 steps of warm-up in a run of 999 steps: DeepSpeed's default; "
                "lr_scheduler.warmup_num_steps=999, or train.steps=1000"
            )
        ],
    ),
    (
        "",
        "lr_scheduler = dict(type='WarmupLR')\ntrain = dict(steps=1000)",
        8,
        [],
    ),
    (
        "",
        "lr_scheduler = dict(type='WarmupDecayLR', warmup_num_steps=5, total_num_steps=100)\ntrain = dict(steps=100)",
        8,
        [],
    ),
    (
        "",
        "lr_scheduler = dict(type='WarmupDecayLR', warmup_num_steps=5, total_num_steps=99)\ntrain = dict(steps=100)",
        8,
        [
            (
                "BAT132 2 the schedule ends after 99 steps; the other 1 have 0 times the peak rate; "
                "total_num_steps=100, or train.steps=99"
            )
        ],
    ),
    (
        "",
        "lr_scheduler = dict(type='WarmupCosineLR', warmup_num_steps=5, total_num_steps=90, cos_min_ratio=0.01)",
        8,
        [],
    ),
    (
        "",
        "lr_scheduler = dict(type='WarmupCosineLR', warmup_num_steps=5, total_num_steps=90)",
        8,
        [
            (
                "BAT132 2 the schedule ends after 90 steps; the other 10 have 0.0001 times the peak rate; "
                "total_num_steps=100, or train.steps=90"
            )
        ],
    ),
    (
        "num_layers=1",
        "activation_checkpoint = 1",
        8,
        [],
    ),
    (
        "",
        "activation_checkpoint = 8\nparallel = dict(pipeline=2)\nbatch = dict(accumulation=4)",
        8,
        [],
    ),
    (
        "",
        "optimizer = dict(lr=1e-3)\nlr_scheduler = dict(type='cosine', min_lr=1e-3)",
        8,
        [],
    ),
    (
        "",
        "optimizer = dict(lr=1e-3)\nlr_scheduler = dict(type='cosine', min_lr=2e-3)",
        8,
        ["BAT106 3 min_lr 0.002 is above lr 0.001; at most 0.001"],
    ),
    (
        "",
        "optimizer = dict(type='SGD', lr=0.1, nesterov=True, momentum=0.1)",
        8,
        [],
    ),
    (
        "",
        "zero = 1\nparallel = dict(pipeline=2)\nbatch = dict(accumulation=16)",
        8,
        [],
    ),
    (
        "",
        "zero = 3\nparallel = dict(pipeline=2)\nbatch = dict(accumulation=16)",
        8,
        [
            (
                "ZER101 2 ZeRO stage 3 is not supported with a pipeline of 2 stages; zero.stage=1, or "
                "parallel.pipeline.size=1"
            )
        ],
    ),
    (
        "",
        "zero = 3",
        8,
        [],
    ),
    (
        "",
        "optimizer = dict(type='Adafactor')",
        8,
        [],
    ),
    (
        "",
        (
            "optimizer = dict(type='Adafactor')\nparallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = "
            "dict(micro_size=32)"
        ),
        8,
        [
            (
                "ZER103 2 Adafactor is not elementwise, and tensor parallelism shards tensors; "
                "parallel.tensor.size=1, or optimizer = dict(type='AdamW', lr=0.001)"
            )
        ],
    ),
    (
        "",
        "precision = 'bf16'",
        8,
        [
            (
                "PRE101 2 bf16 needs ZeRO stage 1 or more: at stage 0 DeepSpeed's step in half precision is "
                "wrong; zero.stage=1"
            )
        ],
    ),
    (
        "",
        "precision = 'fp16'\nzero = 1",
        8,
        [],
    ),
    (
        "",
        ("precision = dict(dtype='bf16', bf16_master_weights_and_grads=True, bf16_optimizer_states=True)\nzero = 2"),
        8,
        [],
    ),
    (
        "",
        (
            "precision = dict(dtype='fp16', fp16_master_weights_and_grads=True)\nzero = dict(stage=2, "
            "offload_optimizer='cpu')"
        ),
        8,
        [
            (
                "PRE102 2 master weights in fp16 need the optimizer 'DeepSpeedCPUAdam' and zero.offload_optimizer; "
                "optimizer.type='DeepSpeedCPUAdam' with zero.offload_optimizer='cpu'"
            )
        ],
    ),
    (
        "",
        (
            "precision = dict(dtype='fp16', fp16_master_weights_and_grads=True)\nzero = 2\noptimizer = "
            "dict(type='DeepSpeedCPUAdam')"
        ),
        8,
        [
            (
                "PRE102 2 master weights in fp16 need the optimizer 'DeepSpeedCPUAdam' and zero.offload_optimizer; "
                "optimizer.type='DeepSpeedCPUAdam' with zero.offload_optimizer='cpu'"
            ),
            (
                "ZER105 4 DeepSpeedCPUAdam runs on the CPU, but zero.offload_optimizer is off; "
                "zero.offload_optimizer='cpu', or optimizer.type='AdamW'"
            ),
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=9, mode='2d'))\nbatch = dict(micro_size=96)",
        9,
        [("TEN202 1 hidden_size 96 is not a multiple of y * q = 9 in mode '2d'; nearest legal: hidden_size=72 or 144")],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=5, mode='2d'))",
        5,
        [
            (
                "TEN104 2 size 5, and mode '2d' needs q*q ranks; nearest legal: 4 or 9; or choose mode 'cuboid', "
                "and a shape"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=20, mode='3d'))",
        20,
        [
            (
                "TEN103 2 size 20, and mode '3d' needs q*q*q ranks; nearest legal: 8 or 27; or choose mode "
                "'cuboid', and a shape"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=12, mode='2.5d'))",
        12,
        ["TEN105 2 mode '2.5d' needs a depth; depth=3 or 12"],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=12, mode='2.5d', depth=2))",
        12,
        ["TEN106 2 size 12 is not depth 2 times a square; depth=3 or 12"],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=12, mode='2.5d', depth=3))\nbatch = dict(micro_size=96)",
        12,
        [],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=6, mode='cuboid', shape=(1, 2, 2)))",
        6,
        ["TEN107 2 shape 1*2*2 has 4 ranks, but size is 6; choose a shape of 6 ranks"],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=6, mode='cuboid'))",
        6,
        ["TEN107 2 mode 'cuboid' needs a shape; choose a shape=(x, y, z) of x*y*z = 6 ranks"],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='1d', depth=2, impl='ring'))",
        8,
        [
            "TEN108 2 depth has no effect in mode '1d'; leave it out: depth belongs to mode '2.5d'",
            "TEN108 2 impl has no effect in mode '1d'; leave it out: impl belongs to mode 'sequence'",
        ],
    ),
    (
        "",
        "parallel = dict(context=2, tensor=dict(size=2, mode='sequence'))",
        8,
        ["TEN109 2 mode 'sequence' is context parallelism by another name; mode='1d'; or leave parallel.context out"],
    ),
    (
        "",
        "parallel = dict(context=2, tensor=dict(size=2, mode='2.5d', depth=2))",
        8,
        ["TEN109 2 mode '2.5d' has its depth on the same axis; leave parallel.context out"],
    ),
    (
        "",
        "parallel = dict(context=2, tensor=dict(size=2, mode='1d'))",
        8,
        [],
    ),
    (
        "",
        "parallel = dict(context=dict(size=4, impl='hybrid', ulysses_size=3))",
        8,
        ["TEN109 2 context of 4 ranks is not a multiple of 3; choose 1 or 2 or 4; or leave it out"],
    ),
    (
        "",
        "parallel = dict(context=dict(size=4, ulysses_size=2))",
        8,
        ["TEN112 2 ulysses_size has no effect with impl 'ring'; impl='hybrid'; or leave it out"],
    ),
    (
        "",
        "parallel = dict(context=dict(size=4, impl='hybrid', ulysses_size=2))",
        8,
        [],
    ),
    (
        "",
        "parallel = dict(context=dict(size=16, impl='ulysses'))",
        16,
        [
            "TEN201 1 num_heads 24 is not a multiple of ulysses = 16 in context parallelism; "
            "nearest legal: num_heads=16 or 32"
        ],
    ),
    (
        "",
        "parallel = dict(context=3)",
        8,
        [
            (
                "PAR101 2 a world of 8 is not a multiple of context 3; start 6 or 9 ranks; or "
                "choose sizes whose product divides 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(context=3, tensor=dict(size=2, mode='1d'))",
        8,
        [
            (
                "PAR101 2 a world of 8 is not a multiple of context 3 * tensor 2 = 6; start 6 or 12 ranks; or "
                "choose sizes whose product divides 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(context=4, tensor=dict(size=2, mode='1d', sequence=True))\ntrain = dict(loss_chunks=13)",
        8,
        ["DEAD123 3 13 chunks for 12 tokens of a sequence on each rank; at most 12"],
    ),
    (
        "",
        (
            "parallel = dict(context=4, tensor=dict(size=2, mode='1d', sequence=True))\n"
            "train = dict(loss_chunks=12)\nactivation_checkpoint = dict(interval=1, mlp_chunks=12)"
        ),
        8,
        [],
    ),
    ("", f"{RESMLP.format(48, 32, 4)}parallel = dict(tensor=dict(size=4, mode='2d'))", 8, []),
    (
        "",
        f"{RESMLP.format(50, 36, 4)}parallel = dict(tensor=dict(size=8, mode='3d'))",
        8,
        ["TEN140 1 hidden_size: 50 is not divisible by z * q = 4; nearest legal: 48 or 52"],
    ),
    (
        "",
        f"{RESMLP.format(48, 36, 4)}parallel = dict(tensor=dict(size=4, mode='1d', sequence=True))",
        8,
        [
            (
                "TEN140 1 image_size: 81 is not divisible by y = 4 (tokens of an image); choose other sizes of images "
                "or patches, or another tensor mode"
            )
        ],
    ),
    (
        "",
        f"{RESMLP.format(48, 30, 7)}",
        8,
        ["TEN141 1 patch_size 7 does not divide image_size 30; nearest legal: 5 or 6"],
    ),
    (
        "",
        f"{RESMLP.format(48, 36, 7)}parallel = dict(tensor=dict(size=8, mode='1d'))",
        8,
        ["TEN141 1 patch_size 7 does not divide image_size 36; nearest legal: 6 or 9"],
    ),
    (
        "",
        f"{RESMLP.format(48, 36, 4)}train = dict(loss_chunks=4)\n"
        "activation_checkpoint = dict(interval=1, mlp_chunks=9999)",
        8,
        [
            "DEAD123 3 loss_chunks has no effect: the model has no head over a vocabulary; leave it out",
            "DEAD123 4 mlp_chunks has no effect: the model's blocks are not dslpar's own; leave it out",
        ],
    ),
    ("", "zero = dict(stage=1, use_multi_rank_bucket_allreduce=True)", 1, []),
    ("", "zero = dict(stage=2, allgather_bucket_size=6)", 8, []),
    (
        "",
        "zero = dict(stage=1, allgather_bucket_size=7)",
        8,
        ["ZER108 2 allgather_bucket_size 7 is odd: ZeRO aligns to two elements; such as 8: an even number"],
    ),
    (
        "",
        "zero = dict(stage=3, zero_quantized_gradients=True, reduce_scatter=False)",
        8,
        ["ZER108 2 zero_quantized_gradients needs reduce_scatter; leave reduce_scatter out"],
    ),
    ("", "zero = dict(stage=3, zero_quantized_gradients=True)", 8, []),
    *(
        (
            "",
            f"zero = dict(stage={stage}, pipeline_loading_checkpoint=True)",
            8,
            [
                (
                    "ZER108 2 DeepSpeed loads checkpoints rank by rank only at ZeRO stage 3; at stage "
                    f"{stage} a resume would fail; leave pipeline_loading_checkpoint out"
                )
            ],
        )
        for stage in (1, 2)
    ),
    ("", "zero = dict(stage=3, pipeline_loading_checkpoint=True)", 8, []),
    (
        "",
        "data = dict(type='blend', parts=[dict(type='text'), dict(eval_fraction=0.1, weight=3), dict()])",
        8,
        [
            (
                "BAT121 2 part 0 has no weight, but part 1 has 3; add weight=1 to data.parts.0, or leave "
                "data.parts.1.weight out"
            )
        ],
    ),
]

AND_SLOW: list[Row] = [
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(micro_size=1, accumulation=12)",
        8,
        [],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(micro_size=1, accumulation=11)",
        8,
        [
            (
                "PERF104 3 4 stages are idle 21.4 % of the step: (S-1) / (m+S-1), m = 11 micro-batches; "
                "batch.accumulation=12: 20 % or schedule=dict(type='zero_bubble'): 8.3 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(micro_size=1, accumulation=4)",
        8,
        [
            (
                "PERF104 3 4 stages are idle 42.9 % of the step: (S-1) / (m+S-1), m = 4 micro-batches; "
                "batch.accumulation=12: 20 % or schedule=dict(type='zero_bubble'): 20 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(micro_size=1, accumulation=3)",
        8,
        [
            (
                "PERF105 3 3 micro-batches for 4 stages: at least 1 stage is always idle (idle share: 50 %); "
                "batch.accumulation=12: 20 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(micro_size=1)",
        8,
        [
            (
                "PERF105 2 1 micro-batch for 4 stages: at least 3 stages are always idle (idle share: 75 %); "
                "batch.accumulation=12: 20 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(global_size=64, accumulation=8)",
        8,
        [
            (
                "PERF104 3 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches; "
                "batch.accumulation=16 or schedule=dict(type='zero_bubble'): 11.1 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(global_size=64, micro_size=4)",
        8,
        [
            (
                "PERF104 3 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches; "
                "batch.micro_size=2 or schedule=dict(type='zero_bubble'): 11.1 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(global_size=64, micro_size=16)",
        8,
        [
            (
                "PERF105 3 2 micro-batches for 4 stages: at least 2 stages are always idle (idle share: 60 %); "
                "batch.micro_size=2"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(global_size=64, accumulation=8)",
        None,
        [
            (
                "PERF104 3 4 stages are idle 27.3 % of the step: (S-1) / (m+S-1), m = 8 micro-batches; choose "
                "batch.accumulation of 12 or more, and a global_size to fit "
                "or schedule=dict(type='zero_bubble'): 11.1 %"
            ),
            "CFG112 1 no world size is given: rules that need it are skipped; --world-size N, or --hostfile FILE",
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(global_size=8)",
        8,
        [
            (
                "PERF105 3 1 micro-batch for 4 stages: at least 3 stages are always idle (idle share: 75 %); "
                "batch.global_size=24 with batch.accumulation=12"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nschedule = dict(num_microbatches=6)",
        8,
        [
            (
                "PERF104 3 4 stages are idle 33.3 % of the step: (S-1) / (m+S-1), m = 6 micro-batches; "
                "schedule.num_microbatches=12: 20 % or schedule=dict(type='zero_bubble', num_microbatches=6): 14.3 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=4)\nbatch = dict(global_size=13, accumulation=4)",
        8,
        [("BAT101 3 global_size 13 is not micro_size ? * accumulation 4 * data 2; global_size=8 or global_size=16")],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=64)\nbatch = dict(accumulation=4)",
        64,
        ["PIP101 2 64 stages, but the model has 32 layers; at most 32: each stage needs at least one layer"],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=dict(size=4, counts=[8, 8, 8, 8]))\nbatch = dict(accumulation=12)",
        8,
        [],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=dict(size=4, counts=[5, 9, 9, 9]))\nbatch = dict(accumulation=12)",
        8,
        [],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "parallel = dict(pipeline=dict(size=2, counts=[20, 12]))\nbatch = dict(accumulation=12)",
        8,
        [
            (
                "PERF106 2 stage 0 computes 24.7 % more than the mean: stages compute as much as 20, 12 layers; "
                "counts=[16, 16]: 0.2 %"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        (
            "train = dict(dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id=[0]*20+[1]*12))\nbatch "
            "= dict(accumulation=12)"
        ),
        8,
        [
            (
                "PERF106 2 stage 0 computes 24.7 % more than the mean: stages compute as much as 20, 12 layers; "
                "custom_pipeline_stage_id=[0] * 16 + [1] * 16: 0.2 %"
            )
        ],
    ),
    (
        "vocab_size=257",
        "parallel = dict(tensor=dict(size=8, mode='1d'))",
        8,
        [],
    ),
    (
        "hidden_size=384, vocab_size=1025",
        "parallel = dict(tensor=dict(size=8, mode='1d'))",
        8,
        [],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "zero = 2\nbatch = dict(accumulation=8)",
        8,
        [
            (
                "PERF109 2 ZeRO 2 sends 7.88 elements per parameter, step and rank with 8 micro-batches, ZeRO 1 "
                "1.75 elements per parameter; zero.stage=1 (if whole gradients fit); or choose fewer, larger "
                "micro-batches"
            )
        ],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "zero = 1\nbatch = dict(accumulation=8)",
        8,
        [],
    ),
    (
        "num_layers=32, hidden_size=4096, num_heads=32, vocab_size=4096, max_seq_len=2048",
        "zero = 3\nbatch = dict(accumulation=8)",
        8,
        [],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=5)\nbatch = dict(accumulation=16)",
        5,
        ["PIP101 2 5 stages, but the model has 4 layers; at most 4: each stage needs at least one layer"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0, 0, 1]))\nbatch = dict(accumulation=16)",
        2,
        ["PIP102 2 3 stage ids for 4 layers; such as [0, 0, 1, 1]: one id for each transformer layer"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0, 1, 0, 0]))\nbatch = dict(accumulation=16)",
        2,
        ["PIP103 2 layer 2 is on stage 0, after a layer on stage 1; such as [0, 0, 0, 1]"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0, 1, 0, 1, 0]))\nbatch = dict(accumulation=16)",
        2,
        [
            "PIP102 2 5 stage ids for 4 layers; such as [0, 0, 1, 1]: one id for each transformer layer",
            "PIP103 2 layer 2 is on stage 0, after a layer on stage 1; such as [0, 0, 0, 1, 1]",
        ],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[0, 0, 1, 2]))\nbatch = dict(accumulation=16)",
        2,
        [
            (
                "PIP104 2 stage id 2 does not exist: the stages are 0..1; choose an id from 0 to 1; the pipeline size "
                "limits it, not the world size"
            )
        ],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, stage_ids=[-1, 0, 1, 1]))\nbatch = dict(accumulation=16)",
        2,
        [
            (
                "PIP104 2 stage id -1 does not exist: the stages are 0..1; choose an id from 0 to 1; the pipeline size "
                "limits it, not the world size"
            )
        ],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=4, stage_ids=[0, 0, 0, 3]))\nbatch = dict(accumulation=16)",
        4,
        ["PIP105 2 stages without layers: 1, 2; such as [0, 1, 2, 3]"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=4, counts=[4, 0, 0, 0]))\nbatch = dict(accumulation=16)",
        4,
        ["PIP105 2 stages without layers: 1, 2, 3; such as [1, 1, 1, 1]"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=4, counts=[1, 1, 2]))\nbatch = dict(accumulation=16)",
        4,
        ["PIP107 2 3 counts for 4 stages; such as [1, 1, 1, 1]: one number for each stage"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, counts=[2, 3]))\nbatch = dict(accumulation=16)",
        2,
        ["PIP107 2 the counts add up to 5, but the model has 4 layers; such as [2, 2]"],
    ),
    (
        "num_layers=4",
        (
            "parallel = dict(pipeline=dict(size=2, counts=[2, 2], stage_ids=[0, 0, 1, 1], method='cost'))\n"
            "batch = dict(accumulation=16)"
        ),
        2,
        [
            (
                "PIP106 2 stage_ids and counts and method each set the partition of the layers; keep one of "
                "stage_ids, counts and method"
            )
        ],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, counts=[2, 2], method='cost'))\nbatch = dict(accumulation=16)",
        2,
        ["PIP106 2 counts and method each set the partition of the layers; keep one of counts and method"],
    ),
    (
        "num_layers=4",
        ("train = dict(dist=dict(pipeline_parallel_size=2, pipeline_num_layers=6))\nbatch = dict(accumulation=16)"),
        2,
        ["PIP108 2 pipeline_num_layers is 6, but the model has 4 layers; write 4, or leave it out"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, method='unifrom'))\nbatch = dict(accumulation=16)",
        2,
        ["PIP109 2 unknown method 'unifrom'; did you mean 'uniform'?"],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, method='xyz'))\nbatch = dict(accumulation=16)",
        2,
        [("PIP109 2 unknown method 'xyz'; choose one of 'cost', 'uniform', 'parameters', 'libai' and 'type:REGEX'")],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=2, method='type:nothing'))\nbatch = dict(accumulation=16)",
        2,
        [
            (
                "PIP109 2 'type:nothing' matches no layer class; choose from the classes Embedding, "
                "PositionEmbedding, Block, LayerNorm, Head"
            )
        ],
    ),
    (
        "num_layers=4",
        "parallel = dict(pipeline=dict(size=1, counts=[4]))",
        2,
        [
            (
                "DEAD101 2 counts has no effect: the pipeline has one stage; leave it out; or choose a size of "
                "the pipeline"
            )
        ],
    ),
    (
        "",
        "model = dict(type='a.B')\nparallel = dict(pipeline=2)\nbatch = dict(accumulation=16)",
        2,
        [
            "CFG111 1 the layers of a.B are not known: rules about layers and sizes are skipped; ",
            (
                "PIP110 2 the partition of a.B over 2 stages is checked only when the model is built; add "
                "layers_cfg=[...] to model: then its layers are known"
            ),
        ],
    ),
    (
        "",
        "model = dict(type='a.B')",
        2,
        ["CFG111 1 the layers of a.B are not known: rules about layers and sizes are skipped; "],
    ),
    (
        "",
        "activation_checkpoint = 7",
        8,
        [],
    ),
    (
        "",
        "activation_checkpoint = 8",
        8,
        [
            (
                "PERF102 2 a segment has 8 layers, and the model 8: the peak memory is not reduced; such as 1: "
                "fewer than 8"
            )
        ],
    ),
    (
        "",
        "checkpoint = dict(keep=1)\ntrain = dict(save_interval=0)",
        8,
        [
            (
                "DEAD105 2 keep has no effect: save_interval 0 writes no checkpoint; leave keep out; or choose a "
                "train.save_interval"
            )
        ],
    ),
    (
        "",
        "schedule = dict(num_microbatches=2)",
        8,
        [],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=8, mode='2.5d', depth=2))\nbatch = dict(micro_size=6)",
        8,
        [
            (
                "BAT102 3 micro_size 6 does not divide over the cuboid: mode '2.5d' needs multiples of 4; nearest "
                "legal: 4 or 8"
            )
        ],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=8, mode='2.5d', depth=2))\nbatch = dict(micro_size=96)",
        8,
        [],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(global_size=6)",
        8,
        [("BAT102 3 micro_size 3 does not divide over the cuboid: mode '2d' needs multiples of 2; global_size=4 or 8")],
    ),
    (
        "",
        "parallel = dict(tensor=dict(size=4, mode='2d'))\nbatch = dict(micro_size=2)",
        8,
        [
            (
                "PERF103 2 mode '2d' sends 121,200 elements per rank and layer for a micro-batch of 192 tokens, "
                "and '1d' 110,592: '2d' sends less from 220 tokens on, and saves 29.2 % of memory (112,752 "
                "elements of weights and activations, '1d' 159,336); batch.micro_size at least 4 or mode='1d'"
            )
        ],
    ),
]

"""Rows in which findings about slow layouts count, too."""


def config(changes: str, rest: str) -> str:
    """Return a config with these changes of the model, or without a model if the rest has its own."""
    if rest.startswith("model"):
        return f"{rest}\n"
    sizes = SIZES | dict(change.split("=") for change in changes.split(", ") if change)
    return f"model = dict(type='GPT', {', '.join(f'{key}={value}' for key, value in sizes.items())})\n{rest}\n"


def said(changes: str, rest: str, where: Where, ignored: tuple[str, ...]) -> list[str]:
    """Return the findings in the rows' format."""
    world, hosts = where if isinstance(where, tuple) else (where, None) if not isinstance(where, str) else (None, where)
    found = findings(config(changes, rest), world, hostfile=hosts, ignored=ignored)
    return [f"{each.code} {each.location.line} {each.message}; {each.help}" for each in found]


@pytest.mark.parametrize(("changes", "rest", "where", "expected"), CASES)
def test_exact_findings(changes: str, rest: str, where: Where, expected: list[str]) -> None:
    assert said(changes, rest, where, TOO_SMALL) == expected


@pytest.mark.parametrize(("changes", "rest", "where", "expected"), AND_SLOW)
def test_exact_findings_with_perf(changes: str, rest: str, where: Where, expected: list[str]) -> None:
    assert said(changes, rest, where, ()) == expected
