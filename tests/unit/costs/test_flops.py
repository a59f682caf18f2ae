"""FLOPs of a step, against torch's count over the real module; peaks of devices, by driver names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from dslpar.core.mesh import Mesh
from dslpar.costs.flops import peak_flops_per_s
from dslpar.distributed.groups import Groups
from dslpar.models import GPT, build_module
from dslpar.models.gpt.costs import flops_per_token, num_multiplied_weights

TIED = GPT(num_layers=3, hidden_size=24, num_heads=4, vocab_size=50, max_seq_len=16)
LLAMA = replace(
    TIED, norm="rmsnorm", activation="swiglu", positions="rotary", bias=False, tie_embeddings=False, num_kv_heads=2
)
MODELS = [
    TIED,
    replace(TIED, tie_embeddings=False, ffn_hidden_size=40),
    replace(TIED, num_layers=1, vocab_size=7),
    LLAMA,
    replace(TIED, num_kv_heads=1, activation="swiglu"),
]


def counted(model: GPT, batch: int) -> int:
    """Return FLOPs of a forward and backward by torch, which counts matrix products, and attention without its mask."""
    groups = Groups(Mesh())
    module = build_module(model, groups, seed=0)
    ids = torch.zeros(batch, model.max_seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(groups)(module(ids), ids).backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("model", MODELS)
def test_the_count_is_torch_s(model: GPT) -> None:
    """They are equal exactly, if the masked half of attention, which torch counts, is included."""
    flops = flops_per_token(model, model.max_seq_len)
    attention = flops.mfu_causal - flops.mfu_6n
    assert counted(model, batch=2) == 2 * model.max_seq_len * (flops.mfu_6n + 2 * attention)
    assert attention > 0


def test_weights_that_are_multiplied_are_the_matrices_of_the_module() -> None:
    for model in MODELS:
        module = build_module(model, Groups(Mesh()), seed=0)
        matrices = {name: p.numel() for name, p in module.named_parameters() if p.dim() >= 2}
        assert matrices["embedding.tokens.weight"] > 0
        assert ("embedding.positions.weight" in matrices) == (model.positions == "learned")
        matrices.pop("embedding.positions.weight", None)
        if not model.tie_embeddings:
            del matrices["embedding.tokens.weight"]
        assert num_multiplied_weights(model) == sum(matrices.values())


@pytest.mark.parametrize(
    ("device", "dtype", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "fp16", 125),
        ("Tesla V100-PCIE-16GB", "fp32", 14),
        ("Tesla V100S-PCIE-32GB", "fp16", 130),
        ("Tesla V100-SXM2-32GB", "bf16", None),
        ("NVIDIA A10", "bf16", 125),
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", "bf16", None),
        ("GRID A100-20C", "bf16", None),
        ("NVIDIA A100-40C", "bf16", None),
        ("AMD Instinct MI250X / MI250", "bf16", None),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312),
        ("NVIDIA A100 80GB PCIe", "fp32", 19.5),
        ("NVIDIA L4", "fp16", 121),
        ("NVIDIA L40S", "bf16", 362.05),
        ("NVIDIA L40", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "bf16", 989.5),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H100 NVL", "bf16", 835.5),
        ("NVIDIA H200", "bf16", 989.5),
        ("NVIDIA H200 NVL", "bf16", 835.5),
        ("NVIDIA B200", "fp16", 2250),
        ("NVIDIA B200", "fp32", 75),
        ("AMD Instinct MI250X", "bf16", 191.5),
        ("AMD Instinct MI300X", "bf16", 1307.4),
        ("NVIDIA GH200 480GB", "bf16", 989.5),
        ("NVIDIA H100 96GB HBM3", "bf16", 989.5),
        ("NVIDIA GB200", "bf16", 2500),
        ("NVIDIA GeForce RTX 4090", "fp16", 165.2),
        ("AMD Instinct MI325X", "fp32", 163.4),
        ("NVIDIA RTX A1000", "bf16", None),
        ("cpu", "fp32", None),
    ],
)
def test_a_peak_is_known_or_it_is_none(device: str, dtype: str, tflops: float | None) -> None:
    peak = peak_flops_per_s(device, dtype)
    assert peak == (None if tflops is None else pytest.approx(tflops * 1e12))
