from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.trainer import Trainer


def deepseek_v3_16b() -> Trainer.Config:
    """deepseek_v3_16b"""
    model_spec = model_registry("16B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/deepseek_v3_16b",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, decay_type="linear", min_lr_factor=0.0),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=1 * 4096,
            max_context_length=4096,
            steps=1000,
        ),
        metrics=MetricsProcessor.Config(log_freq=10, enable_tensorboard=True),
        parallelism=ParallelismConfig(expert_parallel_degree=8),
        checkpoint=CheckpointManager.Config(interval=500, async_mode="async"),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=False),
    )
