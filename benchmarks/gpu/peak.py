"""The most memory that a step takes, against what follows from closed forms."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.gpu.rows import Row, holds
from benchmarks.gpu.speed import CONFIG, GPT_350M, batches_of
from benchmarks.gpu.world import engine_of, one_rank
from dslpar.core.mesh import Mesh
from dslpar.forecast.family import costs_of
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
