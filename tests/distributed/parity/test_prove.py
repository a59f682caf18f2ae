"""`prove` on real ranks: correct layouts pass, and mistakes are found and named."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dslpar
from dslpar.cli.main import main
from dslpar.distributed.forked_ranks import RankError
from dslpar.distributed.groups import Groups
from dslpar.layers import Block, Embedding, Head, LayerNorm, cross_entropy, placement
from dslpar.layers.parameter import ONES, parameter
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.parity.prove import Proof, prove
from tests.support import warm
from tests.support.layout_factors import PLAIN, config_of, job_of
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

VOCABULARY, WIDTH = 32, 16


def job(**row: Any) -> Job:
    made = job_of(dict(PLAIN, **row))
    assert made is not None
    return made


def says(proof: Proof) -> str:
    return f"{[each for each in proof.checks if not each.holds]} {proof.first_difference} {proof.findings}"


# ---- correct layouts are proved ----


@pytest.mark.parametrize(
    "row",
    [
        {"mode": "1d 2 sequence", "pipe": 2, "zero": 1, "accumulation": 4, "clip": 1.0},
        # tests/properties/layouts has their like
        pytest.param({"mode": "2d 4", "tied": False, "keep": "none"}, marks=pytest.mark.prove),
        pytest.param({"data": 3, "zero": 3, "recompute": 1, "optimizer": "SGD"}, marks=pytest.mark.prove),
        {"data": 2, "zero": 2, "offload": True, "context": "ring 2"},
        # The head is frozen, and recomputed with the loss: ZeRO 3 frees its weight before torch looks at it.
        pytest.param(
            {"family": "Llama", "data": 2, "zero": 3, "loss_chunks": 3, "adapters": True},
            marks=pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS),
        ),
    ],
    ids=str,
)
def test_a_layout_is_proved(row: dict[str, Any]) -> None:
    proof = prove(job(**row))
    assert proof.verdict == "proved", says(proof)
    assert {each.name for each in proof.checks} == {"loss", "gradients", "norm", "lr", "weights", "copies"}


def test_a_resume_on_another_layout_is_proved() -> None:
    proof = prove(job(mode="1d 2", data=2, zero=1), steps=4, resume_on=job(pipe=2))
    assert proof.verdict == "proved", says(proof)
    assert [run.axes for run in proof.runs] == ["data 2, y 2", "pipe 2"]


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_a_resume_with_other_micro_batches_is_proved_of_a_model_with_batch_norms() -> None:
    """Statistics are per micro-batch, which is smaller in a pipeline: one process uses each layout's micro-batches."""
    proof = prove(job(family="ResNet", pipe=2), steps=2, resume_on=job(family="ResNet"))
    assert proof.verdict == "proved", says(proof)


def test_the_command_prints_and_keeps_a_certificate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "proof.json")
    argv = ["prove", "configs/libai/tensor_parallel.py", "--world-size", "8", "--format", "json", "--certificate", path]
    assert main(argv) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["verdict"] == "proved"
    assert printed["first_difference"] is None
    assert {"name", "worst", "bound", "at"} == set(printed["checks"][0])
    assert "model.hidden_size: 1024 -> 24" in printed["shrunk"]
    assert json.loads(Path(path).read_text()) == printed
    assert main(["prove", "configs/libai/tensor_parallel.py", "--verify", path]) == 0


# ---- mistakes are found and named ----


def leave_out_the_data_all_reduce() -> None:
    """Make each replica keep its own gradient, at ZeRO 0."""
    from deepspeed.runtime.engine import DeepSpeedEngine

    DeepSpeedEngine.buffered_allreduce_fallback = lambda self, *args, **kwargs: None  # type: ignore[method-assign]


def sum_twice_over_y() -> None:
    """Double what ranks of y sum."""
    from dslpar.layers.gather_reduce import Sharding

    reduce = Sharding.reduce

    def doubled(self: Any, partial: Tensor) -> Tensor:
        return reduce(self, partial) * (2 if self.axis.size > 1 else 1)

    Sharding.reduce = doubled  # type: ignore[method-assign]


