NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron rlhf \
    --model Qwen/Qwen3-8B \
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
    --rlhf_type kto \
    --desirable_weight 1.0 \
    --undesirable_weight 0.2
