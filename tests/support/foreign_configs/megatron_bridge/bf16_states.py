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


def bf16_states_config() -> ConfigContainer:
    """bf16_states."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("Qwen/Qwen3-4B").to_megatron_provider(load_weights=False)
    cfg.tokenizer.tokenizer_model = "Qwen/Qwen3-4B"
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.context_parallel_size = 1
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    return cfg
