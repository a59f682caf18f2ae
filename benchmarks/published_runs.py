"""Published training steps as workloads of the forecast: the rows of ../shared/data/published_runs.csv.

    runs = read("../shared/data/published_runs.csv")
    runs[0].stack, runs[0].workload, runs[0].step_s

Each stack has its `Framework`: how it partitions stages, and what it keeps, sums and sends. Runs in fp8 are left out,
and so are runs without a reported micro-batch.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from dslpar.core.mesh import Keep, Mesh, TensorMesh
from dslpar.forecast.device import Device, device_named
from dslpar.forecast.links import Nodes
from dslpar.forecast.workload import Framework, Recompute, Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.layout.stages import Counts, uniform
from dslpar.models.gpt.section import GPT

STACKS = {
    "0": "nanotron",
    "1": "vTrain multi",
    "2": "vTrain single",
    "3": "foundry",
    "8": "Megatron-LM",
    "9": "Megatron-LM",
    "10": "BigScience",
    "11": "BigScience",
}
"""By the source's number in the data's README; other sources are not scored."""
NEW_STACKS = {
    "20": "NeMo",
    "21": "InternEvo",
    "22": "fms-fsdp",
    "27": "KempnerForge",
}
"""Sources of published_runs_new_stacks.csv, on which no constant is fitted."""
_ALL_STACKS = STACKS | NEW_STACKS
MOST_NODES = 32
"""Limit for nanotron's runs: on 64 nodes its fabric was two to three times slower."""

_DEVICES = {
    "H100-SXM-80GB": "h100-80g",
    "A100-SXM-80GB": "a100-80g",
    "A100-SXM-40GB": "a100-40g",
    "V100-SXM2-32GB": "v100-32g",
    "V100-SXM2-16GB": "v100-16g",
    "H200-SXM-141GB": "h200-141g",
}
_NETWORKS = {
    "EFA 3200": 400,
    "IB HDR 800": 100,
    "IB/RoCE 3200": 400,
    "IB/RoCE 1600": 200,
    "IB HDR 1600": 200,
    "Omni-Path": 50,
    "IB NDR 3200": 400,
    "IB NDR 1600": 200,
    "IB/RoCE 800": 100,
    "IB/RoCE 400": 50,
    "RoCE 400": 50,
}
"""GB/s per node, by the beginning of its description."""

_MEGATRON = Framework(
    name="Megatron",
    gradient_bytes=2.0,
    reduced_bytes=2.0,
    overlaps_reduction=False,
    fused_attention=False,
    splits_messages=True,
    gathers_buffers=False,
)
_FUSED_SOFTMAX_DIVISOR = 4
"""Megatron's softmax is one kernel if this divides samples times heads."""
_UNFUSED_SOFTMAX = replace(_MEGATRON, launch_ratio=21 / 17)
"""Otherwise it has four more kernels (to float32, scale, mask, and back) than the 17 of a layer's forward, as counted
in the source.
"""
_FRAMEWORKS = {
    "nanotron": Framework(name="nanotron", blocking_messages=True, fused_optimizer=False, gathers_buffers=False),
    "foundry": Framework(name="FSDP", gradient_bytes=2.0, reduced_bytes=2.0, prefetches_weights=False),
    "NeMo": Framework(name="Megatron-Core", overlaps_gather=True, buckets=None),
    "InternEvo": Framework(name="InternEvo", gradient_bytes=2.0, reduced_bytes=2.0),
    "fms-fsdp": Framework(name="FSDP", gradient_bytes=2.0, reduced_bytes=2.0),
    "KempnerForge": Framework(name="FSDP", gradient_bytes=2.0, reduced_bytes=2.0),
}


@dataclass(frozen=True)
class PublishedRun:
    """A published measurement of a step."""

    stack: str
    set: str
    """Runs of one set are alternatives with the same model, devices and global batch."""
    filtered: bool
    """Whether the filtered scores leave it out, by the data's README on flags and nodes."""
    workload: Workload
    device: Device
    nodes: Nodes
    step_s: float


