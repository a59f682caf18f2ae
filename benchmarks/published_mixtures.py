"""Published training steps of mixtures of experts in bf16, as workloads of the forecast; no constant is fitted on them.

    for run in mixture_runs():
        run.set, run.workload, run.step_s

All ran on Megatron-Core, whose tokens are sent to their experts, with tokens distributed evenly and none dropped:

- "Megatron-Core": the reference layout for Mixtral 8x7B in NVIDIA/Megatron-LM, megatron/core/transformer/moe/README.md,
  and the 468 TFLOP/s that it reports from version 0.9 on. Attention's scores count there without the causal mask.
- "DGX Cloud": NVIDIA/dgxc-benchmarking, the READMEs of grok1, deepseek_v3/pretrain and qwen3/pretrain. Its older Grok
  runs are left out: their experts are cut over tensor ranks too, and dslpar's are not.
- "Megatron Bridge": NVIDIA-NeMo/Megatron-Bridge, docs/performance-summary.md, container 25.11. GB300 is left out, which
  dslpar's table of devices has not.

Grok-1 has Mixtral's layers with other sizes. Recomputation of single modules is taken as none, unless it is that of
attention's scores. The multi-token prediction of DeepSeek-V3 is not forecast.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from benchmarks.published_runs import PublishedRun
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.costs.any_model import flops_per_token
from dslpar.forecast.device import device_named
from dslpar.forecast.links import Nodes
from dslpar.forecast.workload import Framework, Recompute, Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.layout.stages import Counts, uniform
from dslpar.schema.sections import OtherModel

_MEGATRON_CORE = Framework(name="Megatron-Core", overlaps_gather=True, buckets=None)
"""With --overlap-grad-reduce and --overlap-param-gather."""
_GROK = {
    "vocab_size": 131072,
    "hidden_size": 6144,
    "intermediate_size": 32768,
    "num_hidden_layers": 64,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_DEEPSEEK = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
}
_QWEN3 = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 1536,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
_GPT_OSS = {
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
_MODELS: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "Mixtral 8x7B": ("MixtralForCausalLM", 32, {}),
    "Grok-1": ("MixtralForCausalLM", 64, _GROK),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", 61, _DEEPSEEK),
    "Qwen3-235B-A22B": ("Qwen3MoeForCausalLM", 94, _QWEN3),
    "GPT-OSS 120B": ("GptOssForCausalLM", 36, _GPT_OSS),
}
"""Class of transformers, layers, and the sizes that differ from its defaults."""


class _Row(NamedTuple):
    source: str
    model: str
    device: str
    world: int
    tensor: int
    context: int
    pipe: int
    chunks: int
    """Stages per pipeline rank."""
    expert: int
    micro_size: int
    samples: int
    """Of a step."""
    seq_len: int
    step_s: float = 0.0
    tflops: float = 0.0
    """Per GPU, where the step's time is not published."""
    tokens_per_s: float = 0.0
    """Per GPU, where the step's time is not published."""
    recompute: Recompute = "none"


_ROWS = (
    _Row("Megatron-Core", "Mixtral 8x7B", "h100-80g", 64, 1, 1, 4, 8, 8, 1, 256, 4096, tflops=468.0),
    _Row("DGX Cloud", "Grok-1", "h100-80g", 512, 4, 2, 8, 8, 8, 1, 1024, 8192, step_s=15.933),
    _Row("DGX Cloud", "DeepSeek-V3", "h100-80g", 1024, 2, 1, 16, 1, 64, 1, 8192, 4096, step_s=52.04),
    _Row("DGX Cloud", "Qwen3-235B-A22B", "h100-80g", 256, 2, 1, 8, 4, 32, 1, 2048, 4096, step_s=25.532),
    _Row("Megatron Bridge", "GPT-OSS 120B", "h100-80g", 64, 1, 1, 4, 1, 8, 4, 512, 4096, tokens_per_s=5630),
    _Row("Megatron Bridge", "GPT-OSS 120B", "b200-180g", 64, 1, 1, 1, 1, 8, 4, 512, 4096, tokens_per_s=8213),
    _Row(
        "DGX Cloud",
        "DeepSeek-V3",
        "gb200-186g",
        128,
        2,
        1,
        4,
        1,
        32,
        1,
        1024,
        4096,
        step_s=34.229,
        recompute="selective",
    ),
    _Row("Megatron Bridge", "DeepSeek-V3", "gb200-186g", 256, 1, 1, 4, 4, 64, 1, 4096, 4096, tokens_per_s=3139),
    _Row("Megatron Bridge", "GPT-OSS 120B", "gb200-186g", 64, 1, 1, 1, 1, 64, 1, 1280, 8192, tokens_per_s=15876),
    _Row("Megatron Bridge", "Qwen3-235B-A22B", "gb200-186g", 256, 1, 1, 8, 3, 32, 1, 8192, 4096, tokens_per_s=4916),
)


def mixture_runs() -> list[PublishedRun]:
    """Return the published steps."""
    return [_run(row) for row in _ROWS]


def _run(row: _Row) -> PublishedRun:
    workload, device = _workload(row), device_named(row.device)
    tokens = row.samples * row.seq_len
    step_s = row.step_s
    if row.tokens_per_s:
        step_s = tokens / (row.world * row.tokens_per_s)
    elif row.tflops:
        flops = flops_per_token(workload.model, row.seq_len)
        assert flops is not None, "a model of the table"
        step_s = tokens * (2 * flops.mfu_causal - flops.mfu_6n) / (row.world * row.tflops * 1e12)
    name = f"{row.model} on {row.world} {row.device}"
    nodes = Nodes(device.per_node, device.nic_gb_per_s)
    return PublishedRun(row.source, name, False, workload, device, nodes, step_s)


def _workload(row: _Row) -> Workload:
    name, layers, sizes = _MODELS[row.model]
    config = {"config": {**sizes, "tie_word_embeddings": False, "max_position_embeddings": row.seq_len}}
    group, chunks = row.tensor * row.context, Chunks(row.pipe, row.chunks)
    tensor = TensorMesh(
        d=row.context,
        split="sequence" if row.context > 1 else "batch",
        y=row.tensor,
        mode="1d" if row.tensor > 1 else None,
        residual="sequence" if row.tensor > 1 else "replicated",
        e=row.expert // group,
        exchanges_tokens=True,
    )
    data = row.world // row.pipe // group
    return Workload(
        model=OtherModel(target=f"transformers.{name}", args=config),
        mesh=Mesh(pipe=row.pipe, data=data, tensor=tensor),
        counts=_counts(layers, chunks.stages),
        schedule=Schedule(chunks, row.samples // (data * row.micro_size)),
        micro_size=row.micro_size,
        seq_len=row.seq_len,
        zero=1,
        recompute=row.recompute,
        framework=_MEGATRON_CORE,
    )


def _counts(layers: int, stages: int) -> Counts:
    """Return the layers of each stage; where that divides, embedding and head count as a layer each, as in the recipes.

    >>> _counts(94, 32)[:2], _counts(94, 32)[-1], _counts(36, 4)
    ((2, 3), 2, (9, 9, 9, 9))
    """
    if layers % stages and (layers + 2) % stages == 0:
        each = (layers + 2) // stages
        return (each - 1, *[each] * (stages - 2), each - 1)
    return uniform(layers, stages)
