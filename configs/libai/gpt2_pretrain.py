# GPT-2 as it was published: 12 layers, 768 features, 12 heads, 124 million parameters; transformers' own code.
#
#   dslpar lint configs/libai/gpt2_pretrain.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/gpt2_pretrain.py
#
# Data parallel 4 x tensor parallel 2. Text is byte by byte: data.tokenizer='gpt2' trains on its tokens.
# Batch: 8 (micro) x 8 (accumulation) x 4 (data) = 256 sequences a step, of 1,024 tokens each.

from transformers import GPT2Config, GPT2LMHeadModel

from dslpar.config import LazyCall

from ..common.train import train

model = LazyCall(GPT2LMHeadModel)(
    config=LazyCall(GPT2Config)(
        vocab_size=50257,
        n_positions=1024,
        n_embd=768,
        n_layer=12,
        n_head=12,
    )
)
data = dict(type="text")
optimizer = dict(type="AdamW", lr=6e-4, betas=(0.9, 0.95), weight_decay=0.1)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=6e-5)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=8)
train.dist.tensor_parallel_size = 2
