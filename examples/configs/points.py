# For programs that bring the model and the data:
# deepspeed --num_gpus 2 examples/own_dataset.py --config examples/configs/points.py
optimizer = dict(type="AdamW", lr=1e-2)
batch = dict(global_size=32, accumulation=2)
train = dict(steps=40, eval_interval=20, eval_steps=2, save_interval=20, log_interval=10)