def forget_momentum() -> None:
    """Make each step begin with no state."""
    step = torch.optim.AdamW.step

    def forgetful(self: Any, *args: Any) -> Any:
        self.state.clear()
        return step(self, *args)

    torch.optim.AdamW.step = forgetful  # type: ignore[method-assign, assignment]


def read_another_replica_s_data() -> None:
    """Make every replica read the first one's samples."""
    from dslpar.data.loader import Loader

    init = Loader.__init__

    def first(self: Any, samples: Any, job: Any, data_rank: int, consumed: Any) -> None:
        init(self, samples, job, 0, consumed)

    Loader.__init__ = first  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "row", "axis", "word"),
    [
        (leave_out_the_data_all_reduce, {"data": 2}, "data", "not averaged over data"),
        (sum_twice_over_y, {"mode": "1d 2"}, "y", "needs y"),
        (read_another_replica_s_data, {"data": 2, "optimizer": "SGD"}, "data", "needs data"),
    ],
)
def test_a_mistake_is_found_with_its_axis(
    change: Callable[[], None], row: dict[str, Any], axis: str, word: str
) -> None:
    proof = prove(job(**row), change=change)
    assert proof.verdict == "differs"
    assert proof.first_difference is not None
    assert proof.first_difference.parameter
    assert proof.first_difference.axis == axis
    assert word in proof.first_difference.guess


def test_lost_state_is_seen_at_the_second_step() -> None:
    """The first step's gradients are right, but the final weights are not."""
    proof = prove(job(data=2), change=forget_momentum)
    wrong = {each.name for each in proof.checks if not each.holds}
    assert "weights" in wrong
    assert "gradients" not in wrong
    assert proof.first_difference is not None
    assert "optimizer" in proof.first_difference.guess


@pytest.mark.parametrize("steps", [1, 2])
def test_one_step_is_enough_for_what_the_first_shows(steps: int) -> None:
    proof = prove(job(data=2, optimizer="SGD"), steps=steps, change=leave_out_the_data_all_reduce)
    assert proof.verdict == "differs"


def test_clipping_acts_and_is_a_change_that_is_named() -> None:
    proof = prove(job(data=2, clip=1.0), steps=1)
    assert proof.verdict == "proved", says(proof)
    large = dataclasses.replace(job(data=2).spec.train, clip_grad_norm=100.0)
    spec = dataclasses.replace(job(data=2).spec, train=large)
    proof = prove(dataclasses.replace(job(data=2), spec=spec), steps=1)
    assert any(each.startswith("train.clip_grad_norm: 100.0 -> ") for each in proof.shrunk)


# ---- programs ----


class Forgetful(nn.Module):
    """A learned weight per feature, whose gradient nobody sums."""

    def __init__(self, groups: Groups) -> None:
        super().__init__()
        self.weight = parameter(placement.residual_vector(groups.tensor, WIDTH), ONES)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def language_model(run: Any, *more: nn.Module) -> nn.Sequential:
    groups = run.groups
    ends = LayerNorm(groups, WIDTH), Head(groups, WIDTH, VOCABULARY)
    return nn.Sequential(Embedding(groups, VOCABULARY, WIDTH), Block(groups, WIDTH, 4), *more, *ends)


def loss(run: Any) -> Callable[[Any, Any], Tensor]:
    return lambda logits, labels: cross_entropy(run.groups, logits, labels, VOCABULARY)


def pairs(count: int = 16) -> list[tuple[Tensor, Tensor]]:
    tokens = torch.randint(VOCABULARY, (count, 9), generator=torch.Generator().manual_seed(0))
    return [(row[:-1], row[1:]) for row in tokens]


SQUARE: dict[str, object] = {"parallel": {"tensor": {"size": 4, "mode": "2d"}}, "optimizer": {"type": "SGD", "lr": 0.1}}


def test_a_program_s_model_over_our_layers_is_proved_and_a_forgotten_sum_is_named() -> None:
    warm.import_deepspeed()
    right = dslpar.prove(SQUARE, world_size=4, model=language_model, loss=loss, data=pairs())
    assert right.verdict == "proved", says(right)

    def forgetful(run: Any) -> nn.Sequential:
        return language_model(run, Forgetful(run.groups))

    wrong = dslpar.prove(SQUARE, world_size=4, model=forgetful, loss=loss, data=pairs())
    assert wrong.verdict == "differs"
    assert wrong.first_difference is not None
    assert (wrong.first_difference.parameter, wrong.first_difference.axis) == ("2.weight", "q")
    assert "not summed over q" in wrong.first_difference.guess


