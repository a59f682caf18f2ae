from libai.config import LazyCall
from libai.evaluation import ClsEvaluator
from libai.scheduler import WarmupCosineLR
from omegaconf import DictConfig

train = dict(
    output_dir="./out",
    train_micro_batch_size=16,
    global_batch_size=None,
    num_accumulation_steps=None,
    train_iter=2000,
    train_epoch=0,
    consumed_train_samples=0,
    warmup_ratio=0,
    amp=dict(enabled=False),
    activation_checkpoint=dict(enabled=False),
    zero_optimization=dict(enabled=False, stage=1),
    checkpointer=dict(period=500, max_to_keep=10),
    test_micro_batch_size=16,
    evaluation=dict(
        enabled=True,
        evaluator=LazyCall(ClsEvaluator)(topk=(1, 5)),
        eval_period=500,
        eval_iter=1e5,
        eval_metric="Acc@1",
    ),
    load_weight="",
    log_period=20,
    scheduler=LazyCall(WarmupCosineLR)(warmup_factor=0.001, alpha=0.01, warmup_method="linear"),
    dist=dict(data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1),
    input_placement_device="cuda",
    rdma_enabled=True,
    seed=1234,
)

train = DictConfig(train)
