"""A small GPT's job, its engine on this rank, and its micro-batches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections as schema_sections

VOCAB, LENGTH = 30, 8


def job(world: int, model: Any = None, batch: schema_sections.Batch | None = None, **sections: Any) -> Job:
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH)
    made = schema_sections.Spec(model=model or gpt, batch=batch or schema_sections.Batch(global_size=4), **sections)
    return resolve(made, world, "cfg.py")


def batches(made: Job, data_rank: int, step: int = 0, ignored: int = 0) -> list[tuple[Tensor, Tensor]]:
    """Return random micro-batches. The first `ignored` tokens of the global batch are not counted."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (made.batch.global_size, LENGTH + 1), generator=generator)
    ids, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels = labels.flatten().index_fill(0, torch.arange(ignored), -100).view_as(ids)
    micro, data = made.batch.micro_size, made.mesh.data
    rows = [
        slice((a * data + data_rank) * micro, (a * data + data_rank + 1) * micro)
        for a in range(made.batch.accumulation)
    ]
    return [(ids[row], labels[row]) for row in rows]


def engine_of(made: Job, all_counted: bool = True) -> Any:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    return build_engine(made, Groups(made.mesh), all_counted=all_counted)
