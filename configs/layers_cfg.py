# deepspeed --num_gpus 4 train.py --config configs/layers_cfg.py
# 4 ranks = pipeline 2 * data 2; layers of torch.nn by name, cut over two stages, each built on its own stage alone.
# 32 samples a step = micro 4 * accumulation 4 * data 2; 1,024 tokens of 256 kinds (bytes).
_width = 64

parallel = dict(pipeline=dict(size=2, method="parameters"))
schedule = dict(type="1f1b", num_microbatches=4)
model = dict(
    type="Sequential",
    layers_cfg=[
        dict(type="Embedding", num_embeddings=256, embedding_dim=_width),
        dict(type="LayerNorm", normalized_shape=_width),
        dict(type="Linear", in_features=_width, out_features=4 * _width),
        dict(type="GELU"),
        dict(type="Linear", in_features=4 * _width, out_features=256),
    ],
)
data = dict(seq_len=32)
optimizer = dict(type="RMSprop", lr=1e-3)
zero = dict(stage=1)
batch = dict(micro_size=4)
train = dict(steps=100, clip_grad_norm=1.0, log_interval=10)
