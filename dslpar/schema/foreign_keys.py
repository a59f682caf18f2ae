"""Keys of other frameworks by name, and the key that says the same here: for help, where such a key is not known.

The names are ColossalAI's (its legacy config), LiBai's, Megatron-LM's and GPT-NeoX's arguments, and DeepSpeed's; also
names that those have removed or renamed themselves, which old configs still hold.

    >>> here("micro_batch_size"), here("checkpoint-activations"), here("seed")
    ('batch.micro_size', 'activation_checkpoint', None)
"""

from __future__ import annotations

from collections.abc import Mapping

_NAMES: Mapping[str, str] = {
    # samples of a step
    "batch.global_size": "global_batch_size train_batch_size batch_size",
    "batch.micro_size": """
    micro_batch_size train_micro_batch_size train_micro_batch_size_per_gpu per_device_train_batch_size micro_batch
    """,
    "batch.accumulation": """
    gradient_accumulation gradient_accumulation_steps num_accumulation_steps num_micro_batches num_microbatches
    grad_accumulation_steps grad_acc_steps gas
    """,
    # sizes and the mesh
    "parallel.pipeline": """
    pipeline_model_parallel_size pipeline_parallel_size pipe_parallel_size pipeline_size pp_size pp pipe
    """,
    "parallel.tensor": """
    model_parallel_size tensor_model_parallel_size tensor_parallel_size tp_size tp mp mp_size tensor_parallel
    intra_layer_model_parallel_size context_parallel_size sequence_parallel_size
    """,
    "parallel.tensor.sequence": "sequence_parallel",
    "parallel.data": "data_parallel_size dp_size dp",
    "parallel.pipeline.stage_ids": "custom_pipeline_stage_id pipeline_model_parallel_layout",
    "parallel.pipeline.method": "pipe_partition_method partition_method",
    # the run
    "train.steps": "train_iters train_iter max_steps num_steps iterations num_iterations max_iters",
    "train.clip_grad_norm": "clip_grad gradient_clipping clip_grad_norm max_grad_norm grad_clip clip_gradient",
    "train.eval_steps": "eval_iters eval_iter",
    "train.eval_interval": "eval_period evaluation_interval eval_every",
    "train.save_interval": "checkpoint_period checkpoint_factor save_every save_steps checkpointer_period",
    "train.log_interval": "log_period logging_steps log_every",
    "train.output_dir": "save_dir work_dir output_path",
    "train.seed": "random_seed",
    # the learning rate
    "optimizer.lr": "learning_rate base_lr",
    "lr_scheduler.type": "lr_decay_style lr_schedule",
    "lr_scheduler.warmup_steps": "warmup lr_warmup_iters lr_warmup_steps warmup_iter warmup_iters warmup_num_steps",
    "lr_scheduler.min_lr": "min_learning_rate lr_min eta_min",
    "lr_scheduler": "scheduler lr_decay lr_policy",
    # memory, precision, ZeRO
    "activation_checkpoint": """
    activation_checkpointing checkpoint_activations recompute_granularity recompute_activations
    checkpoint_num_layers gradient_checkpointing recompute_num_layers
    """,
    "precision": "fp16 bf16 bfloat16 amp dtype params_dtype mixed_precision torch_dtype",
    "zero": "zero_optimization zero_optimisation",
    "zero.stage": "zero_stage zero_level",
    # the model
    "model.num_layers": "n_layer n_layers num_hidden_layers",
    "model.hidden_size": "n_embd d_model embed_dim",
    "model.num_heads": "n_head n_heads num_attention_heads",
    "model.num_kv_heads": "n_kv_heads num_query_groups num_key_value_heads",
    "model.ffn_hidden_size": "intermediate_size mlp_ratio ffn_dim",
    "model.vocab_size": "padded_vocab_size",
    "model.max_seq_len": "max_position_embeddings n_positions n_ctx block_size",
    "model.layernorm_eps": "layer_norm_epsilon norm_epsilon layer_norm_eps rms_norm_eps",
    "model.rope_theta": "rotary_base rotary_emb_base",
    "data.seq_len": "seq_length seq_len sequence_length",
    "data.files": "data_path train_data_path",
    "monitor": "tensorboard_dir wandb_project wandb tensorboard csv_monitor",
    "optimizer": "optim",
}
_HERE = {name: key for key, names in _NAMES.items() for name in names.split()}


def here(name: str) -> str | None:
    """The key of dslpar's that says what another framework's key says; None for a name of nobody's."""
    return _HERE.get(name.replace("-", "_").lower())
