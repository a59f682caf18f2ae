"""What a block and a step ask of an accelerator, counted on a CPU: as a rank of a world whose others are not there.

    python -m benchmarks.device_counts

Of a block, forward and backward: kernels, those of them that only move elements, bytes that kernels read and write,
collectives, those that no product hides, and where torch.compile would break its graph. Of the loss: bytes for each
logit in bfloat16. Of a step: how often the host waits for the device. `plain` is the block of benchmarks.one_device, in
torch.nn. Exit status 1: a target (TARGETS) is missed.

Numbers are those of torch's operations before any fusion, so they say what is enqueued and not how long it takes.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import deepspeed
import torch
from torch import nn
from torch.nn import functional

from benchmarks.device_counter import Kernels, Waits, count_kernels, count_waits
from benchmarks.one_device import Plain
from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed import deepspeed_patches
from dslpar.distributed.groups import Groups
from dslpar.engine.build import build_engine
from dslpar.layers import Block, Form, Rotary, cross_entropy, initialize, mark_owners, placement
from dslpar.linter import check
from tests.support.fake_world import fake_world, in_forks
from tests.support.layouts import LAYOUTS

MICRO, SEQUENCE, HIDDEN, HEADS = 4, 32, 64, 8
FORMS: Mapping[str, Form] = {
    "GPT": Form(),
    "Llama": Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=4, bias=False),
}
TENSORS: Mapping[str, mesh.Tensor] = {
    "one process": mesh.Tensor(),
    "1d": LAYOUTS["1d-2"],
    "1d, sequence": LAYOUTS["1d-sequence-2"],
    "1d, sequence, overlap": replace(LAYOUTS["1d-sequence-2"], comm_overlap=True),
    "2d": LAYOUTS["2d-4"],
    "3d": LAYOUTS["3d-8"],
}


class BlockCounts(NamedTuple):
    """Of one block."""

    forward: Kernels
    backward: Kernels
    graph_breaks: int


def block_counts(form: str, tensor: str) -> BlockCounts:
    """Count a block of this form on a rank of this mode; in a process of its own, for the world is this process's."""
    warnings.simplefilter("ignore")
    cuboid = TENSORS[tensor]
    with fake_world(cuboid.size - 1, cuboid.size):
        groups = Groups(Mesh(tensor=cuboid))
        block = Block(groups, HIDDEN, HEADS, form=FORMS[form])
        initialize(block, groups, seed=1)
        mark_owners(block, groups)
        return _counts(block, placement.residual(cuboid, MICRO, SEQUENCE, HIDDEN).local_shape)


def plain_counts() -> BlockCounts:
    """Count the block that is plain torch.nn."""
    return _counts(Plain(HIDDEN, HEADS), (MICRO, SEQUENCE, HIDDEN))


def _counts(block: nn.Module, shape: tuple[int, ...]) -> BlockCounts:
    block = block.to(torch.bfloat16)

    def run() -> tuple[Kernels, Kernels]:
        x = torch.ones(shape, dtype=torch.bfloat16, requires_grad=True)
        with count_kernels() as forward:
            y = block(x)
        gradient = torch.ones_like(y)
        with count_kernels() as backward:
            y.backward(gradient)
        return forward, backward

    run()  # tables are made at their first use
    return BlockCounts(*run(), graph_breaks(block, shape))


def graph_breaks(block: nn.Module, shape: tuple[int, ...]) -> int:
    """Count where torch.compile breaks a block's graph, in the forward and what it traces of the backward."""
    torch._dynamo.reset()
    explained = torch._dynamo.explain(block)(torch.ones(shape, dtype=torch.bfloat16, requires_grad=True))
    return int(explained.graph_break_count)


