"""utils/checkpoint/save_trainer.py: a hook saves the weights."""

import colossalai
import colossalai.nn as col_nn
import torch
from colossalai.logging import get_dist_logger
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, mixer

CONFIG = dict()


def main():
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(backend=args.backend, config=CONFIG)
    logger, model = get_dist_logger(), mixer()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    loaders = [get_dataloader(Images(), batch_size=8, shuffle=True), get_dataloader(Images(16), batch_size=8)]
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), *loaders
    )
    trainer = Trainer(engine=engine, timer=MultiTimer(), logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(col_nn.metric.Accuracy()),
        hooks.LogMetricByEpochHook(logger),
        hooks.SaveCheckpointHook(1, "vit_cifar.pt", model),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=2,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    saved = torch.load("vit_cifar.pt")
    assert saved["epoch"] == 1 and all(torch.equal(saved["model"][n], p) for n, p in model.named_parameters())
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
