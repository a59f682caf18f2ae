"""Weight gradients accumulated by fused products, on a CPU stand-in for the device that has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar.layers import gradient_accumulation_fusion
from dslpar.layers.linear import Linear
from dslpar.layout.resolve import Job
from dslpar.models.gpt import section
from dslpar.schema import sections
from tests.support.engines import LENGTH, VOCAB, batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

SEQUENCE = sections.TensorParallel(size=2, mode="1d", sequence=True)
TWO_D = sections.TensorParallel(size=4, mode="2d")
PIPE = sections.PipelineParallel(size=2)
LAYOUTS = {
    "one process": (1, sections.Parallel()),
    "data 2": (2, sections.Parallel()),
    "1d, sequence": (2, sections.Parallel(tensor=SEQUENCE)),
    "2d": (4, sections.Parallel(tensor=TWO_D)),
    "pipe 2, data 2": (4, sections.Parallel(pipeline=PIPE)),
}
ACCUMULATION, LAYERS = 3, 2
MATRICES = 4 * LAYERS + 1
"""A block's linears, and the head."""


def trained(layout: str, stage: int = 1, dtype: str = "bf16", batch: sections.Batch | None = None, **more: Any) -> Job:
    world, parallel = LAYOUTS[layout]
    gpt = section.GPT(
        num_layers=LAYERS, hidden_size=16, num_heads=4, vocab_size=VOCAB, max_seq_len=LENGTH, tie_embeddings=False
    )
    return job(
        world,
        model=gpt,
        parallel=parallel,
        zero=sections.Zero(stage=stage),
        batch=batch or sections.Batch(global_size=12, accumulation=ACCUMULATION),
        precision=sections.Precision(dtype=dtype, extra={"initial_scale_power": 6} if dtype == "fp16" else {}),
        **more,
    )


def _pretend(add: Callable[[Tensor, Tensor, Tensor], object]) -> list[torch.Size]:
    """Make this process accumulate by `add` in products. Return the shapes of the sums."""
    shapes: list[torch.Size] = []

    def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
        assert total.dtype is torch.float32
        shapes.append(total.shape)
        add(total, a, b)

    gradient_accumulation_fusion.has_wide_products = lambda weight: weight.dtype is not torch.float32
    gradient_accumulation_fusion.add_product_ = add_product_
    return shapes


def _as_ever(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Round the product to its factors' dtype, as if it were a separate tensor."""
    total.add_(a @ b)


def _weights(made: Job, in_products: bool) -> tuple[list[Tensor], int, int]:
    """Return the weights after two steps, the number of fused products, and the number of a matrix's accumulation
    hooks.
    """
    shapes = _pretend(_as_ever) if in_products else []
    engine = engine_of(made)
    ran: list[object] = []
    for p in engine.module.parameters():
        if p.dim() == 2:
            p.register_post_accumulate_grad_hook(ran.append)
    for step in range(2):
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
    return [p.detach().clone() for p in engine.module.parameters()], len(shapes), len(ran)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    sampled(
        [(layout, dtype) for layout in LAYOUTS for dtype in ("bf16", "fp16")],
        {("one process", "fp16"), ("1d, sequence", "bf16")},
    ),
)
def test_sums_are_those_of_autograd_to_the_bit(layout: str, dtype: str) -> None:
    """If the product is rounded as before, everything after it is unchanged: hooks, buckets, the step."""
    made = trained(layout, dtype=dtype)
    now, before = (on_ranks(made.mesh.world_size, _weights, made, way, init="deepspeed") for way in (True, False))
    for (weights, _, hooks), (expected, none, hooks_before) in zip(now, before, strict=True):
        assert none == 0
        assert hooks == hooks_before > 0, "they run without a gradient, too"
        assert all(map(torch.equal, weights, expected))
    added, in_a_step = sum(count for _, count, _ in now), MATRICES * ACCUMULATION
    of_weights_that_are_cut = layout == "2d"  # their gradients are reduced first
    replicas = 2 if layout in ("data 2", "1d, sequence", "pipe 2, data 2") else 1
    # a rank has sums from its first hook on, after its first product
    assert added == (0 if of_weights_that_are_cut else 2 * (in_a_step * replicas - made.mesh.world_size))


def _errors(made: Job) -> tuple[float, float]:
    """Return the largest errors of a sum, in units of its largest element: with products added in fp32, and rounded."""
    exact: dict[int, Tensor] = {}
    rounded: dict[int, Tensor] = {}

    def add(total: Tensor, a: Tensor, b: Tensor) -> None:
        key = id(total)
        for sums, product in ((exact, a.double() @ b.double()), (rounded, (a @ b).double())):
            sums[key] = sums.get(key, total.double().clone()) + product
        total.add_(a.float() @ b.float())
        off.append(float((total - exact[key]).abs().max() / exact[key].abs().max()))
        off_rounded.append(float((rounded[key] - exact[key]).abs().max() / exact[key].abs().max()))

    off: list[float] = []
    off_rounded: list[float] = []
    _pretend(add)
    engine = engine_of(made)
    engine.train_batch(batches(made, 0))
    return max(off), max(off_rounded)


def test_a_product_in_fp32_is_not_rounded_to_bf16() -> None:
    ((wide, narrow),) = on_ranks(1, _errors, trained("one process"), init="deepspeed")
    assert wide < 1e-6, "some roundings of fp32, 6e-8 each"
    assert narrow > 1e-4, "a rounding of bf16 is up to 2^-9"


