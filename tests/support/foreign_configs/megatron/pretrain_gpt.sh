#!/bin/bash
# A model over 4 nodes, as Megatron-LM's examples start one.

export CUDA_DEVICE_MAX_CONNECTIONS=1

GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-4}
MASTER_ADDR=localhost
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))

CHECKPOINT_PATH=$1 #<where to save>
TENSORBOARD_LOGS_PATH="./tb"
DATA_PATH=$2

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)

GPT_MODEL_ARGS=(
    --num-layers 24
    --hidden-size $((16 * 64))
    --num-attention-heads 16
    --seq-length 2048
    --max-position-embeddings 2048
    --vocab-size 50304
    --attention-backend auto # or flash
)

TRAINING_ARGS="
    --micro-batch-size 2 \
    --global-batch-size $((WORLD_SIZE * 8)) \
    --train-iters 500000
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95
    --init-method-std 0.006
    --clip-grad 0.5
    --fp16 --initial-loss-scale 65536
    --lr 6.0e-5 --lr-decay-style cosine --min-lr 6.0e-6
    --lr-warmup-fraction .001 --lr-decay-iters 430000
"

MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 2
	--pipeline-model-parallel-size 4
	--sequence-parallel
)

torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    $TRAINING_ARGS \
    "${MODEL_PARALLEL_ARGS[@]}" \
    --data-path $DATA_PATH --split '949,50,1' \
    --save $CHECKPOINT_PATH --save-interval 10000 \
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 2 \
    --tensorboard-dir $TENSORBOARD_LOGS_PATH 2>&1 | tee train.log
