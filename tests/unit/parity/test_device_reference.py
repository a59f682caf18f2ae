"""The reference of a whole first step: its memory, where it fits, and how bounds are derived."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from dslpar.core.errors import DslparError
from dslpar.data.order import micro_batches
from dslpar.engine.model import model_from_job
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity.device_reference import FirstStep, StepBatches, first_step, least, needed_bytes, places
from dslpar.parity.prove_on_devices import _worst_number
from dslpar.parity.samples import draw_samples

CPU, DEVICE = torch.device("cpu"), torch.device("cuda:0")


def job_in(precision: str, **batch: int) -> Job:
    model = {
        "type": "GPT",
        "num_layers": 2,
        "hidden_size": 32,
        "num_heads": 4,
        "vocab_size": 256,
        "max_seq_len": 16,
    }
    config: dict[str, Any] = {"model": model, "precision": precision, "batch": batch or {"global_size": 4}}
    config |= {"zero": 1} if precision != "fp32" else {}
    return check.resolve(config, 1)


def first_step_in(precision: str, scale: float = 1.0, **batch: int) -> FirstStep:
    """Return a first step with weights multiplied by `scale`."""
    job = job_in(precision, **batch)
    model = model_from_job(job)

    def batches_of(module: nn.Module) -> StepBatches:
        for p in module.parameters():
            p.data *= scale
        samples = draw_samples(job, model, module, 4)
        return StepBatches(list(micro_batches(samples, job.batch, 1, 0, 1, 0)), samples.all_counted)

    return first_step(job, model, batches_of, CPU)


@pytest.mark.parametrize(("precision", "element_bytes"), [("fp32", 8), ("bf16", 4), ("fp16", 4)])
def test_weights_and_gradients_are_counted_before_they_are_allocated(precision: str, element_bytes: int) -> None:
    """Tied tables count once: 256 * 32, and 16 * 32; a block has 12 * 32^2 + 13 * 32; the last norm 2 * 32."""
    job = job_in(precision)
    elements = 272 * 32 + 2 * (12 * 32**2 + 13 * 32) + 64
    assert needed_bytes(job, model_from_job(job)) == 2 * elements * element_bytes


@pytest.mark.parametrize(
    ("on_device", "on_host", "found"),
    [(200, 200, [DEVICE, CPU]), (100, 200, [CPU]), (100, 100, []), (200, 100, [DEVICE])],
)
def test_the_device_comes_before_the_host_where_both_have_room(
    on_device: int, on_host: int, found: list[torch.device]
) -> None:
    assert places(lambda place: on_host if place == CPU else on_device, DEVICE, 110) == found


def test_gradients_do_not_depend_on_micro_batches_whose_numbers_of_counted_labels_differ() -> None:
    whole = first_step_in("fp32", global_size=4, micro_size=4)
    parts = first_step_in("fp32", global_size=4, micro_size=1)
    assert whole.where == "float64 on cpu"
    assert abs(whole.loss - parts.loss) < 1e-7, "denominators are float32"
    for name, gradient in whole.gradients.items():
        assert torch.allclose(gradient, parts.gradients[name], rtol=1e-6, atol=1e-9), name


def test_bounds_grow_with_the_rounding_of_the_precision() -> None:
    """An error of a fifth of a tensor exceeds every bound. fp16 rounds 8 times as finely as bf16.

    The widest bounds are those of norms, whose sums over all tokens have terms that nearly cancel.
    """
    found = {precision: first_step_in(precision) for precision in ("fp32", "fp16", "bf16")}
    shares = {
        precision: max(
            bound.norm / float(first.gradients[name].double().norm())
            for name, bound in first.bounds.items()
            if not name.endswith("qkv.bias")  # the gradient of key biases is zero apart from rounding
        )
        for precision, first in found.items()
    }
    assert shares["fp32"] < 1e-5 < shares["fp16"] < shares["bf16"] / 4 < 0.2 / 4, shares
    assert found["bf16"].where == found["fp16"].where == "float32 on cpu"
    # weights are rounded first, so the references differ only by that
    assert abs(found["fp16"].loss - found["fp32"].loss) < 1e-3


def test_the_least_bound_grows_as_sums_over_ranks_do() -> None:
    assert least(torch.float32, 1) == 1e-6
    assert least(torch.bfloat16, 1) == pytest.approx(4 * 2**-8 * (4 / 3) ** 0.5)
    assert 0.2 < least(torch.bfloat16, 512) < 0.25
    assert least(torch.float16, 8) == least(torch.bfloat16, 8) / 8


@pytest.mark.parametrize(
    ("precision", "scale", "said"),
    [("fp16", 2000.0, r"is not finite in the first step of one process, in fp16"), ("fp32", 0.0, "are zero")],
)
def test_a_step_of_which_nothing_could_differ_is_refused(precision: str, scale: float, said: str) -> None:
    """An infinite bound accepts anything, and zeros stay zeros under any layout."""
    with pytest.raises(DslparError, match=rf"PRE234 .*{said}"):
        first_step_in(precision, scale)


def test_a_number_that_is_none_is_far_off() -> None:
    assert _worst_number([1.0, math.nan], 1.0, 1e-6).off == math.inf
    assert _worst_number([1.0, 1.5], 1.0, 1e-6).off == 0.5
