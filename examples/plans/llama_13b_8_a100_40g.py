"""A 13B Llama on one node of A100s with 40 GB: which changes make it fit?

dslpar plan examples/plans/llama_13b_8_a100_40g.py --world-size 8
"""

parallel = dict(tensor=dict(size=4, mode="1d"))
model = dict(
    type="GPT",
    num_layers=40,
    hidden_size=5120,
    num_heads=40,
    ffn_hidden_size=13824,
    vocab_size=32000,
    max_seq_len=2048,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=128, micro_size=4)
cluster = dict(device="a100-40g")
