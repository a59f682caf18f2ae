from colossalai.amp import AMP_TYPE

TRAIN_ITERS = 1000000
DECAY_ITERS = 990000
WARMUP_FRACTION = 0.01
GLOBAL_BATCH_SIZE = 32
EVAL_ITERS = 10
EVAL_INTERVAL = 10
LR = 0.0001
MIN_LR = 1e-05
WEIGHT_DECAY = 0.01
SEQ_LENGTH = 512
DEPTH = 12
NUM_ATTENTION_HEADS = 12
HIDDEN_SIZE = 768
parallel = dict(pipeline=1, tensor=dict(size=4, mode="sequence"))
fp16 = dict(mode=AMP_TYPE.NAIVE, verbose=True)
clip_grad_norm = 1.0
gradient_handler = [dict(type="SequenceParallelGradientHandler")]
SEED = 1234
NUM_MICRO_BATCHES = 4
