"""A 70B Llama on 256 H100: tensor parallelism within nodes, a pipeline over them, and one chunk too few.

dslpar plan examples/plans/llama_70b_256_h100.py --world-size 256
"""

parallel = dict(pipeline=4, tensor=dict(size=8, mode="1d", sequence=True))
model = dict(
    type="GPT",
    num_layers=80,
    hidden_size=8192,
    num_heads=64,
    num_kv_heads=8,
    ffn_hidden_size=28672,
    vocab_size=32000,
    max_seq_len=4096,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=1024, micro_size=2)
cluster = dict(device="h100-80g")
