"""Tokens a second and MFU of dslpar's engine against a plain loop over the same model in torch.nn, in turns.

The plain loop is what nanoGPT does on one device: bf16 weights' copies by autocast, fused AdamW, torch's attention, one
micro-batch after the other; its model is benchmarks.by_hand's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import torch
from torch import Tensor

from benchmarks import by_hand
from benchmarks.gpu.rows import Row, at_most
from benchmarks.gpu.world import engine_of, one_rank
from dslpar.forecast import flops

TURNS, STEPS = 7, 4
GPT_350M = by_hand.Sizes(layers=24, hidden=1024, heads=16, vocab=50304, sequence=1024, micro=8, accumulation=2)
GPT_1500M = by_hand.Sizes(layers=48, hidden=1536, heads=16, vocab=50304, sequence=1024, micro=2, accumulation=2)
"""With the states of both sides, 14 and 16 bytes a parameter and more for gradients, this fits into 80 GB."""
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
"""Of the seconds of a step, over the plain loop's."""

Step = Callable[[], object]


def gpt_350m(device: torch.device) -> Iterator[Row]:
    """GPT of 350M parameters; on a CPU a tiny one, of which nothing is asked."""
    if device.type == "cpu":
        return _in_turns("tiny", TINY, device, target=None)
    return _in_turns("350M", GPT_350M, device)


def gpt_1500m(device: torch.device) -> Iterator[Row]:
    """GPT of 1.5B parameters: in a process of its own, for what is left of another engine would not fit beside it."""
    return _in_turns("1.5B", GPT_1500M, device)


def gpt_350m_compiled(device: torch.device) -> Iterator[Row]:
    """350M with `compile=True`; the plain loop stays as it is."""
    return _in_turns("350M, compile=True", GPT_350M, device, train=", compile=True")


def _in_turns(
    name: str, sizes: by_hand.Sizes, device: torch.device, train: str = "", target: float | None = TARGET
) -> Iterator[Row]:
    """Seconds over the plain loop's, tokens a second and MFU of both."""
    with one_rank(device):
        batches = batches_of(sizes, device)
        engine = engine_of(CONFIG.format(s=sizes, train=train))
        plain = _plain(sizes, device)
        sides: dict[str, Step] = {"dslpar": partial(engine.train_batch, batches), "plain": partial(plain, batches)}
        seconds = _seconds(sides, device)
    per_token = _flops_per_token(sizes)
    tokens = sizes.micro * sizes.accumulation * sizes.sequence
    peak = flops.peak_flops_per_s(torch.cuda.get_device_name(device), "bf16") if device.type == "cuda" else None
    for side, taken in seconds.items():
        rate = tokens / median(taken)
        mfu = f", MFU {rate * per_token / peak:.1%}" if peak else ""
        yield Row(f"{name}, {side}", f"{rate:,.0f} tokens/s{mfu}")
    ratio = median(own / other for own, other in zip(seconds["dslpar"], seconds["plain"], strict=True))
    what = f"{name}: a step over the plain loop's"
    yield Row(what, f"{ratio:.3g}") if target is None else at_most(what, ratio, target)


def _flops_per_token(sizes: by_hand.Sizes) -> float:
    """Forward and backward; attention is causal, and counted as half."""
    weights = 12 * sizes.layers * sizes.hidden**2 + sizes.vocab * sizes.hidden
    return 6 * weights + 6 * sizes.layers * sizes.hidden * sizes.sequence


def batches_of(sizes: by_hand.Sizes, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    shape = (sizes.accumulation, sizes.micro, sizes.sequence + 1)
    tokens = torch.randint(sizes.vocab, shape, generator=torch.Generator().manual_seed(1)).to(device)
    return [(row[:, :-1].contiguous(), row[:, 1:].contiguous()) for row in tokens]


def _plain(sizes: by_hand.Sizes, device: torch.device) -> Callable[[list[tuple[Tensor, Tensor]]], None]:
    """The plain loop's step."""
    model = by_hand.GPT(sizes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=device.type == "cuda")

    def step(batches: list[tuple[Tensor, Tensor]]) -> None:
        for ids, labels in batches:
            with torch.autocast(device.type, torch.bfloat16):
                loss = by_hand.loss(model(ids), labels) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


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
