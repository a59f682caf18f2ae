"""language/bert/zero/pretraining/run_pretraining.py: a loader of `get_dataloader` before ZeroDDP."""

import colossalai
import torch
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.gemini import ChunkManager, GeminiManager
from colossalai.nn.parallel import ZeroDDP
from colossalai.tensor import ProcessGroup
from colossalai.utils import get_dataloader
from colossalai.utils.model.colo_init_context import ColoInitContext
from colossalai.zero import ZeroOptimizer

from tests.support.colossalai_programs.stand_ins import GPTLMLoss, SmallGPT, Texts

CONFIG = dict()


def get_data(batch_size, seq_len):
    start = torch.randint(0, 32, (batch_size, 1))
    input_ids = ((start + torch.arange(seq_len)) % 32).to(get_current_device())
    return input_ids, torch.ones_like(input_ids)


def main():
    disable_existing_loggers()
    colossalai.launch_from_torch(config={})
    logger = get_dist_logger()
    loader = get_dataloader(Texts(), batch_size=8, shuffle=True)
    assert len(loader) == 4
    with ColoInitContext(device=get_current_device()):
        model = SmallGPT()
    pg = ProcessGroup()
    chunk_size = ChunkManager.search_chunk_size(model, 64 * 1024**2, 32)
    device = GeminiManager.get_default_device("auto")
    chunk_manager = ChunkManager(chunk_size, process_group=pg, enable_distributed_storage=True, init_device=device)
    gemini_manager = GeminiManager("auto", chunk_manager)
    model = ZeroDDP(model, gemini_manager)
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
