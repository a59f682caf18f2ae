"""Messages and hints of the rules about optimizers, schedulers, offload, gradient handlers and listed layers."""

from __future__ import annotations

import pytest

from tests.support.lint import MODEL, codes, findings

SAID = [
    # optimizers
    (
        "optimizer = dict(type='RMSProp')",
        "unknown optimizer 'RMSProp'",
        "did you mean 'RMSprop'? "
        "(a class of your own goes by its full name, such as 'my_package.my_module.MyOptimizer')",
    ),
    (
        "optimizer = dict(type='SparseAdam')",
        "optimizer cannot be 'SparseAdam': it takes sparse gradients, and dslpar's are dense",
        "such as 'AdamW'",
    ),
    (
        "optimizer = dict(type='deepspeed.ops.lamb.FusedLamb')\nzero = 2",
        "Lamb is not elementwise, and ZeRO 2 shards tensors",
        "zero = 0, or optimizer = dict(type='AdamW', lr=0.001)",
    ),
    (
        "optimizer = dict(type='torch.optim.Adafactor')\nparallel = dict(tensor=dict(size=2, mode='1d'))",
        "Adafactor is not elementwise, and tensor parallelism shards tensors",
        "parallel.tensor.size=1, or optimizer = dict(type='AdamW', lr=0.001)",
    ),
    (
        "optimizer = dict(type='a.B', anything=1)\nzero = 1",
        "a.B is not known to be elementwise, and ZeRO 1 shards tensors",
        "zero = 0, or optimizer = dict(type='AdamW', lr=0.001); "
        "or deepspeed.zero_allow_untested_optimizer=True (if it is)",
    ),
    (
        "optimizer = dict(type='Rprop', weight_decay=0.1)",
        "unknown key 'weight_decay' in optimizer",
        "choose from the keys lr, foreach, maximize, differentiable, capturable, etas, step_sizes",
    ),
    (
        "optimizer = dict(type='FusedAdam')\nzero = dict(stage=2, offload_optimizer='cpu')",
        "FusedAdam runs on the accelerator, but zero.offload_optimizer is on",
        "optimizer.type='AdamW' or 'DeepSpeedCPUAdam'",
    ),
    (
        "optimizer = dict(type='DeepSpeedCPUAdam')\nzero = 2",
        "DeepSpeedCPUAdam runs on the CPU, but zero.offload_optimizer is off",
        "zero.offload_optimizer='cpu', or optimizer.type='AdamW'",
    ),
    (
        "optimizer = dict(type='SGD', nesterov=True)",
        "nesterov=True with a momentum of 0",
        "momentum=0.9, or leave nesterov out",
    ),
    # schedules
    (
        "lr_scheduler = dict(type='WarmupDecayLR', warmup_num_steps=5)",
        "missing key 'total_num_steps' in lr_scheduler, which WarmupDecayLR needs",
        "add total_num_steps=... to lr_scheduler",
    ),
    (
        "lr_scheduler = dict(type='ReduceLROnPlateau')",
        "lr_scheduler cannot be 'ReduceLROnPlateau': it needs a metric of the evaluation at each step",
        "such as 'cosine'",
    ),
    (
        "lr_scheduler = dict(type='MultiStepLR', milestones=[3, 2])",
        "lr_scheduler.milestones is [3, 2], but must be a list of rising step numbers",
        "choose a list of rising step numbers",
    ),
    (
        "optimizer = dict(lr=1e-3)\nlr_scheduler = dict(type='OneCycle', cycle_min_lr=0, cycle_max_lr=0.1)",
        "optimizer.lr 0.001 has no effect: OneCycle has cycle_max_lr 0.1",
        "keep one of optimizer.lr and lr_scheduler.cycle_max_lr",
    ),
    (
        "optimizer = dict(type='Rprop')\nlr_scheduler = dict(type='CyclicLR', base_lr=0)",
        "CyclicLR cycles the momentum, but Rprop has none",
        "add cycle_momentum=False to lr_scheduler",
    ),
    (
        "lr_scheduler = dict(type='OneCycleLR', total_steps=9)\ntrain = dict(steps=10)",
        "the scheduler has 9 steps, but the run has 10",
        "total_steps=10, or train.steps=9",
    ),
    *(
        (
            f"lr_scheduler = dict(type='OneCycleLR', {arguments})",
            f"a phase of the scheduler has one step, with pct_start {share}",
            "pct_start=0.3",
        )
        for arguments, share in (
            ("total_steps=4, pct_start=0.25)\ntrain = dict(steps=4", "0.25 of 4 steps"),
            ("total_steps=5, pct_start=0.6, three_phase=True)\ntrain = dict(steps=5", "0.6 of 5 steps"),
        )
    ),
    # micro-batches
    (
        "parallel = dict(pipeline=2)\nschedule = dict(type='gpipe')",
        "schedule.type cannot be 'gpipe': it holds the activations of all micro-batches, for the same bubble as '1f1b'",
        "choose one of '1f1b', 'interleaved', 'zero_bubble'",
    ),
    (
        "parallel = dict(pipeline=2)\nschedule = dict(num_chunks=2)\nbatch = dict(accumulation=4)",
        "num_chunks is 2, but the schedule '1f1b' has one chunk per rank",
        "schedule.type='interleaved' or 'zero_bubble', or num_chunks=1",
    ),
    (
        "schedule = dict(num_microbatches=4)\nbatch = dict(accumulation=2)",
        "num_microbatches is 4, but batch.accumulation is 2",
        "keep one of schedule.num_microbatches and batch.accumulation",
    ),
    (
        "batch = dict(global_size=16, micro_size=1)\nschedule = dict(num_microbatches=3)",
        "global_size 16 is not micro_size 1 * accumulation 3 * data 8",
        "global_size=24 or schedule.num_microbatches=2",
    ),
    (
        "schedule = dict(type='1f1b')",
        "schedule.type has no effect: the pipeline has one stage",
        "leave schedule out; or choose a size of the pipeline",
    ),
    # gradient handlers
    (
        "gradient_handler = [dict(type='colossalai.engine.ZeROGradientHandler')]",
        "ZeROGradientHandler has nothing to do: DeepSpeed's ZeRO reduces what it shards",
        "leave gradient_handler.0 out",
    ),
    (
        "gradient_handler = [dict(type='MoeGradientHandler')]",
        "gradient_handler.0 cannot be 'MoeGradientHandler': no layer here has experts",
        "leave it out",
    ),
    (
        "gradient_handler = dict(type='a.B')\nzero = 3",
        "gradient handlers need whole gradients, which ZeRO stage 3 shards",
        "zero = 0, or leave gradient_handler out",
    ),
    # offload, precision, checkpoints
    (
        "zero = dict(stage=3, offload_param=dict(device='nvme', nvme_path='/nvme'))",
        "zero.offload_param.device cannot be 'nvme': offload to NVMe is not part of this version of dslpar",
        "choose one of 'cpu', 'none'",
    ),
    (
        "zero = dict(offload_optimizer='cpu')",
        "offload_optimizer has no effect at ZeRO stage 0",
        "zero.stage=1 or more, or leave zero.offload_optimizer out",
    ),
    (
        "precision = dict(dtype='fp16', loss_scale=128, hysteresis=3)\nzero = 1",
        "hysteresis has no effect: loss_scale 128 is fixed",
        "keep one of hysteresis and loss_scale",
    ),
    (
        "precision = dict(dtype='bf16', bf16_master_weights_and_grads=True)\nzero = 2",
        "master weights in bf16 need the optimizer 'DeepSpeedCPUAdam' and zero.offload_optimizer",
        "optimizer.type='DeepSpeedCPUAdam' with zero.offload_optimizer='cpu'",
    ),
    (
        "zero = dict(stage=3, offload_optimizer=dict(device='cpu', super_offload=True))",
        "offload_optimizer.super_offload needs ZeRO stage 3 and the optimizer 'DeepSpeedCPUAdam'",
        "leave super_offload out",
    ),
    (
        "zero = dict(stage=1, offload_optimizer=dict(device='cpu', nvme_path='/x'))",
        "nvme_path has no effect: it is a key of offload to NVMe",
        "leave nvme_path out",
    ),
    (
        "precision = dict(dtype='bf16', bf16_optimizer_states=True)\nzero = 1",
        "optimizer states in bf16 need master weights in bf16",
        "add bf16_master_weights_and_grads=True",
    ),
    (
        "checkpoint = dict(keep=1)\ntrain = dict(save_interval=0)",
        "keep has no effect: save_interval 0 writes no checkpoint",
        "leave keep out; or choose a train.save_interval",
    ),
    (
        "activation_checkpoint = dict(interval=9)",
        "a segment has 9 layers, and the model 8: the peak memory is not reduced",
        "such as 1: fewer than 8",
    ),
]