def read(path: str) -> list[PublishedRun]:
    """Return the scored runs. Raises: OSError."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [published_run(row) for row in rows if is_scored(row)]


def read_new_stacks(path: str) -> list[PublishedRun]:
    """Return the timed runs of the stacks on which no constant is fitted. Raises: OSError."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [published_run(row) for row in rows if row["source"] in NEW_STACKS and row["step_s"]]


def is_scored(row: Mapping[str, str]) -> bool:
    """Return whether a row has a time, and everything that a workload needs."""
    return bool(row["source"] in STACKS and row["step_s"] and row["mbs"] and "fp8" not in row["precision"])


def published_run(row: Mapping[str, str]) -> PublishedRun:
    """Return the run of a row."""
    stack = _ALL_STACKS[row["source"]]
    per_node = int(row["gpus_per_node"])
    network = next(speed for name, speed in _NETWORKS.items() if row["net"].startswith(name))
    too_many = stack == "nanotron" and int(row["gpus"]) > MOST_NODES * per_node
    return PublishedRun(
        stack=stack,
        set=row["set"],
        filtered=bool(row["flags"]) or too_many,
        workload=workload_of_row(row),
        device=device_named(_DEVICES[row["device"]]),
        nodes=Nodes(per_node, network),
        step_s=float(row["step_s"]),
    )


