"""A wide model on a cube of 4 x 4 x 4 ranks (3D tensor parallelism), on eight nodes of A100s with 40 GB.

dslpar plan examples/plans/cube_64_a100_40g.py --world-size 64
"""

parallel = dict(tensor=dict(size=64, mode="3d"))
model = dict(type="GPT", num_layers=24, hidden_size=12288, num_heads=96, vocab_size=51200, max_seq_len=2048)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=16)
cluster = dict(device="a100-40g")
