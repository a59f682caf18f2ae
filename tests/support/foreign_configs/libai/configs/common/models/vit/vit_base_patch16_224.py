from .vit_tiny_patch16_224 import model

model.patch_size = 16
model.embed_dim = 768
model.num_heads = 12
