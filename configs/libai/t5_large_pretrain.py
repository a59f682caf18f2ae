# T5-large as it was published: 24 and 24 layers, 1024 features, 16 heads, 738 million parameters; spans are told.
#
#   dslpar lint configs/libai/t5_large_pretrain.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/t5_large_pretrain.py
#
# Data parallel 2 x tensor parallel 2 x pipeline 2, encoder and decoder over the stages. Text is byte by byte:
# data.tokenizer='t5-large' trains on its tokens.
# Batch: 4 (micro) x 16 (accumulation) x 2 (data) = 128 sequences a step, of 512 tokens each.

from transformers import T5Config, T5ForConditionalGeneration

from dslpar.config import LazyCall

from ..common.train import train

model = LazyCall(T5ForConditionalGeneration)(
    config=LazyCall(T5Config)(
        vocab_size=32128,
        d_model=1024,
        d_kv=64,
        d_ff=4096,
        num_layers=24,
        num_decoder_layers=24,
        num_heads=16,
    )
)
data = dict(type="span", seq_len=512)
optimizer = dict(type="AdamW", lr=1e-4, weight_decay=0.01)
lr_scheduler = dict(type="cosine", warmup_steps=10)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=128, micro_size=4)
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2
