from libai.config import LazyCall
from libai.models import BertForPreTraining, BertModel
from omegaconf import DictConfig

cfg = dict(
    vocab_size=30522,
    hidden_size=768,
    hidden_layers=24,
    num_attention_heads=12,
    intermediate_size=4 * 768,
    hidden_dropout_prob=0.1,
    max_position_embeddings=512,
    layernorm_eps=1e-12,
    bias_gelu_fusion=True,
    amp_enabled=False,
)

cfg = DictConfig(cfg)

bert_model = LazyCall(BertModel)(cfg=cfg)
pretrain_model = LazyCall(BertForPreTraining)(cfg=cfg)
