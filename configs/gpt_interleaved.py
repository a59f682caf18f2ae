# deepspeed --num_gpus 8 train.py --config configs/gpt_interleaved.py
# 8 ranks = pipeline 2 * data 2 * tensor 2; of 4 stages, the pipeline's first rank holds 0 and 2, its second 1 and 3.
# 16 samples a step = micro 2 * accumulation 4 * data 2; 2,048 tokens. Accumulation is a multiple of pipeline.
parallel = dict(pipeline=2, tensor=dict(size=2, mode="1d"))  # data parallel size: inferred
schedule = dict(type="interleaved", num_model_chunks=2)
model = dict(type="GPT", num_layers=8, hidden_size=128, num_heads=8, vocab_size=256, max_seq_len=128)
optimizer = dict(type="AdamW", lr=3e-3)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=3e-4)
zero = dict(stage=1)
batch = dict(global_size=16, accumulation=4)
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10, eval_interval=50)
