"""Mixtral 8x7B on 64 H100, with its experts over eight data ranks of a node and a pipeline over nodes.

Tokens are sent to their experts. Megatron-Core's reference layout has the same sizes. It reports 468 TFLOP/s per GPU,
which is 2.90 s per step. Its step in this layout is forecast with its own overlaps (`python -m benchmarks.forecast`).

dslpar plan examples/plans/mixtral_8x7b_64_h100.py --world-size 64
"""

parallel = dict(pipeline=4, expert=8)
schedule = dict(type="interleaved", num_model_chunks=8)
model = dict(
    type="transformers.MixtralForCausalLM",
    config=dict(num_hidden_layers=32, max_position_embeddings=4096, tie_word_embeddings=False),
)
data = dict(seq_len=4096)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=256, micro_size=1)
cluster = dict(device="h100-80g")
