"""features/gradient_clipping/train.py. Its config's `gradient_clipping` is read by neither; `clip_grad_norm` is."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.utils import get_current_device, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, small_resnet

CONFIG = """
BATCH_SIZE = 8
NUM_EPOCHS = 1
gradient_clipping = 2.0
clip_grad_norm = 1e-6
"""


def main():
    colossalai.launch_from_torch(config="./config.py")
    get_dist_logger().info("clipping", ranks=[0])
    model = small_resnet()
    train_dataloader = get_dataloader(dataset=Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    engine, train_dataloader, _, _ = colossalai.initialize(
        model, optimizer, torch.nn.CrossEntropyLoss(), train_dataloader
    )
    before = torch.cat([p.detach().flatten().clone() for p in model.parameters()])
    engine.train()
    for img, label in train_dataloader:
        engine.zero_grad()
        loss = engine.criterion(engine(img.to(get_current_device())), label.to(get_current_device()))
        engine.backward(loss)
        engine.step()
    moved = torch.cat([p.detach().flatten() for p in model.parameters()]) - before
    assert 0 < moved.norm() < 1e-5, "four steps of at most 1e-6"
    return [loss.item()]
