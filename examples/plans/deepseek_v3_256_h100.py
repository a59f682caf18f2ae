"""DeepSeek-V3, 671 billion parameters, on 256 H100: 256 experts over the ranks of a node, and a pipeline over 32 nodes.

The sizes are those of its published config.json. The first three blocks have an MLP, and attention has latents.

dslpar plan examples/plans/deepseek_v3_256_h100.py --world-size 256
"""

parallel = dict(pipeline=32, expert=8)
activation_checkpoint = dict(interval=1)
model = dict(
    type="transformers.DeepseekV3ForCausalLM",
    config=dict(
        vocab_size=129280,
        hidden_size=7168,
        intermediate_size=18432,
        moe_intermediate_size=2048,
        num_hidden_layers=61,
        num_attention_heads=128,
        num_key_value_heads=128,
        n_shared_experts=1,
        n_routed_experts=256,
        routed_scaling_factor=2.5,
        kv_lora_rank=512,
        q_lora_rank=1536,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        n_group=8,
        topk_group=4,
        num_experts_per_tok=8,
        first_k_dense_replace=3,
        norm_topk_prob=True,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
    ),
)
data = dict(seq_len=4096)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=2048, micro_size=1)
cluster = dict(device="h100-80g")
