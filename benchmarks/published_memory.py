"""Published memory measurements as workloads of the forecast: each row's state, and its peak or failure.

    runs = read(DATA / "published_runs.csv")
    workload(runs[0]), runs[0].peak_gib

`benchmarks.published_runs` has the rows with a time. Here are all rows with a peak, a failure, or the best time of a
set. The memory that a framework holds around the model is in its `Framework` below. Differences from dslpar's layers in
what it saves for the backward are in `PublishedWorkload.costs`. No constant is fitted.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from benchmarks.published_runs import model_of_row, nanotron_counts, nanotron_keep
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs.memory import Saved
from dslpar.costs.model_costs import Costs, ModelCosts, function_of
from dslpar.forecast.device import DEVICES, Device
from dslpar.forecast.workload import Buckets, Framework, Recompute, Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.models.gpt.costs import layers
from dslpar.models.gpt.section import GPT

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
"""Beside the repository, not part of it."""
NANOTRON, FIGURE = 0, 13
"""Numbers of sources: nanotron's runs, and figure 1 of arXiv 2205.05198, which is computed."""
MOST_PANELS = 8
"""Above this number of ranks, nanotron is assumed to keep pieces. Its peaks without a pipeline suggest panels there
too, but then 14 runs that ran would be refused. Megatron-LM keeps pieces.
"""
_LEFT_OUT = (7, 12, 14)
"""Sources that do not report the micro-batch, the sequence, or the precision in which they are forecast."""
_DEVICES = {
    "H100-SXM-80GB": "h100-80g",
    "H100-SXM-96GB-HBM2e-500W": "h100-96g",
    "H200-SXM-141GB": "h200-141g",
    "A100-SXM-80GB": "a100-80g",
    "A100-SXM-40GB": "a100-40g",
    "V100-SXM2-32GB": "v100-32g",
    "V100-SXM2-16GB": "v100-16g",
}


class Run(NamedTuple):
    """One row."""

    source: int
    set: str
    """Rows of one set are alternatives with the same model, devices, sequence and global batch."""
    device: Device
    mesh: Mesh
    chunks: Chunks
    zero: int
    micro_size: int
    micro_batches: int
    seq_len: int
    recompute: Recompute
    fuses_attention: bool
    dtype: str
    thrashes: bool
    """Whether the source's step was several times slower than its neighbours', for lack of memory."""
    step_s: float | None
    peak_gib: float | None
    failed: bool
    model: GPT
    framework: str


def read(path: Path) -> list[Run]:
    """Return the rows of a file that can be forecast."""
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if int(row["source"]) not in _LEFT_OUT]
    return [_run(row) for row in rows]


