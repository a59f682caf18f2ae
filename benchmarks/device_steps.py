"""Count the device work of a whole step, and its host's waits, on one rank of a fake process group.

A step is the second step, of ACCUMULATION micro-batches, of an engine or of a plain loop over such a model in torch.nn.
Each function turns this process into a rank of torch's fake group, so call each one in its own process.

Offloaded work counts like the rest, since on a CPU the optimizer's host kernels look like device kernels. Sends and
receives of a pipeline count as collectives. Waits for a stream, such as those of DeepSpeed's ZeRO 3 after each
backward, are not seen, since a CPU has no streams.
"""

from __future__ import annotations

import copy
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest.mock import patch

import deepspeed
import torch
from torch import Tensor, nn

from benchmarks import by_hand
from benchmarks.device_blocks import KV_HEADS
from benchmarks.device_counter import Kernels, Waits, count_kernels, count_waits
from benchmarks.plain_torch import Llama, training_step
from dslpar.distributed import deepspeed_patches, point_to_point
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.linter import check
from tests.support.fake_world import fake_world

ACCUMULATION = 4
SIZES = by_hand.Sizes(layers=2, hidden=64, heads=8, vocab=256, sequence=32, micro=4, accumulation=ACCUMULATION)
CONFIG = f"""
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=32{{form}})
batch = dict(micro_size=4, accumulation={ACCUMULATION})
train = dict(clip_grad_norm=1.0, steps=1000)
precision = 'bf16'
{{keys}}
"""
LLAMA = (
    ", norm='rmsnorm', activation='swiglu', positions='rotary', bias=False, tie_embeddings=False"
    f", num_kv_heads={KV_HEADS}"
)


@dataclass(frozen=True)
class Layout:
    """A job, and the rank that is looked at."""

    keys: str
    world: int = 1
    rank: int = 0
    form: str = ""
    """More of the model's fields."""


def _tensor(size: int, mode: str, more: str = "") -> str:
    return f"parallel = dict(tensor=dict(size={size}, mode='{mode}'{more}))"


MODES: Mapping[str, Layout] = {
    "one process, ZeRO 1": Layout("zero = 1"),
    "1d, data 2, ZeRO 1": Layout(f"zero = 1; {_tensor(2, '1d')}", 4),
    "1d, sequence, data 2, ZeRO 1": Layout(f"zero = 1; {_tensor(2, '1d', ', sequence=True')}", 4),
    "2d, data 2, ZeRO 1": Layout(f"zero = 1; {_tensor(4, '2d')}", 8),
    "3d, data 2, ZeRO 1": Layout(f"zero = 1; {_tensor(8, '3d')}", 16),
}
PIPELINE = "zero = 1; parallel = dict(pipeline=2)"
OTHERS: Mapping[str, Layout] = {
    "data 2, fp32, ZeRO 0": Layout("zero = 0; precision = 'fp32'", 2),
    "1d, data 2, ZeRO 1, gathers overlap": Layout(
        f"zero = dict(stage=1, overlap_param_gather=True); {_tensor(2, '1d')}", 4
    ),
    "1d, data 2, fp16, ZeRO 2": Layout(f"zero = 2; {_tensor(2, '1d')}; precision='fp16'", 4),
    "1d, data 2, ZeRO 2, offload": Layout(f"zero = dict(stage=2, offload_optimizer='cpu'); {_tensor(2, '1d')}", 4),
    "1d, data 2, ZeRO 3": Layout(f"zero = 3; {_tensor(2, '1d')}", 4),
    "pipeline 2, data 2, ZeRO 1, first stage": Layout(PIPELINE, 4),
    "pipeline 2, data 2, ZeRO 1, last stage": Layout(PIPELINE, 4, rank=3),
}
LAYOUTS_OF_STEPS: Mapping[str, Layout] = {
    **{f"GPT, {name}": of for name, of in {**MODES, **OTHERS}.items()},
    **{f"Llama, {name}": replace(of, form=LLAMA) for name, of in MODES.items()},
}


class StepCounts(NamedTuple):
    """Of one step."""

    waits: Waits
    kernels: Kernels


def step_counts(layout: str) -> StepCounts:
    """Count the engine's second step."""
    of = LAYOUTS_OF_STEPS[layout]
    with _counting() as (waits, kernels), _rank_of(of):
        engine = _engine(of)
        engine.host_reads.local_flags = lambda: (False, False, False)  # as the loop of train.py has it
        counts = _second_step(engine.train_batch, waits, kernels)
        assert not engine.skipped, "a step that is skipped is another one"
    return counts


def plain_step_counts(form: str) -> StepCounts:
    """Count the second step of a plain loop over the model of this form in torch.nn."""
    warnings.simplefilter("ignore")
    model: nn.Module = by_hand.GPT(SIZES) if form == "GPT" else Llama(SIZES, KV_HEADS)
    with _counting() as (waits, kernels):
        return _second_step(training_step(model), waits, kernels)


def accumulation_bytes() -> float:
    """Return bytes that adding a bf16 gradient to its sum moves, for a parameter and micro-batch."""
    of = MODES["one process, ZeRO 1"]
    with _rank_of(of):
        zero = _engine(of).deepspeed.optimizer
        largest = max(zero.bit16_groups[0], key=torch.Tensor.numel)
        largest.grad_accum = torch.zeros(largest.shape)
        largest.grad = torch.ones_like(largest)
        with count_kernels() as counts:
            zero._fill_param_grad_accum_attribute(largest)
    return counts.num_bytes / int(largest.numel())


@contextmanager
def _counting() -> Iterator[tuple[Waits, Kernels]]:
    with count_waits() as waits, count_kernels() as kernels:
        yield waits, kernels


@contextmanager
def _rank_of(layout: Layout) -> Iterator[None]:
    """This process as that rank, in the environment that a launcher would give it."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    deepspeed_patches.skip_shm_op()
    of_rank = {"RANK": layout.rank, "LOCAL_RANK": layout.rank, "WORLD_SIZE": layout.world, "LOCAL_SIZE": layout.world}
    os.environ.update({name: str(value) for name, value in of_rank.items()}, MASTER_ADDR="127.0.0.1")
    os.environ["MASTER_PORT"] = "29500"
    with fake_world(layout.rank, layout.world), patch.object(point_to_point, "_receive_header", _header):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        yield


def _header(*_: object) -> list[tuple[torch.dtype, tuple[int, ...]]]:
    """Return the header that the other stage sends before its first message, which is not part of the second step."""
    return [(torch.bfloat16, (SIZES.micro, SIZES.sequence, SIZES.hidden))]


def _engine(layout: Layout) -> Any:
    config = CONFIG.format(form=layout.form, keys=layout.keys.replace("; ", "\n"))
    job = check.resolve(check.load_text(config, "counts.py"), layout.world)
    return build_engine(job, Groups(job.mesh), all_counted=True)


def _second_step(step: Callable[[list[tuple[Tensor, Tensor]]], Any], waits: Waits, kernels: Kernels) -> StepCounts:
    ids = torch.arange(4 * 33).view(4, 33) % 256
    batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * ACCUMULATION
    step(batches)  # makes the optimizer's states
    for places in (waits.reads, waits.copies, waits.synchronizations):
        places.clear()
    before = copy.deepcopy(kernels)
    step(batches)
    return StepCounts(waits, kernels - before)