def _added(made: Job, how: str) -> int:
    shapes = _pretend(_as_ever)
    engine = engine_of(made)
    linears = [part for part in engine.module.modules() if isinstance(part, Linear)]
    if how == "recomputed":
        engine.train_batch(batches(made, 0))
        return len(shapes)
    if how == "hooks":
        for p in engine.module.parameters():
            p.register_hook(lambda grad: grad.mul_(1.0))
    fed = batches(made, 0)
    if how == "autograd.grad":
        # as a program between the engine's calls, when sums exist: it wants the gradient, and the sums must not change
        for x, y in fed[:2]:
            engine.backward(engine.criterion(engine(x), y))
            engine.step()
        before, added = linears[0].weight.grad_accum.clone(), len(shapes)
        loss = engine.criterion(engine.deepspeed.module(fed[0][0]), fed[0][1])
        (gradient,) = torch.autograd.grad(loss, linears[0].weight)
        assert gradient.abs().max() > 0
        assert torch.equal(linears[0].weight.grad_accum, before)
        return len(shapes) - added
    engine.train_batch(fed)
    return len(shapes)


@pytest.mark.parametrize("how", ["hooks", "autograd.grad"])
def test_who_asks_for_a_gradient_gets_it(how: str) -> None:
    assert on_ranks(1, _added, trained("one process"), how, init="deepspeed") == [0]


@pytest.mark.parametrize("checkpoint", [{"interval": 1}, {"interval": 1, "mlp_chunks": 2}], ids=["layers", "parts"])
def test_what_is_computed_again_is_added_in_products_too(checkpoint: dict[str, int]) -> None:
    """The backward of a recomputed layer gets another tensor for the weight, which has no sum."""
    made = trained("one process", activation_checkpoint=sections.ActivationCheckpoint(**checkpoint))
    parts = checkpoint.get("mlp_chunks", 1)
    in_a_batch = LAYERS * (2 + 2 * parts) + 1
    assert on_ranks(1, _added, made, "recomputed", init="deepspeed") == [in_a_batch * ACCUMULATION - 1]


def _penalized(made: Job, asks: bool) -> tuple[list[Tensor], int]:
    shapes = _pretend(_as_ever)
    engine = engine_of(made)
    weight = next(part.weight for part in engine.module.modules() if isinstance(part, Linear))

    def criterion(output: Tensor, label: Tensor) -> Tensor:
        loss: Tensor = engine._loss_fn(output, label)
        if asks:
            (gradient,) = torch.autograd.grad(loss, weight, retain_graph=True)
            assert gradient.abs().max() > 0
        return loss

    engine.forward_backward(batches(made, 0), criterion=criterion)
    engine.step()
    return [p.detach().clone() for p in engine.module.parameters()], len(shapes)


@pytest.mark.parametrize("layout", ["one process", "1d, sequence"])
def test_a_gradient_that_a_criterion_asks_for_is_not_added_to_the_sum(layout: str) -> None:
    made = trained(layout)
    world = made.mesh.world_size
    asked, plain = (on_ranks(world, _penalized, made, asks, init="deepspeed") for asks in (True, False))
    for (weights, added), (expected, added_plainly) in zip(asked, plain, strict=True):
        # DeepSpeed also takes the criterion's call for a backward, after which gradients may be handled as usual
        assert 0 < added <= added_plainly == MATRICES * ACCUMULATION - 1
        assert all(map(torch.equal, weights, expected))


def test_a_step_of_one_micro_batch_has_no_sum() -> None:
    made = trained("one process", batch=sections.Batch(global_size=4))
    assert on_ranks(1, _added, made, "", init="deepspeed") == [0]


@pytest.mark.parametrize(("stage", "dtype"), [(2, "bf16"), (1, "fp32"), (0, "bf16")])
def test_where_no_sum_in_fp32_stands_gradients_go_as_ever(stage: int, dtype: str) -> None:
    assert on_ranks(1, _added, trained("one process", stage, dtype), "", init="deepspeed") == [0]


def test_a_program_s_own_loop_adds_in_products_too() -> None:
    ((added),) = on_ranks(1, _own_loop, trained("one process"), init="deepspeed")
    assert added == MATRICES * ACCUMULATION - 1


def _own_loop(made: Job) -> int:
    shapes = _pretend(_as_ever)
    engine = engine_of(made)
    for x, y in batches(made, 0):
        engine.backward(engine.criterion(engine(x), y))
        engine.step()
    return len(shapes)


def test_this_cpu_has_no_such_products() -> None:
    """Once torch has them for CPUs, this machine can run the real products instead of a stand-in."""
    bf16 = torch.ones(2, 2, dtype=torch.bfloat16)
    assert not gradient_accumulation_fusion.has_wide_products(bf16)
    with pytest.raises((NotImplementedError, TypeError)):
        gradient_accumulation_fusion.add_product_(torch.ones(2, 2), bf16, bf16)


@pytest.mark.parametrize("error", [None, RuntimeError, TypeError])
@pytest.mark.parametrize("result", [17.0, 1.0])
def test_a_device_s_products_are_tried_before_they_are_used(
    monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, result: float
) -> None:
    """A device without them reports it, and wrong ones are detected."""

    def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
        if error is not None:
            raise error("no such operation")
        total.fill_(result)

    monkeypatch.setattr(gradient_accumulation_fusion, "add_product_", add_product_)
    gradient_accumulation_fusion._tried.cache_clear()
    try:
        assert gradient_accumulation_fusion.has_wide_products(torch.ones(2, 2, dtype=torch.float16)) == (
            error is None and result == 17
        )
    finally:
        gradient_accumulation_fusion._tried.cache_clear()
