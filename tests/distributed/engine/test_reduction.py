"""Overlapped gradient reduction: order, result and cost of reducing during the backward."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.device_counter import count_kernels
from dslpar.distributed import collectives, deepspeed_patches
from dslpar.distributed.collectives import Pending
from dslpar.distributed.gradient_buffer import GradientBuffer
from dslpar.distributed.gradient_reduction import IN_FLIGHT
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

PIPE = sections.Parallel(pipeline=sections.PipelineParallel(size=2))
BUCKET = 2000
"""Elements: the model and each of two stages fill several buckets, some of which have parts of two data ranks."""


def trained(world: int, stage: int, accumulation: int, dtype: str = "fp32", **other: Any) -> Job:
    gpt = section.GPT(num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH)
    given: dict[str, Any] = dict(model=gpt, train=sections.Train(clip_grad_norm=0.5))
    return job(
        world,
        zero=sections.Zero(stage=stage, extra={"reduce_bucket_size": BUCKET} | other.pop("zero", {})),
        batch=sections.Batch(global_size=12, accumulation=accumulation),
        precision=sections.Precision(dtype=dtype, extra={"initial_scale_power": 6} if dtype == "fp16" else {}),
        **given | other,
    )


# ---- order ----


def _log(made: Job) -> list[str]:
    """Return the second step's events in order: 'backward', 'gradient', 'reduce', 'wait', 'step'."""
    engine = engine_of(made)
    log: list[str] = []
    data_rank = engine.groups.coord["data"]
    engine.train_batch(batches(made, data_rank, 0))
    tied = {id(p) for p, _ in getattr(engine.module, "get_tied_weights_and_groups", list)()}
    for p in engine.module.parameters():
        event = "tied" if id(p) in tied else "gradient"
        p.register_hook(lambda grad, event=event: log.append(event))
    start = collectives.start_reduce_

    def logged(*args: Any) -> Pending:
        log.append("reduce")
        pending = start(*args)
        return pending._replace(finish=lambda received: log.append("wait") or received)

    collectives.start_reduce_ = logged
    _before(engine.deepspeed, "_backward_prologue", lambda: log.append("backward"))
    _before(engine.deepspeed.optimizer, "step", lambda: log.append("step"))
    engine.train_batch(batches(made, data_rank, 1))
    return log


def _before(owner: Any, name: str, call: Callable[[], None]) -> None:
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        call()
        return original(*args, **kwargs)

    setattr(owner, name, both)


def _backwards(log: list[str]) -> list[list[str]]:
    """Return the log of each backward; the last one ends at the step."""
    parts: list[list[str]] = []
    for event in log[: log.index("step")]:
        parts += [[]] if event == "backward" else []
        parts[-1] += [event] if event != "backward" else []
    return parts


@pytest.mark.parametrize(("parallel", "world"), [(sections.Parallel(), 2), (PIPE, 4)], ids=["data 2", "pipe 2, data 2"])
def test_zero_1_reduces_a_bucket_before_the_next_one_s_gradients_are_computed(
    parallel: sections.Parallel, world: int
) -> None:
    for log in on_ranks(world, _log, trained(world, 1, 3, parallel=parallel), init="deepspeed"):
        first, second, last = _backwards(log)
        assert set(first) | set(second) <= {"gradient", "tied"}, "micro-batches add up before they are sent"
        begun = [index for index, event in enumerate(last) if event == "reduce"]
        gradients = [index for index, event in enumerate(last) if event == "gradient"]
        early = [index for index in begun if index < gradients[-1]]
        assert len(early) >= 2, last
        assert all(any(a < gradient < b for gradient in gradients) for a, b in zip(early, early[2:], strict=False))
        assert "wait" not in last, "nobody waits before the step"
        after = log[log.index("step") :]
        assert after.count("wait") == last.count("reduce")
        assert "reduce" not in after


def test_zero_2_reduces_in_each_backward_and_keeps_few_buckets() -> None:
    for log in on_ranks(2, _log, trained(2, 2, 3), init="deepspeed"):
        for part in _backwards(log):
            assert part.index("reduce") < len(part) - 1 - part[::-1].index("gradient")
        waits = [event for event in log if event in ("reduce", "wait")]
        in_flight = [waits[:end].count("reduce") - waits[:end].count("wait") for end in range(len(waits) + 1)]
        assert in_flight[-1] == 0
        # A bucket goes to at most two ranks. The newest reduction starts before the oldest is waited for.
        assert 2 <= max(in_flight) <= 2 * (IN_FLIGHT + 1)


# ---- result ----


