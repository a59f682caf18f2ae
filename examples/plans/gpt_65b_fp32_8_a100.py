"""65 billion parameters in fp32 on eight ranks: no change of one setting helps.

dslpar plan examples/plans/gpt_65b_fp32_8_a100.py --world-size 8
"""

parallel = dict(tensor=dict(size=8, mode="1d"))
model = dict(type="GPT", num_layers=80, hidden_size=8192, num_heads=64, vocab_size=50257, max_seq_len=2048)
batch = dict(global_size=64, micro_size=1)
cluster = dict(device="a100-80g")
