"""Split your own torch model over pipeline stages by hand: each rank builds only its stage.

deepspeed --num_gpus 2 examples/own_stages.py --config examples/configs/points.py parallel.pipeline=2
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dslpar


def pictures(count: int, seed: int) -> TensorDataset:
    """Return noise of [1, 8, 8] with a bright row, and the index of that row."""
    generator = torch.Generator().manual_seed(seed)
    images, rows = torch.randn(count, 1, 8, 8, generator=generator), torch.randint(8, (count,), generator=generator)
    images[torch.arange(count), 0, rows] += 2
    return TensorDataset(images, rows)


def stage(index: int) -> nn.Module:
    """Return the convolutions, or the classifier on their features."""
    if index == 0:
        return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2))
    return nn.Sequential(nn.Flatten(), nn.Linear(128, 32), nn.ReLU(), nn.Linear(32, 8))


def main() -> None:
    """Train. A stage is any module that maps one tensor to one tensor."""
    args = dslpar.arguments()
    run = dslpar.start(args.config, args.overrides, args.trust)
    engine, train_data, eval_data, _ = dslpar.initialize(
        run,
        model=dslpar.Stage(stage(run.stage)),
        criterion=nn.CrossEntropyLoss(),
        train_data=pictures(512, seed=0),
        eval_data=pictures(64, seed=1),
    )
    dslpar.fit(run, engine, train_data, eval_data, resume=args.resume, eval_only=args.eval_only, dry_run=args.dry_run)


if __name__ == "__main__":
    main()
