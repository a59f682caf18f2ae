# Data parallel 2 x pipeline parallel 4, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/data_pipeline.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/data_pipeline.py
#
# Four stages of two ranks, [0 1], [2 3], [4 5] and [6 7], which share the batch.
# Batch: 1 (micro) x 32 (accumulation) x 2 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.data_parallel_size = 2
train.dist.pipeline_parallel_size = 4  # dslpar: ignore[PERF106] LiBai's cut, with its large vocabulary in mind
train.dist.pipeline_num_layers = model.cfg.hidden_layers
batch = dict(global_size=64, micro_size=1)
