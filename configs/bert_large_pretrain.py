# The file that LiBai's documentation varies (`model.cfg.hidden_layers`), with BERT-large's sizes over GPT's blocks; its
# layouts are below configs/libai, and BERT itself, as it was published, is configs/libai/bert_large_pretrain.py.
#
#   dslpar lint configs/bert_large_pretrain.py --world-size 8
#   deepspeed --num_gpus 8 train.py --config configs/bert_large_pretrain.py
#   bash tools/train.sh tools/train_net.py configs/bert_large_pretrain.py 8 \
#       train.dist.data_parallel_size=2 train.dist.tensor_parallel_size=2 train.dist.pipeline_parallel_size=2
#
# Every rank holds the whole model, unless the command line says otherwise.
# Batch: 8 (micro) x 1 (accumulation) x 8 (data) = 64 sequences a step, of 512 bytes each.

from .common.models.bert import pretrain_model as model
from .common.train import train

batch = dict(global_size=64, micro_size=8)
