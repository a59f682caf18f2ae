"""A model of transformers as it is, Llama 3 8B, on two nodes of H100.

dslpar plan examples/plans/llama3_8b_transformers_16_h100.py --world-size 16
"""

parallel = dict(tensor=dict(size=2, mode="1d", sequence=True))
model = dict(
    type="transformers.LlamaForCausalLM",
    config=dict(
        num_hidden_layers=32,
        hidden_size=4096,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=128256,
        max_position_embeddings=8192,
    ),
)
data = dict(seq_len=8192)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=1)
cluster = dict(device="h100-80g")
