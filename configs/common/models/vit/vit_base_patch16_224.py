# ViT-B/16 as it was published: 12 layers, 768 features, 12 heads, 86 million parameters; images of 224 x 224.

from transformers import ViTConfig, ViTForImageClassification

from dslpar.config import LazyCall

model = LazyCall(ViTForImageClassification)(
    config=LazyCall(ViTConfig)(
        image_size=224,
        patch_size=16,
        num_channels=3,
        hidden_size=768,
        num_hidden_layers=12,
        num_attention_heads=12,
        intermediate_size=3072,
        num_labels=1000,
    )
)