def _run(row: Mapping[str, str]) -> Run:
    source, data, micro_size, pipe, size = (int(row[name]) for name in ("source", "dp", "mbs", "pp", "tp"))
    chunks = Chunks(pipe, int(row["vp"] or 1) if pipe > 1 else 1)
    # the figure has no global batch: assume full pipelines
    count = int(row["gbs"]) // (data * micro_size) if row["gbs"] else 4 * pipe
    is_sharded = row["sp"] == "1" and size > 1
    tensor = TensorMesh(
        y=size,
        mode="1d" if size > 1 else None,
        residual="sequence" if is_sharded else "replicated",
        keep=nanotron_keep(pipe, size) if source == NANOTRON and size <= MOST_PANELS else "none",
    )
    return Run(
        source=source,
        set=row["set"],
        device=DEVICES[_DEVICES[row["device"]]],
        mesh=Mesh(pipe=pipe, data=data, tensor=tensor),
        chunks=chunks,
        zero=int(row["zero"]),
        micro_size=micro_size,
        micro_batches=max(1, count) if chunks.num == 1 else -(-count // pipe) * pipe,
        seq_len=int(row["seq"]),
        recompute=_recompute(row["recompute"]),
        fuses_attention=row["attn"] == "flash",
        dtype="fp16" if row["precision"] == "fp16" else "bf16",
        thrashes="cliff" in row["flags"],
        step_s=float(row["step_s"]) if row["step_s"] else None,
        peak_gib=float(row["peak_gb"]) if row["peak_gb"] else None,
        failed=row["failed"] == "1",
        model=model_of_row(row),
        framework=row["framework"],
    )


def _recompute(text: str) -> Recompute:
    if text == "full":
        return "full"
    return "selective" if text.startswith("selective") else "none"


# Workloads ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PublishedWorkload(Workload):
    """A step of another framework."""

    saved_inner: float = 0.0
    """Elements per token and layer that it saves in addition to dslpar, and that tensor parallelism divides."""

    @cached_property
    def costs(self) -> ModelCosts:
        """Return the costs of the model's parts per rank."""
        assert isinstance(self.model, GPT)
        known = function_of(layers(self.model, self.seq_len))(self.mesh.tensor, float(self.tokens))
        return replace(known, layer=_with_saved(known.layer, self.tokens * self.saved_inner / self.mesh.tensor.y))


def _with_saved(costs: Costs, elements: float) -> Costs:
    saved = costs.memory.saved
    more = Saved(elements=float(saved.elements) + elements, wide=saved.wide)
    return costs._replace(memory=costs.memory._replace(saved=more))


def workload(run: Run) -> PublishedWorkload:
    """Return a row as a workload of the forecast."""
    is_nanotron = run.source == NANOTRON
    return PublishedWorkload(
        model=replace(run.model, dropout=0.1) if run.source == FIGURE else run.model,
        mesh=run.mesh,
        counts=nanotron_counts(run.model, run.mesh.pipe)
        if is_nanotron
        else _even(run.model.num_layers, run.chunks.stages),
        schedule=Schedule(run.chunks, run.micro_batches),
        micro_size=run.micro_size,
        seq_len=run.seq_len,
        zero=run.zero,
        dtype=run.dtype,
        recompute=run.recompute,
        framework=replace(_framework(run), fused_attention=run.fuses_attention),
        saved_inner=_saved_by_nanotron(run.model) if is_nanotron else 0.0,
    )


def _even(num_layers: int, stages: int) -> tuple[int, ...]:
    least, more = divmod(num_layers, stages)
    return tuple(least + (stage < more) for stage in range(stages))


# Frameworks --------------------------------------------------------------------------------------------------------

_MEGATRON = Framework(name="megatron", gradient_bytes=4.0, buckets=None, boundaries=0)
"""Gradients in fp32, beside master weights: 18 bytes per weight. It frees a stage's sent output, and its input is
saved.
"""
_NANOTRON = Framework(name="nanotron", gradient_bytes=6.0, buckets=None, logit_bytes=10.0)
"""Gradients in bf16, in buckets of torch's DDP, beside fp32 sums; logits in bf16, and in fp32 with a gradient."""
_NANOTRON_ONE_REPLICA = replace(_NANOTRON, gradient_bytes=4.0)
"""One replica needs no DDP, and has no buckets."""
_FSDP = Framework(name="fsdp", gradient_bytes=2.0, buckets=None)
"""16 bytes per weight: fp32 gradients, and no bf16 weights between their uses, which dslpar keeps."""
_FOUNDRY = replace(_FSDP, logit_bytes=4.0)
"""flash-attn's cross-entropy: bf16 logits and their gradient."""
_DEEPSPEED = Framework(name="megatron-deepspeed", buckets=Buckets(overlapped=False, reduce=5e8))


def _framework(run: Run) -> Framework:
    if run.source == NANOTRON:
        return _NANOTRON if run.mesh.data > 1 else _NANOTRON_ONE_REPLICA
    if "foundry" in run.framework:
        return _FOUNDRY
    if "FSDP" in run.framework:
        return _FSDP
    return _DEEPSPEED if "DeepSpeed" in run.framework and run.zero else _MEGATRON


def _saved_by_nanotron(model: GPT) -> float:
    """Return what nanotron's layer saves per token in addition to dslpar: copies around the rotation, and of swiglu."""
    kv_size = model.hidden_size // model.num_heads * model.kv_heads
    return 2 * model.hidden_size + 2 * kv_size + model.ffn_size


def winners(runs: Iterable[Run]) -> list[Run]:
    """Return the fastest run of each set with several."""
    by_set: dict[str, list[Run]] = {}
    for run in runs:
        if run.set and run.step_s:
            by_set.setdefault(run.set, []).append(run)
    return [min(runs, key=lambda run: run.step_s or 0.0) for runs in by_set.values() if len(runs) > 1]
