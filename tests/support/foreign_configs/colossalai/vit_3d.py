from colossalai.amp import AMP_TYPE

IMG_SIZE = 32
PATCH_SIZE = 4
DIM = 512
SUMMA_DIM = 2

train_data = dict(
    dataset=dict(type="CIFAR10Dataset", root="/path/to/data", transform_pipeline=[dict(type="ToTensor")]),
    dataloader=dict(batch_size=256, pin_memory=True, num_workers=0),
)
test_data = dict(dataset=dict(train_data["dataset"], train=False), dataloader=train_data["dataloader"])
optimizer = dict(type="Adam", lr=0.001, weight_decay=0)
loss = dict(type="CrossEntropyLoss3D")
model = dict(
    type="VisionTransformerFromConfig",
    embedding_cfg=dict(type="ViTPatchEmbedding3D", img_size=IMG_SIZE, patch_size=PATCH_SIZE, embed_dim=DIM),
    block_cfg=dict(type="ViTBlock", attention_cfg=dict(type="ViTSelfAttention3D", hidden_size=DIM, dropout_prob=0.1)),
    depth=6,
)
hooks = [
    dict(type="Accuracy3DHook"),
    dict(type="LRSchedulerHook", by_epoch=False, lr_scheduler_cfg=dict(type="LinearWarmupLR", warmup_steps=5)),
]
parallel = dict(pipeline=dict(size=1), tensor=dict(size=SUMMA_DIM**3, mode="3d"))
fp16 = dict(mode=AMP_TYPE.PARALLEL, initial_scale=2**8)
num_epochs = 60
lr_scheduler = dict(type="LinearWarmupLR", total_steps=num_epochs, warmup_steps=5)
cudnn_benchmark = True
