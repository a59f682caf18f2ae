from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.qwen3 import model_registry
from torchtitan.trainer import Trainer


def qwen3_14b() -> Trainer.Config:
    """qwen3_14b"""
    model_spec = model_registry("14B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/qwen3_14b",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, decay_type="cosine", min_lr_factor=0.1),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=1 * 8192,
            max_context_length=8192,
            steps=1000,
        ),
        metrics=MetricsProcessor.Config(log_freq=10, enable_tensorboard=True),
        parallelism=ParallelismConfig(),
        checkpoint=CheckpointManager.Config(interval=500, async_mode="async"),
        activation_checkpoint=SelectiveAC.Config(),
        compile=CompileConfig(enable=False),
    )
