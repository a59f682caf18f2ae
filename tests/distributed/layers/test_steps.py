"""Every layer, and GPT, in every mode after three optimizer steps: float32 against dense float64.

In a step, a gradient that differs between copies, or has a wrong scale, makes weights diverge. So copies are compared
bitwise. Each parameter's rate follows its size and gradient, so all move visibly, by at least a hundredth of their size
(AdamW: a thousandth). If a step or a gradient is missing, the error is that movement.

TOLERANCE is 1e-6. float32 rounds by 6e-8, and sums here have some hundred terms, whose rounding adds up like a random
walk to some 1e-7 of the largest. Weights move by a tenth of their size, so they take on less of it than outputs. AdamW
divides by the root of the second moment, and so would turn the noise of small gradients into steps (a key bias's
gradient is 0). Its eps is therefore a hundredth of the parameter's largest gradient, and its rate a thousandth of the
weight's size. Then noise of 1e-6 in a gradient becomes 1e-7 of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dslpar.core.mesh import TensorMesh
from tests.distributed.layers.cases import CASES, errors_after_steps
from tests.distributed.layers.sampled_rows import STEPS, seen_after_steps, seen_in
from tests.support.compare_dense import STEPS as STEPS_TAKEN
from tests.support.layouts import LAYOUTS, mode_of
from tests.support.ranks import RankError, on_ranks
from tests.support.sampling import sampled

TOLERANCE = 1e-6


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """SGD with momentum: three steps move a weight by about a tenth of its size."""
    rated = [{**group, "lr": 0.02 * group["weight_size"] / group["gradient_size"]} for group in groups]
    return torch.optim.SGD(rated, momentum=0.9)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    rated = [{**group, "lr": 1e-3 * group["weight_size"], "eps": 1e-2 * group["gradient_size"]} for group in groups]
    return torch.optim.AdamW(rated, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[..., Any]] = {"sgd": sgd, "adamw": adamw}
LEAST = {"sgd": 1e-2, "adamw": 1e-3}
"""The smallest movement of every weight, relative to its size."""
BY_ADAMW = {"1d, replicated", "2d", "2.5d", "ulysses"}
"""Modes with AdamW in the default run; the others use SGD."""


def assert_near(tensor: TensorMesh, optimizer: str, *cases: str) -> None:
    ranks = on_ranks(tensor.size, errors_after_steps, tensor, OPTIMIZERS[optimizer], *cases)
    for rank, found in enumerate(ranks):
        moved = {what: value for what, value in found.items() if ": movement" in what}
        errors = {what: value for what, value in found.items() if what not in moved}
        wrong = {what: error for what, error in errors.items() if not error <= TOLERANCE}
        assert not wrong, f"rank {rank} of {tensor} after {optimizer}: {wrong}"
        still = {what: value for what, value in moved.items() if not value > LEAST[optimizer]}
        assert not still, f"{still}: a step that was not taken would not be seen"


EACH_TIME = {"1d-2", "1d-sequence-2", "ulysses-2", "ring-2-zigzag", "ring-3-1d-sequence-2", "hybrid-4", "3d-8"}
"""Rows that killed a mutant first in the kill matrix; `make prove` runs all."""


@pytest.mark.parametrize("name", sampled(STEPS, EACH_TIME))
def test_layers_after_steps_equal_dense_ones(name: str) -> None:
    assert_near(LAYOUTS[name], "adamw" if mode_of(LAYOUTS[name]) in BY_ADAMW else "sgd", *STEPS[name])


def test_the_sample_has_every_case_and_every_mode() -> None:
    whole = {name: tuple(case.__name__ for case in CASES) for name in LAYOUTS}
    assert seen_in(LAYOUTS, STEPS, seen_after_steps) == seen_in(LAYOUTS, whole, seen_after_steps)


# ---- it can fail ----


class _Lazy(torch.optim.SGD):
    """Omits its last step if it is the layer's, in float32."""

    calls = 0

    def step(self, closure: None = None) -> None:
        self.calls += 1
        if self.calls < STEPS_TAKEN or self.param_groups[0]["params"][0].dtype == torch.float64:
            super().step(closure)


def lazy(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return _Lazy(sgd(groups).param_groups, momentum=0.9)


def test_a_step_too_few_is_detected() -> None:
    (found,) = on_ranks(1, errors_after_steps, TensorMesh(), lazy, "mlp")
    assert min(error for what, error in found.items() if ": weight" in what) > 1e-2


def unequal(tensor: TensorMesh) -> dict[str, float]:
    """The second rank has one percent more of a gradient that should be equal on both."""
    scaled = 1.01 if torch.distributed.get_rank() == 1 else 1.0

    def scaling(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return sgd([{**group, "gradient_size": group["gradient_size"] / scaled} for group in groups])

    return errors_after_steps(tensor, scaling, "outward")


def test_copies_that_diverge_are_detected() -> None:
    with pytest.raises(RankError, match="copies on different ranks"):
        on_ranks(2, unequal, LAYOUTS["1d-2"])
