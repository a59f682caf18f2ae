from libai.models.utils import GraphBase
from omegaconf import DictConfig

graph = dict(
    enabled=True,
    debug=-1,
    auto_parallel=dict(enabled=False, prune_parallel_cast_ops=True),
    train_graph=dict(_target_=GraphBase, is_train=True),
    global_mode=dict(enabled=False),
)

graph = DictConfig(graph)
