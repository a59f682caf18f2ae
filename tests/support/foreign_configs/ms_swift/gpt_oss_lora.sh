# After ms-swift's examples/models/gpt_oss/mcore.sh: experts and LoRA, text over several lines in quotes.
PYTORCH_CUDA_ALLOC_CONF='expandable_segments:True' \
NPROC_PER_NODE=2 \
CUDA_VISIBLE_DEVICES=0,1 \
megatron sft \
    --model org/tiny-oss \
    --save_safetensors true \
    --merge_lora true \
    --dataset 'org/alpaca-zh#500' \
              'org/alpaca-en#500' \
              'org/self-cognition#500' \
    --tuner_type lora \
    --lora_rank 8 \
    --lora_alpha 32 \
    --target_modules all-linear \
    --expert_model_parallel_size 2 \
    --moe_permute_fusion true \
    --moe_grouped_gemm true \
    --moe_shared_expert_overlap true \
    --moe_aux_loss_coeff 1e-6 \
    --micro_batch_size 8 \
    --global_batch_size 16 \
    --recompute_granularity full \
    --recompute_method uniform \
    --recompute_num_layers 1 \
    --num_train_epochs 1 \
    --finetune true \
    --cross_entropy_loss_fusion true \
    --lr 1e-4 \
    --lr_warmup_fraction 0.05 \
    --min_lr 1e-5 \
    --output_dir megatron_output/oss \
    --eval_steps 100 \
    --save_steps 100 \
    --max_length 2048 \
    --no_save_optim true \
    --no_save_rng true \
    --sequence_parallel true \
    --padding_free false \
    --attention_backend unfused \
    --model_author swift \
    --model_name swift-robot
