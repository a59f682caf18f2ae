"""language/bert/hybrid_parallel: a schedule splits batches, which are dicts, for a Trainer."""

import colossalai
import colossalai.nn as col_nn
import torch
from colossalai.core import global_context as gpc
from colossalai.engine.schedule import NonPipelineSchedule
from colossalai.logging import get_dist_logger
from colossalai.nn.optimizer import CPUAdam
from colossalai.trainer import Trainer, hooks
from colossalai.utils import MultiTimer
from colossalai.utils.memory_utils.utils import colo_set_process_memory_fraction
from colossalai.zero.init_ctx import ZeroInitContext
from colossalai.zero.shard_utils import BucketTensorShardStrategy

from tests.support.colossalai_programs.stand_ins import GPTLMLoss, SmallGPT, Texts

CONFIG = dict(method="colossalai", hyperparameter=dict(num_epochs=2, learning_rate=0.02), parallel=dict(pipeline=1))


def main():
    colo_set_process_memory_fraction(0.2)
    colossalai.launch_from_torch(config=CONFIG)
    assert "zero" not in gpc.config
    with ZeroInitContext(shard_strategy=BucketTensorShardStrategy(), shard_param=True) as ctx:
        model = SmallGPT()
    assert ctx.model_numel_tensor.item() == sum(p.numel() for p in model.parameters())
    optimizer = CPUAdam(model.parameters(), lr=CONFIG["hyperparameter"]["learning_rate"])
    lr_scheduler = col_nn.lr_scheduler.LinearWarmupLR(optimizer, 2)

    def collate(samples):
        ids = torch.stack([sample["input_ids"] for sample, _ in samples])
        return dict(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)

    loader = torch.utils.data.DataLoader(Texts(), batch_size=8, collate_fn=collate)
    engine, train_data, test_data, lr_scheduler = colossalai.initialize(
        model, optimizer, GPTLMLoss(), loader, loader, lr_scheduler
    )

    def batch_data_process_func(batch_data):
        data = {"input_ids": batch_data["input_ids"], "attention_mask": batch_data["attention_mask"]}
        return data, batch_data["labels"]

    losses = []
    for batch in train_data:  # its loop without a pipeline: the engine is model, criterion and optimizer
        labels = batch.pop("labels")
        engine.zero_grad()
        loss = engine.criterion(engine(**batch), labels)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    schedule = NonPipelineSchedule(batch_data_process_func)
    trainer = Trainer(engine=engine, timer=MultiTimer(), logger=get_dist_logger(), schedule=schedule)
    hook_list = [
        hooks.LossHook(),
        hooks.LogMetricByEpochHook(get_dist_logger()),
        hooks.LRSchedulerHook(lr_scheduler, by_epoch=True),
    ]
    trainer.fit(train_dataloader=train_data, epochs=2, test_dataloader=test_data, test_interval=1, hooks=hook_list)
    return [*losses, trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
