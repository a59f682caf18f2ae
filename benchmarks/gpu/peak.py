"""Peak memory of a step on several layouts, against the forecast of `dslpar plan`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from benchmarks.gpu import ranks
from benchmarks.gpu.rows import Row, holds
from dslpar.forecast.stage_memory import stage_memory
from dslpar.forecast.workload import workload_of
from dslpar.linter import check

CONFIG = """
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
"""Layouts by number of ranks."""


def config_of(keys: str) -> str:
    """Return the text of a layout's config."""
    return CONFIG.format(keys=keys, train=", loss_chunks=4" if "mlp_chunks" in keys else "")


def of_layouts(device: torch.device) -> Iterator[Row]:
    """Check torch's peak allocation in a step over the forecast of `dslpar plan`, on the rank with the largest peak."""
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
