"""DeepSpeed's config dict: every key that dslpar sets, and that DeepSpeed takes it as meant."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from dslpar.layout.deepspeed_config import ds_config, merge, overlaps_param_gather, overlaps_reduction
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import deepspeed_policy
from dslpar.schema import sections as schema_sections

CPU = {"device": "cpu"}
MODEL = section.GPT(num_layers=4, hidden_size=8, num_heads=2, vocab_size=256, max_seq_len=16)


def job(world: int = 1, **sections: Any) -> Job:
    return resolve(schema_sections.Spec(model=MODEL, **sections), world, "cfg.py")


def test_the_whole_dict() -> None:
    made = job(
        8,
        parallel=schema_sections.Parallel(
            pipeline=schema_sections.PipelineParallel(size=2), tensor=schema_sections.TensorParallel(size=2, mode="1d")
        ),
        batch=schema_sections.Batch(global_size=16, accumulation=4),
        optimizer=schema_sections.AdamW(lr=1e-3, weight_decay=0.1),
        zero=schema_sections.Zero(stage=1, extra={"reduce_bucket_size": 1000}),
        precision=schema_sections.Precision(dtype="bf16"),
        train=schema_sections.Train(steps=50, clip_grad_norm=1.0),
    )
    assert ds_config(made) == {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 1.0,
        "steps_per_print": 51,
        "timers": {"throughput": {"enabled": False}},
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": 1e-3,
                "weight_decay": 0.1,
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "torch_adam": True,
                "fused": True,
            },
        },
        "zero_optimization": {"stage": 1, "use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 1000},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "pipeline": {"pipe_partitioned": False, "grad_partitioned": False},
    }


def test_clipping_off_is_said_since_left_out_means_on() -> None:
    assert ds_config(job())["gradient_clipping"] == 0.0


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero(stage: int) -> None:
    section = ds_config(job(zero=schema_sections.Zero(stage=stage)))["zero_optimization"]
    buckets = {"use_multi_rank_bucket_allreduce": False, "reduce_bucket_size": 40_000_000}
    assert section == {"stage": stage} | (buckets if stage in (1, 2) else {})


@pytest.mark.parametrize(
    ("stage", "extra", "expected"),
    [
        (0, {}, False),
        (1, {}, True),
        (2, {"overlap_comm": True}, True),
        (3, {"overlap_comm": True}, False),
        (1, {"overlap_comm": False}, False),
        (1, {"reduce_scatter": False}, False),
        (2, {"contiguous_gradients": False}, False),
        (2, {"use_multi_rank_bucket_allreduce": True}, False),
        (1, {"offload_optimizer": CPU}, False),
    ],
)
def test_where_dslpar_overlaps_the_reduction(stage: int, extra: dict[str, Any], expected: bool) -> None:
    assert overlaps_reduction(job(zero=schema_sections.Zero(stage=stage, extra=extra)).spec) == expected


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_where_weights_are_gathered_under_the_forward(stage: int) -> None:
    """The buckets are dslpar's then, and DeepSpeed does not see dslpar's key."""
    spec = job(zero=schema_sections.Zero(stage=stage, overlap_param_gather=True))
    assert overlaps_param_gather(spec.spec) == (stage in (1, 2))
    section = ds_config(spec)["zero_optimization"]
    assert section.get("allgather_bucket_size") == (40_000_000 if stage in (1, 2) else None)
    assert "overlap_param_gather" not in section


def test_an_extra_zero_key_of_the_author_wins() -> None:
    zero = schema_sections.Zero(stage=2, extra={"use_multi_rank_bucket_allreduce": True})
    assert ds_config(job(zero=zero))["zero_optimization"]["use_multi_rank_bucket_allreduce"] is True


def test_what_torch_s_optimizers_take_besides() -> None:
    sgd = ds_config(job(optimizer=schema_sections.SGD(lr=0.1, momentum=0.9, nesterov=True)))["optimizer"]["params"]
    assert sgd == {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True}
    assert ds_config(job(optimizer=schema_sections.AdamW(amsgrad=True)))["optimizer"]["params"]["amsgrad"] is True


def test_sgd_is_allowed_with_zero_alone() -> None:
    sgd = schema_sections.SGD(lr=0.1, momentum=0.9)
    assert "zero_allow_untested_optimizer" not in ds_config(job(optimizer=sgd))
    with_zero = ds_config(job(optimizer=sgd, zero=schema_sections.Zero(stage=1)))
    assert with_zero["zero_allow_untested_optimizer"] is True
    assert with_zero["optimizer"]["params"] == {"lr": 0.1, "weight_decay": 0.0, "momentum": 0.9}


def test_adam_is_not_adamw() -> None:
    assert ds_config(job(optimizer=schema_sections.Adam()))["optimizer"]["params"]["adam_w_mode"] is False


def test_every_optimizer_of_the_language_has_a_section() -> None:
    for name, made in schema_sections.OPTIMIZERS.items():
        assert ds_config(job(optimizer=made()))["optimizer"]["type"] == name


def test_fp16_keys_are_passed_on() -> None:
    precision = schema_sections.Precision(dtype="fp16", extra={"initial_scale_power": 8})
    made = ds_config(job(zero=schema_sections.Zero(stage=1), precision=precision))
    assert made["fp16"] == {"enabled": True, "initial_scale_power": 8}
    assert made["data_types"] == {"grad_accum_dtype": "fp32"}


def test_bf16_is_summed_over_replicas_in_fp32_and_the_author_may_have_it_otherwise() -> None:
    def made(dtype: str, stage: int, **raw: object) -> object:
        precision, zero = schema_sections.Precision(dtype=dtype), schema_sections.Zero(stage=stage)
        return ds_config(job(zero=zero, precision=precision, deepspeed=raw)).get("communication_data_type")

    assert [made("bf16", stage) for stage in (1, 2, 3)] == ["fp32"] * 3
    assert (made("fp16", 1), made("fp32", 1)) == (None, None)
    assert made("bf16", 1, communication_data_type="bf16") == "bf16"


def test_an_optimizer_by_name_is_not_in_the_dict() -> None:
    """dslpar.engine.optimizers makes it, and DeepSpeed gets what it needs to accept it."""
    rmsprop = schema_sections.OtherOptimizer(target="RMSprop", args={"alpha": 0.9})
    assert "optimizer" not in ds_config(job(optimizer=rmsprop))
    sharded = ds_config(job(optimizer=rmsprop, zero=schema_sections.Zero(stage=2)))
    assert sharded["zero_allow_untested_optimizer"] is True
    assert "zero_force_ds_cpu_optimizer" not in sharded
    offloaded = schema_sections.Zero(stage=2, extra={"offload_optimizer": {"device": "cpu"}})
    made = ds_config(job(optimizer=rmsprop, zero=offloaded))
    assert made["zero_force_ds_cpu_optimizer"] is False
    assert made["zero_optimization"]["offload_optimizer"] == {"device": "cpu"}


def test_monitors_write_below_the_output_dir() -> None:
    monitor = schema_sections.Monitor(
        csv=schema_sections.FileMonitor(),
        tensorboard=schema_sections.FileMonitor(),
        wandb=schema_sections.WandbMonitor(),
    )
    made = ds_config(job(monitor=monitor, train=schema_sections.Train(output_dir="runs/a")))
    assert made["csv_monitor"] == {"enabled": True, "output_path": "runs/a/csv", "job_name": "cfg"}
    assert made["tensorboard"] == {"enabled": True, "output_path": "runs/a/tensorboard", "job_name": "cfg"}
    assert made["wandb"] == {"enabled": True, "project": "cfg"}


def test_monitors_as_asked() -> None:
    monitor = schema_sections.Monitor(
        csv=schema_sections.FileMonitor(enabled=False),
        tensorboard=schema_sections.FileMonitor(output_path="/logs", job_name="b"),
        wandb=schema_sections.WandbMonitor(project="p", group="g", team="t"),
    )
    made = ds_config(job(monitor=monitor))
    assert "csv_monitor" not in made
    assert made["tensorboard"] == {"enabled": True, "output_path": "/logs", "job_name": "b"}
    assert made["wandb"] == {"enabled": True, "project": "p", "group": "g", "team": "t"}


def test_the_raw_section_is_merged_last_and_deep() -> None:
    raw = {"comms_logger": {"enabled": True}, "pipeline": {"use_reentrant": False}, "steps_per_print": 7}
    made = ds_config(
        job(2, parallel=schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2)), deepspeed=raw),
    )
    assert made["pipeline"] == {"pipe_partitioned": False, "grad_partitioned": False, "use_reentrant": False}
    assert (made["steps_per_print"], made["comms_logger"]) == (7, {"enabled": True})


def test_merging_changes_neither_side() -> None:
    base, over = {"a": {"b": (1, 2)}, "c": 3}, {"a": {"d": 4}, "c": {"e": 5}}
    assert merge(base, over) == {"a": {"b": [1, 2], "d": 4}, "c": {"e": 5}}
    assert (base, over) == ({"a": {"b": (1, 2)}, "c": 3}, {"a": {"d": 4}, "c": {"e": 5}})


def test_it_is_plain_json_and_the_same_each_time() -> None:
    made = job(4, zero=schema_sections.Zero(stage=1), precision=schema_sections.Precision(dtype="bf16"))
    assert json.loads(json.dumps(ds_config(made))) == ds_config(made) == ds_config(made)


def test_its_own_keys_are_known_to_the_linter() -> None:
    made = ds_config(job(2, parallel=schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2))))
    assert set(made) <= set(deepspeed_policy.TOP) | set(deepspeed_policy.OURS)
    assert set(ds_config(job(zero=schema_sections.Zero(stage=1)))["zero_optimization"]) <= set(deepspeed_policy.ZERO)


def test_no_torch_is_needed() -> None:
    code = "import sys, dslpar.layout.deepspeed_config; assert not {'torch', 'deepspeed'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"zero": schema_sections.Zero(stage=2), "precision": schema_sections.Precision(dtype="bf16")},
        {
            "zero": schema_sections.Zero(stage=1),
            "precision": schema_sections.Precision(dtype="fp16"),
            "optimizer": schema_sections.SGD(),
        },
        {"zero": schema_sections.Zero(stage=3, extra={"offload_optimizer": CPU, "offload_param": CPU})},
        {"optimizer": schema_sections.OtherOptimizer(target="RMSprop"), "zero": schema_sections.Zero(stage=2)},
        {
            "monitor": schema_sections.Monitor(
                csv=schema_sections.FileMonitor(),
                tensorboard=schema_sections.FileMonitor(),
                wandb=schema_sections.WandbMonitor(),
            )
        },
    ],
)
def test_deepspeed_takes_it_as_meant(sections: dict[str, Any]) -> None:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = job(train=schema_sections.Train(clip_grad_norm=0.5), **sections)
    theirs = DeepSpeedConfig(ds_config(made))
    assert theirs.gradient_clipping == 0.5
    assert theirs.zero_optimization_stage == made.spec.zero.stage
    assert theirs.bfloat16_config.enabled == (made.spec.precision.dtype == "bf16")
    assert theirs.float16_config.enabled == (made.spec.precision.dtype == "fp16")
    assert theirs.train_batch_size == made.batch.global_size
    assert theirs.monitor_config.enabled == (made.spec.monitor.csv is not None)
    for name, device in made.spec.zero.extra.items():
        assert getattr(theirs.zero_config, name).device == device["device"]
