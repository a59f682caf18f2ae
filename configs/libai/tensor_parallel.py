# Tensor parallel 8, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/tensor_parallel.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/tensor_parallel.py
#
# Every rank holds an eighth of each layer; all see the same samples.
# Batch: 8 (micro) x 8 (accumulation) x 1 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.tensor_parallel_size = 8
batch = dict(global_size=64, micro_size=8)
