"""Qwen3-30B-A3B on 256 H100: 128 experts over the eight ranks of a node, and ZeRO over all of them.

The sizes are those of its published config.json.

dslpar plan examples/plans/qwen3_30b_a3b_256_h100.py --world-size 256
"""

parallel = dict(expert=8)
model = dict(
    type="transformers.Qwen3MoeForCausalLM",
    config=dict(
        vocab_size=151936,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=40960,
        rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        tie_word_embeddings=False,
    ),
)
data = dict(seq_len=4096)
precision = "bf16"
zero = dict(stage=2)
batch = dict(global_size=1024, micro_size=1)
cluster = dict(device="h100-80g")
