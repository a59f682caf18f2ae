#!/usr/bin/env bash
# After ms-swift's examples/megatron/multi-node: the second of two nodes, which SLURM numbers.
export PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True'
export NNODES=${SLURM_NNODES:-2} NODE_RANK=${SLURM_NODEID:-1}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_PORT=29500 NPROC_PER_NODE=4

EXTRA=""
if [[ $NNODES -gt 1 ]]; then
    EXTRA="--distributed_timeout_minutes 120"
fi

megatron pt \
    --model org/tiny-14b \
    --save_safetensors true \
    --dataset 'org/texts' \
    --load_from_cache_file true \
    --streaming true \
    --split_dataset_ratio 0.01 \
    --tensor_model_parallel_size 4 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
    --packing true \
    --recompute_granularity selective \
    --train_iters 2000 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-6 \
    --output_dir megatron_output/tiny \
    --eval_steps 200 \
    --save_steps 200 \
    --max_length 8192 \
    --no_save_optim true \
    --no_save_rng true \
    --sequence_parallel true \
    --attention_backend flash $EXTRA
