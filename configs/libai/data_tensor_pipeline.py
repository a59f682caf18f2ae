# Data parallel 2 x tensor parallel 2 x pipeline parallel 2, in LiBai's form, on one host with 8 GPUs.
#
#   dslpar lint configs/libai/data_tensor_pipeline.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/libai/data_tensor_pipeline.py
#
# Two stages, [0 1 2 3] and [4 5 6 7], each of two tensor groups that share the batch.
# Batch: 2 (micro) x 16 (accumulation) x 2 (data) = 64 sequences a step, of 1,024 bytes each.

from ..common.models.gpt import pretrain_model as model
from ..common.train import train

train.dist.data_parallel_size = 2
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2
train.dist.pipeline_num_layers = model.cfg.hidden_layers
batch = dict(global_size=64, micro_size=2)
