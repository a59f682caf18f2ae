import torch

from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from megatron.bridge.recipes.common import _peft_common, _pretrain_common, _sft_common
from megatron.bridge.recipes.utils.optimizer_utils import distributed_fused_adam_with_cosine_annealing
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import (
    CheckpointConfig, ConfigContainer, DistributedDataParallelConfig, GPTDatasetConfig, LoggerConfig, RNGConfig,
    TokenizerConfig, TrainingConfig, ValidationConfig,
)
from megatron.bridge.training.mixed_precision import bf16_mixed


def pretrain_config(
    tensor_model_parallel_size: int = 2,
    pipeline_model_parallel_size: int = 4,
    global_batch_size: int = 256,
    train_iters: int = 5000,
    *,
    seq_length: int = 4096,
) -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-8B").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = tensor_model_parallel_size
    cfg.model.pipeline_model_parallel_size = pipeline_model_parallel_size
    cfg.model.sequence_parallel = tensor_model_parallel_size > 1
    cfg.train.global_batch_size = global_batch_size
    cfg.train.train_iters = train_iters
    cfg.dataset.seq_length = seq_length
    if pipeline_model_parallel_size > 1:
        cfg.model.virtual_pipeline_model_parallel_size = 2
    return cfg


def pretrain_long_config() -> ConfigContainer:
    return pretrain_config(seq_length=4096 * 8)
