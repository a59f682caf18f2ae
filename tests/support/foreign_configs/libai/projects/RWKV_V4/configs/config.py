from libai.config import LazyCall, get_config
from omegaconf import OmegaConf
from projects.RWKV_V4.dataset import RWKVDataset
from projects.RWKV_V4.modeling.model import GPT

graph = get_config("common/models/graph.py").graph
train = get_config("common/train.py").train
optim = get_config("common/optim.py").optim
cfg = get_config("common/models/gpt.py").cfg

model = LazyCall(GPT)(vocab_size=6064, ctx_len=1024, model_type="RWKV", n_layer=6, n_embd=cfg.hidden_size + 128)

train = get_config("common/train.py").train
train.input_placement_device = "cpu"
train.dist.pipeline_num_layers = model.n_layer
train.train_micro_batch_size = 12
dataloader = OmegaConf.create()
dataloader.train = LazyCall(RWKVDataset)(data_dir="/data/enwik8", ctx_len=model.ctx_len)
train.train_iter = 0
train.train_epoch = 1
