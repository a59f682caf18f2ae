import os

from configs.common.models.graph import graph
from configs.common.optim import optim
from libai.config import LazyCall
from libai.scheduler import WarmupExponentialLR
from omegaconf import OmegaConf
from projects.Aquila.aquila import AquilaForCausalLM
from projects.Aquila.aquila_dataset import AquilaDataset
from projects.Aquila.configs.aquila_config import cfg

from configs.common.train import train

learning_rate = 5e-5
dataset_path = "./data"
pretrained_model_path = "/models/Aquila-7B"

graph["enabled"] = False
optim.update(dict(lr=learning_rate, weight_decay=0.1))

tokenization = OmegaConf.create()
tokenization.make_vocab_size_divisible_by = 1
tokenization.tokenizer = LazyCall(AquilaDataset)(vocab_file=pretrained_model_path + "/vocab.json")

cfg.pretrained_model_path = pretrained_model_path
model = LazyCall(AquilaForCausalLM)(cfg=cfg)

dataloader = OmegaConf.create()
dataloader.train = LazyCall(AquilaDataset)(path=os.path.join(dataset_path, "train"), tokenizer=tokenization.tokenizer)

train.update(
    dict(
        train_micro_batch_size=4,
        train_epoch=5,
        train_iter=1,
        warmup_ratio=1 / 3,
        num_accumulation_steps=8,
        rdma_enabled=False,
        train_with_fp16=True,
        activation_checkpoint=dict(enabled=True),
        dist=dict(data_parallel_size=1, tensor_parallel_size=2, pipeline_parallel_size=1, device_type="cuda"),
        scheduler=LazyCall(WarmupExponentialLR)(warmup_factor=0.0, gamma=1.0, warmup_method="linear"),
    )
)
