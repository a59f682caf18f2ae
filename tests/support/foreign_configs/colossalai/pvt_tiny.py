from colossalai.amp import AMP_TYPE

model = "pvt_tiny"
drop_path = 0.1
clip_grad = None
batch_size = 100
lr = 5e-4
opt = "adamw"
num_epochs = 2
fp16 = dict(
    mode=AMP_TYPE.TORCH,
)
gradient_accumulation = 16
cutmix_minmax = None
output_dir = ""
