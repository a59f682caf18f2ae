"""image/vision_transformer/data_parallel/train_with_cifar10.py: two replicas, each with its own samples."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.nn.metric import Accuracy
from colossalai.trainer import Trainer, hooks
from colossalai.utils import get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, mixer

CONFIG = """
BATCH_SIZE = 4
NUM_EPOCHS = 2
gradient_accumulation = 1
clip_grad_norm = 1.0
"""


def main():
    args = colossalai.get_default_parser().parse_args()
    disable_existing_loggers()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    model = mixer()
    train_dataloader = get_dataloader(Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    test_dataloader = get_dataloader(Images(16, train=False), batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    optimizer = colossalai.nn.Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)
    criterion = torch.nn.CrossEntropyLoss()
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )
    assert len(train_dataloader) == 32 // 4 // gpc.data_parallel_size
    trainer = Trainer(engine=engine, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
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