def _weights(made: Job, patches: bool) -> tuple[list[torch.Tensor], list[float]]:
    if not patches:
        deepspeed_patches.overlap_reduction = lambda *_: None
        deepspeed_patches.accumulate_without_copies = lambda *_: None
    engine = engine_of(made)
    norms = []
    for step in range(3):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
        norms.append(engine.grad_norm)
    return [p.detach().clone() for _, p in engine.named_parameters()], norms


LAYOUTS = {"one process": (sections.Parallel(), 1), "data 2": (sections.Parallel(), 2), "pipe 2, data 2": (PIPE, 4)}
CASES = [
    (layout, stage, accumulation, dtype)
    for layout, stage, accumulation, dtype in product(LAYOUTS, (1, 2), (1, 3), ("fp32", "bf16", "fp16"))
    if stage == 1 or not layout.startswith("pipe")
]
FEW = {("data 2", 2, 3, "bf16"), ("pipe 2, data 2", 1, 3, "bf16")}


@pytest.mark.parametrize(("layout", "stage", "accumulation", "dtype"), sampled(CASES, FEW))
def test_the_result_is_deepspeed_s_to_the_bit(layout: str, stage: int, accumulation: int, dtype: str) -> None:
    """Two ranks can add two numbers in one way only. With more ranks, gloo's order depends on positions in a bucket."""
    parallel, world = LAYOUTS[layout]
    made = trained(world, stage, accumulation, dtype, parallel=parallel)
    with_patches, without = (on_ranks(world, _weights, made, patches, init="deepspeed") for patches in (True, False))
    for (weights, norms), (expected, expected_norms) in zip(with_patches, without, strict=True):
        assert norms == expected_norms
        assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))


