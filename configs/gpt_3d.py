# deepspeed --hostfile hostfiles/8gpu --no_ssh_check --master_addr 127.0.0.1 train.py --config configs/gpt_3d.py
# 8 ranks = pipeline 2 * data 2 * tensor 2; 16 samples a step = micro 2 * accumulation 4 * data 2; 2,048 tokens.
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))  # data parallel size: inferred
model = dict(type='GPT', num_layers=4, hidden_size=128, num_heads=8, vocab_size=256, max_seq_len=128)
optimizer = dict(type='AdamW', lr=3e-3)
lr_scheduler = dict(type='cosine', warmup_steps=10, min_lr=3e-4)
zero = dict(stage=1)
batch = dict(global_size=16, accumulation=4)
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10, eval_interval=50)
