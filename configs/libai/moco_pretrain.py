# MoCo v3's pre-training of ViT-S/16 as it was published: 12 layers, 384 features, 12 heads; of dslpar's own layers. Two
# views of each image are made by a program: dslpar.initialize("configs/libai/moco_pretrain.py", train_data=...), a data
# set of ((view, other_view), label).
#
#   dslpar lint configs/libai/moco_pretrain.py --world-size 8
#   deepspeed --num_gpus 8 program.py --config configs/libai/moco_pretrain.py
#
# Data parallel 4 x tensor parallel 2, in fp32, without accumulation: all samples of a step are compared.
# Batch: 1,024 (micro) x 1 (accumulation) x 4 (data) = 4,096 images a step.

from dslpar.config import LazyCall
from dslpar.models import MoCo

from ..common.train import train

model = LazyCall(MoCo)(
    image_size=224,
    patch_size=16,
    num_channels=3,
    hidden_size=384,
    num_layers=12,
    num_heads=12,
    projection_size=256,
    projection_hidden_size=4096,
    temperature=0.2,
    momentum=0.99,
)
optimizer = dict(type="AdamW", lr=2.4e-3, weight_decay=0.1)
lr_scheduler = dict(type="cosine", warmup_steps=10)  # published: 300 epochs, 40 of them to warm up
zero = dict(stage=1)
batch = dict(global_size=4096, micro_size=1024)
train.dist.tensor_parallel_size = 2
train.eval_interval = None
