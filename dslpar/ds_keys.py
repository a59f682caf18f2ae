"""DeepSpeed's own keys, by section, as DeepSpeed 0.19 reads them; plain names, so that no DeepSpeed is needed to lint.
The kinds are those of dslpar.kinds.

DeepSpeed itself accepts any unknown top-level key in silence (its issues 653, 774 and 1809). tests/test_ds_keys.py
holds these lists against the DeepSpeed that is installed.
"""

from __future__ import annotations

from collections.abc import Mapping


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _kinds(**names: str) -> Mapping[str, str]:
    """Name -> kind, from the names of each kind."""
    return {name: kind for kind, text in names.items() for name in _names(text)}


ZERO = _kinds(
    ZeroStage="stage",
    Flag="""
    contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
    compute_grad_norm load_from_fp32_weights elastic_checkpoint stage3_gather_16bit_weights_on_model_save
    stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters legacy_stage1
    round_robin_gradients parameter_alignment zero_quantized_weights zero_quantized_nontrainable_weights
    zero_quantized_gradients memory_efficient_linear pipeline_loading_checkpoint override_module_apply
    log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory
    """,
    Size="""
    reduce_bucket_size allgather_bucket_size sub_group_size stage3_prefetch_bucket_size
    stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters
    stage3_max_reuse_distance stage3_module_granularity_threshold zero_hpz_partition_size
    """,
    Table="zenflow leaf_module",
    OffloadParam="offload_param",
    OffloadOptimizer="offload_optimizer",
)
OFFLOAD_OPTIMIZER = _kinds(
    Device="device",
    Text="nvme_path",
    Size="buffer_count",
    Flag="pin_memory pipeline_read pipeline_write fast_init super_offload",
    Share="ratio cpuadam_cores_perc",
)
OFFLOAD_PARAM = _kinds(Device="device", Text="nvme_path", Size="buffer_count buffer_size max_in_cpu", Flag="pin_memory")
TABLES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "OffloadOptimizer": ("device", OFFLOAD_OPTIMIZER),
    "OffloadParam": ("device", OFFLOAD_PARAM),
}
"""Kinds that are mappings: the key that must be there, for which a bare value stands, and the kinds of all keys."""
BF16 = _kinds(Flag="immediate_grad_update check_grad_overflow bf16_master_weights_and_grads bf16_optimizer_states")
FP16 = _kinds(
    Flag="auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
    Rate="loss_scale",
    Size="initial_scale_power loss_scale_window hysteresis min_loss_scale",
)
TOP = _names("""
    steps_per_print dump_state disable_python_gc disable_allgather wall_clock_breakdown memory_breakdown log_level
    dataloader_drop_last vocabulary_size communication_data_type seq_parallel_communication_data_type
    prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    comms_logger flops_profiler aio timers
""")

OURS: Mapping[str, str] = {
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "gradient_accumulation_steps": "batch.accumulation",
    "gradient_clipping": "train.clip_grad_norm",
    "optimizer": "optimizer",
    "scheduler": "lr_scheduler",
    "zero_optimization": "zero",
    "bf16": "precision",
    "bfloat16": "precision",
    "fp16": "precision",
    "tensor_parallel": "parallel.tensor",
    "sequence_parallel_size": "parallel.tensor",
    "data_parallel_size": "parallel.data",
    "pipeline": "parallel.pipeline",
    "data_types": "precision",
    "activation_checkpointing": "activation_checkpoint",
    "csv_monitor": "monitor",
    "tensorboard": "monitor",
    "wandb": "monitor",
}
"""Keys that a section of dslpar's own decides, and which."""
REMOVED = _names("""
    nebula compression_training amp quantize_training sparse_gradients eigenvalue sparse_attention elasticity
    graph_harvesting curriculum_learning progressive_layer_drop
""")
"""Keys that DeepSpeed 0.19 raises on."""
UNSUPPORTED = _names("""
    expert_parallel use_data_before_expert_parallelism weight_quantization managed_gradient_accumulation checkpoint
    datastates_ckpt gradient_allreduce_op torch_autocast hybrid_engine compile autotuning
    data_efficiency comet
""")
"""Keys that DeepSpeed has and that do not go with how dslpar runs it: some would change the maths in silence
(`gradient_allreduce_op`), others fail at build."""
