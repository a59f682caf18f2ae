from configs.common.data.imagenet import dataloader
from configs.common.models.graph import graph
from configs.common.optim import optim
from omegaconf import OmegaConf

from configs.common.train import train

from .models.vit import model

finetune = OmegaConf.create()
finetune.enable = True
finetune.path = "projects/MOCOV3/output/vit.pth"

dataloader.train.dataset[0].root = "/dataset/extract"
dataloader.test[0].dataset.root = "/dataset/extract"
dataloader.train.mixup_func = None
dataloader.train.dataset[0].transform.transforms.append(dict(name="flip", p=0.5))

model.depth = 2 * 6
optim.lr = 1.5e-4
optim.weight_decay = 0.1
train["train_micro_batch_size"] = 128
train["warmup_ratio"] = 40 / 300
train["scheduler"]["alpha"] = 0.001
effective_batch_size = train.train_micro_batch_size * 32
optim.lr *= effective_batch_size / 256
graph.enabled = not finetune.enable
