"""image/vilt/run.py and schedule.py: the model returns its losses, and a schedule of the program's own calls it."""

import os

import colossalai
import torch
from colossalai.core import global_context as gpc
from colossalai.logging import get_dist_logger
from colossalai.nn.lr_scheduler import LinearWarmupLR
from colossalai.trainer import Trainer, hooks
from torch.nn.modules.loss import _Loss

from tests.support.colossalai_programs.stand_ins import SmallGPT, Texts

CONFIG = """
num_epochs = 2
NUM_EPOCHS = 2
gradient_accumulation = 2
clip_grad_norm = 1.0
"""


class MLM_loss(_Loss):
    def forward(self, *args):
        return sum(v for k, v in args[0].items() if "loss" in k)


class MLMLossHook(hooks.LossHook):
    def after_train_iter(self, trainer, logits, label, loss):
        if self._is_stage_to_compute:
            self.train_loss.update(sum(v for k, v in logits.items() if "loss" in k))


class ViltSchedule(colossalai.engine.schedule.NonPipelineSchedule):
    @staticmethod
    def _call_engine(engine, inputs):
        return engine(inputs)

    @staticmethod
    def _call_engine_criterion(engine, outputs, labels):
        return engine.criterion(outputs)


class ViLT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.text = SmallGPT()

    def forward(self, batch):
        logits = self.text(batch["text_ids_mlm"])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["text_labels_mlm"].flatten())
        return {"mlm_loss": loss, "itm_loss": 0.0 * logits.mean(), "logits": logits}


def main():
    config = "./config.py"
    gpc.load_config(config)
    assert gpc.config.NUM_EPOCHS == 2
    if "OMPI_COMM_WORLD_RANK" in os.environ:
        colossalai.launch_from_openmpi(config=config, host="localhost", port=11455, backend="nccl")
    elif "SLURM_PROCID" in os.environ:
        colossalai.launch_from_slurm(config=config, host="localhost", port=11455, backend="nccl")
    else:
        colossalai.launch_from_torch(config=config)
    logger = get_dist_logger("root")
    logger.info("launched")

    def collate(samples):
        ids = torch.stack([sample["input_ids"] for sample, _ in samples])
        return {"text_ids_mlm": ids, "text_labels_mlm": ids}

    loader = torch.utils.data.DataLoader(Texts(), batch_size=8, collate_fn=collate)
    model = ViLT()
    optim = torch.optim.Adam(model.parameters(), lr=0.02, betas=(0.9, 0.99))
    schedule = ViltSchedule(lambda sample: (sample, dict()))
    lr_scheduler = LinearWarmupLR(optim, warmup_steps=50, total_steps=gpc.config.NUM_EPOCHS)
    engine, train_dataloader, test_dataloader, lr_scheduler = colossalai.initialize(
        model=model,
        optimizer=optim,
        criterion=MLM_loss(),
        train_dataloader=loader,
        test_dataloader=loader,
        lr_scheduler=lr_scheduler,
        verbose=True,
    )
    trainer = Trainer(engine=engine, schedule=schedule, logger=logger)
    hook_list = [MLMLossHook(), hooks.LogMetricByStepHook(), hooks.SaveCheckpointHook(checkpoint_dir="./ckpt")]
    colossalai.context.config.Config.from_file(config)
    trainer.fit(
        train_dataloader=train_dataloader,
        test_dataloader=test_dataloader,
        hooks=hook_list,
        epochs=gpc.config.num_epochs,
        display_progress=True,
        test_interval=2,
    )
    return [trainer.states["metrics"]["train"]["Loss"].get_accumulated_value()]
