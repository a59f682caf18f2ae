from colossalai.amp import AMP_TYPE
from titans.model.gpt import gpt3
from torch.optim import Adam

BATCH_SIZE = 192
NUM_EPOCHS = 60
SEQ_LEN = 2048
NUM_MICRO_BATCHES = 192
HIDDEN_SIZE = 12288
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE)

optimizer = dict(type=Adam, lr=0.00015, weight_decay=1e-2)
model = dict(type=gpt3, checkpoint=True)
fp16 = dict(mode=AMP_TYPE.NAIVE)
parallel = dict(pipeline=24, tensor=dict(size=4, mode="1d"))
