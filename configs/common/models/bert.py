# BERT-large's shape over bytes: 24 layers, about 303 million parameters. The blocks and the loss over next tokens are
# GPT's, under LiBai's names of sizes; BERT itself is configs/libai/bert_large_pretrain.py.

from dslpar.config import LazyCall
from dslpar.models import GPT

pretrain_model = LazyCall(GPT)(
    cfg=dict(
        hidden_layers=24,
        hidden_size=1024,
        num_attention_heads=16,
        vocab_size=256,
        max_seq_length=512,
        ffn_hidden_size=4096,
    )
)