@pytest.mark.parametrize(("text", "message", "hint"), SAID, ids=[text for text, _, _ in SAID])
def test_messages(text: str, message: str, hint: str) -> None:
    found = findings(f"{MODEL}{text}\n")
    assert [(finding.message, finding.help) for finding in found] == [(message, hint)]


LAYERS = [
    (
        "[dict(type='Liner')]",
        "unknown type 'Liner' in model.layers_cfg.0",
        "did you mean 'Linear'? (a class of your own",
    ),
    (
        "[dict(type='MSELoss')]",
        "unknown type 'MSELoss' in model.layers_cfg.0",
        "a name of torch.nn's, such as 'Linear' (",
    ),
    ("[dict(type='ReLU'), 3]", "model.layers_cfg.1 must be a dict", "layers_cfg=[dict(type='Linear', "),
    ("[dict(inplace=True)]", "missing key 'type' in model.layers_cfg.0", "layers_cfg=[dict(type='Linear', "),
    ("'ReLU'", "model.layers_cfg must be a list of dicts, at least one", "layers_cfg=[dict(type='Linear', "),
    ("[]", "model.layers_cfg must be a list of dicts, at least one", "layers_cfg=[dict(type='Linear', "),
    (
        "[dict(type='ReLU', layer_idx=-2)]",
        "model.layers_cfg.0.layer_idx is -2, but must be a whole number from 0, or -1 for the last",
        "choose a whole number from 0, or -1 for the last",
    ),
    (
        "[dict(type='ReLU', layer_idx=index) for index in (0, 2)]",
        "layer_idx is 2: it counts layers from 0, up, without gaps",
        "0 or 1, or leave it out",
    ),
]


