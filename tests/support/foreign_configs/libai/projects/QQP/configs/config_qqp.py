from configs.common.models.bert import cfg as qqp_cfg
from configs.common.models.graph import graph
from configs.common.optim import optim
from libai.config import LazyCall
from omegaconf import OmegaConf
from projects.QQP.dataset.qqp_dataset import QQPDataset
from projects.QQP.modeling.model import Classification

from configs.common.train import train

tokenization = OmegaConf.create()
tokenization.tokenizer = LazyCall(QQPDataset)(vocab_file="/vocab.txt", do_lower_case=True)

qqp_cfg.update(
    dict(
        vocab_size=21248,
        hidden_size=1024,
        hidden_layers=24,
        num_attention_heads=16,
        num_classes=2,
        pretrain_megatron_weight=None,
    )
)
model = LazyCall(Classification)(cfg=qqp_cfg)

optim.lr = 1e-6
optim.weight_decay = 0.1

train.update(
    dict(
        output_dir="output/qqp",
        train_micro_batch_size=16,
        train_epoch=1,
        train_iter=0,
        log_period=50,
        amp=dict(enabled=True),
        checkpointer=dict(period=2000, max_to_keep=20),
        dist=dict(
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            pipeline_num_layers=model.cfg.hidden_layers,
        ),
    )
)
graph["enabled"] = False
