"""Tokens a second and MFU of dslpar's engine against plain torch and a nanoGPT-like model, in turns.

Plain torch is a loop over torch's own transformer layers, benchmarks.plain_torch; the other is what small training
scripts do, benchmarks.gpu.nano_gpt. Both compute by autocast in bf16, with fused AdamW and one micro-batch after the
other. dslpar takes turns with one and then with the other: the states of three would not fit beside each other.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks import by_hand
from benchmarks.gpu.nano_gpt import nano_step
from benchmarks.gpu.rows import Row, at_most
from benchmarks.gpu.training import cannot_compile
from benchmarks.gpu.world import engine_of, one_rank
from benchmarks.plain_torch import StockGPT, TrainingStep, training_step
from dslpar.costs import flops
from dslpar.engine.compiled_layers import loses_gradients

TURNS, STEPS = 7, 4
GPT_350M = by_hand.Sizes(layers=24, hidden=1024, heads=16, vocab=50304, sequence=1024, micro=8, accumulation=2)
GPT_1500M = by_hand.Sizes(layers=48, hidden=1536, heads=16, vocab=50304, sequence=1024, micro=2, accumulation=2)
"""With the states of two sides, 14 and 16 bytes per parameter and more for gradients, this fits into 80 GB."""
TINY = by_hand.Sizes(layers=2, hidden=64, heads=4, vocab=256, sequence=64, micro=2, accumulation=2)
CONFIG = """
model = dict(type='GPT', num_layers={s.layers}, hidden_size={s.hidden}, num_heads={s.heads},
             vocab_size={s.vocab}, max_seq_len={s.sequence})
optimizer = dict(type='AdamW', lr=3e-4)
batch = dict(micro_size={s.micro}, accumulation={s.accumulation})
train = dict(steps=1000, clip_grad_norm=1.0{train})
precision = 'bf16'
zero = 1
"""
TARGET = 1.05
"""Of the seconds of a step, over the other side's."""

Step = Callable[[], object]


def plain_step(sizes: by_hand.Sizes, device: torch.device) -> TrainingStep:
    """Return the step of a loop over torch's own layers."""
    with device:
        model = StockGPT(sizes)
    return training_step(model)


OTHERS: Mapping[str, Callable[[by_hand.Sizes, torch.device], TrainingStep]] = {
    "plain torch": plain_step,
    "nanoGPT-like": nano_step,
}
"""What dslpar is compared with."""


def gpt_350m(device: torch.device) -> Iterator[Row]:
    """GPT of 350M parameters; on a CPU a tiny one, of which nothing is asked."""
    if device.type == "cpu":
        return _in_turns("tiny", TINY, device, target=None)
    return _in_turns("350M", GPT_350M, device)


def gpt_1500m(device: torch.device) -> Iterator[Row]:
    """GPT of 1.5B parameters: in a process of its own, for what is left of another engine would not fit beside it."""
    return _in_turns("1.5B", GPT_1500M, device)


def gpt_350m_compiled(device: torch.device) -> Iterator[Row]:
    """350M with `compile=True`; the others stay as they are."""
    if loses_gradients():
        return iter([cannot_compile()])
    return _in_turns("350M, compile=True", GPT_350M, device, train=", compile=True")


def _in_turns(
    name: str, sizes: by_hand.Sizes, device: torch.device, train: str = "", target: float | None = TARGET
) -> Iterator[Row]:
    """Tokens a second and MFU of all sides, and a step's seconds over each of the others'."""
    with one_rank(device):
        batches = batches_of(sizes, device)
        engine = engine_of(CONFIG.format(s=sizes, train=train))
        for other, make_step in OTHERS.items():
            step = make_step(sizes, device)
            sides: dict[str, Step] = {"dslpar": partial(engine.train_batch, batches), other: partial(step, batches)}
            seconds = _seconds(sides, device)
            for side, taken in seconds.items():
                beside = f" beside {other}" if side == "dslpar" else ""
                yield Row(f"{name}, {side}{beside}", _rate(sizes, median(taken), device))
            ratio = median(own / its for own, its in zip(seconds["dslpar"], seconds[other], strict=True))
            what = f"{name}: a step over {other}'s"
            yield Row(what, f"{ratio:.3g}") if target is None else at_most(what, ratio, target)
            del step, sides
            _free(device)


def _rate(sizes: by_hand.Sizes, seconds: float, device: torch.device) -> str:
    """Tokens a second, and on a GPU that we know its MFU."""
    rate = sizes.micro * sizes.accumulation * sizes.sequence / seconds
    peak = flops.peak_flops_per_s(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    return f"{rate:,.0f} tokens/s" + (f", MFU {rate * _flops_per_token(sizes) / peak:.1%}" if peak else "")


def _flops_per_token(sizes: by_hand.Sizes) -> float:
    """Forward and backward; attention is causal, and counted as half."""
    weights = 12 * sizes.layers * sizes.hidden**2 + sizes.vocab * sizes.hidden
    return 6 * weights + 6 * sizes.layers * sizes.hidden * sizes.sequence


def batches_of(sizes: by_hand.Sizes, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the micro-batches of a step, of random ids."""
    shape = (sizes.accumulation, sizes.micro, sizes.sequence + 1)
    tokens = torch.randint(sizes.vocab, shape, generator=torch.Generator().manual_seed(1)).to(device)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def _seconds(sides: dict[str, Step], device: torch.device) -> dict[str, list[float]]:
    """Of STEPS steps each, in turns, after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(TURNS + 1):
        for name, step in sides.items():
            _wait(device)
            began = time.perf_counter()
            for _ in range(STEPS):
                step()
            _wait(device)
            if turn:
                seconds[name].append((time.perf_counter() - began) / STEPS)
    return seconds


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _free(device: torch.device) -> None:
    """Give back what a side has left, for the next one."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
