# MAE's pre-training of ViT-B/16 as it was published: three quarters of the patches are masked, and a decoder of 8
# layers tells their pixels; transformers' own code, by policy.
#
#   dslpar lint configs/libai/mae_pretraining.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/mae_pretraining.py data.path=/datasets/imagenet/train
#
# Data parallel 4 x tensor parallel 2. Images are a folder for each class; pip install dslpar[train,hf].
# Batch: 128 (micro) x 8 (accumulation) x 4 (data) = 4,096 images a step.

from transformers import ViTMAEConfig, ViTMAEForPreTraining

from dslpar.config import LazyCall

from ..common.train import train

model = LazyCall(ViTMAEForPreTraining)(
    config=LazyCall(ViTMAEConfig)(
        image_size=224,
        patch_size=16,
        num_channels=3,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        decoder_hidden_size=512,
        decoder_num_hidden_layers=8,
        decoder_num_attention_heads=16,
        decoder_intermediate_size=2048,
        mask_ratio=0.75,
        norm_pix_loss=True,
    )
)
data = dict(type="images", path="imagenet/train", mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225], flip=True)
optimizer = dict(type="AdamW", lr=2.4e-3, betas=(0.9, 0.95), weight_decay=0.05)
lr_scheduler = dict(type="cosine", warmup_steps=10)  # published: 800 epochs, 40 of them to warm up
precision = "bf16"
zero = dict(stage=1)
batch = dict(global_size=4096, micro_size=128)
train.dist.tensor_parallel_size = 2