@pytest.mark.parametrize(("layers", "message", "hint"), LAYERS, ids=[layers for layers, _, _ in LAYERS])
def test_messages_about_listed_layers(layers: str, message: str, hint: str) -> None:
    """A partition that depends on an unknown value is not checked."""
    text = f"model = dict(type='Sequential', layers_cfg={layers})\nparallel = dict(pipeline=dict(size=8, counts=[1]))\n"
    found = [finding for finding in findings(text) if finding.code != "PIP107"]
    assert [finding.message for finding in found] == [message]
    assert found[0].help.startswith(hint)


@pytest.mark.parametrize(
    ("pipeline", "code"),
    [
        ("8", "PIP101"),
        ("dict(size=2, stage_ids=[0, 0, 1])", "PIP102"),
        ("dict(size=2, stage_ids=[1, 0, 1, 1])", "PIP103"),
        ("dict(size=2, stage_ids=[0, 0, 1, 2])", "PIP104"),
        ("dict(size=2, stage_ids=[0, 0, 0, 0])", "PIP105"),
        ("dict(size=2, counts=[1, 4])", "PIP107"),
        ("dict(size=2, method='type:Conv')", "PIP109"),
        ("dict(size=4)", "PIP113"),
        ("dict(size=4, stage_ids=[0, 1, 2, 3])", "PIP113"),
        ("dict(size=2, counts=[2, 2])", None),
        ("dict(size=2, method='type:my')", "PIP114"),
        ("dict(size=2, method='type:relu|my')", None),
        ("dict(size=2, method='parameters')", None),
    ],
)
def test_listed_layers_are_partitioned_as_a_gpt(pipeline: str, code: str | None) -> None:
    linear = "dict(type='Linear', in_features=8, out_features=8)"
    text = f"model = dict(type='a.B', layers_cfg=[{linear}, dict(type='ReLU'), dict(type='a.MyLayer'), {linear}])\n"
    assert codes(f"{text}parallel = dict(pipeline={pipeline})\n") == ([code] if code else [])


