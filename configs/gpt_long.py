# deepspeed --num_gpus 8 train.py --config configs/gpt_long.py
# 8 ranks = context 4 * tensor 2; 2 samples a step of 512 tokens, of which each pair of tensor ranks stores 128.
# Long sequences: keys and values go around a ring of 4, logits and MLPs are computed by parts of the tokens.
parallel = dict(context=dict(size=4, impl="ring"), tensor=dict(size=2, mode="1d", sequence=True))
model = dict(
    type="GPT",
    num_layers=2,
    hidden_size=64,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden_size=192,
    vocab_size=256,
    max_seq_len=512,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
    tie_embeddings=False,
)
optimizer = dict(type="AdamW", lr=3e-3)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=3e-4)
activation_checkpoint = dict(interval=1, offload=True, mlp_chunks=4)
batch = dict(global_size=2)
train = dict(steps=100, clip_grad_norm=1.0, loss_chunks=4, log_interval=10, eval_interval=50)
