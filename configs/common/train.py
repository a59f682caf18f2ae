# The run, as every config below configs/libai starts from it. An importer gets a copy of its own, and sets sizes on it;
# sizes of 1 say nothing, so the data-parallel size is inferred from the world.

train = dict(
    steps=100,
    seed=1234,
    clip_grad_norm=1.0,
    log_interval=1,
    eval_interval=50,
    dist=dict(
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        pipeline_num_layers=None,  # must be the model's
        custom_pipeline_stage_id=None,  # the stage of each layer; None: LiBai's automatic cut
    ),
)
