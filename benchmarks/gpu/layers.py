"""Layers on the device: numbers against float64, waits of the host, kernels, determinism, memory."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.rows import Row, at_most, holds
from dslpar.core.mesh import Mesh
from dslpar.costs import any_model as costs
from dslpar.distributed.determinism import VARIABLES
from dslpar.distributed.groups import Groups
from dslpar.layers import (
    IGNORE_INDEX,
    Block,
    Form,
    Head,
    Rotary,
    cross_entropy,
    gradient_accumulation_fusion,
    initialize,
)
from dslpar.models.gpt import section
from dslpar.models.recompute import Step, run_layers

FORMS = {
    "GPT": Form(),
    "Llama": Form(norm="rmsnorm", activation="swiglu", rotary=Rotary(), num_kv_heads=4, bias=False),
}
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Relative to the largest element: a few dozen roundings of a sum whose terms are as large as it is."""
NARROW_SUMS = ("norm1", "norm2")
"""Parameters whose gradients torch's LayerNorm sums over tokens in the weights' dtype on a CPU, but in float32 on a
GPU.
"""


def _block(form: str, hidden: int, heads: int, dropout: float = 0.0) -> Block:
    groups = Groups(Mesh())
    block = Block(groups, hidden, heads, form=FORMS[form], dropout=dropout)
    initialize(block, groups, seed=1)
    return block


def _input(hidden: int, device: torch.device, dtype: torch.dtype, micro: int = 2, sequence: int = 256) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(micro, sequence, hidden, generator=generator, dtype=torch.float64)
    return x.to(device, dtype).requires_grad_()


def _results(block: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Return the output and all gradients by name."""
    y = block(x)
    y.backward(torch.ones_like(y) / 8)
    assert x.grad is not None
    gradients = {name: p.grad for name, p in block.named_parameters() if p.grad is not None}
    return {"y": y.detach(), "x": x.grad} | gradients


def numbers(device: torch.device) -> Iterator[Row]:
    """Check a block's output and gradients in each dtype against float64 on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, heads = (256, 8) if device.type == "cpu" else (1024, 16)
    for form in FORMS:
        block = _block(form, hidden, heads)
        exact = _results(copy.deepcopy(block).double(), _input(hidden, torch.device("cpu"), torch.float64))
        for dtype, tolerance in TOLERANCE.items():
            found = _results(copy.deepcopy(block).to(device, dtype), _input(hidden, device, dtype))
            is_narrow = device.type == "cpu" and dtype is not torch.float32
            compared = {
                name: value for name, value in exact.items() if not (is_narrow and name.startswith(NARROW_SUMS))
            }
            what = f"{form} block, {str(dtype).removeprefix('torch.')}, against float64"
            yield at_most(what, _distance(found, compared), tolerance)


SCALE = 64.0
"""Scale of the summed losses, like a loss scale: a probability of 1 / vocabulary is subnormal in float16."""


def head_and_loss(device: torch.device) -> Iterator[Row]:
    """Check a head with its loss, and their gradients, against torch's in float64 on the CPU.

    On a GPU the loss has its own steps, even if one rank has the whole vocabulary. Here the vocabulary is padded, some
    labels are ignored, and in the second row the others are smoothed.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    hidden, vocab, width = (64, 1000, 1024) if device.type == "cpu" else (1024, 50257, 50304)
    groups = Groups(Mesh())
    head = Head(groups, hidden, width)
    initialize(head, groups, seed=1)
    labels = torch.randint(vocab, (2, 256), generator=torch.Generator().manual_seed(3))
    labels[:, ::7] = IGNORE_INDEX
    for smoothing in (0.0, 0.1):
        exact = _exact_loss(head, _input(hidden, labels.device, torch.float64), labels, vocab, smoothing)
        for dtype, tolerance in TOLERANCE.items():
            ours, x = copy.deepcopy(head).to(device, dtype), _input(hidden, device, dtype)
            loss = cross_entropy(groups, ours(x), labels.to(device), vocab, label_smoothing=smoothing, reduction="sum")
            (SCALE * loss).backward()
            found = {"loss": loss.detach(), "x": x.grad, "weight": ours.weight.grad}
            what = f"head and loss, smoothing {smoothing:g}, {str(dtype).removeprefix('torch.')}, against float64"
            yield at_most(what, _distance(found, exact), tolerance)


def _exact_loss(head: Head, x: Tensor, labels: Tensor, vocab: int, smoothing: float) -> dict[str, Tensor | None]:
    weight = head.weight.detach().double().requires_grad_()
    logits = functional.linear(x, weight)[..., :vocab].flatten(0, 1)
    loss = functional.cross_entropy(
        logits, labels.flatten(), reduction="sum", label_smoothing=smoothing, ignore_index=IGNORE_INDEX
    )
    (SCALE * loss).backward()
    return {"loss": loss.detach(), "x": x.grad, "weight": weight.grad}


def _distance(found: Mapping[str, Any], exact: Mapping[str, Any]) -> float:
    """Return the largest difference of an element, relative to its tensor's largest, or NaN if there is one."""
    off = [(found[name].double().cpu() - other).abs().max() / other.abs().max() for name, other in exact.items()]
    return float(torch.stack(off).max())


def waits(device: torch.device) -> Iterator[Row]:
    """Check that neither forward nor backward of a block waits for the device, by torch's errors on waits."""
    for form in FORMS:
        block = _block(form, 256, 8).to(device, torch.bfloat16)
        x = _input(256, device, torch.bfloat16)
        _results(block, x)  # the first use makes tables
        torch.cuda.set_sync_debug_mode("error")
        try:
            _results(block, x)
            said = "none"
        except RuntimeError as error:
            said = str(error).splitlines()[0]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        yield holds(f"{form} block: waits of the host", said, "none", said == "none")


def kernels(device: torch.device) -> Iterator[Row]:
    """Yield a block's kernels by torch's profiler, and the attention kernel that ran."""
    for form in FORMS:
        block = _block(form, 1024, 16).to(device, torch.bfloat16)
        x = _input(1024, device, torch.bfloat16)
        _results(block, x)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            _results(block, x)
            torch.cuda.synchronize()
        names = [each.name for each in seen.events() if each.device_type == DeviceType.CUDA]
        attention = [name for name in names if "flash" in name.lower() or "fmha" in name.lower()]
        yield Row(f"{form} block: kernels, forward and backward", str(len(names)))
        yield holds(
            f"{form} block: attention",
            attention[0][:28] if attention else "no fused one",
            "a fused kernel",
            bool(attention),
        )


def sums(device: torch.device) -> Iterator[Row]:
    """Check that a product adds to an fp32 sum without rounding to half precision.

    Half-precision training at ZeRO 1 accumulates weight gradients in this way if torch has such products.
    """
    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.bfloat16, torch.float16):
        a, b = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((1024, 4096), (4096, 512)))
        total = torch.randn(1024, 512, generator=generator).to(device)
        name, exact = str(dtype).removeprefix("torch."), total.double() + a.double() @ b.double()
        if not gradient_accumulation_fusion.has_wide_products(a):
            yield Row(f"sums in products, {name}", "this device has none")
            continue
        gradient_accumulation_fusion.add_product_(total, a, b)
        off = float((total.double() - exact).abs().max() / exact.abs().max())
        # A sum of 4,096 products in fp32, in any order; one rounding to bf16 is up to 2e-3.
        yield at_most(f"sums in products, {name}, against float64", off, 1e-5)