class RunsTwice(nn.Module):
    """A layer that is used twice, each time with a nested backward."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.layer, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 16), nn.Linear(16, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for _ in range(2):
            x = x + checkpoint(self.layer, x, use_reentrant=True)
        logits: Tensor = self.head(x)
        return logits


def _sums_of_first_backward(made: Job) -> list[tuple[Tensor, Tensor]]:
    """Return for each parameter its sum, and the fp32 sum of its gradients in order."""
    engine = engine_of(made)
    came: dict[Any, Tensor] = {p: torch.zeros(p.shape) for p in engine.module.parameters()}

    def note(grad: Tensor, total: Tensor) -> None:
        total.add_(grad)

    for p, total in came.items():
        p.register_hook(partial(note, total=total))
    x, y = batches(made, 0)[0]
    engine.backward(engine.criterion(engine(x), y))
    return [(p.grad_accum.clone(), total) for p, total in came.items()]


def test_gradients_of_a_backward_within_another_are_not_added_in_half_precision() -> None:
    """Gradients wait for their addition no longer than a backward: the second gradient of a layer would be added on
    top.
    """
    model = sections.OtherModel(target=f"{__name__}.RunsTwice")
    (sums,) = on_ranks(1, _sums_of_first_backward, trained(1, 1, 3, "bf16", model=model), init="deepspeed")
    for found, expected in sums:
        assert torch.equal(found, expected)
        assert expected.abs().max() > 0


def _summed_later(made: Job) -> list[torch.Tensor]:
    """Two batches per step, the first of which is kept back."""
    engine = engine_of(made)
    rank = engine.groups.coord["data"]
    for step in range(2):
        with engine.no_sync():
            engine.forward_backward(batches(made, rank, 2 * step))
        if step:
            engine.forward_backward(batches(made, rank, 2 * step + 1))
        engine.sync_grads()
        engine.step()
    return [p.detach().clone() for _, p in engine.named_parameters()]


def _summed_by_deepspeed(made: Job) -> list[torch.Tensor]:
    deepspeed_patches.overlap_reduction = lambda *_: None
    return _summed_later(made)


@pytest.mark.parametrize(("parallel", "world"), [(sections.Parallel(), 2), (PIPE, 4)], ids=["data 2", "pipe 2, data 2"])
def test_gradients_that_were_kept_back_are_reduced_once(parallel: sections.Parallel, world: int) -> None:
    made = trained(world, 1, 3, parallel=parallel)
    found, expected = (on_ranks(world, fn, made, init="deepspeed") for fn in (_summed_later, _summed_by_deepspeed))
    for mine, theirs in zip(found, expected, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def _by_parts_of_tokens(made: Job) -> list[torch.Tensor]:
    engine = engine_of(made)
    for step in range(2):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
    return [p.detach().clone() for _, p in engine.named_parameters()]


@pytest.mark.parametrize(
    ("world", "dtype"), sampled([(1, "fp32"), (1, "bf16"), (2, "fp32"), (2, "bf16")], {(1, "fp32"), (2, "bf16")})
)
def test_a_head_that_the_loss_runs_is_reduced_when_the_last_backward_is_there(world: int, dtype: str) -> None:
    """Its hook runs before that of the model's output, by which DeepSpeed tells the optimizer the number of the
    backward; and a large head has its own bucket.
    """
    gpt = section.GPT(
        num_layers=2, hidden_size=16, num_heads=2, vocab_size=VOCAB, max_seq_len=LENGTH, tie_embeddings=False
    )
    whole, parts = (
        trained(
            *(world, 1, 3, dtype),
            model=gpt,
            zero={"reduce_bucket_size": VOCAB * 16},
            train=sections.Train(loss_chunks=chunks),
            optimizer=sections.SGD(lr=0.5),
        )
        for chunks in (1, 2)
    )
    found, expected = (on_ranks(world, _by_parts_of_tokens, made, init="deepspeed") for made in (parts, whole))
    for mine, theirs in zip(found, expected, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            # Weights move by half a gradient, if that is large enough. In bf16 each product rounds by 2**-9.
            assert (a - b).abs().max() <= (1e-5 if dtype == "fp32" else 2**-5) * b.abs().max()


def _raised(made: Job, call: str) -> str:
    """Return the error of a step, or of a program's own loss.backward(), after the engine's first backward."""
    engine = engine_of(made)
    x, y = batches(made, 0)[0]
    engine.backward(engine.criterion(engine(x), y))
    loss = engine.criterion(engine.deepspeed.module(x), y)
    with pytest.raises(RuntimeError) as raised:
        {"step": engine.deepspeed.optimizer.step, "backward": loss.backward}[call]()
    return str(raised.value)


@pytest.mark.parametrize(
    ("accumulation", "call", "said"),
    [(3, "step", "gradients were not reduced"), (1, "backward", "whose reduction has begun")],
)
def test_no_gradient_is_lost_without_a_word(accumulation: int, call: str, said: str) -> None:
    (message,) = on_ranks(1, _raised, trained(1, 1, accumulation), call, init="deepspeed")
    assert said in message


def _is_overlapped(made: Job) -> bool:
    owner = getattr(engine_of(made).deepspeed.optimizer.reduce_gradients, "__self__", None)
    return isinstance(owner, GradientBuffer)


@pytest.mark.parametrize(
    ("zero", "expected"),
    [
        ({}, True),
        ({"overlap_comm": True}, True),
        ({"overlap_comm": False}, False),
        ({"use_multi_rank_bucket_allreduce": True}, False),
        ({"offload_optimizer": {"device": "cpu"}}, False),
    ],
)
def test_it_is_on_unless_the_author_says_otherwise(zero: dict[str, Any], expected: bool) -> None:
    assert on_ranks(1, _is_overlapped, trained(1, 1, 1, zero=zero), init="deepspeed") == [expected]


# ---- DeepSpeed's behaviour: when one of these fails, the patch of its number in deepspeed_patches can go ----


def test_m14_deepspeed_still_waits_for_each_reduction() -> None:
    source = inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_bucket)
    assert "dist.reduce(tensor_to_allreduce, global_rank, group=process_group)" in source
    copying = inspect.getsource(stage_1_and_2.DeepSpeedZeroOptimizer.allreduce_and_copy)
    assert copying.index("get_accelerator().synchronize()") < copying.index("self.allreduce_bucket(")


def _bytes_a_parameter(made: Job, without: tuple[str, ...]) -> float:
    """Return the bytes read and written to add the second micro-batch's gradient, counted in torch's dispatcher."""
    for patch in without:
        setattr(deepspeed_patches, patch, lambda *_: None)
    zero = engine_of(made).deepspeed.optimizer
    (p, *_) = zero.bit16_groups[0]
    p.grad_accum = torch.full(p.shape, 2.0)
    p.grad = torch.ones_like(p)
    with count_kernels() as counts:
        zero._fill_param_grad_accum_attribute(p)
    assert p.grad is None
    assert torch.equal(p.grad_accum, torch.full(p.shape, 3.0))
    return counts.num_bytes / p.numel()


@pytest.mark.parametrize(
    ("without", "expected"),
    [((), 10), (("overlap_reduction",), 10), (("overlap_reduction", "accumulate_without_copies"), 18)],
)
def test_m15_deepspeed_still_copies_each_gradient_in_fp32(without: tuple[str, ...], expected: int) -> None:
    """2 for the gradient, 4 and 4 for the sum, and 4 and 4 for a copy. The reductions' buffer adds in the same way."""
    assert on_ranks(1, _bytes_a_parameter, trained(1, 1, 2, "bf16"), without, init="deepspeed") == [expected]
