"""image/mae/main_pretrain.py: `engine.model` computes the loss; checkpoints of weights and the number of the epoch."""

from pathlib import Path

import colossalai
import torch
from colossalai.context import Config
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import CosineAnnealingLR
from colossalai.utils import get_current_device, get_dataloader
from colossalai.utils.checkpointing import load_checkpoint, save_checkpoint
from tqdm import tqdm

from tests.support.colossalai_programs.stand_ins import Images

CONFIG = """
from pathlib import Path

VERBOSE = DEBUG = True
BATCH_SIZE = 8
NUM_EPOCHS = 4
LEARNING_RATE = 1e-2
WEIGHT_DECAY = 5e-2
MASK_RATIO = 0.75
CHECKPOINT_INTERVAL = 2
OUTPUT_DIR = Path("output")
RESUME = False
RESUME_DIR = OUTPUT_DIR / "checkpoint-2.pth"
"""
LOGGER = get_dist_logger()


class MaskedAutoencoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = torch.nn.Linear(64, 16), torch.nn.Linear(16, 64)

    def forward(self, imgs, mask_ratio=0.75):
        patches = imgs.flatten(2)
        pred = self.decoder(self.encoder(patches * (1 - mask_ratio)))
        return (pred - patches).square().mean(), pred, None


def init_engine(config: Config):
    model = MaskedAutoencoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.LEARNING_RATE, betas=(0.9, 0.95))
    options = dict(dataset=Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, num_workers=0, pin_memory=True)
    engine, train_dataloader, test_dataloader, _ = colossalai.initialize(
        model,
        optimizer,
        torch.nn.CrossEntropyLoss(),
        get_dataloader(**options, drop_last=True),
        get_dataloader(**options, drop_last=False),
    )
    return engine, train_dataloader, test_dataloader


def main():
    args = colossalai.get_default_parser().parse_args()
    colossalai.launch_from_torch(args.config)
    config = gpc.config
    engine, train_dataloader, _ = init_engine(config)
    lr_scheduler = CosineAnnealingLR(engine.optimizer, total_steps=config.NUM_EPOCHS * len(train_dataloader))
    start_epoch, losses = 0, []
    for again in (False, True):
        if again:
            start_epoch = 1 + load_checkpoint(config.RESUME_DIR, engine.model, None, None, strict=False)
            LOGGER.info(f"Resume from checkpoint {config.RESUME_DIR}, start epoch {start_epoch}")
        for epoch in range(start_epoch, config.NUM_EPOCHS):
            engine.train()
            for idx, (img, _) in enumerate(tqdm(train_dataloader, desc=f"epoch {epoch}")):
                img = img.to(get_current_device())
                engine.zero_grad()
                loss, _, _ = engine.model(img, mask_ratio=config.MASK_RATIO)
                engine.backward(loss)
                engine.step()
                lr_scheduler.step()
                losses.append(loss.item())
                LOGGER.debug(f"iteration {idx}: {next(engine.model.parameters()).flatten()[:10]}")
            if epoch % config.CHECKPOINT_INTERVAL == 0:
                save_checkpoint(config.OUTPUT_DIR / f"checkpoint-{epoch}.pth", epoch, engine.model, None, None)
    assert start_epoch == 3 and Path("output/checkpoint-0.pth").exists()
    return losses
