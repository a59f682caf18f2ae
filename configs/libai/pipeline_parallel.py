# Pipeline parallel 8, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/pipeline_parallel.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/pipeline_parallel.py
#
# Eight stages; the automatic cut is LiBai's. Eight times as many micro-batches as stages keep the idle share at 7/71.
# Batch: 1 (micro) x 64 (accumulation) x 1 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.pipeline_parallel_size = 8  # dslpar: ignore[PERF106] LiBai's cut, with its large vocabulary in mind
train.dist.pipeline_num_layers = model.cfg.hidden_layers
batch = dict(global_size=64, micro_size=1)
