"""Dry runs: calls and bytes by operation and axis equal those of the engine's real step.

The engine is DeepSpeed's, built as in training, on CPU tensors, as one rank of torch's fake process group. Every
micro-batch is computed. Collectives over data replicas are DeepSpeed's own, and left out on both sides.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from fractions import Fraction
from typing import Any
from unittest.mock import patch

import pytest
import torch

from dslpar.distributed import point_to_point
from dslpar.distributed.groups import Groups
from dslpar.dry_run.dry_run import DryRun, dry_run
from dslpar.layers import placement
from dslpar.layout.resolve import Job
from tests.support import warm
from tests.support.dry_runs import LLAMA, job_of
from tests.support.fake_world import fake_world
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

AGAIN = "activation_checkpoint = dict(interval=1)"
WITHOUT_DROPOUT = LLAMA.replace("dropout=0.1", "dropout=0.0")
CASES: Mapping[str, tuple[int, Mapping[str, Any]]] = {
    "1d": (-1, {"mode": "1d", "more": AGAIN}),
    "1d sequence, 1f1b, first stage of a tied table": (1, {"mode": "1d sequence", "schedule": "1f1b"}),
    "1d sequence, 1f1b, last stage": (-1, {"mode": "1d sequence", "schedule": "1f1b", "more": AGAIN}),
    "2d, interleaved": (-1, {"mode": "2d", "schedule": "interleaved"}),
    "2.5d, zero bubble, Llama": (1, {"mode": "2.5d", "schedule": "zero_bubble", "form": WITHOUT_DROPOUT}),
    "2.5d, zero bubble, recomputed": (-1, {"mode": "2.5d", "schedule": "zero_bubble", "more": AGAIN}),
    "3d, zero bubble of chunks": (-1, {"mode": "3d", "schedule": "zero_bubble, chunks"}),
    "3d, Llama with dropout": (1, {"mode": "3d", "form": LLAMA}),
    "ring, 1f1b": (1, {"mode": "ring", "schedule": "1f1b", "more": AGAIN}),
    "ulysses": (-1, {"mode": "ulysses", "form": LLAMA}),
    "pipeline alone": (-1, {"schedule": "1f1b"}),
}
Counts = dict[tuple[str, str], tuple[int, Fraction]]


FEW = {
    "1d sequence, 1f1b, first stage of a tied table",
    "2d, interleaved",
    "2.5d, zero bubble, Llama",
    "3d, zero bubble of chunks",
}
"""Every schedule. tests/unit/dry_run/test_dry_run.py has every mode."""


@pytest.mark.parametrize("name", sampled(CASES, FEW))
def test_a_dry_run_counts_what_the_engine_asks_for(name: str) -> None:
    warm.import_deepspeed()
    (real,) = on_ranks(1, _engine_counts, name, init=None)
    (dry,) = on_ranks(1, _dry_counts, name, init=None)
    assert dry == real
    assert real


def _subject(name: str) -> tuple[Job, int]:
    rank, of = CASES[name]
    job = job_of(**of)
    return job, rank % job.mesh.world_size


def _dry_counts(name: str) -> Counts:
    result = dry_run(*_subject(name))
    return _within_tensor_groups(result.operations) | _sends(result)


def _sends(result: DryRun) -> Counts:
    sent = [each.num_bytes for each in result.messages if each.kind == "send"]
    return {("send", "pipe"): (len(sent), Fraction(sum(sent)))} if sent else {}


def _within_tensor_groups(counts: Counts) -> Counts:
    """Leave out replicas, the loss, and receives, which send nothing."""
    return {
        (kind, "pipe" if axes.startswith("pipe") else axes): value
        for (kind, axes), value in counts.items()
        if "data" not in axes and kind not in ("receive", "broadcast")
    }


def _engine_counts(name: str) -> Counts:
    import deepspeed

    from dslpar.distributed import deepspeed_patches
    from dslpar.engine.build import build_engine
    from tests.support.traffic_counter import counting

    job, rank = _subject(name)
    world = job.mesh.world_size
    warnings.simplefilter("ignore")
    deepspeed_patches.skip_shm_op()
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": 29500}
    os.environ.update({key: str(value) for key, value in of_rank.items()}, MASTER_ADDR="127.0.0.1")
    with fake_world(rank, world), patch.object(point_to_point, "_read_header", lambda _: _residual(job)):
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        engine = build_engine(job, Groups(job.mesh), all_counted=True)
        ids = torch.zeros(8, 32, dtype=torch.int64)
        with counting(engine.groups) as sent:
            engine.forward_backward([(ids, ids)] * 8)
    counts = {key: (calls, Fraction(sent.bytes.get(key, 0))) for key, calls in sent.calls.items()}
    # If a tied weight is not on all stages, its stages are no axis to the counter.
    named = {(kind, "pipe" if axes == "other" else axes): value for (kind, axes), value in counts.items()}
    return _within_tensor_groups(named)


def _residual(job: Job) -> point_to_point.Forms:
    return [(torch.float32, placement.residual(job.mesh.tensor, 8, 32, 64).local_shape)]
