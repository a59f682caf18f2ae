# deepspeed --num_gpus 4 train.py --config configs/gpt_zero3.py
# 4 ranks = data 2 * tensor 2; parameters and Adam state are sharded in CPU memory, activations are computed twice.
# 16 samples a step = micro 2 * accumulation 4 * data 2; 2,048 tokens. Checkpoints after 50 and 100 steps; --resume.
parallel = dict(tensor=dict(size=2, mode="1d", sequence=True))
model = dict(type="GPT", num_layers=4, hidden_size=128, num_heads=8, vocab_size=256, max_seq_len=128)
zero = dict(stage=3, offload_optimizer="cpu", offload_param="cpu")
precision = "bf16"
activation_checkpoint = 1
optimizer = dict(type="AdamW", lr=3e-3)
lr_scheduler = dict(type="OneCycleLR", total_steps=100)
batch = dict(global_size=16, accumulation=4)
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10, save_interval=50)
checkpoint = dict(keep=2)
monitor = dict(csv=True)
