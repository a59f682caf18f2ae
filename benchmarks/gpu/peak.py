"""The most memory that a step takes, against what follows from closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from benchmarks.gpu import ranks
from benchmarks.gpu.rows import Row, holds
from benchmarks.gpu.speed import CONFIG, GPT_350M, batches_of
from benchmarks.gpu.world import engine_of, one_rank
from dslpar.core.mesh import Mesh
from dslpar.forecast.family import costs_of
from dslpar.forecast.stage_memory import stage_memory
from dslpar.forecast.workload import workload_of
from dslpar.linter import check
from dslpar.schema.sections import Model

STATE_BYTES = 2 + 4 + 4 + 4
"""Of a parameter: the bf16 weight; in float32 its master copy and Adam's two moments."""
LOGIT_BYTES = 2 + 4 + 2
"""As the loss's backward begins: the bf16 logits, their softmax in float32, their gradient."""


def of_a_step(device: torch.device) -> Iterator[Row]:
    """Peak of a step of 350M in bf16 at ZeRO 1, one micro-batch, over states, saved activations and logits.

    The peak is where the backward begins. Gradients come later: 6 bytes a parameter, as activations go; and so do the
    optimizer's copies of them, 8 bytes. What the closed form leaves out is the reduction's buckets, some 2 %, and the
    final norm.
    """
    sizes = GPT_350M._replace(accumulation=1)
    with one_rank(device):
        batches = batches_of(sizes, device)
        engine = engine_of(CONFIG.format(s=sizes, train=""))
        engine.train_batch(batches)  # which makes Adam's moments
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        engine.train_batch(batches)
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated()
        num_parameters = sum(p.numel() for p in engine.module.parameters())
    model, tokens = engine.job.spec.model, sizes.micro * sizes.sequence
    assert isinstance(model, Model)
    saved = costs_of(model).layer_memory(model, Mesh().tensor, tokens).saved
    layers = sizes.layers * (2 * float(saved.elements) + 4 * float(saved.wide))
    forecast = STATE_BYTES * num_parameters + layers + LOGIT_BYTES * tokens * sizes.vocab
    ratio = peak / forecast
    yield Row("a step of 350M, bf16, ZeRO 1: peak", f"{peak / 2**30:.2f} GiB, forecast {forecast / 2**30:.2f}")
    yield holds("a step of 350M: peak over the forecast", f"{ratio:.3f}", "0.95 to 1.10", 0.95 <= ratio <= 1.10)


FORECAST = """
model = dict(type='GPT', num_layers=8, hidden_size=1024, num_heads=16, vocab_size=50304, max_seq_len=1024)
optimizer = dict(type='AdamW', lr=1e-4)
batch = dict(global_size=16, accumulation=4)
train = dict(steps=6, save_interval=0, clip_grad_norm=1.0{train})
{keys}
"""
BF16, ONE, FLAT = "precision = 'bf16'\n", "zero = 1\n", "parallel = dict(tensor=dict(size={}, mode='{}'{}))\n"
PIPE = "parallel = dict(pipeline=2)\n"
LAYOUTS: Mapping[int, Mapping[str, str]] = {
    1: {
        "fp32, ZeRO 0": "",
        "ZeRO 1": BF16 + ONE,
        "ZeRO 1, recomputed": BF16 + ONE + "activation_checkpoint = 1\n",
        "ZeRO 1, parts of tokens": BF16 + ONE + "activation_checkpoint = dict(interval=1, mlp_chunks=4)\n",
    },
    2: {
        "1d": BF16 + ONE + FLAT.format(2, "1d", ""),
        "1d, sequence": BF16 + ONE + FLAT.format(2, "1d", ", sequence=True"),
        "pipeline": BF16 + ONE + PIPE,
        "pipeline, zero bubble": BF16 + ONE + PIPE + "schedule = dict(type='zero_bubble')\n",
        "data, ZeRO 1": BF16 + ONE,
        "data, ZeRO 2": BF16 + "zero = 2\n",
        "data, ZeRO 3": BF16 + "zero = 3\n",
        "ring": BF16 + ONE + "parallel = dict(context=dict(size=2, impl='ring'))\n",
    },
    4: {"2d": BF16 + ONE + FLAT.format(4, "2d", "")},
}
"""By ranks."""


def config_of(keys: str) -> str:
    """Return the text of a layout's config."""
    return FORECAST.format(keys=keys, train=", loss_chunks=4" if "mlp_chunks" in keys else "")


def forecast_of_layouts(device: torch.device) -> Iterator[Row]:
    """The most that torch gives out in a step, over what `dslpar plan` says, of the rank that needs the most."""
    for world, layouts in LAYOUTS.items():
        if world > ranks.most_ranks(device):
            for layout in layouts:
                yield Row(f"{layout} on {world} ranks: peak", "not run", f"{world} GPUs")
            continue
        configs = {layout: config_of(keys) for layout, keys in layouts.items()}
        ended, found = ranks.train(configs, world, device)
        for layout, text in configs.items():
            name = f"{layout} on {world} rank{'s' * (world > 1)}: peak over the forecast"
            if layout not in found:
                yield ranks.failed(name, ended)
                continue
            workload = workload_of(check.resolve(check.load_text(text, "gpu.py"), world))
            assert workload is not None, "a GPT's costs are known"
            expected = [stage_memory(workload, rank).allocated for rank in range(workload.mesh.pipe)]
            peaks = [max(peak for pipe, peak in found[layout].peaks if pipe == rank) for rank in range(len(expected))]
            seen = ", ".join(
                f"{peak / 2**30:.2f} for {other / 2**30:.2f} GiB" for peak, other in zip(peaks, expected, strict=True)
            )
            ratio = max(peaks) / max(expected)
            yield holds(name, f"{ratio:.3f}: {seen}", "0.97 to 1.03", 0.97 <= ratio <= 1.03)
