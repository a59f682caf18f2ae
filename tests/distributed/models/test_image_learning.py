"""ResMLP learns digits and MoCo's loss falls, over stages, replicas and tensor ranks, from short configs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import dslpar
from tests.support import learning
from tests.support.plain_models import written
from tests.support.ranks import on_ranks

pytestmark = [pytest.mark.prove, pytest.mark.minutes(8)]

RESMLP = """
model = dict(type='ResMLP', num_layers=4, hidden_size=32, image_size=8, patch_size=2, num_channels=1, num_classes=10,
             init_std=0.15, layer_scale=1.0)
optimizer = dict(type='AdamW', lr=5e-3)
lr_scheduler = dict(type='cosine', warmup_steps=10)
batch = dict(global_size=32, accumulation=2)
train = dict(steps=300, clip_grad_norm=1.0)
parallel = dict(pipeline=2, tensor=dict(size=2, mode='1d'))
"""
MOCO = """
model = dict(type='MoCo', num_layers=2, hidden_size=32, num_heads=4, image_size=8, patch_size=2, num_channels=1,
             projection_size=32, projection_hidden_size=64)
optimizer = dict(type='AdamW', lr=1e-3)
lr_scheduler = dict(type='cosine', warmup_steps=10)
batch = dict(global_size=64, accumulation=1)
train = dict(steps=150, clip_grad_norm=1.0)
parallel = dict(tensor=dict(size=2, mode='1d'))
"""


class TwoViews:
    """Digits without classes: each image twice, shifted by at most a pixel, with noise."""

    def __init__(self) -> None:
        self.digits = learning.digits().train

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(index)
        image, label = self.digits[index]
        first, second = (self._view(image, generator) for _ in range(2))
        return (first, second), label

    def _view(self, image: Tensor, generator: torch.Generator) -> Tensor:
        down, right = torch.randint(-1, 2, (2,), generator=generator).tolist()
        return image.roll((down, right), (1, 2)) + 0.1 * torch.randn(image.shape, generator=generator)


def losses_of(given: Any, steps: int) -> list[float]:
    """Return the loss of each step."""
    engine, losses, batches = given.engine, [], []
    while engine.steps_done < steps:
        for batch in given.train_data:
            batches.append(batch)
            if len(batches) == engine.job.batch.accumulation:
                losses.append(engine.train_batch(batches))
                batches = []
            if engine.steps_done == steps:
                break
    return losses


def _accuracy(path: str, steps: int) -> float:
    given = dslpar.initialize(path, train_data=learning.digits().train)
    losses_of(given, steps)
    return learning.accuracy(given.engine)


def test_resmlp_tells_nine_of_ten_held_out_digits(tmp_path: Path) -> None:
    found = on_ranks(8, _accuracy, written(tmp_path, RESMLP), 300, init="deepspeed")
    assert max(found) >= 0.90


def _first_and_last(path: str, steps: int) -> tuple[float, float]:
    losses = losses_of(dslpar.initialize(path, train_data=TwoViews()), steps)
    return sum(losses[:5]) / 5, sum(losses[-10:]) / 10


def test_the_contrastive_loss_of_moco_falls(tmp_path: Path) -> None:
    first, last = on_ranks(4, _first_and_last, written(tmp_path, MOCO), 150, init="deepspeed")[0]
    assert last < 0.8 * first
    assert last < 0.8 * 2 * 2 * 0.2 * math.log(64)  # the loss of guessing among the keys of 64 samples
