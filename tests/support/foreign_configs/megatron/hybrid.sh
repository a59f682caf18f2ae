#!/bin/bash
# After Megatron-LM's examples/mamba/train.sh: state-space layers by a pattern, chosen by `case`.
MODEL_SCALE="800M" # or "8B"
case "${MODEL_SCALE}" in
    "800M")
        TP=1
        PATTERN="M-M-M--M-*M-M-M-M--*M-M-M-M-*M--M-M-M-*M-M--M-M-"
        HIDDEN_SIZE=1024
        HEADS=16
        GLOBAL_BATCH_SIZE=32
        ;;
    "8B")
        TP=4
        PATTERN="M-M-M--M-M*-M-M-M-M--M*-M-M-M-M-M*--M-M-M-M-M*-M--M-M-M-"
        HIDDEN_SIZE=4096
        HEADS=32
        GLOBAL_BATCH_SIZE=8
        ;;
    *)
        echo "Invalid version specified"
        exit 1
        ;;
esac
DATA_PATH=$1
export NCCL_IB_SL=1 CUDA_DEVICE_MAX_CONNECTIONS=1
SEQ_LEN=4096
options=" \
       --tensor-model-parallel-size ${TP} \
       --pipeline-model-parallel-size 1 \
       --use-distributed-optimizer \
       --overlap-param-gather \
       --overlap-grad-reduce \
       --untie-embeddings-and-output-weights \
       --init-method-std 0.02 \
       --position-embedding-type none \
       --hybrid-layer-pattern ${PATTERN} \
       --hidden-size ${HIDDEN_SIZE} \
       --num-attention-heads ${HEADS} \
       --group-query-attention \
       --num-query-groups 8 \
       --seq-length ${SEQ_LEN} \
       --max-position-embeddings ${SEQ_LEN} \
       --train-samples 73242188 \
       --lr-warmup-samples 50000 \
       --lr-decay-samples 73192188 \
       --data-path ${DATA_PATH} \
       --split 99,1,0 \
       --tokenizer-type GPTSentencePieceTokenizer \
       --micro-batch-size 4 \
       --global-batch-size ${GLOBAL_BATCH_SIZE} \
       --lr 2.5e-4 \
       --min-lr 2.5e-5 \
       --lr-decay-style cosine \
       --weight-decay 0.1 \
       --clip-grad 1.0 \
       --attention-dropout 0.0 \
       --hidden-dropout 0.0 \
       --disable-bias-linear \
       --normalization RMSNorm \
       --log-interval 10 \
       --save-interval 2000 \
       --bf16 \
       --use-mcore-models \
       --spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec \
       --no-create-attention-mask-in-dataloader"

torchrun --nproc_per_node 8 ../../pretrain_hybrid.py ${options}
