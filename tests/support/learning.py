"""Data from which small models learn in a minute: bytes of Python's own source, and digits."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from tests.support.digits import folder, load_digits

BYTES, MASK, SENTINEL, START = 256, 256, 257, 258
VOCABULARY = 260
LENGTH = 32
NOT_COUNTED = -100


@lru_cache
def windows() -> Tensor:
    """Return windows of bytes [samples, LENGTH]."""
    sources = [torch.__file__, folder() / "datasets" / "__init__.py", Path(torch.__file__).with_name("_tensor.py")]
    text = b"".join(Path(source).read_bytes() for source in sources)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    return tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)


class Masked:
    """Windows with a seventh of the bytes masked as targets, and whether the second half follows the first."""

    def __init__(self) -> None:
        self.tokens = windows()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(index)
        ids = self.tokens[index].clone()
        is_next = index % 2 == 0
        if not is_next:
            ids[LENGTH // 2 :] = self.tokens[(index + 17) % len(self)][LENGTH // 2 :]
        chosen = torch.rand(LENGTH, generator=generator) < 1 / 7
        labels = ids.masked_fill(~chosen, NOT_COUNTED)
        mask = torch.arange(LENGTH) < LENGTH - index % 4
        types = (torch.arange(LENGTH) >= LENGTH // 2).long()
        inputs = ids.masked_fill(chosen, MASK), mask, types
        return inputs, (labels.masked_fill(~mask, NOT_COUNTED), torch.tensor(int(is_next)))


class Denoised:
    """Windows with a span of eight bytes replaced by one token; the decoder predicts the span."""

    SPAN = 8

    def __init__(self) -> None:
        self.tokens = windows()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        begin = index % (LENGTH - self.SPAN)
        ids, span = self.tokens[index], self.tokens[index][begin : begin + self.SPAN]
        shown = torch.cat([ids[:begin], torch.tensor([SENTINEL]), ids[begin + self.SPAN :]])
        padded = torch.cat([shown, torch.zeros(LENGTH - len(shown), dtype=torch.long)])
        decoder = torch.cat([torch.tensor([START]), span[:-1]])
        return (padded, torch.arange(LENGTH) < len(shown), decoder), span


class NextByte:
    """Windows with each next byte as target."""

    def __init__(self) -> None:
        self.tokens = windows()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.tokens[index][:-1][:24], self.tokens[index][1:][:24]


class Hidden:
    """Digits with some of their sixteen patches hidden as targets, drawn anew for each sample."""

    PATCHES = 16

    def __len__(self) -> int:
        return len(digits().train)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        image, _ = digits().train[index]
        return (image, torch.rand(self.PATCHES, generator=torch.Generator().manual_seed(index))), image


class Digits(NamedTuple):
    """scikit-learn's 1,797 digits of 8 x 8 pixels; every fifth is held out."""

    train: Any
    held_out: tuple[Tensor, Tensor]


@lru_cache
def digits() -> Digits:
    """Return images [samples, 1, 8, 8] of about mean 0 and variance 1, and their classes."""
    found = load_digits()
    images = (torch.tensor(found.images, dtype=torch.float32)[:, None] - 4.9) / 6.0
    classes = torch.tensor(found.target)
    is_held_out = torch.arange(len(classes)) % 5 == 0
    train = TensorDataset(images[~is_held_out], classes[~is_held_out])
    return Digits(train, (images[is_held_out], classes[is_held_out]))


def accuracy(engine: Any) -> float:
    """Return a model's accuracy on held-out digits, or -1 on a rank without logits."""
    images, classes = digits().held_out
    size = engine.job.batch.micro_size * engine.job.batch.accumulation
    right = total = 0
    for begin in range(0, len(images) - size + 1, size):
        parts = torch.split(images[begin : begin + size], engine.job.batch.micro_size)
        labels = torch.split(classes[begin : begin + size], engine.job.batch.micro_size)
        found = engine.forward(zip(parts, labels, strict=True), keep_outputs=True)
        if found.output is not None:
            logits = getattr(found.output, "logits", found.output)
            right += int((logits.argmax(-1).cpu() == found.label.cpu()).sum())
            total += len(found.label)
    return right / total if total else -1.0
