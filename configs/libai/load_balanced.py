# Pipeline parallel 4 with a cut by hand x data parallel 2, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/load_balanced.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/load_balanced.py
#
# The last stage also has the head, so it takes fewer layers: 6, 7, 7 and 4.
# Batch: 1 (micro) x 32 (accumulation) x 2 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.pipeline_parallel_size = 4
train.dist.pipeline_num_layers = model.cfg.hidden_layers
train.dist.custom_pipeline_stage_id = [0] * 6 + [1] * 7 + [2] * 7 + [3] * 4  # dslpar: ignore[PERF106] LiBai's example
batch = dict(global_size=64, micro_size=1)
