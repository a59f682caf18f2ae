"""features/amp/train.py: a loop over the engine, or a Trainer with --use_trainer."""

import time

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_current_device, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, small_resnet

CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 8
NUM_EPOCHS = 2
clip_grad_norm = 1.0
"""


def main():
    parser = colossalai.get_default_parser()
    parser.add_argument("--use_trainer", action="store_true")
    args = parser.parse_args()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    logger.info("initialized distributed environment", ranks=[0])
    model = small_resnet()
    train_dataloader = get_dataloader(dataset=Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-1, weight_decay=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS * 4)
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)
    losses = []
    if not args.use_trainer:
        engine.train()
        for epoch in range(gpc.config.NUM_EPOCHS):
            start = time.time()
            for img, label in train_dataloader:
                img, label = img.to(get_current_device()), label.to(get_current_device())
                engine.zero_grad()
                output = engine(img)
                loss = engine.criterion(output, label)
                engine.backward(loss)
                engine.step()
                lr_scheduler.step()
                losses.append(loss.item())
            avg_step_time = (time.time() - start) / len(train_dataloader)
            logger.info(f"epoch: {epoch}, loss: {loss.item()}, avg step time: {avg_step_time} / s")
    else:
        timer = MultiTimer()
        trainer = Trainer(engine=engine, logger=logger, timer=timer)
        hook_list = [
            hooks.LossHook(),
            hooks.LogMetricByEpochHook(logger),
            hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
            hooks.LogTimingByEpochHook(timer=timer, logger=logger),
        ]
        trainer.fit(
            train_dataloader=train_dataloader,
            epochs=gpc.config.NUM_EPOCHS,
            hooks=hook_list,
            display_progress=True,
            test_interval=1,
        )
        losses.append(trainer.states["metrics"]["train"]["Loss"].get_accumulated_value())
    gpc.destroy()
    return losses
