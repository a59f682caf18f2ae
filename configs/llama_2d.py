# deepspeed --num_gpus 8 train.py --config configs/llama_2d.py
# 8 ranks = data 2 * tensor 4, a square of 2 * 2; 16 samples a step = micro 4 * accumulation 2 * data 2; 2,048 tokens.
# Llama's form of the model: two queries share each key and value, and nothing has a bias.
parallel = dict(tensor=dict(size=4, mode="2d"))  # data parallel size: inferred
model = dict(
    type="GPT",
    num_layers=4,
    hidden_size=128,
    num_heads=8,
    num_kv_heads=4,
    ffn_hidden_size=352,  # 8/3 of hidden_size for swiglu's three weights, up to a multiple of 32
    vocab_size=256,
    max_seq_len=128,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
optimizer = dict(type="AdamW", lr=3e-3)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=3e-4)
zero = dict(stage=1)
batch = dict(global_size=16, accumulation=2)
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10, eval_interval=50)