def test_zero_allow_untested_optimizer_is_accepted() -> None:
    own = "optimizer = dict(type='a.B')\nzero = 1\ndeepspeed = dict(zero_allow_untested_optimizer=True)\n"
    assert codes(MODEL + own) == []
    assert codes(MODEL + own.replace("a.B", "Lamb")) == ["ZER103"]


def test_every_optimizer_is_accepted_without_shards() -> None:
    assert codes(MODEL + "optimizer = dict(type='Lamb')\nparallel = dict(tensor=dict(size=4, mode='sequence'))\n") == []


@pytest.mark.parametrize(
    "text",
    [
        "optimizer = dict(type=nothing)",
        "lr_scheduler = dict(type='StepLR', step_size=nothing)",
        "zero = dict(stage=2, offload_optimizer=dict(device=nothing))",
        "gradient_handler = [nothing, dict(type=nothing)]",
        "model = dict(type='Sequential', layers_cfg=[dict(type='a.MyLayer', layer_idx=nothing)])",
        "model = dict(type='Sequential', layers_cfg=nothing)\nparallel = dict(pipeline=2)",
    ],
)
def test_an_unknown_value_has_one_finding(text: str) -> None:
    assert set(codes(text if "model" in text else MODEL + text)) == {"CFG010"}


def test_classes_by_reference() -> None:
    """As in LiBai, a class is a LazyCall, by its full name."""
    text = (
        "from dslpar import LazyCall as L\n"
        "from torch.optim import RMSprop\nfrom torch.optim.lr_scheduler import StepLR\n"
        "optimizer = L(RMSprop)(lr=1e-2, alpha=0.9)\nlr_scheduler = L(StepLR)(step_size=10)\n"
    )
    assert codes(MODEL + text) == []
    assert codes(MODEL + text.replace("alpha", "alhpa").replace("step_size", "size")) == ["CFG101", "CFG104", "CFG101"]


@pytest.mark.parametrize("key", ["optimizer", "lr_scheduler", "data"])
def test_a_type_of_none_counts_as_left_out(key: str) -> None:
    assert codes(MODEL + f"{key} = dict(type=None)") == []
    assert codes("model = dict(type=None, num_layers=8)") == ["CFG104"]


def test_hint_about_deepspeed_cpu_adam_fits_a_pipeline() -> None:
    """The hint keeps the ZeRO stage, since a pipeline forbids stage 2."""
    text = MODEL + "optimizer = dict(type='DeepSpeedCPUAdam')\nparallel = dict(pipeline=2)\n"
    (found,) = findings(text + "zero = 1")
    hint = "zero.offload_optimizer='cpu', or optimizer.type='AdamW'"
    assert (found.code, found.help) == ("ZER105", hint)
    assert codes(text + "zero = dict(stage=1, offload_optimizer='cpu')") == []


