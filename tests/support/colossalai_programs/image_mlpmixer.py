"""image/mlpmixer/train_data.py: a Trainer whose scheduler steps each batch; `import *`."""

import os

import colossalai
import torch
from colossalai.amp.amp_type import AMP_TYPE
from colossalai.builder import *  # noqa: F403
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn import Accuracy, CrossEntropyLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, mixer

CONFIG = """
BATCH_SIZE = 8
LEARNING_RATE = 2e-2
WEIGHT_DECAY = 3e-2
TENSOR_PARALLEL_SIZE = 1
TENSOR_PARALLEL_MODE = None
NUM_EPOCHS = 2
WARMUP_EPOCHS = 1
parallel = dict(pipeline=1, tensor=dict(mode=TENSOR_PARALLEL_MODE, size=TENSOR_PARALLEL_SIZE))
seed = 42
LOG_PATH = f"./vit_{TENSOR_PARALLEL_MODE}_cifar10_tp{TENSOR_PARALLEL_SIZE}_bs{BATCH_SIZE}_lr{LEARNING_RATE}/"
"""


def build_cifar(batch_size):
    train = get_dataloader(dataset=Images(), shuffle=True, batch_size=batch_size, num_workers=0, pin_memory=True)
    test = get_dataloader(dataset=Images(12, train=False), batch_size=batch_size, num_workers=0, pin_memory=True)
    return train, test


def main():
    assert AMP_TYPE.TORCH.value == "torch"
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    if hasattr(gpc.config, "LOG_PATH"):
        if gpc.get_global_rank() == 0:
            log_path = gpc.config.LOG_PATH
            if not os.path.exists(log_path):
                os.mkdir(log_path)
            logger.log_to_file(log_path)
    model = mixer()
    train_dataloader, test_dataloader = build_cifar(gpc.config.BATCH_SIZE // gpc.data_parallel_size)
    criterion = CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY)
    steps_per_epoch = len(train_dataloader)
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer=optimizer,
        total_steps=gpc.config.NUM_EPOCHS * steps_per_epoch,
        warmup_steps=gpc.config.WARMUP_EPOCHS * steps_per_epoch,
    )
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        lr_scheduler=lr_scheduler,
    )
    logger.info("Engine is built", ranks=[0])
    timer = MultiTimer()
    trainer = Trainer(engine=engine, logger=logger, timer=timer)
    hook_list = [
        hooks.LogMetricByEpochHook(logger=logger),
        hooks.LogMetricByStepHook(),
        hooks.AccuracyHook(accuracy_func=Accuracy()),
        hooks.LossHook(),
        hooks.ThroughputHook(),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=False),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    assert lr_scheduler.get_last_lr()[0] < 1e-9, "the cosine has ended"
    assert "sample_per_sec" in trainer.states["step_metrics"]["throughput"]
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
