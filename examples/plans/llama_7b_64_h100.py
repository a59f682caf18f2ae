"""A 7B Llama on eight nodes of H100: does plain data parallelism with ZeRO do?

dslpar plan examples/plans/llama_7b_64_h100.py --world-size 64
"""

parallel = dict(data=64)
model = dict(
    type="GPT",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    ffn_hidden_size=11008,
    vocab_size=32000,
    max_seq_len=4096,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
precision = "bf16"
zero = dict(stage=2)
batch = dict(global_size=512, micro_size=1)
cluster = dict(device="h100-80g")
