"""ColossalAI's training loop, with its import names.

deepspeed --num_gpus 2 examples/colossalai_trainer.py --config examples/configs/points.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dslpar
from dslpar.compat import colossalai

NUM_EPOCHS = 2


def points(count: int) -> TensorDataset:
    """Return points of a plane, and whether each is inside the circle."""
    x = torch.randn(count, 2, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.norm(dim=1) > 1).long())


def main() -> None:
    """Train for some epochs, with a checkpoint after each."""
    args = dslpar.arguments()
    run = colossalai.launch_from_torch(config=dslpar.load(args.config, args.overrides, trusted=args.trust))
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    engine, train_dataloader, _, _ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss(), points(512))
    if args.resume:
        engine.resume()
    for epoch in range(engine.consumed_samples // 512, NUM_EPOCHS):
        engine.train()
        for data, label in train_dataloader:
            engine.zero_grad()
            output = engine(data)
            loss = engine.criterion(output, label)
            engine.backward(loss)
            engine.step()
        mean = engine.mean_over_replicas(loss).item()
        saved = engine.save()
        if run.groups.rank == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, saved in {saved}", flush=True)


if __name__ == "__main__":
    main()
