"""image/resnet/train.py: training and evaluation by a loop, or by a Trainer with --use_trainer."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_current_device, get_dataloader
from tqdm import tqdm

from tests.support.colossalai_programs.stand_ins import Images, small_resnet

CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 8
NUM_EPOCHS = 2
CONFIG = dict(fp16=dict(mode=AMP_TYPE.TORCH))
"""


def main():
    parser = colossalai.get_default_parser()
    parser.add_argument("--use_trainer", action="store_true")
    args = parser.parse_args()
    colossalai.launch_from_torch(config="./config.py")
    logger, device = get_dist_logger(), get_current_device()
    model = small_resnet()
    train_dataloader = get_dataloader(dataset=Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    test_dataloader = get_dataloader(
        dataset=Images(12, train=False), add_sampler=False, batch_size=gpc.config.BATCH_SIZE, pin_memory=True
    )
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    lr_scheduler = CosineAnnealingLR(optimizer, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )
    losses = []
    if not args.use_trainer:
        for epoch in range(gpc.config.NUM_EPOCHS):
            engine.train()
            train_dl = tqdm(train_dataloader) if gpc.get_global_rank() == 0 else train_dataloader
            for img, label in train_dl:
                img, label = img.to(device), label.to(device)
                engine.zero_grad()
                output = engine(img)
                train_loss = engine.criterion(output, label)
                engine.backward(train_loss)
                engine.step()
            lr_scheduler.step()
            engine.eval()
            correct, total = 0, 0
            for img, label in test_dataloader:
                img, label = img.to(device), label.to(device)
                with torch.no_grad():
                    output = engine(img)
                    test_loss = engine.criterion(output, label)
                pred = torch.argmax(output, dim=-1)
                correct += torch.sum(pred == label)
                total += img.size(0)
            losses.append(test_loss.item())
            lr = lr_scheduler.get_last_lr()[0]
            logger.info(
                f"Epoch {epoch} - train loss: {train_loss:.5}, acc: {correct / total:.5}, lr: {lr:.5g}", ranks=[0]
            )
        return losses
    timer = MultiTimer()
    trainer = Trainer(engine=engine, timer=timer, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LogMemoryByEpochHook(logger),
        hooks.LogTimingByEpochHook(timer, logger),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    return [trainer.states["metrics"]["test"]["Loss"].get_accumulated_value()]
