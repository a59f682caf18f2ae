# After Megatron-Bridge's src/megatron/bridge/perf_recipes/kimi: a recipe for many nodes.
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.comm_overlap import CommOverlapConfig
from megatron.bridge.training.config import ConfigContainer

PIPELINE = [["embedding"] + ["decoder"] * 4] + [["decoder"] * 4] * 14 + [["decoder", "loss"]]


def _benchmark(cfg: ConfigContainer) -> None:
    cfg.train.train_iters = 50
    cfg.validation.eval_iters = 0
    cfg.checkpoint.save = None
    cfg.logger.log_interval = 1
    cfg.logger.tensorboard_dir = None


def kimi_pretrain_256gpu() -> ConfigContainer:
    """256 GPUs, pipeline of 16."""
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("org/tiny-kimi").to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 1
    cfg.model.pipeline_model_parallel_size = 16
    cfg.model.virtual_pipeline_model_parallel_size = None
    cfg.model.pipeline_model_parallel_layout = PIPELINE
    cfg.model.context_parallel_size = 1
    cfg.model.expert_model_parallel_size = 16
    cfg.model.expert_tensor_parallel_size = 1
    cfg.model.sequence_parallel = cfg.model.tensor_model_parallel_size > 1
    cfg.model.recompute_granularity = "selective"
    cfg.model.recompute_modules = ["mla_up_proj", "moe_act"]
    cfg.model.moe_flex_dispatcher_backend = "hybridep"
    cfg.train.global_batch_size = 2048
    cfg.train.micro_batch_size = 1
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=False)
    cfg.comm_overlap.overlap_moe_expert_parallel_comm = True
    cfg.ddp.overlap_param_gather = True
    cfg.mixed_precision = "bf16_with_mxfp8_mixed"
    _benchmark(cfg)
    return cfg
