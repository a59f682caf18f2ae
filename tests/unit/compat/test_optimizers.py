"""Lamb and Lars by values of ColossalAI 0.1.10's own code; the Adams and SGD are torch's with other defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dslpar.compat import optimizers


@pytest.mark.parametrize(
    ("name", "arguments", "weight", "bias"),
    [
        ("Lamb", dict(lr=0.01, weight_decay=0.1), [[0.942685, -2.053012], [0.555167, 2.939806]], [-0.032256, 0.032258]),
        (
            "Lars",
            dict(lr=0.5, momentum=0.9, weight_decay=0.01),
            [[0.998471, -2.002681], [0.504258, 2.993978]],
            [-0.250287, 5.005755],
        ),
        ("Lars", dict(lr=0.5), [[0.998966, -2.002067], [0.503101, 2.995866]], [-0.250125, 5.002503]),
    ],
)
def test_three_steps(name: str, arguments: dict[str, Any], weight: Any, bias: Any) -> None:
    w, b = torch.nn.Parameter(torch.tensor([[1.0, -2.0], [0.5, 3.0]])), torch.nn.Parameter(torch.zeros(2))
    optimizer = getattr(optimizers, name)([w, b], **arguments)
    for step in range(3):
        w.grad, b.grad = torch.tensor([[0.1, 0.2], [-0.3, 0.4]]) * (step + 1), torch.tensor([0.5, -20.0])
        optimizer.step()
    torch.testing.assert_close(w.detach(), torch.tensor(weight), atol=2e-6, rtol=0)
    torch.testing.assert_close(b.detach(), torch.tensor(bias), atol=2e-6, rtol=0)


def test_defaults_are_those_of_colossalai() -> None:
    weights = [torch.nn.Parameter(torch.ones(1))]
    for name in ("HybridAdam", "CPUAdam", "FusedAdam"):
        made = getattr(optimizers, name)(weights)
        assert isinstance(made, torch.optim.AdamW)
        assert (made.defaults["lr"], made.defaults["weight_decay"]) == (1e-3, 0)
    assert optimizers.FusedSGD(weights, 0.1, 0.9).defaults["momentum"] == 0.9


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("HybridAdam", dict(adamw_mode=False), "write torch.optim.Adam"),
        ("HybridAdam", dict(bias_correction=False), "leave bias_correction=False out"),
        ("CPUAdam", dict(nvme_offload_fraction=0.5), "device='nvme'"),
        ("FusedSGD", dict(lr=0.1, wd_after_momentum=True), "leave wd_after_momentum=True out"),
        ("Lars", dict(eeta=2), "eeta is 2"),
    ],
)
def test_refused_arguments(name: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        getattr(optimizers, name)([torch.nn.Parameter(torch.ones(1))], **arguments)
