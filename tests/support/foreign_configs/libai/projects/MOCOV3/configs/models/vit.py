from configs.common.models.vit.vit_tiny_patch16_224 import model
from projects.MOCOV3.modeling.vit import VisionTransformerMoCo

model._target_ = VisionTransformerMoCo
model.update(embed_dim=384, num_heads=12, stop_grad_conv1=True)
