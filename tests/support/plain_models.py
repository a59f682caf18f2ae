"""Plain torch models of user programs, their data, and reference results of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.resnet import ResNet18

STEPS, GLOBAL = 5, 16
PIPE, PIPE_DATA = "parallel = dict(pipeline=2)\n", "parallel = dict(pipeline=2, data=2)\n"
Weights = dict[str, Tensor]


def written(folder: Path, text: str) -> str:
    path = folder / "cfg.py"
    path.write_text(text)
    return str(path)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))


def points(step: int, inputs: int = 6, classes: int = 4) -> tuple[Tensor, Tensor]:
    """Return a global batch."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL, inputs, generator=generator), torch.randint(classes, (GLOBAL,), generator=generator)


def shares(engine: Any, x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Return this rank's micro-batches of a global batch."""
    batch, data, rank = engine.job.batch, engine.job.mesh.data, engine.groups.coord["data"]
    return [(xs[rank::data][0], ys[rank::data][0]) for xs, ys in zip(*_cut(batch, data, x, y), strict=True)]


def _cut(batch: Any, data: int, *values: Tensor) -> list[Any]:
    return [value.view(batch.accumulation, data, batch.micro_size, *value.shape[1:]) for value in values]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def plain_torch(module: nn.Module, micro_size: int, steps: int = STEPS, clip: float = 0.5, draw: Any = points) -> Any:
    """Return [(loss, norm)], weights and buffers of one process without DeepSpeed."""
    optimizer, rows = sgd(module.parameters()), []
    for step in range(steps):
        x, y = draw(step)
        pieces = list(zip(x.split(micro_size), y.split(micro_size), strict=True))
        losses = [nn.functional.cross_entropy(module(xs), ys) / len(pieces) for xs, ys in pieces]
        loss = torch.stack(losses).sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        rows.append((loss.item(), norm.item()))
    return rows, {name: value.detach().clone() for name, value in module.state_dict().items()}


def assert_equal(got: list[Any], expected: Any, rel: float = 1e-6) -> None:
    """Compare losses and norms on every rank, and the weights gathered from all ranks, none missing."""
    rows, weights = expected
    held: Weights = {}
    for ours, theirs in got:
        for (loss, norm), (other_loss, other_norm) in zip(ours, rows, strict=True):
            assert loss == pytest.approx(other_loss, rel=rel)
            assert norm == pytest.approx(other_norm, rel=rel)
        for name, value in theirs.items():
            assert torch.equal(held.setdefault(name, value), value), f"replicas of {name} differ"
    assert set(held) == set(weights)
    for name, value in weights.items():
        assert (held[name] - value).abs().max() <= rel * value.abs().max(), name


def resnet() -> ResNet18:
    torch.manual_seed(0)
    return ResNet18(num_classes=5, width=4)


def images(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(GLOBAL, 3, 32, 32, generator=generator), torch.randint(5, (GLOBAL,), generator=generator)