def loss_bytes() -> tuple[float, float]:
    """Return bytes that a loss and its backward move for a logit in bfloat16: torch's, of upcast logits, and ours."""
    tokens, vocab_size = 64, 4096
    found = []
    labels = torch.zeros(tokens, dtype=torch.int64, device="meta")
    ours = partial(cross_entropy, Groups(Mesh()), vocab_size=vocab_size)
    for loss in (lambda logits, labels: functional.cross_entropy(logits.float(), labels), ours):
        logits = torch.empty(tokens, vocab_size, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with count_kernels() as counts:
            loss(logits, labels).backward()
        found.append(counts.num_bytes / logits.numel())
    return found[0], found[1]


# ---- a step ----

CONFIG = """
model = dict(type='GPT', num_layers=2, hidden_size=64, num_heads=8, vocab_size=256, max_seq_len=32)
batch = dict(micro_size=4, accumulation=4)
train = dict(clip_grad_norm=1.0, steps=1000)
precision = 'bf16'
"""


@dataclass(frozen=True)
class Layout:
    """A job, and the world that it needs."""

    keys: str
    world: int


LAYOUTS_OF_STEPS: Mapping[str, Layout] = {
    "one process, ZeRO 1": Layout("zero = 1", 1),
    "data 2, fp32, ZeRO 0": Layout("zero = 0; precision = 'fp32'", 2),
    "1d, data 2, ZeRO 1": Layout("zero = 1; parallel = dict(tensor=dict(size=2, mode='1d'))", 4),
    "1d, data 2, ZeRO 1, gathers overlap": Layout(
        "zero = dict(stage=1, overlap_param_gather=True); parallel = dict(tensor=dict(size=2, mode='1d'))", 4
    ),
    "1d, data 2, fp16, ZeRO 2": Layout(
        "zero = 2; parallel = dict(tensor=dict(size=2, mode='1d')); precision='fp16'", 4
    ),
    "1d, data 2, ZeRO 3": Layout("zero = 3; parallel = dict(tensor=dict(size=2, mode='1d'))", 4),
    "3d, data 2, ZeRO 1": Layout("zero = 1; parallel = dict(tensor=dict(size=8, mode='3d'))", 16),
}


def step_waits(layout: str) -> Waits:
    """Count the waits of the second step; in a process of its own."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    deepspeed_patches.skip_shm_op()
    keys, world = LAYOUTS_OF_STEPS[layout].keys, LAYOUTS_OF_STEPS[layout].world
    job = check.resolve(check.load_text(CONFIG + keys.replace("; ", "\n"), "counts.py"), world)
    rank = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": 29500}
    os.environ.update({name: str(value) for name, value in rank.items()}, MASTER_ADDR="127.0.0.1")
    with fake_world(0, world), count_waits() as waits, count_kernels():
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        engine = build_engine(job, Groups(job.mesh), all_counted=True)
        engine.host_reads.local_flags = lambda: (False, False, False)  # as the loop of train.py has it
        ids = torch.arange(4 * 33).view(4, 33) % 256
        batches = [(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())] * 4
        for _ in range(2):
            for places in (waits.reads, waits.copies, waits.synchronizations):
                places.clear()
            engine.train_batch(batches)
        assert not engine.skipped, "a step that is skipped is another one"
    return waits


# ---- the table ----


class Target(NamedTuple):
    """What is asked at most, and where."""

    what: str
    most: float
    applies: Callable[[str], bool] = lambda name: True


TARGETS = (
    Target("graph breaks", 0),
    Target("exposed", 2, lambda name: name.endswith("overlap")),
    Target("bytes a logit", 16),
    Target("reads", 1),
    Target("synchronize", 0, lambda name: "ZeRO 3" not in name),
    Target("copies from the host", 0, lambda name: "ZeRO 3" not in name),
)
"""ZeRO 3 of DeepSpeed waits for streams of its own after each backward."""


def missed(name: str, **counts: float) -> list[str]:
    """Return which targets the counts of a row miss; `counts` by a target's name, with underscores."""
    return [
        f"{name}: {target.what} {counts[key]:g}, asked at most {target.most:g}"
        for target in TARGETS
        if (key := target.what.replace(" ", "_")) in counts and target.applies(name) and counts[key] > target.most
    ]


def main() -> int:
    """Print the tables; see the module."""
    misses: list[str] = []
    blocks: dict[str, Callable[[], Any]] = {"GPT, plain torch": plain_counts}
    blocks |= {f"{form}, {tensor}": partial(block_counts, form, tensor) for form in FORMS for tensor in TENSORS}
    print(f"{'a block':28} kernels   copies    KB moved  collectives  exposed  graph breaks")
    for name, counts in zip(blocks, in_forks(_call, list(blocks.values()), timeout_s=240), strict=True):
        forward, backward, breaks = counts
        both = f"{forward.kernels:3} + {backward.kernels:<3} {forward.layout_copies:3} + {backward.layout_copies:<3}"
        moved = (forward.num_bytes + backward.num_bytes) // 1024
        collectives, exposed = forward.collectives + backward.collectives, forward.exposed + backward.exposed
        print(f"{name:28} {both} {moved:9} {collectives:12} {exposed:8} {breaks:13}")
        misses += missed(name, exposed=exposed, graph_breaks=breaks)
    torchs, ours = loss_bytes()
    print(f"\nthe loss, bytes a logit: {ours:.1f}; torch's, of upcast logits, {torchs:.1f}")
    misses += missed("the loss", bytes_a_logit=ours)
    print(f"\n{'a step, accumulation 4':35} reads  copies from the host  synchronize")
    for name, waits in zip(LAYOUTS_OF_STEPS, in_forks(step_waits, list(LAYOUTS_OF_STEPS), timeout_s=240), strict=True):
        reads, copies, synchronize = (len(each) for each in (waits.reads, waits.copies, waits.synchronizations))
        print(f"{name:35} {reads:5} {copies:21} {synchronize:12}")
        misses += missed(name, reads=reads, copies_from_the_host=copies, synchronize=synchronize)
    print("\n" + ("\n".join(misses) or "all targets are met"))
    return int(bool(misses))


def _call(count: Callable[[], Any]) -> Any:
    return count()


if __name__ == "__main__":
    sys.exit(main())
