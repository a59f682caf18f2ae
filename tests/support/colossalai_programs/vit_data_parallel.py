"""image/vision_transformer/data_parallel/train.py: mixup, whose labels are a dict, Lamb, and a hook of its own."""

import colossalai
import torch
from colossalai.context import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.trainer import Trainer, hooks
from colossalai.trainer.hooks import BaseHook

from tests.support.colossalai_programs.stand_ins import Images, MixupLoss, mixer

CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 8
DROP_RATE = 0.1
NUM_EPOCHS = 2
gradient_accumulation = 2
clip_grad_norm = 1.0
dali = dict(gpu_aug=True, mixup_alpha=0.2)
"""


class MixupAccuracy(torch.nn.Module):
    def forward(self, logits, targets):
        return (logits.argmax(-1) == targets["targets_a"]).sum()


class TotalBatchsizeHook(BaseHook):
    def __init__(self, priority: int = 2) -> None:
        super().__init__(priority)
        self.logger = get_dist_logger()

    def before_train(self, trainer):
        total = gpc.config.BATCH_SIZE * gpc.config.gradient_accumulation * gpc.get_world_size(ParallelMode.DATA)
        self.logger.info(f"Total batch size = {total}", ranks=[0])


def build_dali_imagenet(batch_size, num):
    def mixed(samples):
        images, labels = torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])
        lam = torch.full((len(images),), 0.9)
        return 0.9 * images + 0.1 * images.flip(0), dict(targets_a=labels, targets_b=labels.flip(0), lam=lam)

    return torch.utils.data.DataLoader(Images(num), batch_size=batch_size, collate_fn=mixed)


def main():
    args = colossalai.get_default_parser().parse_args()
    disable_existing_loggers()
    colossalai.launch_from_torch(config=args.config)
    logger = get_dist_logger()
    model = mixer()
    train_dataloader, test_dataloader = build_dali_imagenet(8, 40), build_dali_imagenet(8, 16)
    optimizer = colossalai.nn.Lamb(model.parameters(), lr=1.8e-2, weight_decay=0.1)
    criterion = MixupLoss(loss_fn_cls=torch.nn.CrossEntropyLoss)
    lr_scheduler = LinearWarmupLR(optimizer, warmup_steps=1, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, criterion, train_dataloader, test_dataloader
    )
    assert len(train_dataloader) == 4, "the fifth batch fills no step"
    trainer = Trainer(engine=engine, logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(accuracy_func=MixupAccuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
        TotalBatchsizeHook(),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        hooks=hook_list,
        display_progress=True,
        test_interval=1,
    )
    assert engine.steps_done == 4
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
