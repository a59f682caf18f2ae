# Data parallel 2 x tensor parallel 4, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/data_tensor.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/data_tensor.py
#
# Tensor groups [0 1 2 3] and [4 5 6 7].
# Batch: 8 (micro) x 4 (accumulation) x 2 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.data_parallel_size = 2
train.dist.tensor_parallel_size = 4
batch = dict(global_size=64, micro_size=8)
