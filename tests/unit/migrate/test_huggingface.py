"""Configs of Accelerate, Trainer, Axolotl and LLaMA-Factory: every key has an entry, and files are followed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dslpar.migrate.convert import Import, convert
from dslpar.migrate.foreign_lint import lint_text
from dslpar.migrate.registry import TABLES
from dslpar.migrate.sources import read_text
from dslpar.migrate.table import Epoch
from tests.support.paths import ROOT

SAMPLES = ROOT / "tests/support/foreign_configs"
SOURCES = ("accelerate", "axolotl", "llama_factory", "training_arguments")
OF_DEEPSPEED = (
    "ds.json",
    "ds_alst.json",
    "ds_fp8.json",
    "ds_zero2.json",
    "ds_zero3.json",
    "zero2.json",
    "zero3_offload.json",
)
"""Files that a sample names."""
FILES = sorted(file for name in SOURCES for file in (SAMPLES / name).iterdir() if file.name not in OF_DEEPSPEED)
ALWAYS = {
    "llama_factory": {"finetuning_type": "lora"},
    "axolotl": {"base_model": "org/tiny"},
    "accelerate": {},
    "training_arguments": {"per_device_train_batch_size": 1},
}


def made_of(file: Path) -> Import:
    source = read_text(file.read_text(encoding="utf-8"), str(file))
    assert source.name == file.parent.name
    return convert(source)


def of(name: str, epoch: Epoch | None = None, model: Mapping[str, object] | None = None, **keys: Any) -> Import:
    """Convert a source with these keys; `__` stands for a dot."""
    tree: dict[str, Any] = {}
    for key, value in (ALWAYS[name] | keys).items():
        *above, last = key.split("__")
        level = tree
        for part in above:
            level = level.setdefault(part, {})
        level[last] = value
    return convert(read_text(json.dumps(tree), "source.yaml", name), model, epoch)


def fate(made: Import, key: str) -> str:
    return next(entry.fate for entry in made.entries if entry.key == key)


def test_there_are_thirty_samples_of_each_source() -> None:
    assert {name: sum(file.parent.name == name for file in FILES) >= 30 for name in SOURCES} == dict.fromkeys(
        SOURCES, True
    )


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.name}")
def test_every_key_of_a_real_config_is_known(file: Path) -> None:
    made = made_of(file)
    assert not [entry for entry in made.entries if "no such key" in entry.why]
    assert not [entry for entry in made.entries if entry.fate != "kept" and entry.fate != "renamed" and not entry.why]


def test_auto_is_filled_in_at_the_lines_of_the_file_that_is_named() -> None:
    made = made_of(SAMPLES / "llama_factory/llama3_full_sft.yaml")
    filled = next(entry for entry in made.entries if entry.key == "deepspeed.train_micro_batch_size_per_gpu")
    assert (filled.location.path.rpartition("/")[2], filled.location.line, filled.value) == ("ds.json", 6, 1)
    assert made.values["precision.dtype"] == "bf16"


def test_a_file_that_cannot_be_read_is_reported_at_its_name(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(" " * (256 * 1024 + 1))
    text, path = "per_device_train_batch_size: 1\ndeepspeed: ds.json\n", str(tmp_path / "a.yaml")
    source = read_text(text, path)
    (entry,) = (entry for entry in convert(source).entries if "what that file sets is not in the result" in entry.why)
    assert "ds.json' has more than 256 KiB" in entry.why
    assert (entry.fate, entry.location.line, entry.location.column) == ("needed", 2, 12)
    (warning,) = (item for item in lint_text(text, path, 8) if item.code == "CFG009")
    assert (warning.severity, warning.location.line, warning.location.column) == ("warning", 2, 12)
    assert warning.message.endswith("has more than 256 KiB: its keys are not checked")


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    source = read_text("per_device_train_batch_size: 1\ndeepspeed: ds.json\n", str(tmp_path / "a.yaml"))
    (missing,) = (entry for entry in convert(source).entries if "missing file 'ds.json'" in entry.why)
    assert (missing.fate, missing.location.line) == ("needed", 2)


def test_a_folder_becomes_pretrained(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    source = read_text("base_model: tiny\nsequence_len: 64\n", str(tmp_path / "a.yaml"))
    values = convert(source).values
    assert (values["model.type"], values["model.pretrained"]) == ("transformers.LlamaForCausalLM", "tiny")


# Keys that change the training ----------------------------------------------------------------------------------------

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "accelerate": {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "dynamo_config__dynamo_backend": "INDUCTOR",
        "fp8_config__backend": "TE",
        "deepspeed_config__zero_stage": 3,
        "deepspeed_config__gradient_clipping": 0.5,
        "deepspeed_config__gradient_accumulation_steps": 4,
        "deepspeed_config__offload_optimizer_device": "cpu",
        "deepspeed_config__offload_param_device": "cpu",
        "deepspeed_config__enable_msamp": True,
        "fsdp_config__fsdp_sharding_strategy": "SHARD_GRAD_OP",
        "fsdp_config__fsdp_reshard_after_forward": False,
        "fsdp_config__fsdp_offload_params": True,
        "fsdp_config__fsdp_activation_checkpointing": True,
        "fsdp_config__fsdp_activation_checkpointing_offload": True,
        "parallelism_config__parallelism_config_tp_size": 2,
        "parallelism_config__parallelism_config_cp_size": 2,
        "parallelism_config__parallelism_config_sp_size": 2,
        "megatron_lm_config__megatron_lm_tp_degree": 2,
        "megatron_lm_config__megatron_lm_pp_degree": 2,
        "megatron_lm_config__megatron_lm_context_parallel_size": 2,
        "megatron_lm_config__megatron_lm_expert_model_parallel_size": 2,
        "megatron_lm_config__megatron_lm_num_micro_batches": 4,
        "megatron_lm_config__megatron_lm_gradient_clipping": 0.5,
        "megatron_lm_config__megatron_lm_use_distributed_optimizer": True,
        "megatron_lm_config__megatron_lm_recompute_granularity": "full",
        "megatron_lm_config__megatron_lm_optimizer_cpu_offload": True,
        "megatron_lm_config__megatron_lm_use_custom_fsdp": True,
        "megatron_lm_config__megatron_lm_use_precision_aware_optimizer": True,
        "megatron_lm_config__megatron_lm_eod_mask_loss": True,
        "megatron_lm_config__megatron_lm_calculate_per_token_loss": True,
        "megatron_lm_config__megatron_lm_decoder_last_pipeline_num_layers": 2,
        "megatron_lm_config__megatron_lm_expert_tensor_parallel_size": 2,
        "megatron_lm_config__megatron_lm_use_rotary_position_embeddings": True,
        "megatron_lm_config__megatron_lm_attention_dropout": 0.1,
        "megatron_lm_config__megatron_lm_hidden_dropout": 0.1,
    },
    "training_arguments": {
        "model_name_or_path": "a/b",
        "model_revision": "v2",
        "model_init_kwargs__rope_theta": 1,
        "per_device_train_batch_size": 4,
        "per_gpu_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "auto_find_batch_size": True,
        "accelerator_config__split_batches": True,
        "split_batches": True,
        "accelerator_config__gradient_accumulation_kwargs__num_steps": 2,
        "max_steps": 10,
        "optim": "adafactor",
        "adafactor": True,
        "optim_args": "a=1",
        "optim_target_modules": ["x"],
        "learning_rate": 0.1,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_beta2": 0.8,
        "adam_epsilon": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs__num_cycles": 2,
        "lr_scheduler_kwargs__min_lr": 0.1,
        "warmup_steps": 4,
        "warmup_ratio": 0.1,
        "bf16": True,
        "tf32": True,
        "gradient_checkpointing": True,
        "activation_checkpointing": True,
        "activation_offloading": True,
        "torch_compile": True,
        "seed": 3,
        "data_seed": 3,
        "average_tokens_across_devices": False,
        "label_smoothing_factor": 0.1,
        "neftune_noise_alpha": 5,
        "fsdp": "full_shard",
        "max_length": 9,
        "parallelism_config__tp_size": 2,
        "parallelism_config__cp_size": 2,
        "load_in_4bit": True,
        "load_in_8bit": True,
        "dataset_name": "a",
        "packing": True,
        "packing_strategy": "wrapped",
        "completion_only_loss": True,
        "assistant_only_loss": True,
        "group_by_length": True,
        "train_sampling_strategy": "group_by_length",
        "shuffle_dataset": True,
        "streaming": True,
        "truncation_mode": "keep_end",
        "chat_template": "x",
        "eos_token": "x",
        "loss_type": "dft",
        "router_aux_loss_coef": 0.1,
        "disable_dropout": True,
        "load_best_model_at_end": True,
        "resume_from_checkpoint": "out/checkpoint-1",
        "ignore_data_skip": True,
        "torchdynamo": "inductor",
        "beta": 0.5,
        "num_generations": 4,
        "torch_dtype": "bfloat16",
        "half_precision_backend": "apex",
    },
    "axolotl": {
        "batch_size": 8,
        "micro_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "auto_find_batch_size": True,
        "accelerator_config__split_batches": True,
        "train_on_inputs": True,
        "group_by_length": True,
        "sample_packing": True,
        "sequence_len": 64,
        "rope_scaling": {"type": "linear"},
        "model_config__rope_theta": 1,
        "overrides_of_model_config__rope_theta": 1,
        "model_revision": "v2",
        "model_type": "AutoModelForTokenClassification",
        "lr_scheduler_kwargs__min_lr": 0.1,
        "lr_scheduler_kwargs__num_cycles": 2,
        "optim_args__eps": 1,
        "max_steps": 9,
        "optimizer": "muon",
        "learning_rate": 0.1,
        "weight_decay": 0.1,
        "adam_beta1": 0.8,
        "adam_beta2": 0.8,
        "adam_epsilon": 0.1,
        "max_grad_norm": 0.5,
        "lr_scheduler": "linear",
        "cosine_min_lr_ratio": 0.1,
        "cosine_constant_lr_ratio": 0.5,
        "warmup_steps": 4,
        "bf16": True,
        "gradient_checkpointing": True,
        "activation_offloading": True,
        "layer_offloading": True,
        "selective_checkpointing__offload": True,
        "tiled_mlp": True,
        "torch_compile": True,
        "seed": 3,
        "val_set_size": 0.1,
        "adapter": "qlora",
        "load_in_4bit": True,
        "load_in_8bit": True,
        "unfrozen_parameters": ["x"],
        "relora": True,
        "loraplus_lr_ratio": 2,
        "neftune_noise_alpha": 5,
        "embedding_lr": 0.1,
        "lr_groups": [{"name": "a"}],
        "tensor_parallel_size": 2,
        "context_parallel_size": 2,
        "sequence_parallel_degree": 2,
        "expert_parallel_size": 2,
        "expert_parallel_token_capacity": 9,
        "fsdp": ["full_shard"],
        "fsdp_config__reshard_after_forward": False,
        "fsdp_config__activation_checkpointing": True,
        "fsdp_config__offload_params": True,
        "fsdp_config__fsdp_offload_params": True,
        "fsdp_config__fsdp_activation_checkpointing": True,
        "fsdp_config__mixed_precision_policy": "bf16",
        "datasets": ["a"],
        "pretraining_dataset": "a",
        "rl": "dpo",
        "trl__beta": 0.1,
        "reward_model": True,
        "kd_trainer": True,
        "use_eaft": True,
        "liger_use_token_scaling": True,
        "plugins": ["my.Plugin"],
        "trainer_cls": "my.Trainer",
        "qat__group_size": 8,
        "fp8": True,
        "fp32_norms": True,
        "scaling_softmax": True,
        "dense_mixer": True,
        "reinit_weights": True,
        "resize_token_embeddings_to_32x": True,
        "shuffle_merged_datasets": False,
        "curriculum_sampling": True,
        "chat_template": "x",
        "early_stopping_patience": 2,
        "special_tokens__eos_token": "x",
        "resume_from_checkpoint": "out/checkpoint-1",
        "load_best_model_at_end": True,
    },
    "llama_factory": {
        "stage": "dpo",
        "finetuning_type": "oft",
        "rope_scaling": "linear",
        "mixture_of_depths": "convert",
        "train_from_scratch": True,
        "shift_attn": True,
        "moe_aux_loss_coef": 0.1,
        "resize_vocab": True,
        "upcast_layernorm": True,
        "upcast_lmhead_output": True,
        "use_unsloth_gc": True,
        "pure_bf16": True,
        "lora_rank": 4,
        "lora_alpha": 4,
        "lora_dropout": 0.1,
        "lora_target": "q_proj",
        "additional_target": "lm_head",
        "use_rslora": True,
        "use_dora": True,
        "pissa_init": True,
        "loraplus_lr_ratio": 2,
        "adapter_name_or_path": "a",
        "quantization_bit": 4,
        "fp8": True,
        "use_galore": True,
        "use_apollo": True,
        "use_badam": True,
        "use_muon": True,
        "use_adam_mini": True,
        "use_llama_pro": True,
        "freeze_trainable_layers": 4,
        "freeze_vision_tower": False,
        "cutoff_len": 9,
        "dataset": "a",
        "template": "x",
        "train_on_prompt": True,
        "mask_history": True,
        "packing": True,
        "neat_packing": True,
        "streaming": True,
        "mix_strategy": "interleave_under",
        "max_samples": 9,
        "val_size": 0.1,
        "disable_shuffling": True,
        "ignore_pad_token_for_loss": False,
        "default_system": "x",
        "add_tokens": "x",
        "use_dft_loss": True,
        "use_asft_loss": True,
        "use_eaft_loss": True,
        "use_mca": True,
        "use_hyper_parallel": True,
        "early_stopping_steps": 3,
        "eval_dataset": "a",
        "use_kt": True,
        "tensor_model_parallel_size": 2,
        "neftune_noise_alpha": 5,
        "label_smoothing_factor": 0.1,
        "optim": "adafactor",
        "per_gpu_train_batch_size": 2,
    },
}
KINDS = {"deepspeed_config": "DEEPSPEED", "fsdp_config": "FSDP", "megatron_lm_config": "MEGATRON_LM"}
BESIDE = {"lr_scheduler_kwargs__min_lr": {}, "cosine_min_lr_ratio": {"learning_rate": 0.1}, "data_seed": {"seed": 4}}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, keys in CHANGES.items() for key in keys])
def test_a_key_that_changes_the_training_is_never_dropped(name: str, key: str) -> None:
    beside: dict[str, Any] = dict(BESIDE.get(key, {}))
    if name == "accelerate" and key.partition("__")[0] in KINDS:
        beside["distributed_type"] = KINDS[key.partition("__")[0]]
    made = of(name, **beside | {key: CHANGES[name][key]})
    dotted = key.replace("__", ".")
    fates = {entry.fate for entry in made.entries if entry.key.startswith(dotted)}
    assert fates & {"kept", "renamed", "changed", "needed"}, fates
    assert not [entry for entry in made.entries if entry.key.startswith(dotted) and "no such key" in entry.why]


@pytest.mark.parametrize("name", SOURCES)
def test_a_default_that_is_written_needs_no_author(name: str) -> None:
    """Neither the values of switches that are off, nor the defaults: they say nothing."""
    table = TABLES[name]
    own = {row.pattern for row in table.rows if row.conversion == "unless_default"}
    for key in {
        default.key for default in table.defaults if not default.conditions and default.value is not None
    } & own:
        value = next(default.value for default in table.defaults if default.key == key)
        assert fate(of(name, **{key.replace(".", "__"): value}), key) == "dropped", key


# Mappings -------------------------------------------------------------------------------------------------------------

FSDP, MEGATRON = {"distributed_type": "FSDP"}, {"distributed_type": "MEGATRON_LM"}
TRAINER = {"fsdp": True}
WORDS = "parallelism_config__parallelism_config_"
PLUGIN = "megatron_lm_config__megatron_lm_"


@pytest.mark.parametrize(
    ("name", "keys", "values"),
    [
        ("accelerate", {f"{WORDS}tp_size": 4}, {"parallel.tensor.size": 4, "parallel.tensor.mode": "1d"}),
        ("accelerate", {f"{WORDS}cp_size": 2}, {"parallel.context.size": 2, "parallel.context.impl": "ring"}),
        ("accelerate", {f"{WORDS}sp_size": 2}, {"parallel.context.size": 2, "parallel.context.impl": "ulysses"}),
        ("accelerate", {f"{WORDS}dp_shard_size": 4}, {"zero.stage": 3}),
        (
            "accelerate",
            {f"{WORDS}dp_shard_size": 1, f"{WORDS}tp_size": 1},
            {"zero.stage": None, "parallel.tensor.size": None},
        ),
        ("accelerate", FSDP | {"fsdp_config__fsdp_sharding_strategy": "FULL_SHARD"}, {"zero.stage": 3}),
        ("accelerate", FSDP | {"fsdp_config__fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"zero.stage": 2}),
        ("accelerate", FSDP | {"fsdp_config__fsdp_sharding_strategy": "NO_SHARD"}, {"zero.stage": 0}),
        ("accelerate", FSDP | {"fsdp_config__fsdp_sharding_strategy": 1}, {"zero.stage": 3}),
        ("accelerate", FSDP | {"fsdp_config__fsdp_reshard_after_forward": False}, {"zero.stage": 2}),
        (
            "accelerate",
            FSDP | {"fsdp_config__fsdp_reshard_after_forward": False, f"{WORDS}dp_shard_size": 4},
            {"zero.stage": 2},
        ),
        (
            "accelerate",
            FSDP | {"fsdp_config__fsdp_offload_params": True},
            {"zero.offload_param.device": "cpu", "zero.offload_optimizer.device": "cpu"},
        ),
        (
            "accelerate",
            FSDP | {"fsdp_config__fsdp_offload_params": True, "fsdp_config__fsdp_reshard_after_forward": False},
            {"zero.stage": 2, "zero.offload_param.device": None, "zero.offload_optimizer.device": "cpu"},
        ),
        (
            "accelerate",
            FSDP | {"fsdp_config__fsdp_offload_params": True, "fsdp_config__fsdp_sharding_strategy": "SHARD_GRAD_OP"},
            {"zero.stage": 2, "zero.offload_param.device": None, "zero.offload_optimizer.device": "cpu"},
        ),
        (
            "training_arguments",
            {"fsdp": "full_shard offload"},
            {"zero.stage": 3, "zero.offload_param.device": "cpu", "zero.offload_optimizer.device": "cpu"},
        ),
        (
            "axolotl",
            {"fsdp_config__offload_params": True, "fsdp_config__reshard_after_forward": False},
            {"zero.stage": 2, "zero.offload_param.device": None, "zero.offload_optimizer.device": "cpu"},
        ),
        ("accelerate", FSDP | {"fsdp_config__fsdp_activation_checkpointing": True}, {"activation_checkpoint": 1}),
        (
            "accelerate",
            {"distributed_type": "MULTI_GPU", "fsdp_config__fsdp_offload_params": True},
            {"zero.offload_param.device": None},
        ),
        ("accelerate", {"distributed_type": "DEEPSPEED"}, {"zero.stage": 2}),
        ("accelerate", {"distributed_type": "NO"}, {"batch.accumulation": 1}),
        (
            "accelerate",
            MEGATRON | {f"{PLUGIN}tp_degree": 2, f"{PLUGIN}pp_degree": 4, f"{PLUGIN}sequence_parallelism": True},
            {
                "parallel.tensor.size": 2,
                "parallel.tensor.mode": "1d",
                "parallel.tensor.sequence": True,
                "parallel.pipeline.size": 4,
            },
        ),
        (
            "accelerate",
            MEGATRON | {f"{PLUGIN}tp_degree": 1, f"{PLUGIN}sequence_parallelism": True},
            {"parallel.tensor.sequence": None},
        ),
        (
            "accelerate",
            MEGATRON | {f"{PLUGIN}num_micro_batches": 8, f"{PLUGIN}gradient_clipping": 0.5},
            {"batch.accumulation": 8, "train.clip_grad_norm": 0.5},
        ),
        ("accelerate", MEGATRON | {f"{PLUGIN}use_distributed_optimizer": True}, {"zero.stage": 1}),
        ("accelerate", MEGATRON | {f"{PLUGIN}expert_model_parallel_size": 8}, {"parallel.expert.size": 8}),
        (
            "accelerate",
            MEGATRON
            | {
                f"{PLUGIN}recompute_granularity": "full",
                f"{PLUGIN}recompute_method": "uniform",
                f"{PLUGIN}recompute_num_layers": 3,
            },
            {"activation_checkpoint": 3},
        ),
        ("accelerate", MEGATRON | {f"{PLUGIN}recompute_granularity": "selective"}, {"activation_checkpoint": None}),
        ("accelerate", {"distributed_type": "MULTI_GPU", f"{PLUGIN}tp_degree": 2}, {"parallel.tensor.size": None}),
        (
            "training_arguments",
            {"fsdp": "shard_grad_op offload"},
            {"zero.stage": 2, "zero.offload_param.device": None},
        ),
        ("training_arguments", {"fsdp": ["full_shard", "auto_wrap"]}, {"zero.stage": 3}),
        ("training_arguments", TRAINER | {"fsdp_config__version": 2}, {"zero.stage": 3}),
        ("training_arguments", TRAINER | {"fsdp_config__reshard_after_forward": False}, {"zero.stage": 2}),
        ("training_arguments", TRAINER | {"fsdp_config__cpu_offload": True}, {"zero.offload_param.device": "cpu"}),
        ("training_arguments", TRAINER | {"fsdp_config__activation_checkpointing": True}, {"activation_checkpoint": 1}),
        ("training_arguments", {"fsdp_config__activation_checkpointing": True}, {"activation_checkpoint": None}),
        ("training_arguments", {"parallelism_config__tp_size": 2}, {"parallel.tensor.size": 2}),
        ("training_arguments", {"per_gpu_train_batch_size": 1}, {"batch.micro_size": 1}),
        (
            "training_arguments",
            {"activation_checkpointing": True, "activation_checkpointing_kwargs__every_n_layers": 2},
            {"activation_checkpoint": 2},
        ),
        (
            "training_arguments",
            {"activation_checkpointing": True, "activation_checkpointing_kwargs__offload": True},
            {"activation_checkpoint.interval": 1, "activation_checkpoint.offload": True},
        ),
        ("training_arguments", {"torch_dtype": "bfloat16"}, {"precision.dtype": "bf16"}),
        ("training_arguments", {"max_steps": 100, "warmup_ratio": 0.1}, {"lr_scheduler.warmup_steps": 10}),
        ("training_arguments", {"max_steps": 100, "warmup_steps": 0.05}, {"lr_scheduler.warmup_steps": 5}),
        ("training_arguments", {"warmup_steps": 7}, {"lr_scheduler.warmup_steps": 7}),
        (
            "training_arguments",
            {"use_peft": True, "lora_r": 4, "lora_modules_to_save": ["lm_head"]},
            {"model.lora.r": 4, "model.lora.modules_to_save": ["lm_head"]},
        ),
        ("training_arguments", {"lora_r": 4}, {"model.lora.r": None}),
        (
            "axolotl",
            {},
            {
                "optimizer.betas": (0.9, 0.999),
                "optimizer.eps": 1e-8,
                "lr_scheduler.type": "cosine",
                "train.clip_grad_norm": 1.0,
                "optimizer.type": "AdamW",
                "precision.dtype": "bf16",
                "train.seed": 42,
                "checkpoint.keep": 4,
            },
        ),
        ("axolotl", {"dp_shard_size": 4}, {"zero.stage": 3}),
        ("axolotl", {"dp_shard_size": 4, "fsdp_config__reshard_after_forward": False}, {"zero.stage": 2}),
        ("axolotl", {"fsdp_config__fsdp_sharding_strategy": "SHARD_GRAD_OP"}, {"zero.stage": 2}),
        ("axolotl", {"max_steps": 1000}, {"lr_scheduler.warmup_steps": 30}),
        ("axolotl", {"max_steps": 10000}, {"lr_scheduler.warmup_steps": 100}),
        ("axolotl", {"max_steps": 10000, "warmup_ratio": 0.03}, {"lr_scheduler.warmup_steps": 300}),
        ("axolotl", {"max_steps": 1000, "warmup_steps": 1}, {"lr_scheduler.warmup_steps": 2}),
        ("axolotl", {"max_steps": 1000, "warmup_steps": 0}, {"lr_scheduler.warmup_steps": None}),
        ("axolotl", {"learning_rate": 0.5, "cosine_min_lr_ratio": 0.1}, {"lr_scheduler.min_lr": 0.05}),
        (
            "axolotl",
            {"adapter": "lora", "lora_r": 4, "lora_target_linear": True},
            {"model.lora.r": 4, "model.lora.target_modules": "all-linear"},
        ),
        (
            "axolotl",
            {"lora_r": 4, "lora_target_linear": True},
            {"model.lora.r": None, "model.lora.target_modules": None},
        ),
        ("axolotl", {"expert_parallel_size": 4}, {"parallel.expert.size": 4}),
        (
            "llama_factory",
            {},
            {
                "model.lora.r": 8,
                "model.lora.lora_alpha": 16,
                "model.lora.target_modules": "all-linear",
                "activation_checkpoint": 1,
            },
        ),
        ("llama_factory", {"lora_rank": 4, "lora_alpha": 5}, {"model.lora.r": 4, "model.lora.lora_alpha": 5}),
        ("llama_factory", {"finetuning_type": "full"}, {"model.lora.r": None, "model.lora.lora_alpha": None}),
        ("llama_factory", {"disable_gradient_checkpointing": True}, {"activation_checkpoint": None}),
        (
            "llama_factory",
            {"additional_target": "embed_tokens, lm_head"},
            {"model.lora.modules_to_save": ["embed_tokens", "lm_head"]},
        ),
        (
            "training_arguments",
            {"lr_scheduler_type": "constant", "warmup_steps": 20},
            {"lr_scheduler.type": "constant", "lr_scheduler.warmup_steps": None},
        ),
        (
            "training_arguments",
            {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 20},
            {"lr_scheduler.type": "constant", "lr_scheduler.warmup_steps": 20},
        ),
        ("llama_factory", {"lr_scheduler_type": "constant", "warmup_steps": 20}, {"lr_scheduler.warmup_steps": None}),
        ("axolotl", {"lr_scheduler": "constant", "warmup_steps": 20}, {"lr_scheduler.warmup_steps": None}),
        ("axolotl", {"lr_scheduler": "constant", "max_steps": 100}, {"lr_scheduler.warmup_steps": None}),
        ("axolotl", {"lr_scheduler": "constant_with_warmup", "max_steps": 100}, {"lr_scheduler.warmup_steps": 3}),
        ("llama_factory", {"val_size": 0.1}, {"data.eval_fraction": 0.1}),
        (
            "llama_factory",
            {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
            {"parallel.tensor.size": 2, "zero.stage": 1},
        ),
    ],
)
def test_a_mapping(name: str, keys: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    keys = dict(keys)
    if name == "training_arguments" and "per_gpu_train_batch_size" in keys:
        keys["per_device_train_batch_size"] = None
    made = of(name, **keys).values
    assert {key: made.get(key) for key in values} == dict(values)


def test_hsdp_needs_the_author() -> None:
    for name, start in (("accelerate", WORDS), ("axolotl", ""), ("training_arguments", "parallelism_config__")):
        made = of(name, **{f"{start}dp_replicate_size": 2, f"{start}dp_shard_size": 4})
        assert fate(made, f"{start}dp_replicate_size".replace("__", ".")) == "needed"
        assert (
            fate(of(name, **{f"{start}dp_replicate_size": 2}), f"{start}dp_replicate_size".replace("__", "."))
            == "dropped"
        )


@pytest.mark.parametrize(
    ("name", "key", "steps"), [("training_arguments", "num_train_epochs", 750), ("axolotl", "num_epochs", 750)]
)
def test_epochs_are_steps_and_shares_of_them(name: str, key: str, steps: int) -> None:
    made = of(name, Epoch(2000, 8), **{key: 3, "warmup_ratio": 0.1})
    assert (made.values["train.steps"], made.values["lr_scheduler.warmup_steps"]) == (steps, steps // 10)
    assert {fate(of(name, **{key: 3, "warmup_ratio": 0.1}), each) for each in (key, "warmup_ratio")} == {"needed"}
    both = of(name, Epoch(2000, 8), **{key: 3, "max_steps": 20})
    assert (both.values["train.steps"], fate(both, key)) == (20, "dropped")


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ({"packing": False}, (2e-5, 10, "bf16", 1, 1024)),
        ({"precompute_ref_log_probs": False}, (1e-6, 10, "bf16", 1, 1024)),
        ({"num_generations": 8}, (1e-6, 10, "bf16", 1, None)),
        ({"packing": False, "fp16": True}, (2e-5, 10, "fp16", 1, 1024)),
        ({}, (5e-5, 500, None, None, None)),
    ],
)
def test_trls_own_defaults(keys: Mapping[str, Any], values: tuple[Any, ...]) -> None:
    made = of("training_arguments", **keys).values
    names = ("optimizer.lr", "train.log_interval", "precision.dtype", "activation_checkpoint", "data.seq_len")
    assert tuple(made.get(name) for name in names) == values


@pytest.mark.parametrize(
    ("keys", "asks"),
    [
        ({}, False),
        ({"packing": True}, False),
        ({"precompute_ref_log_probs": False}, True),
        ({"beta": 0.1}, True),
        ({"beta": 0.1, "num_generations": 8}, False),
    ],
)
def test_only_dpo_switches_dropout_off(keys: Mapping[str, Any], asks: bool) -> None:
    made = of("training_arguments", **keys)
    assert ("model.dropout" in {entry.to for entry in made.entries if entry.fate == "needed"}) is asks


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("training_arguments", {"model_name_or_path": "org/tiny"}),
        ("axolotl", {"model_config__rope_theta": 2, "adapter": "lora", "lora_r": 2}),
        ("llama_factory", {"model_name_or_path": "org/tiny", "lora_rank": 2}),
        ("accelerate", {"distributed_type": "NO"}),
    ],
)
def test_another_model_replaces_the_sources(name: str, keys: Mapping[str, Any]) -> None:
    made = of(name, model={"type": "GPT", "num_layers": 2}, **keys)
    assert {key for key in made.values if key.startswith("model")} == {"model.type", "model.num_layers"}
    assert not [entry for entry in made.entries if entry.fate == "needed" and entry.to.startswith("model")]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("pipe_parallel_size: 1\nnum_layers: 2\nzero_optimization: {stage: 1}\n", "gpt_neox"),
        ("model: {type: GPT, num_layers: 2}\nbatch: {micro_size: 1}\noptimizer: {type: AdamW, lr: 0.1}\n", "dslpar"),
        ("base_model: a\nfsdp_config: {fsdp_version: 2, fsdp_sharding_strategy: FULL_SHARD}\n", "axolotl"),
        ("base_model: a\nmicro_batch_size: 1\ndataset_num_proc: 4\nrlhf_type: x\n", "axolotl"),
        ("stage: sft\nfinetuning_type: full\ndataset: a\ntensor_model_parallel_size: 2\n", "llama_factory"),
        ("model: a\ntuner_type: lora\nmicro_batch_size: 1\ndataset: b\n", "ms_swift"),
        ("distributed_type: FSDP\nmixed_precision: bf16\n", "accelerate"),
        ("per_device_train_batch_size: 1\nparallelism_config: {tp_size: 2}\n", "training_arguments"),
    ],
)
def test_a_file_is_its_own_frameworks(text: str, name: str) -> None:
    assert read_text(text, "a.yaml").name == name
