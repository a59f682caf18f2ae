"""GPT-2 XL, 1.5 billion parameters, on one node of A100s: how large may a micro-batch be?

dslpar plan examples/plans/gpt2_xl_8_a100.py --world-size 8
"""

model = dict(type="GPT", num_layers=48, hidden_size=1600, num_heads=25, vocab_size=50257, max_seq_len=1024)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=512, micro_size=8)
cluster = dict(device="a100-80g")
