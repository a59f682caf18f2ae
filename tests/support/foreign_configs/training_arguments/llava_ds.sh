#!/bin/bash
# After LLaVA's scripts/v1_5/finetune.sh: DeepSpeed's launcher, its JSON beside the script.
MODEL=${MODEL:-org/tiny-13b}
deepspeed --num_gpus 8 llava/train/train_mem.py \
    --deepspeed ./ds_zero3.json \
    --model_name_or_path $MODEL \
    --version v1 \
    --data_path ./data/mix.json \
    --image_folder ./data \
    --vision_tower org/clip-large \
    --mm_projector_type mlp2x_gelu \
    --mm_vision_select_layer -2 \
    --mm_use_im_start_end False \
    --image_aspect_ratio pad \
    --group_by_modality_length True \
    --bf16 True \
    --output_dir ./checkpoints/tiny \
    --num_train_epochs 1 \
    --per_device_train_batch_size 16 \
    --gradient_accumulation_steps 1 \
    --eval_strategy "no" \
    --save_strategy "steps" \
    --save_steps 50000 \
    --save_total_limit 1 \
    --learning_rate 2e-5 \
    --weight_decay 0. \
    --warmup_ratio 0.03 \
    --lr_scheduler_type "cosine" \
    --logging_steps 1 \
    --tf32 True \
    --model_max_length 2048 \
    --gradient_checkpointing True \
    --dataloader_num_workers 4 \
    --lazy_preprocess True \
    --report_to wandb
