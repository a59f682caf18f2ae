from torchtitan.config import JobConfig
from torchtitan.config.job_config import Model, Optimizer, Parallelism, Training


def llama3_8b() -> JobConfig:
    return JobConfig(
        model=Model(name="llama3", flavor="8B"),
        optimizer=Optimizer(name="AdamW", lr=3e-4),
        training=Training(local_batch_size=1, seq_len=8192, steps=1000, dataset="c4"),
        parallelism=Parallelism(tensor_parallel_degree=2),
    )
