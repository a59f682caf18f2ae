"""Sequences of 131,072 tokens of a 7B Llama on 64 H100: what holds the activations?

dslpar plan examples/plans/long_sequence_64_h100.py --world-size 64
"""

parallel = dict(tensor=dict(size=8, mode="sequence", impl="ulysses"))
model = dict(
    type="GPT",
    num_layers=32,
    hidden_size=4096,
    num_heads=32,
    ffn_hidden_size=11008,
    vocab_size=32000,
    max_seq_len=131072,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
precision = "bf16"
zero = dict(stage=3)
batch = dict(global_size=32, micro_size=1)
cluster = dict(device="h100-80g")
