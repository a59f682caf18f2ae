# deepspeed --num_gpus 8 train.py --config configs/gpt_zero_bubble.py
# 8 ranks = pipeline 4 * data 2; the gradients of weights are put off to the time in which a rank would be idle.
# 16 samples a step = micro 1 * accumulation 8 * data 2; 2,048 tokens.
parallel = dict(pipeline=4)  # data parallel size: inferred
schedule = dict(type="zero_bubble")
model = dict(type="GPT", num_layers=8, hidden_size=128, num_heads=8, vocab_size=256, max_seq_len=128)
optimizer = dict(type="AdamW", lr=3e-3)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=3e-4)
zero = dict(stage=1)
batch = dict(global_size=16, accumulation=8)
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10, eval_interval=50)
