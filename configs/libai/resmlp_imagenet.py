# ResMLP-S12 on ImageNet, of dslpar's own layers.
#
#   dslpar lint configs/libai/resmlp_imagenet.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/resmlp_imagenet.py data.path=/datasets/imagenet/train
#
# Data parallel 2 x tensor parallel 2 x pipeline 2. Images are a folder for each class.
# Batch: 32 (micro) x 16 (accumulation) x 2 (data) = 1,024 images a step.

from ..common.models.resmlp.resmlp_12 import model
from ..common.train import train

data = dict(type="images", path="imagenet/train", mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225], flip=True)
optimizer = dict(type="AdamW", lr=1e-3, weight_decay=0.2)
lr_scheduler = dict(type="cosine", warmup_steps=10, min_lr=1e-5)
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=1024, micro_size=32)
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2
