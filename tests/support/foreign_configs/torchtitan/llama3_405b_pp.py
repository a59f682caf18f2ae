from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import default_adamw, LRSchedulersContainer
from torchtitan.config import CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer


def llama3_405b_pp() -> Trainer.Config:
    """llama3_405b_pp"""
    model_spec = model_registry("405B")
    return Trainer.Config(
        hf_assets_path="./assets/hf/llama3_405b_pp",
        model_spec=model_spec,
        optimizer=default_adamw(lr=8e-5),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=200, decay_type="linear", min_lr_factor=0.0),
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=1 * 8192,
            max_context_length=8192,
            steps=1000,
        ),
        metrics=MetricsProcessor.Config(log_freq=10, enable_tensorboard=True),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, pipeline_parallel_degree=8, pipeline_parallel_schedule="Interleaved1F1B", num_pp_microbatches=16),
        checkpoint=CheckpointManager.Config(interval=500, async_mode="async"),
        activation_checkpoint=FullAC.Config(),
        compile=CompileConfig(enable=False),
    )
