# RoBERTa-base as it was published: 12 layers, 768 features, 12 heads, 125 million parameters; masks are drawn anew in
# each epoch, and there are no pairs.
#
#   dslpar lint configs/libai/roberta_pretrain.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/roberta_pretrain.py
#
# Data parallel 4 x tensor parallel 2. Text is byte by byte: data.tokenizer='roberta-base' trains on its tokens.
# Batch: 16 (micro) x 4 (accumulation) x 4 (data) = 256 sequences a step, of 512 tokens each.

from transformers import RobertaConfig, RobertaForMaskedLM

from dslpar.config import LazyCall

from ..common.train import train

model = LazyCall(RobertaForMaskedLM)(
    config=LazyCall(RobertaConfig)(
        vocab_size=50265,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        max_position_embeddings=514,  # two that no token has
        type_vocab_size=1,
        layer_norm_eps=1e-5,
    )
)
data = dict(type="mlm")
optimizer = dict(type="AdamW", lr=6e-4, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.01)
lr_scheduler = dict(type="linear", warmup_steps=10)  # published: 24,000 of 500,000
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=16)
train.dist.tensor_parallel_size = 2
