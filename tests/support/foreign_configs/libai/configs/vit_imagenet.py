from libai.config import LazyCall
from libai.scheduler import WarmupCosineLR

from .common.data.imagenet import dataloader
from .common.models.graph import graph
from .common.models.vit.vit_base_patch16_224 import model
from .common.optim import optim
from .common.train import train

dataloader.train.dataset[0].root = "/path/to/imagenet"
dataloader.test[0].dataset.root = "/path/to/imagenet"
model.num_classes = 1000
dataloader.train.mixup_func.num_classes = model.num_classes

optim.lr = 1e-3 * 1024 / 1024
optim.weight_decay = 0.3
train.train_micro_batch_size = 128
train.train_epoch = 300
train.warmup_ratio = 20 / 300
train.evaluation.eval_period = 1000
train.scheduler = LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.01, warmup_method="linear")
del train.evaluation.eval_metric
