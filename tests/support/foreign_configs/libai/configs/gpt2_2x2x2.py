from .gpt2_pretrain import dataloader, graph, model, optim, tokenization, train

train.dist.data_parallel_size = 2
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2
train.dist.custom_pipeline_stage_id = [0] * 4 + [1] * 2
train.num_accumulation_steps = 8
graph.enabled = train.dist.pipeline_parallel_size > 1