def workload_of_row(row: Mapping[str, str]) -> Workload:
    """Return the workload of a row."""
    stack, model = _ALL_STACKS[row["source"]], model_of_row(row)
    sizes = {name: int(row[name] or 1) for name in ("dp", "tp", "pp", "vp", "mbs", "gbs", "seq", "zero")}
    pipe, chunks = sizes["pp"], Chunks(sizes["pp"], sizes["vp"] if sizes["pp"] > 1 else 1)
    sequence = row["sp"] == "1" and sizes["tp"] > 1
    tensor = TensorMesh(
        y=sizes["tp"],
        mode="1d" if sizes["tp"] > 1 else None,
        residual="sequence" if sequence else "replicated",
        keep=nanotron_keep(pipe, sizes["tp"]) if stack == "nanotron" else "x",
    )
    return Workload(
        model=model,
        mesh=Mesh(pipe=pipe, data=sizes["dp"], tensor=tensor),
        counts=counts_of_row(stack, model, chunks),
        schedule=Schedule(chunks, max(1, round(sizes["gbs"] / (sizes["dp"] * sizes["mbs"])))),
        micro_size=sizes["mbs"],
        seq_len=sizes["seq"],
        zero=int(row["zero"] or 0),
        dtype="fp16" if row["precision"] == "fp16" else "bf16",
        recompute=_recompute(row["recompute"]),
        framework=_framework(stack, model.num_heads * sizes["mbs"] // sizes["tp"], row["zero"] == "3"),
    )


def _framework(stack: str, samples_and_heads: int, shards_weights: bool) -> Framework:
    """Return a stack's behaviour, for attention over so many samples times heads per rank.

    The rows of Megatron-LM's paper with ZeRO 3 ran on the DeepSpeed of 2021, before it gathered weights ahead.
    """
    if stack in _FRAMEWORKS:
        return _FRAMEWORKS[stack]
    megatron = _UNFUSED_SOFTMAX if samples_and_heads % _FUSED_SOFTMAX_DIVISOR else _MEGATRON
    return replace(megatron, prefetches_weights=False) if shards_weights else megatron


def model_of_row(row: Mapping[str, str]) -> GPT:
    """Return the model of a row: Llama's form if its MLP is gated, else GPT-2's."""
    llama = row["act"] == "swiglu"
    return GPT(
        num_layers=int(row["L"]),
        hidden_size=int(row["h"]),
        num_heads=int(row["a"]),
        vocab_size=_vocab_size(row),
        max_seq_len=int(row["seq"]),
        num_kv_heads=int(row["kv"] or row["a"]),
        ffn_hidden_size=int(row["ffn"]),
        tie_embeddings=row["tied"] == "1",
        norm="rmsnorm" if llama else "layernorm",
        activation="swiglu" if llama else "gelu",
        positions="rotary" if llama else "learned",
        bias=not llama,
    )


def nanotron_keep(pipe: int, size: int) -> Keep:
    """Return what nanotron keeps of a layer's gathered panels, judged by its steps and peaks: whole panels on two ranks
    and without a pipeline, else pieces, which it gathers again.
    """
    return "x" if pipe == 1 or size <= 2 else "none"


def _vocab_size(row: Mapping[str, str]) -> int:
    """Return the size of a row's vocabulary on its ranks.

    vTrain's models have 50,257 tokens (src/config.py of its repository), and the data has them padded for eight ranks.
    That a single rank does not pad is inferred from its steps: the part independent of the layers grows by 4.7 ms per
    sample on one rank, and by 0.9 ms on each of two.
    """
    return 50257 if STACKS.get(row["source"], "").startswith("vTrain") and row["tp"] == "1" else int(row["vocab"])


def counts_of_row(stack: str, model: GPT, chunks: Chunks) -> Counts:
    """Return the layers on each stage: nanotron weighs the head by its products, Megatron counts layers."""
    return nanotron_counts(model, chunks.pipe) if stack == "nanotron" else uniform(model.num_layers, chunks.stages)


def nanotron_counts(model: GPT, pipe: int) -> Counts:
    """Return the layers on each stage, as nanotron's `build_model` (src/nanotron/models/base.py) partitions them.

    A stage takes layers until their cost and the cost of all earlier layers reach its share of the total, with the head
    included. The code there has "exceeds". But for the model of 16 layers whose head costs as much as four layers, both
    steps and peaks match ten layers on the first of two stages, not eleven.

    >>> model = GPT(num_layers=16, hidden_size=2048, num_heads=32, vocab_size=131072, max_seq_len=4096,
    ...             ffn_hidden_size=8192, activation="swiglu")
    >>> nanotron_counts(model, 4), nanotron_counts(model, 8)
    ((5, 5, 5, 1), (3, 2, 3, 2, 3, 2, 1, 0))
    """
    layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.ffn_size
    total, stage = model.num_layers * layer + model.hidden_size * model.vocab_size, 0
    counts = [0] * pipe
    for num in range(1, model.num_layers + 1):
        counts[stage] += 1
        if num * layer * pipe >= total * (stage + 1):
            stage = min(stage + 1, pipe - 1)
    return tuple(counts)


def _recompute(text: str) -> Recompute:
    if text == "full":
        return "full"
    return "selective" if text.startswith("selective") else "none"


def by_set(runs: Sequence[PublishedRun]) -> dict[str, list[int]]:
    """Return the positions of each set's runs."""
    found: dict[str, list[int]] = {}
    for index, run in enumerate(runs):
        found.setdefault(run.set, []).append(index)
    return found


# arXiv 2205.05198, tables 3 and 5 -----------------------------------------------------------------------------------

_SELECTIVE_TABLE = (
    # layers, hidden size, heads, pipe, chunks, global batch, micro-batch, seconds: with full, with selective recompute
    (48, 6144, 64, 1, 1, 4, 4, 1.42, 1.10),
    (96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
    (105, 20480, 128, 35, 3, 280, 1, 49.05, 37.83),
    (128, 25600, 160, 64, 1, 512, 1, 94.42, 71.49),
)


def selective_recompute_runs() -> list[PublishedRun]:
    """Return the eight steps of Korthikanti et al., 22B to 1T parameters on A100s, each in two variants.

    The variants are full recomputation, and recomputation of attention scores alone, with sequence parallelism.
    """
    device = device_named("a100-80g")
    made = []
    for layers, hidden, heads, pipe, num, samples, micro_size, *seconds in _SELECTIVE_TABLE:
        model = GPT(num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=51200, max_seq_len=2048)
        chunks = Chunks(pipe, num)
        for step_s, selective in zip(seconds, (False, True), strict=True):
            tensor = TensorMesh(y=8, mode="1d", residual="sequence" if selective else "replicated")
            workload = Workload(
                model=model,
                mesh=Mesh(pipe=pipe, tensor=tensor),
                counts=uniform(layers, chunks.stages),
                schedule=Schedule(chunks, samples // micro_size),
                micro_size=micro_size,
                seq_len=2048,
                dtype="fp16",
                recompute="selective" if selective else "full",
                framework=_MEGATRON,
            )
            name = f"2205.05198/{hidden}"
            made.append(PublishedRun("2205.05198", name, False, workload, device, Nodes(8, 200), step_s))
    return made
