# After ms-swift's examples/yaml/megatron/sft.sh: the arguments are in the YAML beside it.
NPROC_PER_NODE=4 \
CUDA_VISIBLE_DEVICES=0,1,2,3 \
megatron sft \
    sft.yaml
