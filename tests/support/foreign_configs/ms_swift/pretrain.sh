NPROC_PER_NODE=8 \
CUDA_VISIBLE_DEVICES=0,1,2,3,4,5,6,7 \
megatron pt \
    --model Qwen/Qwen3-8B \
    --dataset swift/chinese-c4 \
    --load_from_cache_file true \
    --split_dataset_ratio 0.01 \
    --micro_batch_size 1 \
    --global_batch_size 16 \
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
    --streaming true \
    --packing true \
    --train_iters 10000 \
    --lr_decay_style cosine \
    --weight_decay 0.1 \
    --adam_beta2 0.95 \
    --clip_grad 1.0
