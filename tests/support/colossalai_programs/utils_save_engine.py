"""utils/checkpoint/save_engine.py, and load.py after it: weights saved by a loop over the engine, loaded before it."""

import colossalai
import colossalai.nn as col_nn
import torch
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn import calc_acc
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer, get_dataloader, load_checkpoint, save_checkpoint

from tests.support.colossalai_programs.stand_ins import Images, mixer

CONFIG = dict()


def build_cifar(batch_size):
    train = get_dataloader(dataset=Images(), shuffle=True, batch_size=batch_size, pin_memory=True)
    return train, get_dataloader(dataset=Images(16, train=False), batch_size=batch_size, pin_memory=True)


def save():
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(config=CONFIG, backend=args.backend)
    logger, model = get_dist_logger(), mixer()
    train_dataloader, test_dataloader = build_cifar(8)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        criterion=torch.nn.CrossEntropyLoss(),
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
    )
    for epoch in range(2):
        engine.train()
        for _, (img, label) in enumerate(train_dataloader):
            engine.zero_grad()
            output = engine(img)
            loss = engine.criterion(output, label)
            engine.backward(loss)
            engine.step()
        engine.eval()
        acc, test_cases = 0, 0
        for _, (img, label) in enumerate(test_dataloader):
            acc += calc_acc(engine(img), label)
            test_cases += len(label)
        logger.info(f"epoch = {epoch}, test acc = {acc / test_cases}", ranks=[0])
        save_checkpoint("vit_cifar.pt", epoch, engine.model)
    return model


def main():
    saved = save()
    disable_existing_loggers()
    colossalai.launch_from_torch(config=CONFIG)
    logger, model = get_dist_logger(), mixer()
    assert load_checkpoint("vit_cifar.pt", model) == 1
    for ours, theirs in zip(model.parameters(), saved.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001, weight_decay=0)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), *build_cifar(8)
    )
    trainer = Trainer(engine=engine, timer=MultiTimer(), logger=logger)
    hook_list = [
        hooks.LossHook(),
        hooks.AccuracyHook(col_nn.metric.Accuracy()),
        hooks.LogMetricByEpochHook(logger),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=1,
        test_dataloader=test_dataloader,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
    )
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
