"""Train your own model on your own data set, with every feature of train.py.

deepspeed --num_gpus 2 examples/own_dataset.py --config examples/configs/points.py
deepspeed --num_gpus 2 examples/own_dataset.py --config examples/configs/points.py --resume train.steps=80
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import dslpar


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Points of a plane; the class of each is its quadrant."""

    def __init__(self, count: int, seed: int) -> None:
        self.points = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = (self.points[index] > 0).long()
        return self.points[index], 2 * x + y


def print_held_out_loss(event: dslpar.Event) -> None:
    """Print the held-out loss: hooks run on every rank, and rank 0 prints."""
    if event.name == "eval" and event.engine.groups.rank == 0:
        print(f"after {event.step} steps the held-out loss is {event.metrics['eval_loss']:.3f}", flush=True)


def main() -> None:
    """Train. With --resume, continue from the newest checkpoint, on any layout."""
    args = dslpar.arguments()
    run = dslpar.start(args.config, args.overrides, args.trust)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 4))
    engine, train_data, eval_data, _ = dslpar.initialize(
        run, model=model, criterion=nn.CrossEntropyLoss(), train_data=Points(512, seed=0), eval_data=Points(128, seed=1)
    )
    flags = {"resume": args.resume, "eval_only": args.eval_only, "dry_run": args.dry_run}
    dslpar.fit(run, engine, train_data, eval_data, hooks=[print_held_out_loss], **flags)


if __name__ == "__main__":
    main()
