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


def gpt_pretrain_config() -> ConfigContainer:
    optimizer, scheduler = distributed_fused_adam_with_cosine_annealing(lr_warmup_iters=500, max_lr=3e-4, min_lr=3e-5)
    model = GPTModelProvider(
        num_layers=24, hidden_size=1024, num_attention_heads=16, ffn_hidden_size=4096, seq_length=2048,
        tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True, vocab_size=50304,
        position_embedding_type="rope", normalization="RMSNorm", gated_linear_unit=True, activation_func=F.silu,
        add_bias_linear=False, share_embeddings_and_output_weights=False, hidden_dropout=0.0, attention_dropout=0.0,
    )
    return ConfigContainer(
        model=model,
        train=TrainingConfig(train_iters=1000, global_batch_size=64, micro_batch_size=2),
        validation=ValidationConfig(eval_interval=100, eval_iters=10),
        optimizer=optimizer,
        scheduler=scheduler,
        ddp=DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=True),
        dataset=GPTDatasetConfig(seq_length=2048, split="949,50,1", blend=None, random_seed=1234),
        logger=LoggerConfig(log_interval=10, tensorboard_dir="tb"),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", vocab_size=50304),
        checkpoint=CheckpointConfig(save="out", load="out", save_interval=100),
        rng=RNGConfig(seed=1234),
        mixed_precision="bf16_mixed",
    )
