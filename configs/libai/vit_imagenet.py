# ViT-B/16 on ImageNet; transformers' own code, by policy.
#
#   dslpar lint configs/libai/vit_imagenet.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/vit_imagenet.py data.path=/datasets/imagenet/train
#
# Data parallel 4 x tensor parallel 2. Images are a folder for each class; pip install dslpar[train,hf].
# Batch: 128 (micro) x 2 (accumulation) x 4 (data) = 1,024 images a step.

from ..common.models.vit.vit_base_patch16_224 import model
from ..common.train import train

data = dict(type="images", path="imagenet/train", mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225], flip=True)
optimizer = dict(type="AdamW", lr=1e-3, weight_decay=0.3)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=1e-5)  # published: 300 epochs, 20 of them to warm up
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=1024, micro_size=128)
train.dist.tensor_parallel_size = 2
