"""The code of ColossalAI's page on parallelization, with only imports and omitted parts changed."""

from __future__ import annotations

import os
import warnings
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dslpar.compat import colossalai
from dslpar.core.errors import DslparError
from tests.support.plain_models import GLOBAL, STEPS, images, plain_torch, resnet, sgd
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

CONFIG = {"batch": {"global_size": GLOBAL, "accumulation": 4}, "train": {"steps": STEPS, "clip_grad_norm": 0.5}}
PIPELINE = {"parallel": {"pipeline": {"size": 2}}}

IMPORTS = """\
from dslpar.compat import colossalai
from dslpar.compat.colossalai import MODELS, ModelFromConfig, ParallelMode
from dslpar.compat.colossalai import InterleavedPipelineSchedule, PipelineSchedule
from dslpar.compat.colossalai import build_pipeline_model, build_pipeline_model_from_cfg, global_context as gpc
"""
SPLIT = """\
model = resnet18(num_classes=10)

if gpc.get_local_rank(ParallelMode.PIPELINE) == 0:
    model = nn.Sequential(
        model.conv1,
        model.bn1,
        model.relu,
        model.maxpool,
        model.layer1,
        model.layer2
    )
elif gpc.get_local_rank(ParallelMode.PIPELINE) == 1:
    from functools import partial

    class Flatten(nn.Module):
        def forward(self, x):
            return torch.flatten(x, 1)

    model = nn.Sequential(
        model.layer3,
        model.layer4,
        model.avgpool,
        Flatten(),
        model.fc
    )
"""
FROM_CONFIG = """\
@MODELS.register_module
class MyModel(ModelFromConfig):

    def __init__(self, arg1, arg2):
        ...
        self.layers_cfg = [
            dict(type='Linear', in_features=3, out_features=512),
            dict(type='Linear', in_features=512, out_features=512),
        ]

model_cfg = dict(
    type='MyModel',
    arg1=1,
    arg2=2
)

# from config
model = build_pipeline_model_from_cfg(model_cfg, num_chunks=1)
"""
SEQUENTIAL = """\
# from torch.nn.Sequential
model = build_pipeline_model(sequential_model, num_model_chunks)
"""
LOOP = """\
engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, criterion, train_dataloader)

schedule = PipelineSchedule(num_microbatches=4)

# execute a training epoch
data_iter = iter(train_dataloader)

for i in range(len(train_dataloader)):
    output, label, loss = schedule.forward_backward_step(engine,
                                                        data_iter,
                                                        forward_only=False,
                                                        )
    losses.append(None if loss is None else loss.item())
"""


INTERLEAVED_LOOP = LOOP.replace(
    "schedule = PipelineSchedule(num_microbatches=4)",
    "# interleaved pipeline\nschedule = InterleavedPipelineSchedule(num_microbatches=4, num_model_chunks=2)",
)
"""The line that the page has as a comment."""


def run_snippets(config: dict[str, Any], model: str, data: Any, loop: str = LOOP) -> Any:
    """Return the loop's losses, the warnings, and the output at the end of the data."""
    colossalai.launch_from_torch(config=config)
    losses: list[float | None] = []
    names: dict[str, Any] = {"torch": torch, "nn": nn, "losses": losses, "resnet18": lambda num_classes: resnet()}
    names |= {"sequential_model": four_linears(), "num_model_chunks": 2}
    exec(IMPORTS + model, names)
    names |= {"optimizer": sgd(names["model"].parameters()), "criterion": nn.CrossEntropyLoss()}
    names["train_dataloader"] = data()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("default")
        exec(loop, names)
        with pytest.raises(StopIteration) as end:
            names["schedule"].forward_backward_step(names["engine"], names["data_iter"])
    return losses, {str(each.message) for each in warned}, str(end.value)


