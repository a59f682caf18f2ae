"""features/gradient_accumulation/train.py: weights change at every fourth batch only."""

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.utils import get_current_device, get_dataloader

from tests.support.colossalai_programs.stand_ins import Images, small_resnet

CONFIG = """
from colossalai.amp import AMP_TYPE

BATCH_SIZE = 4
NUM_EPOCHS = 200
gradient_accumulation = 4
"""


def main():
    colossalai.launch_from_torch(config="./config.py")
    get_dist_logger()
    model = small_resnet(num_classes=10)
    train_dataloader = get_dataloader(dataset=Images(), shuffle=True, batch_size=gpc.config.BATCH_SIZE, pin_memory=True)
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)
    engine.train()
    param_by_iter = [next(model.parameters()).flatten()[0].item()]
    for idx, (img, label) in enumerate(train_dataloader):
        img, label = img.to(get_current_device()), label.to(get_current_device())
        engine.zero_grad()
        output = engine(img)
        train_loss = engine.criterion(output, label)
        engine.backward(train_loss)
        engine.step()
        param_by_iter.append(next(model.parameters()).flatten()[0].item())
        if idx == gpc.config.gradient_accumulation - 1:
            break
    assert len(set(param_by_iter[:4])) == 1 and param_by_iter[4] != param_by_iter[0], param_by_iter
    return [train_loss.item()]
