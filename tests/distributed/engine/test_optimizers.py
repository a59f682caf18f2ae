"""Optimizers and LR schedulers by name: the reported rate moved the weights, and shards change nothing."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar.core.errors import DslparError
from dslpar.layout.resolve import Job
from dslpar.schema import sections as schema_sections
from dslpar.schema import torch_optimizers as known
from tests.support.engines import batches, engine_of, job
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

STEPS = 5


def other(target: str, **args: Any) -> schema_sections.OtherLRScheduler:
    return schema_sections.OtherLRScheduler(target=target, args=args)


def _rates(made: Job) -> list[tuple[float, float, float]]:
    """Return for each step the reported rate, the update's length over the gradient's norm, and the momentum used."""
    engine = engine_of(made)
    rows = []
    for step in range(STEPS):
        before = [p.detach().clone() for p in engine.module.parameters()]
        momentum = engine.deepspeed.optimizer.param_groups[0].get("momentum", math.nan)
        engine.train_batch(batches(made, engine.groups.coord["data"], step))
        moved = [(p.detach() - old).square().sum() for p, old in zip(engine.module.parameters(), before, strict=True)]
        rows.append((engine.lr, torch.stack(moved).sum().sqrt().item() / engine.grad_norm, momentum))
    return rows


LR_SCHEDULERS = {
    "ours": (schema_sections.LRScheduler(type="linear", warmup_steps=2), [0.15, 0.3, 0.2, 0.1, 0.0]),
    # DeepSpeed counts the first two steps as its step 0, and keeps the optimizer's lr as the peak.
    "WarmupLR": (
        other("WarmupLR", warmup_min_lr=0.1, warmup_num_steps=2, warmup_type="linear"),
        [0.1, 0.1, 0.2, 0.3, 0.3],
    ),
    "WarmupDecayLR": (
        other("WarmupDecayLR", total_num_steps=4, warmup_min_lr=0.1, warmup_num_steps=2, warmup_type="linear"),
        [0.1, 0.1, 0.2, 0.3, 0.2],
    ),
    "LRRangeTest": (
        other("deepspeed.runtime.lr_schedules.LRRangeTest", lr_range_test_step_size=1, lr_range_test_step_rate=1.0),
        [0.3, 0.6, 0.9, 1.2, 1.5],
    ),
    "OneCycle": (
        other("OneCycle", cycle_min_lr=0.1, cycle_max_lr=0.5, cycle_first_step_size=2, cycle_momentum=False),
        [0.1, 0.3, 0.5, 0.3, 0.1],
    ),
    "StepLR": (other("StepLR", step_size=2, gamma=0.5), [0.3, 0.3, 0.15, 0.15, 0.075]),
    "CosineAnnealingLR": (
        other("CosineAnnealingLR", T_max=4),
        [0.3, 0.3 * (1 + math.sqrt(0.5)) / 2, 0.15, 0.3 * (1 - math.sqrt(0.5)) / 2, 0.0],
    ),
    "CyclicLR": (
        other("torch.optim.lr_scheduler.CyclicLR", base_lr=0.1, max_lr=0.3, step_size_up=2, cycle_momentum=False),
        [0.1, 0.2, 0.3, 0.2, 0.1],
    ),
    # torch refuses the int 0, which the config language takes for a share. All steps belong to the second phase,
    # which torch begins at step -1, so the first step is already 1/5 down.
    "OneCycleLR": (
        other(
            "OneCycleLR",
            total_steps=5,
            pct_start=0,
            final_div_factor=1e12,
            anneal_strategy="linear",
            cycle_momentum=False,
        ),
        [0.24, 0.18, 0.12, 0.06, 0.0],
    ),
}


@pytest.mark.parametrize("name", LR_SCHEDULERS)
def test_the_reported_rate_is_the_one_that_moved_the_weights(name: str) -> None:
    """Plain SGD moves by lr * gradient. Weights of 0.02 round at 1e-9, and updates are some 0.1, so 1e-5 is wide."""
    schedule, rates = LR_SCHEDULERS[name]
    made = job(
        1, optimizer=schema_sections.SGD(lr=0.3), lr_scheduler=schedule, train=schema_sections.Train(steps=STEPS)
    )
    rows = on_ranks(1, _rates, made, init="deepspeed")[0]
    assert [lr for lr, _, _ in rows] == pytest.approx(rates, abs=1e-12)
    assert [moved for _, moved, _ in rows] == pytest.approx(rates, rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("stage", sampled([0, 1, 3], {1}))
def test_momentum_that_cycles_reaches_the_optimizer(stage: int) -> None:
    """torch's OneCycleLR lowers momentum while it raises the rate; ZeRO's shards step with the same values."""
    cycle = other("OneCycleLR", max_lr=0.3, total_steps=STEPS, base_momentum=0.5, max_momentum=0.9)
    sections = {"optimizer": schema_sections.SGD(lr=0.3, momentum=0.9), "lr_scheduler": cycle}
    whole = on_ranks(1, _losses, job(1, **sections), init="deepspeed")[0]
    made = job(2, zero=schema_sections.Zero(stage=stage), **sections)
    assert on_ranks(2, _losses, made, init="deepspeed")[0] == pytest.approx(whole, rel=1e-6)
    if stage == 0:
        momenta = [momentum for *_, momentum in on_ranks(1, _rates, job(1, **sections), init="deepspeed")[0]]
        assert momenta[0] == 0.9
        assert min(momenta) == pytest.approx(0.5, abs=0.1)


def _losses(made: Job) -> list[float]:
    engine = engine_of(made)
    return [engine.train_batch(batches(made, engine.groups.coord["data"], step)) for step in range(STEPS)]


# ---- optimizers ----

ELEMENTWISE = [
    name
    for name, row in known.OPTIMIZERS.items()
    if row.elementwise and not row.refused and row.dotted.startswith("torch.optim.")
]


@pytest.mark.parametrize("name", sampled(ELEMENTWISE, {"ASGD", "Adagrad", "NAdam", "RMSprop"}))
def test_shards_of_an_elementwise_optimizer_step_as_the_whole_does(name: str) -> None:
    """Losses of 5 steps, some of which divide a tiny gradient by its own size: 1e-4 is far below a step's 1e-2."""
    decay = {} if name == "Rprop" else {"weight_decay": 0.1}
    sections: dict[str, Any] = {"optimizer": schema_sections.OtherOptimizer(target=name, lr=1e-3, **decay)}
    whole = on_ranks(1, _losses, job(1, **sections), init="deepspeed")[0]
    sharded = job(2, zero=schema_sections.Zero(stage=2), **sections)
    assert on_ranks(2, _losses, sharded, init="deepspeed")[0] == pytest.approx(whole, rel=1e-4)
    assert len({round(loss, 5) for loss in whole}) == STEPS


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(schema_sections.SGD(lr=0.1, momentum=0.9, nesterov=True), marks=pytest.mark.prove),
        schema_sections.AdamW(lr=1e-2, amsgrad=True),
    ],
)
def test_variants_reach_the_optimizer(made: Any) -> None:
    """The curve differs from the default's, and is the same with shards."""
    plain = type(made)(lr=made.lr, **({"momentum": 0.9} if isinstance(made, schema_sections.SGD) else {}))
    whole, other_ = (on_ranks(1, _losses, job(1, optimizer=each), init="deepspeed")[0] for each in (made, plain))
    sharded = job(2, optimizer=made, zero=schema_sections.Zero(stage=1))
    assert on_ranks(2, _losses, sharded, init="deepspeed")[0] == pytest.approx(whole, rel=1e-5)
    assert whole != other_


