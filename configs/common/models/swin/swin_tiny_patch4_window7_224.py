# Swin-T as it was published: 2, 2, 6 and 2 layers of 96 to 768 features, 28 million parameters; images of 224 x 224.

from transformers import SwinConfig, SwinForImageClassification

from dslpar.config import LazyCall

model = LazyCall(SwinForImageClassification)(  # dslpar: ignore[CFG111] no pipeline here needs its layers
    config=LazyCall(SwinConfig)(
        image_size=224,
        patch_size=4,
        num_channels=3,
        embed_dim=96,
        depths=[2, 2, 6, 2],
        num_heads=[3, 6, 12, 24],
        window_size=7,
        drop_path_rate=0.2,
        num_labels=1000,
    )
)
