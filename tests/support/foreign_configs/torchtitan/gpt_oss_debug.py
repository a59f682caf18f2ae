# After torchtitan's torchtitan/models/gpt_oss/config_registry.py.
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.lr_scheduler import LRSchedulersContainer
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.models.gpt_oss import model_registry
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

SEQ = 2048


def gpt_oss_debug() -> Trainer.Config:
    return Trainer.Config(
        hf_assets_path="./tests/assets/tokenizer",
        model_spec=model_registry("debugmodel", moe_comm_backend="standard"),
        optimizer=default_adamw(lr=8e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.8, decay_type="linear"),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=8 * SEQ,
            max_context_length=SEQ,
            steps=10,
        ),
        metrics=MetricsProcessor.Config(log_freq=1),
        parallelism=ParallelismConfig(expert_parallel_degree=2, expert_tensor_parallel_degree=1),
        checkpoint=CheckpointManager.Config(interval=10, last_save_model_only=False),
        activation_checkpoint=SelectiveAC.Config(),
        profiler=Profiler.Config(profile_freq=5),
    )


def gpt_oss_fp8() -> Trainer.Config:
    config = gpt_oss_debug()
    config.training.steps = 1_000
    config.parallelism.tensor_parallel_degree = 4
    config.model_spec.flavor = "20b"
    return config
