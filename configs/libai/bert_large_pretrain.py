# BERT-large as it was published: 24 layers, 1024 features, 16 heads, 335 million parameters; transformers' own code, by
# policy, told masked tokens and next sentences.
#
#   dslpar lint configs/libai/bert_large_pretrain.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/bert_large_pretrain.py
#
# Data parallel 2 x tensor parallel 2 x pipeline 2. Text is byte by byte: data.tokenizer='bert-large-uncased', a folder
# with its tokenizer.json, trains on word pieces. pip install dslpar[train,hf].
# Batch: 8 (micro) x 16 (accumulation) x 2 (data) = 256 sequences a step, of 512 tokens each.

from transformers import BertConfig, BertForPreTraining

from dslpar.config import LazyCall

from ..common.train import train

model = LazyCall(BertForPreTraining)(
    config=LazyCall(BertConfig)(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
        max_position_embeddings=512,
    )
)
data = dict(type="mlm")
optimizer = dict(type="AdamW", lr=1e-4, weight_decay=0.01)
lr_scheduler = dict(type="linear", warmup_steps=10)  # published: 10,000 of 1,000,000
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=8)
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2
