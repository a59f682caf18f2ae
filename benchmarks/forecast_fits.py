"""Published runs and their terms, and fits of the forecast's constants to them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from benchmarks.published_runs import PublishedRun, read, read_new_stacks, selective_recompute_runs
from dslpar.forecast.calibrate import Run, calibrate
from dslpar.forecast.constants import Constants
from dslpar.forecast.step_time import terms_of

DATA = os.path.join(os.path.dirname(__file__), "..", "..", "shared", "data")
STACKS = ("vTrain single", "vTrain multi", "foundry", "BigScience", "nanotron")
"""Stacks to whose runs constants are fitted."""
UNFITTED = "Megatron-LM"

NEUTRAL = Constants(
    product_efficiency=0.75,
    wide_products=0.9,
    product_depth=200,
    misaligned_products=1.3,
    fused_attention=0.4,
    wide_attention=0.6,
    plain_attention=0.5,
    elementwise_passes=1.0,
    logit_bytes=30,
    layer_launch_s=0.5e-3,
    backward_launch=2.0,
    collective_launch_s=50e-6,
    tensor_launch=0.005,
    blocking_launch=1.0,
    link_efficiency=0.7,
    nic_efficiency=0.7,
    nic_crowding=0.02,
    link_latency_s=15e-6,
    nic_latency_s=40e-6,
    hop_s=0.3e-3,
    reduction_exposed=0.5,
    weights_exposed=0.3,
    exposed_layers=1.0,
    gather_passes=2.0,
    flat_gather_passes=1.0,
    optimizer_bytes=20,
    unfused_optimizer=5.0,
    step_s=5e-3,
)
"""Start of fits: round values, taken from no run."""
NEUTRAL_RUNS = 0.02
"""Weight of the prior on them, in runs: almost nothing."""


@dataclass(frozen=True)
class Data:
    """Runs and their terms."""

    runs: Sequence[PublishedRun]
    terms: Sequence[Run]

    def of_stack(self, stack: str, filtered: bool = True) -> list[int]:
        """Return the positions of a stack's runs. `filtered`: without those that the README leaves out."""
        return [i for i, run in enumerate(self.runs) if run.stack == stack and not (filtered and run.filtered)]


def load(path: str) -> Data:
    """Read the runs of a folder."""
    return data_of(read(os.path.join(path, "published_runs.csv")))


def load_unfitted(path: str) -> Data:
    """Read the runs of a folder that are never fitted, of every stack but `UNFITTED`."""
    return data_of([*selective_recompute_runs(), *read_new_stacks(os.path.join(path, "published_runs_new_stacks.csv"))])


def data_of(runs: Sequence[PublishedRun]) -> Data:
    """Return runs with their terms."""
    return Data(runs, [Run(terms_of(run.workload, run.device, run.nodes), run.step_s) for run in runs])


def fit(data: Data, chosen: Sequence[int], start: Constants = NEUTRAL, prior_runs: float = NEUTRAL_RUNS) -> Constants:
    """Fit constants to some runs; each stack weighs as the square root of its number of runs."""
    counts: dict[str, int] = {}
    for index in chosen:
        counts[data.runs[index].stack] = counts.get(data.runs[index].stack, 0) + 1
    scale = len(chosen) / sum(map(sqrt, counts.values()))
    weighted = [data.terms[i]._replace(weight=scale / sqrt(counts[data.runs[i].stack])) for i in chosen]
    return calibrate(weighted, start, prior_runs=prior_runs).constants


def thinned(data: Data, chosen: Sequence[int], most: int | None) -> list[int]:
    """Return at most `most` runs of each stack, evenly spread."""
    if most is None:
        return list(chosen)
    kept = []
    for stack in sorted({data.runs[i].stack for i in chosen}):
        own = [i for i in chosen if data.runs[i].stack == stack]
        kept += own[:: max(1, -(-len(own) // most))]
    return kept
