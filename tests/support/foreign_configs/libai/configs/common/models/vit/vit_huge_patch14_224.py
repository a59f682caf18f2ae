from .vit_base_patch16_224 import model

model.patch_size -= 2
model.embed_dim = 1280
model["depth"] = 32
model.num_heads = model.embed_dim // 80
