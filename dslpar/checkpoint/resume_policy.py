"""What a resume may change: every key of a config in one of three classes. No torch.

======  ==========================================================  ==============================================
class   what of                                                     a resume that changes it
======  ==========================================================  ==============================================
`FREE`  layout, speed, memory; what is written, and where           goes on with the same curve (a layout's is told)
`TOLD`  values that act on every step: rates, clipping, precision   goes on with the new value, which is told
`SAME`  the model, the optimizer's kind, the text, seed, batch      is another run, and refused
======  ==========================================================  ==============================================

Keys are dotted, as in a config and on the command line; `optimizer.*` are those of a section that takes what its class
takes. A key that stands nowhere here belongs to no class, and tests/distributed/checkpoint/test_resume_policy.py says
so: whoever adds a key to the
spec decides.
"""

from __future__ import annotations

from collections.abc import Mapping

FREE, TOLD, SAME = "free", "told", "same"

_KEYS: Mapping[str, str] = {
    FREE: """
        parallel.data.size
        parallel.pipeline.size parallel.pipeline.stage_ids parallel.pipeline.counts parallel.pipeline.method
        parallel.tensor.size parallel.tensor.mode parallel.tensor.depth parallel.tensor.shape parallel.tensor.sequence
        parallel.tensor.impl parallel.tensor.residual parallel.tensor.inner parallel.tensor.keep
        parallel.order
        train.dist.data_parallel_size train.dist.tensor_parallel_size train.dist.pipeline_parallel_size
        train.dist.pipeline_num_layers train.dist.custom_pipeline_stage_id train.dist.auto_pipeline_stage_id
        train.dist.actual_pipeline_stage_id
        zero.stage zero.*
        batch.global_size batch.micro_size batch.accumulation
        data.type data.seq_len data.files data.eval_fraction
        activation_checkpoint.interval
        schedule.type schedule.num_microbatches schedule.num_chunks
        train.log_interval train.eval_interval train.eval_steps train.output_dir train.save_interval
        train.step_timeout train.max_skipped train.term_grace train.requeue_status
        checkpoint.keep checkpoint.resume_from
        monitor.csv.enabled monitor.csv.output_path monitor.csv.job_name
        monitor.tensorboard.enabled monitor.tensorboard.output_path monitor.tensorboard.job_name
        monitor.wandb.enabled monitor.wandb.project monitor.wandb.group monitor.wandb.team monitor.wandb.offline
    """,
    TOLD: """
        model.dropout
        optimizer.lr optimizer.weight_decay optimizer.betas optimizer.eps optimizer.nesterov
        lr_scheduler.type lr_scheduler.warmup_steps lr_scheduler.min_lr
        precision.dtype precision.*
        train.steps train.clip_grad_norm
        gradient_handler
        deepspeed.*
    """,
    SAME: """
        model.type model.num_layers model.hidden_size model.num_heads model.vocab_size model.max_seq_len
        model.num_kv_heads model.ffn_hidden_size model.tie_embeddings model.norm model.activation model.positions
        model.rope_theta model.bias model.layernorm_eps model.init_std model.*
        optimizer.type optimizer.momentum optimizer.amsgrad optimizer.*
        lr_scheduler.*
        train.seed
    """,
}
"""What decides `batch.global_size`, `data.seq_len` and the text is compared as it comes out: see `manifest.fixed`."""

CLASSES: Mapping[str, str] = {key: class_ for class_, keys in _KEYS.items() for key in keys.split()}
"""The class of each key."""


def class_of(key: str) -> str:
    """The class of a dotted key; of one that its section does not list, that of the section's open ones."""
    section = key.partition(".")[0]
    return CLASSES.get(key) or CLASSES[f"{section}.*"]