class SignSGD(torch.optim.Optimizer):
    """A user's optimizer: moves every element by lr (arXiv 1802.04434), without decay."""

    def __init__(self, params: Any, lr: float, flip: bool = False) -> None:
        super().__init__(params, {"lr": -lr if flip else lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign() * group["lr"])


def _moved(made: Job) -> Tensor:
    engine = engine_of(made)
    before = [p.detach().clone() for p in engine.module.parameters()]
    engine.train_batch(batches(made, 0))
    return torch.cat([(p.detach() - old).flatten() for p, old in zip(engine.module.parameters(), before, strict=True)])


def test_a_class_of_one_s_own_is_called_with_its_arguments() -> None:
    moved = []
    for args in ({}, {"flip": True}):
        section = schema_sections.OtherOptimizer(target=f"{__name__}.SignSGD", lr=0.25, args=args)
        moved.append(on_ranks(1, _moved, job(1, optimizer=section), init="deepspeed")[0])
    assert torch.equal(moved[0].sign(), -moved[1].sign())
    assert moved[0].abs().max() == pytest.approx(0.25, abs=1e-6)  # a weight of up to 0.1 rounds at 1e-8


# ---- refusals ----


@pytest.mark.parametrize(
    ("target", "args", "decay", "code", "said"),
    [
        ("no_such_package.Optimizer", {}, 0, "CFG006", "there is no package"),
        ("torch.optim.Nothing", {}, 0, "CFG006", "has no 'Nothing'"),
        ("torch.nn.Linear", {}, 0, "CFG225", "not a torch.optim.Optimizer"),
        ("RMSprop", {"alpha": -1.0}, 0, "CFG223", "Invalid alpha"),
        ("RMSprop", {"beta": 0.5}, 0, "CFG223", "unexpected keyword argument 'beta'"),
        (f"{__name__}.SignSGD", {}, 0.1, "CFG223", "unexpected keyword argument 'weight_decay'"),
    ],
)
def test_an_optimizer_that_cannot_be(target: str, args: dict[str, Any], decay: float, code: str, said: str) -> None:
    from dslpar.engine.optimizers import optimizer_factory

    section = schema_sections.OtherOptimizer(target=target, weight_decay=decay, args=args)

    def make() -> Any:
        made = optimizer_factory(job(1, optimizer=section))
        return made and made([{"params": [torch.nn.Parameter(torch.zeros(1))]}])

    with pytest.raises(DslparError, match=said) as refused:
        make()
    (finding,) = refused.value.findings
    assert (finding.code, finding.location.path) == (code, "cfg.py")
    assert finding.help


@pytest.mark.parametrize(
    ("target", "args", "code", "said"),
    [
        ("torch.optim.lr_scheduler.ReduceLROnPlateau", {}, "CFG212", "not an LR scheduler that steps by itself"),
        ("torch.optim.SGD", {}, "CFG212", "not an LR scheduler that steps by itself"),
        ("torch.relu", {}, "CFG212", "not an LR scheduler that steps by itself"),
        ("torch.optim.lr_scheduler.Nothing", {}, "CFG006", "has no 'Nothing'"),
        ("StepLR", {"step": 3}, "CFG223", "unexpected keyword argument 'step'"),
        ("WarmupLR", {"warmup_num_steps": 0}, "CFG223", "must be a positive integer"),
        ("CosineAnnealingWarmRestarts", {"T_0": -1}, "CFG223", "Expected positive integer T_0"),
        (
            "OneCycleLR",
            {"max_lr": 0.1, "total_steps": 4, "pct_start": 0.25, "cycle_momentum": False},
            "CFG223",
            "division by",
        ),
    ],
)
def test_a_schedule_that_cannot_be(target: str, args: dict[str, Any], code: str, said: str) -> None:
    from dslpar.engine.optimizers import lr_scheduler_factory

    made = job(1, lr_scheduler=schema_sections.OtherLRScheduler(target=target, args=args))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.1)
    with pytest.raises(DslparError, match=said) as refused:
        lr_scheduler_factory(made)(optimizer)
    assert [finding.code for finding in refused.value.findings] == [code]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("This op had not been implemented on CPU backend."), "CFG229"),  # from FusedLamb and FusedLion
        (RuntimeError("DeepSpeedCPULion requires the cpu_lion op, which failed to build/load."), "CFG229"),
        (ValueError("Invalid learning rate"), "CFG223"),
        (RuntimeError("out of memory"), ""),
    ],
)
def test_a_kernel_that_is_not_there_is_no_wrong_argument(
    error: Exception, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dslpar.engine.optimizers import optimizer_factory

    def init(self: object, params: object, **_: object) -> None:
        raise error

    monkeypatch.setattr(torch.optim.RMSprop, "__init__", init)
    make = optimizer_factory(job(1, optimizer=schema_sections.OtherOptimizer(target="RMSprop")))
    assert make is not None
    with pytest.raises(DslparError if code else RuntimeError) as refused:
        make([{"params": [torch.nn.Parameter(torch.zeros(1))]}])
    if code:
        assert [finding.code for finding in refused.value.findings] == [code]  # type: ignore[attr-defined]


def test_what_deepspeed_says_of_a_kernel_that_it_has_not() -> None:
    """The words by which the error is recognized."""
    from deepspeed.ops.op_builder.cpu import NotImplementedBuilder

    with pytest.raises(ValueError, match="op had not been implemented"):
        NotImplementedBuilder().load()


def _refused_in_a_run(made: Job) -> str:
    with pytest.raises(DslparError) as refused:
        engine_of(made)
    return refused.value.findings[0].code


def test_deepspeed_lets_the_finding_through() -> None:
    section = schema_sections.OtherOptimizer(target="RMSprop", args={"alpha": -1.0})
    assert on_ranks(2, _refused_in_a_run, job(2, optimizer=section), init="deepspeed") == ["CFG223"] * 2


# ---- DeepSpeed's behaviour: when this fails, the patch of its number in deepspeed_patches can go ----


def _groups_of_adagrad(made: Job) -> int:
    import deepspeed

    from dslpar.layout.deepspeed_config import ds_config

    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    groups: list[dict[str, Any]] = [{"params": [*part.parameters()]} for part in module]
    optimizer = torch.optim.Adagrad(groups)
    config = ds_config(made)
    runner, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config, dist_init_required=False)
    return len(runner.optimizer.optimizer.param_groups)


def test_m10_zero_still_makes_adagrad_anew_in_one_group() -> None:
    made = job(1, zero=schema_sections.Zero(stage=1), optimizer=schema_sections.OtherOptimizer(target="Adagrad"))
    assert on_ranks(1, _groups_of_adagrad, made, init="deepspeed") == [1]
