# For a program that brings the model alone: text, byte by byte, by default the source of Python's standard library.
# deepspeed --num_gpus 4 examples/own_model.py --config examples/configs/text.py
parallel = dict(tensor=dict(size=4, mode="2d"))
data = dict(type="text", seq_len=32)
optimizer = dict(type="AdamW", lr=3e-3)
batch = dict(global_size=16)
train = dict(steps=40, clip_grad_norm=1.0, eval_interval=20, eval_steps=2, log_interval=10)
