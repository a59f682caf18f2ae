from libai.config import LazyCall
from omegaconf import DictConfig
from projects.Aquila.aquila import AquilaForCausalLM

cfg = dict(
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=11008,
    max_position_embeddings=2048,
    num_attention_heads=32,
    hidden_layers=32,
    pretraining_tp=1,
    rms_norm_eps=1e-05,
    rope_scaling=None,
    tie_word_embeddings=False,
    vocab_size=100008,
    use_cache=True,
    top_p=1.0,
    pretrained_model_path="",
)

cfg = DictConfig(cfg)
model = LazyCall(AquilaForCausalLM)(cfg=cfg)
