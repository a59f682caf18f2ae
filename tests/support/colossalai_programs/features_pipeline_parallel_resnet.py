"""features/pipeline_parallel/resnet.py: a ResNet cut by the names of its modules, and a Trainer."""

import colossalai
import colossalai.nn as col_nn
import torch
import torch.nn as nn
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.pipeline.pipelinable import PipelinableContext
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, small_resnet

BATCH_SIZE = 8
NUM_EPOCHS = 2
NUM_CHUNKS = 1
CONFIG = dict(NUM_MICRO_BATCHES=4, parallel=dict(pipeline=2))


def main():
    disable_existing_loggers()
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(backend=args.backend, config=CONFIG)
    logger = get_dist_logger()
    pipelinable = PipelinableContext()
    with pipelinable:
        model = small_resnet()
    exec_seq = ["conv1", "relu", "layer1", "avgpool", (lambda x: torch.flatten(x, 1), "behind"), "fc"]
    pipelinable.to_layer_list(exec_seq)
    model = pipelinable.partition(NUM_CHUNKS, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    train_dataloader = get_dataloader(dataset=Images(), batch_size=BATCH_SIZE)
    test_dataloader = get_dataloader(dataset=Images(16, train=False), batch_size=BATCH_SIZE)
    lr_scheduler = col_nn.lr_scheduler.LinearWarmupLR(optimizer, NUM_EPOCHS, warmup_steps=1)
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader, lr_scheduler
    )
    timer = MultiTimer()
    trainer = Trainer(engine=engine, timer=timer, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(col_nn.metric.Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=NUM_EPOCHS,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    if not gpc.is_last_rank(ParallelMode.PIPELINE):
        return [0.0]
    assert trainer.states["metrics"]["test"]["Accuracy"].samples == 16
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
