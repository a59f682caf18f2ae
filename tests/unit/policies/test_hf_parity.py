"""Comparison of a policy's results with plain transformers': what counts as a difference."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from dslpar.policies import hf_parity

ONE, ZEROS = torch.ones(2), torch.zeros(2)


def result(**gradients: Tensor) -> hf_parity.Result:
    return hf_parity.Result((ONE,), ONE.sum(), {"used": ONE, **gradients})


@pytest.mark.parametrize(
    ("one", "other", "off"),
    [
        (result(), result(), {}),
        (result(w=ONE), result(), {"w": float("inf")}),
        (result(), result(w=ONE), {"w": float("inf")}),
        (result(w=ZEROS), result(), {}),  # a weight that nothing uses
        (result(), result(w=ZEROS), {}),
        (result(w=ONE * float("nan")), result(w=ONE), {"w": float("inf")}),
    ],
)
def test_a_missing_gradient_and_a_nan_are_differences(
    one: hf_parity.Result, other: hf_parity.Result, off: dict[str, float]
) -> None:
    assert {name: value for name, value in hf_parity.worst(one, other).items() if value} == off


def test_a_tied_weight_has_its_first_name() -> None:
    model = nn.ModuleDict({"head": nn.Linear(2, 3, bias=False), "table": nn.Embedding(3, 2)})
    model["table"].weight = model["head"].weight
    assert hf_parity.first_names(model) == {"head.weight": "head.weight", "table.weight": "head.weight"}


def test_torchs_softmax_takes_its_own_arguments_in_float64() -> None:
    signature = inspect.signature(functional.softmax)
    x = torch.randn(2, 3, dtype=torch.float64)
    with hf_parity.in_float64():
        assert inspect.signature(functional.softmax).parameters.keys() == signature.parameters.keys()
        assert functional.softmax(x, dim=-1, dtype=torch.float32).dtype == torch.float64
        torch.testing.assert_close(nn.Softmax(-1)(x), torch.softmax(x, -1))