@pytest.mark.parametrize(
    ("tensor", "expected", "hint"),
    [
        (
            "size=2, mode='1d', keep='x'",
            "no effect: no layer gathers tensors in mode '1d' of shape 1*2*1",
            "leave it out",
        ),
        ("size=4, mode='sequence', keep='both'", "no effect: no layer gathers", "leave it out"),
        ("size=3, mode='2.5d', depth=3, keep='none'", "no effect: no layer gathers", "leave it out"),
        ("size=1, keep='none'", "no effect: no layer gathers tensors without a mode", "leave it out"),
        (
            "size=2, mode='1d', sequence=True, keep='w'",
            "no layer gathers weights in mode '1d'",
            "keep='none' means the",
        ),
        ("size=2, mode='1d', sequence=True, keep='both'", "no layer gathers weights", "keep='x' means the same"),
        (
            "size=2, mode='cuboid', shape=(2, 1, 1), keep='both'",
            "no layer gathers activations",
            "keep='w' means the same",
        ),
        (
            "size=2, mode='cuboid', shape=(2, 1, 1), keep='x'",
            "no layer gathers activations",
            "keep='none' means the same",
        ),
        ("size=2, mode='1d', sequence=True, keep='x'", None, ""),
        ("size=2, mode='cuboid', shape=(1, 1, 2), keep='x'", None, ""),
        ("size=4, mode='cuboid', shape=(2, 2, 1), residual='replicated', keep='w'", None, ""),
        ("size=4, mode='2d', keep='both'", None, ""),
    ],
)
def test_keep_names_gathered_panels(tensor: str, expected: str | None, hint: str) -> None:
    found = findings(f"{MODEL}parallel = dict(tensor=dict({tensor}))\nbatch = dict(micro_size=12)\n", 12)
    assert [finding.code for finding in found] == (["DEAD109"] if expected else [])
    if expected:
        assert expected in found[0].message
        assert hint in found[0].help


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("optimizer = 'RMSprop'", "write optimizer = dict(type='RMSprop')"),
        ("optimizer = 3", "write optimizer = dict(type='AdamW')"),
        ("lr_scheduler = 'cosine'", "write lr_scheduler = dict(type='cosine')"),
    ],
)
def test_a_class_without_its_package_gets_the_full_name(text: str, hint: str) -> None:
    (found,) = findings(MODEL + text)
    assert (found.code, found.help) == ("CFG102", hint)


def test_messages_about_grouped_queries_and_rotary_positions() -> None:
    grouped = MODEL.replace("num_heads=24", "num_heads=24, num_kv_heads={}")
    tensor = "parallel = dict(tensor=dict(size=8, mode='1d'))\n"
    (found,) = findings(grouped.format(4) + tensor)
    expected = "num_kv_heads 4 is not a multiple of y = 8 in mode '1d'"
    assert (found.code, found.message, found.help) == ("TEN206", expected, "nearest legal: num_kv_heads=8")
    (found,) = findings(grouped.format(5))
    expected = "num_heads 24 is not a multiple of num_kv_heads 5"
    assert (found.code, found.message, found.help) == ("TEN207", expected, "nearest legal: num_kv_heads=4 or 6")
    odd = grouped.replace("hidden_size=96", "hidden_size=120, positions='rotary'").format(8)
    (found,) = findings(odd)
    expected = "a head has 5 features, and rotary positions rotate pairs of them"
    assert (found.code, found.message, found.help) == ("TEN209", expected, "nearest legal: hidden_size=96 or 144")


def test_rules_about_one_rank_need_no_mode() -> None:
    """Mistakes on any cuboid are reported before the mode is valid."""
    text = MODEL.replace("hidden_size=96", "hidden_size=90") + "parallel = dict(tensor=4)\n"
    found = {finding.code: finding.help for finding in findings(text)}
    assert found.keys() == {"TEN205", "TEN101"}
    assert found["TEN205"] == "nearest legal: hidden_size=72 or 96"


def test_adapters_are_of_transformers_models() -> None:
    (found,) = [item for item in findings(MODEL.replace("dict(", "dict(lora=dict(r=4), ", 1)) if item.code == "CFG101"]
    assert found.help.startswith("choose a class of transformers', such as type='transformers.GPT2LMHeadModel'")
