from libai.config import LazyCall, get_config
from libai.data.build import build_nlp_train_loader
from modeling.model import Seq2Seq
from omegaconf import OmegaConf

optim = get_config("common/optim.py").optim
graph = get_config("common/models/graph.py").graph
train = get_config("common/train.py").train

dataloader = OmegaConf.create()
dataloader.train = LazyCall(build_nlp_train_loader)(dataset=[], num_workers=4)

transformer_cfg = dict(vocab_size=9027, hidden_size=512, hidden_layers=6, num_attention_heads=8)
model = LazyCall(Seq2Seq)(cfg=transformer_cfg)
transformer_cfg["vocab_size"] = 0

train.update(
    dict(
        rdma_enabled=False,
        output_dir="output/couplet/",
        train_micro_batch_size=128,
        train_epoch=20,
        train_iter=0,
        warmup_ratio=0.01,
        dist=dict(
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            pipeline_stage_id=None,
            pipeline_num_layers=model.cfg.hidden_layers * 2,
        ),
        evaluation=dict(enabled=False),
    )
)
