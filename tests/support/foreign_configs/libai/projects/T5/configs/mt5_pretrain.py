from libai.config import LazyCall, get_config
from projects.T5.models.t5_model import T5ForPreTraining

train = get_config("common/train.py")["train"]
optim = get_config("common/optim.py").optim

cfg = dict(hidden_layers=6, hidden_size=512, intermediate_size=1024, num_attention_heads=6, vocab_size=250112)
for name in ("embedding", "hidden", "attention_probs"):
    cfg[f"{name}_dropout_prob"] = 0.1
model = LazyCall(T5ForPreTraining)(cfg={**cfg, "mlp_type": "mt5"})

train.dist.pipeline_num_layers = 2 * model.cfg.hidden_layers
ids = [min(layer * 4 // train.dist.pipeline_num_layers, 3) for layer in range(train.dist.pipeline_num_layers)]
train.dist.custom_pipeline_stage_id = ids
train.dist.pipeline_parallel_size = len(set(ids))
if train.dist.pipeline_parallel_size > 2 and not train.amp.enabled:
    train.amp.enabled = True
elif train.rdma_enabled:
    train.amp.enabled = False
train.output_dir = "output/{}_{:02d}".format("mt5", train.dist.pipeline_parallel_size)
