# Starts from a folder that transformers saved, such as the one that examples/fine_tune.py --make writes.
# deepspeed --num_gpus 2 examples/fine_tune.py --config examples/configs/fine_tuning.py
parallel = dict(tensor=dict(size=2, mode="1d"))
model = dict(type="transformers.LlamaForCausalLM", pretrained="../outputs/tiny_llama")
data = dict(type="text", seq_len=32)
optimizer = dict(type="AdamW", lr=1e-3)
batch = dict(global_size=8)
train = dict(steps=20, clip_grad_norm=1.0, eval_interval=10, eval_steps=2, log_interval=5)
