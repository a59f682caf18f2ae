# Data parallel 8, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/data_parallel.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/data_parallel.py
#
# Every rank holds the whole model and takes its share of the batch.
# Batch: 8 (micro) x 1 (accumulation) x 8 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.data_parallel_size = 8
batch = dict(global_size=64, micro_size=8)
