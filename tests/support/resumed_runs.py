"""Runs that continue from their newest checkpoint, and a bitwise comparison of two of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dslpar import checkpoint
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections as schema_sections

VOCAB, LENGTH, SAMPLES = 61, 8, 20
"""20 samples with 8 per step: an epoch ends within step 3, and step 5 is in the middle of the second."""


def job_of(folder: Path, world: int, **sections: Any) -> Job:
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, dropout=0.1)
    train = schema_sections.Train(steps=10, output_dir=str(folder), clip_grad_norm=0.5)
    plain: dict[str, Any] = {
        "model": gpt,
        "train": train,
        "batch": schema_sections.Batch(global_size=8),
        "lr_scheduler": schema_sections.LRScheduler(type="cosine", warmup_steps=3),
        "optimizer": schema_sections.AdamW(lr=1e-2),
    }
    return resolve(schema_sections.Spec(**plain | sections), world, "cfg.py")


class Samples:
    """Random tokens."""

    num_samples = SAMPLES

    def batch(self, samples: Sequence[int], numbers: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(0, VOCAB, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(7))[samples]
        return tokens[:, :-1], tokens[:, 1:]


def engine_of(job: Job) -> Any:
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    return build_engine(job, Groups(job.mesh), all_counted=True)


def step(engine: Any) -> tuple[float, float, float]:
    """Take the run's next step."""
    from dslpar.data.order import micro_batches

    job, data_rank = engine.job, engine.groups.coord["data"]
    fed = micro_batches(Samples(), job.batch, job.spec.train.seed, engine.consumed_samples, job.mesh.data, data_rank)
    loss = engine.train_batch(fed if engine.needs_data else ())
    return loss, engine.grad_norm, engine.lr


def loaded(job: Job) -> Any:
    """Return a fresh engine with the newest checkpoint of the job's folder."""
    engine = engine_of(job)
    stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
    assert stored is not None
    checkpoint.check(stored, job, "")
    checkpoint.load(engine, stored)
    return engine


Outcome = tuple[list[tuple[int, float, float, float, bool]], dict[str, torch.Tensor]]


def run(job: Job, until: int, corrupt: int | None = None) -> Outcome:
    """Continue from the newest checkpoint to step `until`, save, and return the lines and this rank's state.

    The loss of step `corrupt` is infinite.
    """
    from dslpar.data.order import micro_batches
    from dslpar.distributed.groups import Groups
    from dslpar.engine.build import build_engine

    engine = build_engine(job, Groups(job.mesh), all_counted=True)
    stored = checkpoint.find_checkpoint(job, engine.groups.axis("pipe", "data", "tensor"))
    if stored is not None:
        checkpoint.check(stored, job, "text")
        checkpoint.load(engine, stored)
    lines = []
    while engine.steps_done < until:
        if engine.steps_done + 1 == corrupt:
            spoil(engine)
        at, seed = engine.consumed_samples, job.spec.train.seed
        fed = micro_batches(Samples(), job.batch, seed, at, job.mesh.data, engine.groups.coord["data"])
        loss = engine.train_batch(fed if engine.needs_data else ())
        lines.append((engine.steps_done, loss, engine.grad_norm, engine.lr, engine.skipped))
    checkpoint.save(engine, "text")
    return lines, held_by(engine)


def spoil(engine: Any) -> None:
    """Make the next backward give a non-finite gradient."""
    p = next(p for p in engine.module.parameters() if p.requires_grad)
    handle = p.register_hook(lambda grad: (handle.remove(), grad * float("inf"))[1])


def held_by(engine: Any) -> dict[str, torch.Tensor]:
    """Return the weights and the optimizer's state."""
    weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    kept: dict[str, torch.Tensor] = {}
    for index, state in enumerate(engine.deepspeed.optimizer.state.values()):
        kept |= {f"{index}.{key}": value.clone() for key, value in state.items() if torch.is_tensor(value)}
    return weights | kept


def same(one: Outcome, other: Outcome) -> list[str]:
    """Return the names that differ in any bit."""
    assert one[1].keys() == other[1].keys()
    lines = [f"{a} is not {b}" for a, b in zip(one[0], other[0], strict=True) if repr(a) != repr(b)]
    return lines + [name for name in one[1] if not torch.equal(one[1][name], other[1][name])]


def parallel(pipe: int = 1, order: Any = None, **tensor: Any) -> schema_sections.Parallel:
    pipeline = schema_sections.PipelineParallel(size=pipe) if pipe > 1 else None
    return schema_sections.Parallel(
        pipeline=pipeline, tensor=schema_sections.TensorParallel(**tensor) if tensor else None, order=order
    )


PIPED = schema_sections.Batch(global_size=8, accumulation=2)
FOUR_LAYERS = section.GPT(num_layers=4, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, dropout=0.1)


def scheduled(kind: str, num_chunks: int, **sections: Any) -> dict[str, Any]:
    """Return the sections of a 2-rank pipeline, and a model of four layers with a tied table."""
    schedule = schema_sections.PipelineSchedule(type=kind, num_model_chunks=num_chunks)
    return {"parallel": parallel(2), "batch": PIPED, "schedule": schedule, "model": FOUR_LAYERS} | sections
