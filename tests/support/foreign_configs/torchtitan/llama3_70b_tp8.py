from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def llama3_70b_tp8() -> Trainer.Config:
    """llama3_70b_tp8"""
    model_spec = model_registry("70B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/llama3_70b_tp8",
        model_spec=model_spec,
        optimizer=default_adamw(lr=3e-4),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, decay_type="linear", min_lr_factor=0.0),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=1 * 8192,
            max_context_length=8192,
            steps=1000,
        ),
        metrics=MetricsProcessor.Config(log_freq=10, enable_tensorboard=True),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, data_parallel_shard_degree=-1),
        checkpoint=CheckpointManager.Config(interval=500, async_mode="async"),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=True),
    )
