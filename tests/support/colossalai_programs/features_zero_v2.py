"""features/zero/train_v2.py: ZeroDDP and ZeroOptimizer; the program asks for the version."""

import colossalai
import torch
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.gemini import GeminiManager
from colossalai.gemini.chunk import init_chunk_manager
from colossalai.nn.parallel import ZeroDDP
from colossalai.tensor import ProcessGroup
from colossalai.utils.model.colo_init_context import ColoInitContext
from colossalai.zero import ZeroOptimizer

from tests.support.colossalai_programs.stand_ins import GPTLMLoss, SmallGPT

CONFIG = dict()


def get_data(batch_size, seq_len):
    start = torch.randint(0, 32, (batch_size, 1))
    input_ids = ((start + torch.arange(seq_len)) % 32).to(get_current_device())
    return input_ids, torch.ones_like(input_ids)


def main():
    disable_existing_loggers()
    colossalai.launch_from_torch(config={})
    logger = get_dist_logger()
    pg = ProcessGroup()
    with ColoInitContext(device=get_current_device()):
        model = SmallGPT()
    assert pg.dp_world_size() == 1 and colossalai.__version__ > "0.1.10"
    chunk_manager = init_chunk_manager(model=model, init_device=get_current_device(), search_range_mb=32)
    model = ZeroDDP(model, GeminiManager("auto", chunk_manager), pin_memory=True)
    logger.info(chunk_manager, ranks=[0])
    criterion = GPTLMLoss()
    optimizer = HybridAdam(model.parameters(), lr=2e-2)
    optimizer = ZeroOptimizer(optimizer, model, initial_scale=2**5)
    model.train()
    losses = []
    for n in range(10):
        input_ids, attn_mask = get_data(8, 8)
        optimizer.zero_grad()
        outputs = model(input_ids, attn_mask)
        loss = criterion(outputs, input_ids)
        optimizer.backward(loss)
        optimizer.step()
        losses.append(loss.item())
        logger.info(f"[{n + 1}/10] Loss:{loss.item():.3f}", ranks=[0])

    return losses
