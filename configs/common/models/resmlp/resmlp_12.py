# ResMLP-S12 as it was published: 12 layers, 384 features, 15 million parameters; images of 224 x 224.

from dslpar.config import LazyCall
from dslpar.models import ResMLP

model = LazyCall(ResMLP)(
    image_size=224,
    patch_size=16,
    num_channels=3,
    hidden_size=384,
    num_layers=12,
    layer_scale=0.1,
    num_classes=1000,
)
