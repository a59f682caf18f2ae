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


def deepseek_v3_pretrain_config() -> ConfigContainer:
    """deepseek_v3_pretrain."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("deepseek-ai/DeepSeek-V3").to_megatron_provider(load_weights=False)
    cfg.tokenizer.tokenizer_model = "deepseek-ai/DeepSeek-V3"
    cfg.model.tensor_model_parallel_size = 2
    cfg.model.pipeline_model_parallel_size = 16
    cfg.model.context_parallel_size = 1
    cfg.model.expert_model_parallel_size = 64
    cfg.model.expert_tensor_parallel_size = 1
    cfg.model.mtp_num_layers = 1
    cfg.model.pipeline_model_parallel_layout = "Et*4|t*4|t*4L"
    return cfg
