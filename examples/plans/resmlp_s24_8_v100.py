"""A ResMLP-S24 on a node of V100s with 16 GB, in fp16.

dslpar plan examples/plans/resmlp_s24_8_v100.py --world-size 8
"""

model = dict(type="ResMLP", num_layers=24, hidden_size=384)
precision = "fp16"
zero = dict(stage=1)
batch = dict(global_size=1024, micro_size=128)
cluster = dict(device="v100-16g")
