"""image/detr/main.py: the model is called by itself, and the loss is a sum over a dict; two groups of parameters."""

import os

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from torch.utils.data import DataLoader, DistributedSampler

from tests.support.colossalai_programs.stand_ins import Images, SmallResNet

CONFIG = """
LOG_PATH = "./detr"
BATCH_SIZE = 8
LEARNING_RATE = 1e-1
WEIGHT_DECAY = 1e-4
NUM_EPOCHS = 2
clip_max_norm = 0.1
lr_backbone = 1e-2
lr_drop = 200
num_workers = 0
"""


class Criterion(torch.nn.Module):
    weight_dict = {"loss_ce": 1, "loss_bbox": 0.5}

    def forward(self, outputs, targets):
        labels = torch.stack([target["labels"] for target in targets])
        return {"loss_ce": torch.nn.functional.cross_entropy(outputs, labels), "loss_bbox": outputs.square().mean()}


def collate_fn(batch):
    return torch.stack([image for image, _ in batch]), [{"labels": label} for _, label in batch]


def main():
    args_co = colossalai.get_default_parser().parse_args()
    device = colossalai.utils.get_current_device()
    colossalai.launch_from_torch(config=args_co.config)
    logger = get_dist_logger()
    if hasattr(gpc.config, "LOG_PATH"):
        if gpc.get_global_rank() == 0:
            log_path = gpc.config.LOG_PATH
            if not os.path.exists(log_path):
                os.mkdir(log_path)
            logger.log_to_file(log_path)
    args = gpc.config
    model, criterion = SmallResNet(4), Criterion()
    model.to(device)
    param_dicts = [
        {"params": [p for n, p in model.named_parameters() if "conv" not in n and p.requires_grad]},
        {"params": [p for n, p in model.named_parameters() if "conv" in n], "lr": gpc.config.lr_backbone},
    ]
    dataset_train, dataset_val = Images(), Images(16, train=False)
    sampler_train, sampler_val = DistributedSampler(dataset_train), DistributedSampler(dataset_val, shuffle=False)
    batch_sampler = torch.utils.data.BatchSampler(sampler_train, args.BATCH_SIZE, drop_last=True)
    dataloader_train = DataLoader(dataset_train, batch_sampler=batch_sampler, collate_fn=collate_fn)
    dataloader_val = DataLoader(dataset_val, args.BATCH_SIZE, sampler=sampler_val, collate_fn=collate_fn)
    optimizer = torch.optim.AdamW(param_dicts, lr=gpc.config.LEARNING_RATE, weight_decay=gpc.config.WEIGHT_DECAY)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, gpc.config.lr_drop)
    engine, train_dataloader, val_dataloader, _ = colossalai.initialize(
        model=model,
        optimizer=optimizer,
        criterion=criterion,
        train_dataloader=dataloader_train,
        test_dataloader=dataloader_val,
    )
    losses = []
    for _ in range(gpc.config.NUM_EPOCHS):
        engine.train()
        logger.info(len(train_dataloader), ranks=[0])
        for samples, targets in train_dataloader:
            samples = samples.to(device)
            targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
            outputs = model(samples)
            loss_dict = criterion(outputs, targets)
            weight_dict = criterion.weight_dict
            total = sum(loss_dict[k] * weight_dict[k] for k in loss_dict if k in weight_dict)
            engine.zero_grad()
            engine.backward(total)
            if args.clip_max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_max_norm)
            engine.step()
            losses.append(total.item())
        logger.info(f"train loss: {losses[-1]:.5}, lr: {lr_scheduler.get_last_lr()[0]:.5g}", ranks=[0])
        engine.eval()
        for samples, targets in val_dataloader:
            criterion(model(samples.to(device)), targets)
    return losses
