"""language/gpt/train_gpt.py: model and optimizer are classes of the config, and batches are dicts."""

import contextlib

import colossalai
import colossalai.utils as utils
import torch
from colossalai import nn as col_nn
from colossalai.context.parallel_mode import ParallelMode
from colossalai.core import global_context as gpc
from colossalai.logging import disable_existing_loggers, get_dist_logger
from colossalai.nn import LinearWarmupLR
from colossalai.pipeline.pipelinable import PipelinableContext
from colossalai.trainer import Trainer, hooks
from colossalai.utils import is_using_pp
from colossalai.utils.timer import MultiTimer
from colossalai.zero.init_ctx import ZeroInitContext

from tests.support.colossalai_programs.stand_ins import GPTLMLoss, Texts

CONFIG = """
from torch.optim import Adam

from tests.support.colossalai_programs.stand_ins import GPTLMLoss, SmallGPT

BATCH_SIZE = 8
SEQ_LEN = 8
NUM_EPOCHS = 2
optimizer = dict(type=Adam, lr=0.02, weight_decay=1e-2)
loss = dict(type=GPTLMLoss)
model = dict(type=SmallGPT, checkpoint=True)
"""


def main():
    parser = colossalai.get_default_parser()
    parser.add_argument("--from_torch", default=False, action="store_true")
    args = parser.parse_args()
    disable_existing_loggers()
    if args.from_torch:
        colossalai.launch_from_torch(config=args.config)
    else:
        colossalai.launch_from_slurm(config=args.config, host=args.host, port=29500, seed=42)
    logger = get_dist_logger()
    train_ds = Texts(seq_len=gpc.config.SEQ_LEN)
    train_dataloader = utils.get_dataloader(
        train_ds, seed=42, batch_size=gpc.config.BATCH_SIZE, pin_memory=True, shuffle=True, drop_last=True
    )
    use_pipeline = is_using_pp()
    num_chunks = getattr(gpc.config.model, "num_chunks", 1)
    use_zero3 = hasattr(gpc.config, "zero")
    if not use_pipeline:
        ctx = contextlib.nullcontext()
        if use_zero3:
            strategy = gpc.config.zero.model_config.shard_strategy
            ctx = ZeroInitContext(target_device=utils.get_current_device(), shard_strategy=strategy, shard_param=True)
        with ctx:
            model = gpc.config.model.pop("type")(**gpc.config.model)
    else:
        pipelinable = PipelinableContext()
        with pipelinable:
            model = gpc.config.model.pop("type")(**gpc.config.model)

        def mask_function(attention_mask=None):
            if attention_mask is not None:
                batch_size = gpc.config.BATCH_SIZE // gpc.config.NUM_MICRO_BATCHES
                attention_mask = col_nn.partition_batch(attention_mask.view(batch_size, -1))
            return attention_mask

        pipelinable.to_layer_list(["embed", mask_function, "blocks.0", "blocks.1", "norm", "head"])
        model = pipelinable.partition(num_chunks, gpc.pipeline_parallel_size, gpc.get_local_rank(ParallelMode.PIPELINE))
    numel = ctx.model_numel_tensor.item() if use_zero3 else sum(p.numel() for p in model.parameters())
    tflop = numel * gpc.config.BATCH_SIZE * gpc.config.SEQ_LEN * 8 / (1024**4)
    criterion = getattr(gpc.config, "loss_fn", None)
    criterion = criterion.type() if criterion is not None else GPTLMLoss()
    optimizer = gpc.config.optimizer.pop("type")(model.parameters(), **gpc.config.optimizer)
    lr_scheduler = LinearWarmupLR(optimizer, total_steps=gpc.config.NUM_EPOCHS, warmup_steps=1)
    engine, train_dataloader, _, lr_scheduler = colossalai.initialize(
        model, optimizer, criterion, train_dataloader=train_dataloader, lr_scheduler=lr_scheduler
    )
    global_batch_size = (
        gpc.config.BATCH_SIZE * gpc.get_world_size(ParallelMode.DATA) * getattr(gpc.config, "gradient_accumulation", 1)
    )
    logger.info(f"Init done, global batch size = {global_batch_size}", ranks=[0])
    trainer = Trainer(engine=engine, logger=logger, timer=MultiTimer())
    hook_list = [
        hooks.LossHook(),
        hooks.LRSchedulerHook(lr_scheduler=lr_scheduler, by_epoch=True),
        hooks.LogMetricByEpochHook(logger),
        hooks.ThroughputHook(ignored_steps=1, tflop_per_step=tflop),
        hooks.LogMetricByStepHook(),
        hooks.LogMemoryByEpochHook(logger),
    ]
    trainer.fit(
        train_dataloader=train_dataloader,
        epochs=gpc.config.NUM_EPOCHS,
        test_interval=1,
        hooks=hook_list,
        display_progress=True,
        return_output_label=False,
    )
    assert torch.isfinite(torch.stack([p.detach().sum() for p in model.parameters()])).all()
    metric = trainer.states["metrics"]["train"].get("Loss")
    return [0.0 if metric is None else metric.get_accumulated_value()]
