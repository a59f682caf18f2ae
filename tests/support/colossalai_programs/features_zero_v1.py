"""features/zero/train.py: ShardedModelV2 and ShardedOptimizerV2."""

import colossalai
import torch
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn.optimizer import HybridAdam
from colossalai.utils import get_current_device
from colossalai.zero.init_ctx import ZeroInitContext
from colossalai.zero.shard_utils import TensorShardStrategy
from colossalai.zero.sharded_model import ShardedModelV2
from colossalai.zero.sharded_optim import ShardedOptimizerV2

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
    shard_strategy = TensorShardStrategy()
    context = ZeroInitContext(target_device=get_current_device(), shard_strategy=shard_strategy, shard_param=True)
    with context as ctx:
        model = SmallGPT()
    logger.info(f"Model numel: {ctx.model_numel_tensor.item()}", ranks=[0])
    model = ShardedModelV2(model, shard_strategy, tensor_placement_policy="cuda", reuse_fp16_shard=True)
    criterion = GPTLMLoss()
    optimizer = HybridAdam(model.parameters(), lr=2e-2)
    optimizer = ShardedOptimizerV2(model, optimizer, initial_scale=2**5)
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