def test_stages_by_hand_are_proved() -> None:
    def half(run: Any) -> Any:
        made = nn.Sequential(nn.Linear(8, 16), nn.ReLU()) if run.stage == 0 else nn.Linear(16, 4)
        return dslpar.Stage(made)

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=generator), torch.tensor(index % 4)) for index in range(24)]
    config: dict[str, object] = {"parallel": {"pipeline": 2}, "batch": {"micro_size": 2, "accumulation": 2}}
    proof = dslpar.prove(config, world_size=4, model=half, loss=nn.CrossEntropyLoss(), data=data)
    assert proof.verdict == "proved", says(proof)
    assert proof.runs[0].axes == "pipe 2, data 2"


class WithUnused(nn.Module):
    """A model with a layer that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(4, 5), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.used(x)
        return y


@pytest.mark.parametrize("stage", [0, 1])
def test_a_weight_that_no_backward_reaches_decays_in_all_layouts(stage: int) -> None:
    """DeepSpeed has zeros as its gradient."""
    config = {"zero": stage, "batch": {"micro_size": 2}, "optimizer": {"type": "AdamW", "lr": 0.1, "weight_decay": 0.5}}
    data = [(x, y) for x, y in zip(torch.randn(8, 4), torch.arange(8) % 5, strict=True)]
    proof = dslpar.prove(
        config, world_size=2, model=lambda run: WithUnused(), loss=nn.functional.cross_entropy, data=data
    )
    assert proof.verdict == "proved", (proof.first_difference, proof.findings)


def test_a_step_without_gradients_is_refused() -> None:
    """MoCo's loss of a single sample is zero, in every layout and with every mistake."""
    config, world_size = config_of(dict(PLAIN, family="MoCo", mode="1d 2"))
    config["batch"] = {"micro_size": 1}
    proof = prove(check.resolve(check.load(config), world_size))
    assert proof.verdict == "refused"
    assert "all gradients of the first step are zero" in proof.findings[0].message


def test_the_momentum_encoder_of_a_rank_that_has_all_of_it_moves_once() -> None:
    """Alone in its group, ZeRO 3 keeps the full weight and the rank's part of it in the same memory."""
    proof = prove(job(family="MoCo", mode="1d 2", zero=3))
    assert proof.verdict == "proved", says(proof)


def test_too_few_samples_are_refused() -> None:
    """With one sample for all replicas, no missing reduction between them would be seen."""
    config: dict[str, object] = {"batch": {"micro_size": 2, "accumulation": 2}}
    with pytest.raises(RankError):  # a program's own exception on its own process is no finding
        dslpar.prove(config, world_size=2, model=lambda run: 1 / 0, data=pairs(16))
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    data = [(torch.ones(8), torch.tensor(1))]
    few = dslpar.prove(config, world_size=2, model=model, loss=nn.CrossEntropyLoss(), data=data)
    assert (few.verdict, few.findings[0].code) == ("refused", "BAT210")
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, generator=generator), torch.tensor(index % 4)) for index in range(20)]
    enough = dslpar.prove(config, world_size=2, model=model, loss=nn.CrossEntropyLoss(), data=data)
    assert enough.verdict == "proved", says(enough)
    assert any(each.startswith("dropout") for each in enough.not_proven)


def test_a_layer_that_does_not_divide_is_refused() -> None:
    def odd(run: Any) -> nn.Sequential:
        """Return three heads, of which two ranks would have one and a half each."""
        parts = Embedding(run.groups, VOCABULARY, 18), Block(run.groups, 18, 3), Head(run.groups, 18, VOCABULARY)
        return nn.Sequential(*parts)

    proof = dslpar.prove(SQUARE, world_size=4, model=odd, loss=loss, data=pairs())
    assert proof.verdict == "refused"
    assert proof.findings[0].code == "TEN201"
