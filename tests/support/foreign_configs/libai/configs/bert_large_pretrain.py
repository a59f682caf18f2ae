from libai.config import LazyCall
from libai.evaluation import PPLEvaluator

from .common.models.bert import pretrain_model as model
from .common.models.graph import graph
from .common.optim import optim
from .common.train import train

model.cfg.num_attention_heads = 16
model.cfg.hidden_size = 768
model.cfg.hidden_layers = 8
model.cfg.vocab_size = 30522

train.dist.pipeline_num_layers = model.cfg.hidden_layers
train.train_micro_batch_size = 16
train.warmup_ratio = 0.01
train.amp.enabled = True
train.evaluation.evaluator = LazyCall(PPLEvaluator)()
optim.params.clip_grad_max_norm = 0.5
assert model.cfg.hidden_size % model.cfg.num_attention_heads == 0, "heads"
