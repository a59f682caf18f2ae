"""image/simclr/train_simclr.py: two views per sample, a checkpoint per epoch, and a hook of the program's own."""

import colossalai
import torch
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.trainer import Trainer, hooks
from colossalai.trainer.hooks import BaseHook
from colossalai.utils import MultiTimer, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images

CONFIG = """
LOG_NAME = "cifar-simclr"
BATCH_SIZE = 8
NUM_EPOCHS = 2
LEARNING_RATE = 0.03
WEIGHT_DECAY = 0.0005
MOMENTUM = 0.9
dataset = dict(root="./dataset")
gradient_accumulation = 2
clip_grad_norm = 1.0
"""


class TotalBatchsizeHook(BaseHook):
    def __init__(self, priority: int = 2) -> None:
        super().__init__(priority)
        self.logger = get_dist_logger()

    def before_train(self, trainer):
        total = gpc.config.BATCH_SIZE * gpc.config.gradient_accumulation * gpc.get_world_size(ParallelMode.DATA)
        self.logger.info(f"Total batch size = {total}", ranks=[0])


class SimCLR(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Linear(192, 8)

    def forward(self, x1, x2):
        return self.encoder(x1.flatten(1)), self.encoder(x2.flatten(1))


class NT_Xentloss(torch.nn.Module):
    def forward(self, z1, z2, label):
        scores = torch.nn.functional.normalize(z1) @ torch.nn.functional.normalize(z2).T
        return torch.nn.functional.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class TwoViews(Images):
    def __getitem__(self, index):
        image, label = super().__getitem__(index)
        return (image, image.flip(-1)), label


def main():
    colossalai.launch_from_torch(config="./config.py")
    logger = get_dist_logger()
    model = SimCLR()
    options = dict(num_workers=0, batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    train_dataloader = get_dataloader(dataset=TwoViews(), shuffle=True, **options)
    test_dataloader = get_dataloader(dataset=TwoViews(16, train=False), add_sampler=False, **options)
    criterion = NT_Xentloss()
    optimizer = colossalai.nn.FusedSGD(
        model.parameters(),
        lr=gpc.config.LEARNING_RATE,
        weight_decay=gpc.config.WEIGHT_DECAY,
        momentum=gpc.config.MOMENTUM,
    )
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )
    logger.info("initialized colossalai components", ranks=[0])
    timer = MultiTimer()
    trainer = Trainer(engine=engine, logger=logger, timer=timer)
    hook_list = [
        hooks.LossHook(),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        TotalBatchsizeHook(),
        hooks.SaveCheckpointHook(interval=1, checkpoint_dir=f"./ckpt/{gpc.config.LOG_NAME}/weights.pt"),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    assert engine.steps_done == 4, "four batches per epoch, two per step"
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
