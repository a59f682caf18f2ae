from configs.common.train import train as shared_train

from .aquila_sft import cfg, graph, model, optim, train

train.train_epoch = 10
shared_train.log_period = 5
cfg.max_position_embeddings = 8192
model.cfg.max_position_embeddings = cfg.max_position_embeddings
same_epochs = shared_train.train_epoch
