"""A config in LiBai's form on two nodes of V100s.

dslpar plan examples/plans/libai_16_v100.py --world-size 16
"""

train = dict(dist=dict(tensor_parallel_size=4, pipeline_parallel_size=2))
model = dict(type="GPT", num_layers=32, hidden_size=2560, num_heads=32, vocab_size=50304, max_seq_len=1024)
precision = "fp16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=4)
cluster = dict(device="v100-32g")
