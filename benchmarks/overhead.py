"""dslpar's overhead over DeepSpeed: CPU time of a training step against the same GPT written by hand.

Each side is built once, in its own processes, which are forked from this one: one process, or two that are the stages
of a pipeline. Then the sides take steps in turns. Before anything is timed, both must give the same loss for the same
weights.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial

import torch

from benchmarks import by_hand
from benchmarks.by_hand import MicroBatch, Sizes
from benchmarks.measure import Ratio, in_turns, ratio
from benchmarks.sides import FORK, Step, side
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.models import GPT, build_module

TARGET = 1.02
SIZES = Sizes()

CONFIG = """
model = dict(type='GPT', num_layers={s.layers}, hidden_size={s.hidden}, num_heads={s.heads},
             vocab_size={s.vocab}, max_seq_len={s.sequence})
optimizer = dict(type='AdamW', lr=3e-4, weight_decay=0.01)
batch = dict(micro_size={s.micro}, accumulation={s.accumulation})
train = dict(clip_grad_norm=1.0, steps=1000)
"""


def ratios() -> Iterator[Ratio]:
    """One process, and a pipeline of two."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    alone = FORK.Process(target=check_same_model)
    alone.start()
    alone.join()
    assert alone.exitcode == 0, "the two models differ"
    yield compare("dslpar / DeepSpeed by hand, one process, CPU time a step", 1)
    yield compare("dslpar / DeepSpeed by hand, pipeline of 2, CPU time a step", 2)


def compare(name: str, world: int) -> Ratio:
    """CPU time of steps in a world of 1 rank, or of 2 stages."""
    with side(partial(step_of_dslpar, world), world) as ours, side(partial(step_by_hand, world), world) as reference:
        return ratio(name, [cpu for (cpu,) in in_turns(ours, reference)], TARGET)


# The two sides --------------------------------------------------------------------------------------------------


def step_of_dslpar(world: int) -> Step:
    """Builds dslpar's engine."""
    start_deepspeed()
    job = job_for(world)
    return partial(build_engine(job, Groups(job.mesh), all_counted=True).train_batch, batches_of_step())


def step_by_hand(world: int) -> Step:
    """Builds the engine written by hand."""
    start_deepspeed()
    return partial(by_hand.train_batch, by_hand.build(SIZES, world), batches_of_step())


def job_for(world: int) -> Job:
    """dslpar's Job of SIZES, cut into equal stages."""
    half = SIZES.layers // 2
    cut = f"parallel = dict(pipeline=dict(size=2, counts=[{half}, {half}]))" if world == 2 else ""
    return check.resolve(check.load_text(CONFIG.format(s=SIZES) + cut, "overhead.py"), world)


def check_same_model() -> None:
    """Both models, with the same weights, give the same loss."""
    ours = build_module(
        GPT(
            num_layers=SIZES.layers,
            hidden_size=SIZES.hidden,
            num_heads=SIZES.heads,
            vocab_size=SIZES.vocab,
            max_seq_len=SIZES.sequence,
        ),
        Groups(Mesh()),
        seed=1234,
    )
    theirs = by_hand.GPT(SIZES)
    by_hand.copy_weights(theirs, ours.parameters())
    ids, labels = batches_of_step()[0]
    torch.testing.assert_close(by_hand.loss(ours(ids), labels), by_hand.loss(theirs(ids), labels), rtol=1e-6, atol=0)


def batches_of_step() -> list[MicroBatch]:
    """The same micro-batches for everyone."""
    shape = (SIZES.accumulation, SIZES.micro, SIZES.sequence + 1)
    tokens = torch.randint(SIZES.vocab, shape, generator=torch.Generator().manual_seed(1))
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def start_deepspeed() -> None:
    """DeepSpeed over the running process group, without compiling its shared-memory op."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__

    __compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