def batches_of_images() -> Any:
    """Return a loader of whole batches, as in ColossalAI's programs."""
    pairs = [images(step) for step in range(STEPS)]
    every = torch.utils.data.TensorDataset(torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
    return torch.utils.data.DataLoader(every, batch_size=GLOBAL)


def points_of_three() -> Any:
    """Return a data set, which dslpar orders and splits."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(3 * GLOBAL, 3, generator=generator)
    return torch.utils.data.TensorDataset(x, torch.randint(512, (3 * GLOBAL,), generator=generator))


def test_the_resnet_that_is_split_by_hand_trains() -> None:
    """The page's loop has no engine.step(): each step is taken when the next one begins, with a warning.

    Convolutions sum in fp32 over five steps, so the tolerance is 1e-4.
    """
    first, last = on_ranks(2, run_snippets, PIPELINE | CONFIG, SPLIT, batches_of_images, init="deepspeed")
    rows, _ = plain_torch(resnet(), micro_size=4, draw=images)
    assert last[0] == pytest.approx([loss for loss, _ in rows], rel=1e-4)
    assert first[0] == [None] * STEPS
    assert [len(first[1]), len(last[1])] == [1, 0], "rank 0 alone warns"
    assert "engine.step() is missing after forward_backward_step()" in first[1].pop()
    assert "the data ended after step 5: a pass has len(train_dataloader) steps, each of 4 micro-batches" in last[2]


def test_a_model_from_config_trains_the_same_with_and_without_a_pipeline() -> None:
    """The part on each rank has parameters for an optimizer, and len(train_dataloader) counts steps."""
    _, (losses, *_) = on_ranks(2, run_snippets, PIPELINE | CONFIG, FROM_CONFIG, points_of_three, init="deepspeed")
    ((alone, *_),) = on_ranks(1, run_snippets, CONFIG, FROM_CONFIG, points_of_three, init="deepspeed")
    assert len(losses) == 3
    assert losses == pytest.approx(alone, rel=1e-6)


# ---- the interleaved schedule ----


def four_linears() -> nn.Sequential:
    """Return linears that are equal on all ranks, as the page's `sequential_model`."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 512))


CHUNKS = {"schedule": {"type": "interleaved", "num_model_chunks": 2}}
FOUR_FROM_CONFIG = FROM_CONFIG.replace(
    "            dict(type='Linear', in_features=512, out_features=512),\n",
    "            dict(type='Linear', in_features=512, out_features=512),\n" * 3,
)
"""The page's list continues after two layers: `...`."""


INTERLEAVED: dict[str, tuple[dict[str, Any], str]] = {
    "num_chunks=1 and a config": (CHUNKS, FOUR_FROM_CONFIG),
    "num_chunks=2": ({}, FOUR_FROM_CONFIG.replace("num_chunks=1", "num_chunks=2")),
    "Sequential": ({}, SEQUENTIAL),
    "Sequential, zero_bubble": ({"schedule": {"type": "zero_bubble", "num_model_chunks": 2}}, SEQUENTIAL),
}
EACH_TIME = {(2, "num_chunks=2"), (1, "Sequential, zero_bubble")}


@pytest.mark.parametrize(("data", "name"), sampled(product((1, 2), INTERLEAVED), EACH_TIME))
def test_the_interleaved_schedule_of_the_page_trains(data: int, name: str) -> None:
    """If the config does not set it, num_chunks gives their number. The loss equals one process and plain 1F1B."""
    config, model = INTERLEAVED[name]
    ranks = on_ranks(
        2 * data, run_snippets, PIPELINE | CONFIG | config, model, points_of_three, INTERLEAVED_LOOP, init="deepspeed"
    )
    ((alone, *_),) = on_ranks(1, run_snippets, CONFIG, model, points_of_three, INTERLEAVED_LOOP, init="deepspeed")
    one_chunk = model.replace("num_chunks=2", "num_chunks=1").replace("num_model_chunks", "1")
    *_, (plain, *_) = on_ranks(2, run_snippets, PIPELINE | CONFIG, one_chunk, points_of_three, init="deepspeed")
    assert [losses for losses, *_ in ranks[:data]] == [[None] * 3] * data, "the first stage has no loss"
    for losses, *_ in ranks[data:]:
        assert losses == pytest.approx(alone, rel=1e-6)
        assert losses == pytest.approx(plain, rel=1e-6)
    assert len(alone) == 3


HAND_SPLIT = """\
stages = [sequential_model[:1], sequential_model[1:3], sequential_model[3:4], sequential_model[4:]]
rank = gpc.get_local_rank(ParallelMode.PIPELINE)
model = nn.ModuleList([stages[rank], stages[rank + 2]])
"""


def test_the_chunks_of_a_model_that_is_split_by_hand() -> None:
    """As in ColossalAI, each rank has a ModuleList of its chunks."""
    parts = PIPELINE | CONFIG | CHUNKS, HAND_SPLIT
    _, (losses, *_) = on_ranks(2, run_snippets, *parts, points_of_three, INTERLEAVED_LOOP, init="deepspeed")
    ((alone, *_),) = on_ranks(1, run_snippets, CONFIG, SEQUENTIAL, points_of_three, init="deepspeed")
    assert losses == pytest.approx(alone, rel=1e-6)


def _other_chunks(config: dict[str, Any], num_model_chunks: int) -> str:
    run = colossalai.launch_from_torch(config=config)
    model = colossalai.build_pipeline_model(four_linears())
    assert run.num_stages == 2
    engine, *_ = colossalai.initialize(model, sgd(model.parameters()), nn.CrossEntropyLoss())
    schedule = colossalai.InterleavedPipelineSchedule(num_microbatches=4, num_model_chunks=num_model_chunks)
    with pytest.raises(DslparError) as error:
        schedule.forward_backward_step(engine, iter(()))
    return str(error.value)


@pytest.mark.parametrize(
    ("config", "asked", "said"),
    [
        ({}, 2, "num_model_chunks is 2, but each rank of the job has 1\nhelp: write schedule = dict(type='interleaved',"
         " num_model_chunks=2), or PipelineSchedule"),
        (CHUNKS, 3, "num_model_chunks is 3, but each rank of the job has 2\nhelp: write schedule ="
         " dict(type='interleaved', num_model_chunks=3), or InterleavedPipelineSchedule(..., num_model_chunks=2)"),
    ],
)  # fmt: skip
def test_chunks_that_the_job_does_not_have(config: dict[str, Any], asked: int, said: str) -> None:
    for error in on_ranks(2, _other_chunks, PIPELINE | CONFIG | config, asked, init="deepspeed"):
        assert "PIP212 other-num-model-chunks: " + said in error


# ---- launch ----


def _launched(folder: str) -> Any:
    place = [int(os.environ.pop(name)) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")]
    os.environ.pop("LOCAL_RANK"), os.environ.pop("MASTER_ADDR")
    config = Path(folder, "config.py")
    args = colossalai.get_default_parser().parse_args(["--config", str(config), "--host", "127.0.0.1"])
    run = colossalai.launch(args.config, *place[:2], args.host, place[2], backend="gloo", seed=7)
    gpc, mode = colossalai.global_context, colossalai.ParallelMode
    names = ("GLOBAL", "DATA", "MODEL", "PIPELINE", "TENSOR")
    groups = {name: gpc.get_ranks_in_group(mode[name]) for name in names}
    assert [each.name for each in mode if gpc.is_initialized(each)] == ["GLOBAL", "DATA", "MODEL", "PIPELINE"]
    seeds = run.job.spec.train.seed, torch.initial_seed()
    with pytest.raises(ValueError, match="backend is 'nccl', but this device uses 'gloo': leave backend out"):
        colossalai.launch_from_torch(config, backend="nccl")
    ends = gpc.is_first_rank(mode.PIPELINE), gpc.is_last_rank(mode.PIPELINE), gpc.get_world_size(mode.MODEL)
    return groups, ends, gpc.config.NUM_EPOCHS, *seeds


def test_launch_takes_a_place_and_gpc_says_who_is_where(tmp_path: Path) -> None:
    (tmp_path / "config.py").write_text("NUM_EPOCHS = 3\nparallel = dict(pipeline=2)\nbatch = dict(accumulation=4)\n")
    ranks = on_ranks(2, _launched, str(tmp_path), init=None)
    for rank, (groups, ends, epochs, *seeds) in enumerate(ranks):
        assert groups == {"GLOBAL": [0, 1], "DATA": [rank], "MODEL": [0, 1], "PIPELINE": [0, 1], "TENSOR": [rank]}
        assert ends == (rank == 0, rank == 1, 2)
        assert (epochs, seeds) == (3, [7, 7])


def test_what_needs_a_launch_says_so() -> None:
    with pytest.raises(DslparError, match="HST231 not-launched: no run was launched"):
        colossalai.initialize(nn.Linear(1, 1))


RANK_VARIABLES = {
    "slurm": {
        "RANK": "SLURM_PROCID",
        "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
        "LOCAL_RANK": "SLURM_LOCALID",
        "LOCAL_SIZE": "SLURM_STEP_TASKS_PER_NODE",
    },
    "openmpi": {
        "RANK": "OMPI_COMM_WORLD_RANK",
        "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
        "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
        "LOCAL_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
}


def two_linears() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 16), nn.Linear(16, 512))


def _losses(model: nn.Module) -> list[float | None]:
    losses: list[float | None] = []
    names: dict[str, Any] = {"model": model, "losses": losses, "criterion": nn.CrossEntropyLoss()}
    exec(IMPORTS, names)
    names |= {"optimizer": sgd(model.parameters()), "train_dataloader": points_of_three()}
    exec(LOOP + "    engine.step()\n", names)
    return losses


def _launched_by(launcher: str) -> Any:
    """Train a pipeline of modules that are already built, with a launcher's own variables."""
    host, port = os.environ.pop("MASTER_ADDR"), int(os.environ.pop("MASTER_PORT"))
    for name, theirs in RANK_VARIABLES[launcher].items():
        os.environ[theirs] = os.environ.pop(name)
    launch = {"slurm": colossalai.launch_from_slurm, "openmpi": colossalai.launch_from_openmpi}[launcher]
    run = launch(PIPELINE | CONFIG, host=host, port=port, seed=7)
    model = colossalai.build_pipeline_model(two_linears())
    place = run.stage, torch.distributed.get_rank(), run.job.spec.train.seed
    return place, [p.numel() for p in model.parameters()], _losses(model)


def _in_one_process() -> list[float | None]:
    colossalai.launch_from_torch(config=CONFIG, seed=7)
    return _losses(two_linears())


@pytest.mark.parametrize("launcher", RANK_VARIABLES)
def test_under_slurm_and_openmpi_each_rank_has_its_part_of_a_built_model(launcher: str) -> None:
    """The parts come from the model as built, so the losses are those of one process."""
    first, last = on_ranks(2, _launched_by, launcher, init=None)
    assert [first[:2], last[:2]] == [((0, 0, 7), [3 * 16, 16]), ((1, 1, 7), [16 * 512, 512])]
    (alone,) = on_ranks(1, _in_one_process, init="deepspeed")
    assert len(alone) == 3
    assert first[2] == [None] * 3
    assert last[2] == pytest.approx(alone, rel=1e-6)
