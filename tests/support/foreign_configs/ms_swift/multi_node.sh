NNODES=$WORLD_SIZE \
NODE_RANK=$RANK \
MASTER_ADDR=$MASTER_ADDR \
NPROC_PER_NODE=8 \
megatron sft \
    --model Qwen/Qwen2.5-14B \
    --dataset 'AI-ModelScope/alpaca-gpt4-data-zh#500' 'swift/self-cognition#500' \
    --load_from_cache_file true \
    --split_dataset_ratio 0.01 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
    --num_train_epochs 1 \
    --lr 1e-5 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-6 \
    --output_dir megatron_output \
    --eval_steps 200 \
    --save_steps 200 \
    --max_length 2048 \
    --dataloader_num_workers 4 \
    --no_save_optim true \
    --no_save_rng true \
    --sequence_parallel true \
    --attention_backend flash \
    --cross_entropy_loss_fusion true \
    --tensor_model_parallel_size 4 \
    --report_to wandb \
    --wandb_project swift \
    --wandb_exp_name run-1
