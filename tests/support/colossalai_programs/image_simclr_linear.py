"""image/simclr/train_linear.py: weights of a file go into `engine.model` before the training."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, mixer

CONFIG = """
LOG_NAME = "cifar-simclr"
BATCH_SIZE = 8
NUM_EPOCHS = 2
LEARNING_RATE = 0.03
WEIGHT_DECAY = 0.0005
MOMENTUM = 0.9
gradient_accumulation = 1
"""


def main():
    colossalai.launch_from_torch(config="./config.py")
    logger = get_dist_logger()
    torch.save({"model": {"1.bias": torch.full((16,), 0.5)}}, "epoch800.pt")
    model = mixer()
    train_dataloader = get_dataloader(dataset=Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE)
    test_dataloader = get_dataloader(Images(16, train=False), add_sampler=False, batch_size=gpc.config.BATCH_SIZE)
    optimizer = colossalai.nn.FusedSGD(
        model.parameters(),
        lr=gpc.config.LEARNING_RATE,
        weight_decay=gpc.config.WEIGHT_DECAY,
        momentum=gpc.config.MOMENTUM,
    )
    lr_scheduler = CosineAnnealingWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader, test_dataloader
    )
    engine.model.load_state_dict(torch.load("epoch800.pt")["model"], strict=False)
    assert engine.module.state_dict()["1.bias"].eq(0.5).all()
    logger.info("pretrained model loaded", ranks=[0])
    trainer = Trainer(engine=engine, logger=logger, timer=MultiTimer())
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        hooks.SaveCheckpointHook(interval=5, checkpoint_dir=f"./ckpt/{gpc.config.LOG_NAME}-eval"),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
