from flowvision import transforms
from flowvision.data import Mixup
from libai.config import LazyCall
from libai.data import ImageNetDataset, build_image_test_loader, build_image_train_loader
from omegaconf import OmegaConf

train_aug = LazyCall(transforms.Compose)(
    transforms=[
        LazyCall(transforms.RandomResizedCrop)(size=(224, 224), scale=(0.08, 1.0), ratio=(3.0 / 4.0, 4.0 / 3.0)),
        LazyCall(transforms.ToTensor)(),
    ]
)
test_aug = LazyCall(transforms.Compose)(
    transforms=[
        LazyCall(transforms.Resize)(size=256),
        LazyCall(transforms.CenterCrop)(size=224),
    ]
)

dataloader = OmegaConf.create()
dataloader.train = LazyCall(build_image_train_loader)(
    dataset=[LazyCall(ImageNetDataset)(root="./dataset", train=True, transform=train_aug)],
    num_workers=4,
    mixup_func=LazyCall(Mixup)(mixup_alpha=0.8, cutmix_alpha=1.0, num_classes=1000),
)
dataloader.test = [
    LazyCall(build_image_test_loader)(
        dataset=LazyCall(ImageNetDataset)(root="./dataset", train=False, transform=test_aug),
        num_workers=4,
    )
]
