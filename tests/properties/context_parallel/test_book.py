"""A book in one sample: 131,072 tokens over eight ranks through DeepSpeed, in a few GB per rank.

One process could not hold its activations beside other ranks of this machine. So the losses are compared with one
process at an eighth of the length, with the same layers.
"""

from __future__ import annotations

import resource

import pytest
import torch

from dslpar.engine.build import build_engine
from dslpar.layout.resolve import Job, resolve
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.ranks import on_ranks

BOOK, STEPS = 131_072, 3
MOST_BYTES = 5 * 10**9


def job(tokens: int, context: int) -> Job:
    model = section.GPT(
        num_layers=2,
        hidden_size=16,
        num_heads=1,
        ffn_hidden_size=48,
        vocab_size=256,
        max_seq_len=tokens,
        norm="rmsnorm",
        activation="swiglu",
        positions="rotary",
        bias=False,
        tie_embeddings=False,
    )
    spec = sections.Spec(
        model=model,
        parallel=sections.Parallel(context=sections.ContextParallel(size=context)),
        optimizer=sections.AdamW(lr=1e-2),
        batch=sections.Batch(global_size=1),
        train=sections.Train(steps=STEPS, loss_chunks=8),
        activation_checkpoint=sections.ActivationCheckpoint(interval=1, offload=True, mlp_chunks=4),
    )
    return resolve(spec, context, "book.py")


def train(made: Job) -> tuple[list[float], int]:
    """Return the losses of the steps, and this process's peak memory in bytes."""
    from dslpar.distributed.groups import Groups

    engine = build_engine(made, Groups(made.mesh), all_counted=True)
    ids = torch.randint(256, (1, made.seq_len + 1), generator=torch.Generator().manual_seed(1)) // 8
    losses = [engine.train_batch([(ids[:, :-1], ids[:, 1:])]) for _ in range(STEPS)]
    return losses, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.prove
@pytest.mark.minutes(15)
def test_a_book_trains_in_little_memory() -> None:
    found = on_ranks(8, train, job(BOOK, 8), init="deepspeed")
    losses = found[0][0]
    assert all(each == losses for each, _ in found)
    assert losses[-1] < losses[0]
    assert max(size for _, size in found) < MOST_BYTES


@pytest.mark.prove
@pytest.mark.minutes(8)
def test_its_losses_are_those_of_one_process() -> None:
    """The tolerance covers fp32 sums of 16,384 terms in another order; AdamW divides by roots of small numbers."""
    ((one, _),) = on_ranks(1, train, job(BOOK // 8, 1), init="deepspeed")
    for losses, _ in on_ranks(8, train, job(BOOK // 8, 8), init="deepspeed"):
        assert losses == pytest.approx(one, rel=1e-5)
