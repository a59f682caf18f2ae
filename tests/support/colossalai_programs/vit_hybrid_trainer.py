"""image/vision_transformer/hybrid_parallel/train_with_trainer.py: a pipeline and a Trainer."""

import colossalai
import torch
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn import Accuracy, CrossEntropyLoss
from colossalai.nn.lr_scheduler import CosineAnnealingWarmupLR
from colossalai.pipeline.pipelinable import PipelinableContext
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader, is_using_pp
from tqdm import tqdm

from tests.support.colossalai_programs.stand_ins import Images, Mixer

CONFIG = """
BATCH_SIZE = 8
LEARNING_RATE = 3e-2
WEIGHT_DECAY = 0.3
NUM_EPOCHS = 2
WARMUP_EPOCHS = 1
parallel = dict(pipeline=2)
clip_grad_norm = 1.0
NUM_MICRO_BATCHES = parallel["pipeline"]
"""


def main():
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    if is_using_pp():
        pipelinable = PipelinableContext()
        with pipelinable:
            model = Mixer()
        pipelinable.to_layer_list()
        pipelinable.policy = "uniform"
        model = pipelinable.partition(1, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))
    else:
        model = Mixer()
    total_numel = sum(p.numel() for p in model.parameters())
    stage = gpc.get_local_rank(ParallelMode.PIPELINE) if gpc.is_initialized(ParallelMode.PIPELINE) else 0
    logger.info(f"number of parameters: {total_numel} on pipeline stage {stage}")
    train_dataloader = get_dataloader(dataset=Images(), batch_size=gpc.config.BATCH_SIZE)
    test_dataloader = get_dataloader(dataset=Images(16, train=False), batch_size=gpc.config.BATCH_SIZE)
    criterion = CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY)
    lr_scheduler = CosineAnnealingWarmupLR(
        optimizer=optimizer, total_steps=gpc.config.NUM_EPOCHS, warmup_steps=gpc.config.WARMUP_EPOCHS
    )
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
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
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    metric = trainer.states["metrics"]["train"].get("Loss")
    return [0.0 if metric is None else metric.get_accumulated_value()]
