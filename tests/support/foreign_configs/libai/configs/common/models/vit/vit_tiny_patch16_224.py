from flowvision.models import VisionTransformer
from libai.config import LazyCall

model = LazyCall(VisionTransformer)(
    img_size=224, patch_size=16, in_chans=3, embed_dim=192, depth=12, num_heads=3, num_classes=1000, loss_func=None
)
