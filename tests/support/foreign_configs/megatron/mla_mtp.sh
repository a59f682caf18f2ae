#!/bin/bash
# DeepSeek-V3's shape after Megatron-LM's tests/functional_tests/test_cases/moe: latent attention, MTP, shared experts.
MLA="--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --qk-pos-emb-head-dim 64 --v-head-dim 128"
MOE=(
  --num-experts 64 --moe-layer-freq "([0]*1+[1]*27)" --moe-ffn-hidden-size 1408
  --moe-shared-expert-intermediate-size 2816 --moe-router-topk 6 --moe-router-topk-scaling-factor 2.446
  --moe-router-score-function sigmoid --moe-router-enable-expert-bias --moe-router-bias-update-rate 1e-3
  --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-3 --moe-token-dispatcher-type flex
  --moe-enable-deepep --moe-router-dtype fp32 --moe-permute-fusion --moe-grouped-gemm
)
deepspeed_unused=1
torchrun --nproc-per-node=8 --nnodes=2 --node-rank=${NODE_RANK:?} --rdzv-backend=c10d pretrain_gpt.py \
  --num-layers 28 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16 --kv-channels 16 \
  $MLA "${MOE[@]}" --mtp-num-layers 1 --mtp-loss-scaling-factor 0.1 \
  --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights \
  --position-embedding-type rope --rotary-base 1000000 --rope-type rope --rotary-scaling-factor 40 \
  --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 \
  --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 --expert-model-parallel-size 8 \
  --expert-tensor-parallel-size 1 --pipeline-model-parallel-layout "Et*14|t*14mL" --use-distributed-optimizer \
  --micro-batch-size 1 --global-batch-size 64 --lr 4.2e-4 --min-lr 4.2e-5 --train-iters 1000 --lr-warmup-iters 50 \
  --fp8-recipe blockwise --fp8-format e4m3 --bf16 --use-precision-aware-optimizer --exp-avg-dtype bf16 \
  --recompute-granularity selective --recompute-modules moe_act layernorm mla_up_proj \
  --vocab-size 129280 --tokenizer-type NullTokenizer --mock-data