def bits(device: torch.device) -> Iterator[Row]:
    """Check that recomputation with dropout changes no bit, and that two equal runs give equal bits."""
    for name, value in VARIABLES.items():  # as train.deterministic sets them, before cuBLAS starts
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    for form in FORMS:
        results = []
        for interval in (0, 1, 0):
            blocks = [_block(form, 256, 8, dropout=0.1).to(device, torch.bfloat16) for _ in range(2)]
            x = _input(256, device, torch.bfloat16)
            torch.manual_seed(5)
            y = run_layers([Step(block, True) for block in blocks], x, interval)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), x.grad, *(p.grad for block in blocks for p in block.parameters())])
        first, recomputed, again = results
        yield holds(
            f"{form} blocks, dropout: again", _differing(first, again), "0 tensors differ", not _differing(first, again)
        )
        yield holds(
            f"{form} blocks, dropout: recomputed",
            _differing(first, recomputed),
            "0 tensors differ",
            not _differing(first, recomputed),
        )


def _differing(ours: list[Tensor | None], theirs: list[Tensor | None]) -> int:
    return sum(not torch.equal(own, other) for own, other in zip(ours, theirs, strict=True))  # type: ignore[arg-type]


SECTIONS: Mapping[str, Mapping[str, Any]] = {
    "GPT": {},
    "Llama": dict(norm="rmsnorm", activation="swiglu", positions="rotary", num_kv_heads=4, bias=False),
}
"""The fields of a GPT's section per form."""


def saved(device: torch.device) -> Iterator[Row]:
    """Check the memory that a block keeps for its backward, over the closed form of dslpar.costs.memory."""
    hidden, heads, micro, sequence = 2048, 16, 4, 2048
    sizes: dict[str, Any] = dict(
        hidden_size=hidden, num_heads=heads, ffn_hidden_size=4 * hidden, vocab_size=1, max_seq_len=sequence
    )
    for form, fields in SECTIONS.items():
        block = _block(form, hidden, heads).to(device, torch.bfloat16)
        x = _input(hidden, device, torch.bfloat16, micro, sequence)
        _results(block, x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = block(x)
        torch.cuda.synchronize()
        # The input is kept as well, but existed before; the output belongs to the next layer.
        kept = torch.cuda.memory_allocated() - before + 2 * x.numel() - 2 * y.numel()
        found = costs.layer_memory(section.GPT(num_layers=1, **sizes, **fields), Mesh().tensor, micro * sequence).saved
        # The closed form counts the result of an RMSNorm, which torch keeps on a CPU, but its GPU kernel does not.
        results = 2 * x.numel() if form == "Llama" else 0
        forecast = 2 * float(found.elements - results) + 4 * float(found.wide)
        ratio = kept / forecast
        name = f"{form} block: kept for the backward, over the forecast"
        del y  # frees what its block has kept, which the next count would include
        yield holds(name, f"{ratio:.3f}", "0.95 to 1.05", 0.95 <= ratio <= 1.05)
