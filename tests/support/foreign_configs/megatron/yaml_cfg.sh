#!/bin/bash
# After Megatron-LM's examples/gpt3/README.md: the YAML in place of arguments.
export CUDA_DEVICE_MAX_CONNECTIONS=1
torchrun --nproc_per_node 8 --nnodes 1 pretrain_gpt.py \
    --yaml-cfg ../megatron_yaml/gpt_config.yaml
