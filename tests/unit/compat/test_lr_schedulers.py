"""Values of ColossalAI 0.1.10's LR schedulers, run with torch 1.12's arithmetic, from a learning rate of 2."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dslpar.compat import lr_schedulers

VALUES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("LinearWarmupLR", dict(total_steps=8, warmup_steps=3), [0.5, 1.0, 1.5, 2.0, 1.6, 1.2, 0.8, 0.4, 0.0]),
    ("LinearWarmupLR", dict(total_steps=5), [2.0, 1.6, 1.2, 0.8, 0.4, 0.0]),
    ("CosineAnnealingLR", dict(total_steps=6, eta_min=0.1), [2.0, 1.872724, 1.525, 1.05, 0.575, 0.227276, 0.1]),
    (
        "CosineAnnealingWarmupLR",
        dict(total_steps=9, warmup_steps=3),
        [0.666667, 1.333333, 2.0, 2.0, 1.866025, 1.5, 1.0, 0.5, 0.133975, 0.0],
    ),
    (
        "CosineAnnealingWarmupLR",
        dict(total_steps=9, warmup_steps=3, eta_min=0.2),
        [0.666667, 1.333333, 2.0, 2.0, 1.879423, 1.55, 1.1, 0.65, 0.320577, 0.2],
    ),
    ("CosineAnnealingWarmupLR", dict(total_steps=6), [2.0, 1.866025, 1.5, 1.0, 0.5, 0.133975, 0.0]),
    ("FlatAnnealingLR", dict(total_steps=9), [2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.5, 0.5, 0.0]),
    (
        "FlatAnnealingWarmupLR",
        dict(total_steps=10, warmup_steps=2, eta_min=0.1),
        [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.525, 0.575, 0.1],
    ),
    (
        "FlatAnnealingWarmupLR",
        dict(total_steps=10, warmup_steps=2, pct_start=0.5),
        [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 1.707107, 1.0, 0.292893, 0.0],
    ),
    (
        "PolynomialLR",
        dict(total_steps=6, end_lr=0.1, power=2),
        [2.0, 1.419444, 0.944444, 0.575, 0.311111, 0.152778, 0.1],
    ),
    (
        "PolynomialWarmupLR",
        dict(total_steps=8, warmup_steps=3, end_lr=0.1, power=2.0),
        [0.666667, 1.333333, 2.0, 2.0, 1.316, 0.784, 0.404, 0.176, 0.1],
    ),
    ("MultiStepLR", dict(total_steps=8, milestones=[2, 4]), [2.0, 2.0, 0.2, 0.2, 0.02, 0.02, 0.02, 0.02, 0.02]),
    (
        "MultiStepWarmupLR",
        dict(total_steps=9, warmup_steps=2, milestones=[3, 5], gamma=0.5),
        [1.0, 2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
    (
        "MultiStepWarmupLR",
        dict(total_steps=9, warmup_steps=2, milestones=[2, 5], gamma=0.5),
        [1.0, 2.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5],
    ),
    (
        "OneCycleLR",
        dict(total_steps=8),
        [0.08, 1.63855, 1.943884, 1.623491, 1.111968, 0.566122, 0.153283, 8e-06, 0.153283],
    ),
    ("StepLR", dict(total_steps=6, step_size=2, gamma=0.5), [2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.25]),
    ("ExponentialLR", dict(total_steps=5, gamma=0.5), [2.0, 1.0, 0.5, 0.25, 0.125, 0.0625]),
]


@pytest.mark.parametrize(("name", "arguments", "wanted"), VALUES)
def test_values(name: str, arguments: dict[str, Any], wanted: list[float]) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    scheduler = getattr(lr_schedulers, name)(optimizer, **arguments)
    found = []
    for _ in range(len(wanted) - 1):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert [*found, scheduler.get_last_lr()[0]] == pytest.approx(wanted, abs=1e-6)


def test_a_loaded_state_goes_on() -> None:
    def scheduler() -> lr_schedulers.CosineAnnealingWarmupLR:
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
        made = lr_schedulers.CosineAnnealingWarmupLR(optimizer, total_steps=9, warmup_steps=3)
        optimizer.step()
        return made

    whole, resumed = scheduler(), scheduler()
    for step in range(5):
        whole.step()
        if step == 2:
            resumed.load_state_dict(whole.state_dict())
    for _ in range(2):
        resumed.step()
    assert resumed.get_last_lr() == whole.get_last_lr() == pytest.approx([1.5])


@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("FlatAnnealingLR", dict(total_steps=4, pct_start=1.5), "pct_start is 1.5"),
        ("PolynomialLR", dict(total_steps=4, end_lr=-1), "end_lr is -1"),
        ("MultiStepWarmupLR", dict(total_steps=4, warmup_steps=1), "needs milestones"),
        ("CosineAnnealingWarmupLR", dict(total_steps=4, warmup_steps=-1), "negative"),
    ],
)
def test_refused_arguments(name: str, arguments: dict[str, Any], text: str) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    with pytest.raises(ValueError, match=text):
        getattr(lr_schedulers, name)(optimizer, **arguments)


def test_accumulation_steps_at_every_nth_call() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    wrapped = lr_schedulers.GradAccumLrSchedulerByStep(lr_schedulers.LinearWarmupLR(optimizer, 4), 2)
    optimizer.step()
    rates = []
    for _ in range(4):
        wrapped.step()
        rates.append(wrapped.get_last_lr()[0])
    assert rates == [2.0, 1.5, 1.5, 1.0]
    assert wrapped.compute_effective_steps_per_epoch(range(7), 2) == 3
