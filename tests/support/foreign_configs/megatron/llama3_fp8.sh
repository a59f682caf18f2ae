#!/bin/bash
# After Megatron-LM's examples/llama/train_llama3_8b_h100_fp8.sh: arguments in quotes, and context parallelism.
CHECKPOINT_PATH=${1:-"checkpoints/llama3_8b_fp8"}
TOKENIZER_ARG=${2:-"MOCK"}
DATA_ARG=${3:-"MOCK"}
DTYPE="fp8"
TP_SIZE=1
CP_SIZE=2
MICRO_BATCH_SIZE=1
SEQ_LENGTH=8192

MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --kv-channels 128
    --seq-length $SEQ_LENGTH
    --max-position-embeddings $SEQ_LENGTH
    --position-embedding-type rope
    --rotary-base 1000000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --normalization RMSNorm
    --init-method-std 0.0134
    --attention-backend fused
    --apply-layernorm-1p
    --untie-embeddings-and-output-weights
    --disable-bias-linear
)
TRAINING_ARGS=(
    --micro-batch-size $MICRO_BATCH_SIZE
    --global-batch-size 128
    --train-samples 1953125
    --lr-decay-samples 1949218
    --lr-warmup-samples 3906
    --lr 0.00015
    --min-lr 0.00001
    --decoupled-lr 5.0e-4
    --decoupled-min-lr 4.5e-5
    --lr-decay-style cosine
    --clip-grad 1.0
    --weight-decay 0.1
    --adam-beta1 0.9
    --adam-beta2 0.95
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --calculate-per-token-loss
    --manual-gc
    --empty-unused-memory-level 1
    --exit-duration-in-mins 235
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-amax-history-len 1024"
        "--fp8-amax-compute-algo max"
        "--fp8-param-gather"
    )
fi
DATA_ARGS=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    DATA_ARGS+=("--data-path $DATA_ARG" "--tokenizer-type HuggingFaceTokenizer" "--tokenizer-model $TOKENIZER_ARG")
fi

torchrun --nproc_per_node 8 pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    --tensor-model-parallel-size $TP_SIZE --context-parallel-size $CP_SIZE \
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather \
    ${DATA_ARGS[@]} \
    --log-interval 1 --eval-iters 32 --eval-interval 100 --save-interval 1000 --log-throughput \
    --profile --profile-step-start 4 --profile-step-end 6 \
    --ckpt-format torch_dist --distributed-timeout-minutes 60 \
    --save "$CHECKPOINT_PATH" --load "$CHECKPOINT_PATH"
