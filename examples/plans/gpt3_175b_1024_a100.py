"""GPT-3, 175 billion parameters, on 1,024 A100s, as Megatron-LM lays it out: 8 x 8 x 16, an interleaved schedule.

dslpar plan examples/plans/gpt3_175b_1024_a100.py --world-size 1024
"""

parallel = dict(pipeline=8, tensor=dict(size=8, mode="1d", sequence=True))
model = dict(type="GPT", num_layers=96, hidden_size=12288, num_heads=96, vocab_size=51200, max_seq_len=2048)
precision = "bf16"
zero = dict(stage=1)
schedule = dict(type="interleaved", num_model_chunks=2)
batch = dict(global_size=1536, micro_size=1)
cluster = dict(device="a100-80g")
