"""Coverage: the effects that no measured run has, and the memory of the host that one of them takes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.forecast_fits import DATA, load, load_unfitted
from dslpar.core.mesh import Mesh, TensorMesh
from dslpar.forecast.constants import CALIBRATED, ERROR, MIXTURES, UNCOVERED, widest
from dslpar.forecast.coverage import GATHERED, SENT, effects_of
from dslpar.forecast.device import device_named
from dslpar.forecast.host_memory import host_bytes, offloads_of
from dslpar.forecast.plan import Machine, forecast
from dslpar.forecast.workload import Buckets, Framework, Workload
from dslpar.layout.chunks import Chunks
from dslpar.layout.schedule import Schedule
from dslpar.models.gpt.section import GPT
from dslpar.models.resmlp.section import ResMLP
from dslpar.schema.sections import OtherModel

H100 = device_named("h100-80g")
MODEL = GPT(num_layers=8, hidden_size=1024, num_heads=16, vocab_size=51200, max_seq_len=2048)


ONE = TensorMesh()


def workload(pipe: int = 1, tensor: TensorMesh = ONE, split: bool = False, **changes: Any) -> Workload:
    made = Workload(
        model=MODEL,
        mesh=Mesh(pipe=pipe, data=8, tensor=tensor),
        counts=(8 // pipe,) * pipe,
        schedule=Schedule(Chunks(pipe), 8, split),
        micro_size=1,
        seq_len=2048,
        zero=3,
    )
    return replace(made, **changes)


MIXTURE = OtherModel(target="transformers.MixtralForCausalLM", args={"config": {}})
EXCHANGE = TensorMesh(e=4, exchanges_tokens=True)
OFFLOAD = Framework(offloads_optimizer=True, buckets=Buckets(offloads_weights=True))


@pytest.mark.parametrize(
    ("made", "device", "names"),
    [
        (workload(), "h100-80g", ()),
        (workload(pipe=2, recompute="full", zero=1), "a100-40g", ()),
        (workload(tensor=TensorMesh(y=4, mode="1d", residual="sequence")), "h100-80g", ()),
        (workload(), "mi300x-192g", ("mi300x-192g",)),
        (workload(framework=OFFLOAD), "h100-80g", ("offload",)),
        (workload(recompute="full", offloads_inputs=True), "h100-80g", ("offload",)),
        (workload(model=MIXTURE), "h100-80g", (GATHERED,)),
        (workload(model=MIXTURE, tensor=EXCHANGE), "h100-80g", (SENT,)),
        (workload(pipe=2, split=True), "h100-80g", ("zero_bubble",)),
        (workload(tensor=TensorMesh(q=2, y=2, mode="2d", residual="hidden")), "h100-80g", ("mode 2d",)),
        (workload(tensor=TensorMesh(y=4, mode="1d", comm_overlap=True)), "h100-80g", ("comm_overlap",)),
        (workload(dtype="fp32", loss_chunks=4), "h100-80g", ("loss_chunks", "fp32")),
    ],
)
def test_what_no_run_covers(made: Workload, device: str, names: tuple[str, ...]) -> None:
    assert tuple(effects_of(made, device_named(device))) == names


def test_layers_of_images_are_not_a_decoder_s() -> None:
    model = ResMLP(num_layers=8, hidden_size=384, image_size=224, patch_size=16, num_classes=1000)
    assert effects_of(workload(model=model, seq_len=196), H100) == {"layers other than a decoder's": UNCOVERED}


def test_the_error_is_wider_for_an_effect_that_your_runs_have_not_either() -> None:
    made, machine = workload(framework=OFFLOAD), Machine.usual(H100)
    assert forecast(workload(), machine).error == ERROR
    assert forecast(made, machine).error == UNCOVERED
    calibrated = replace(machine, error=CALIBRATED, num_runs=5)
    assert forecast(workload(), calibrated).error == CALIBRATED
    assert forecast(made, calibrated).error == UNCOVERED
    assert forecast(made, replace(calibrated, covers=frozenset({"offload"}))).error == CALIBRATED


def test_published_steps_of_mixtures_have_an_error_of_their_own() -> None:
    made, machine = workload(model=MIXTURE, tensor=EXCHANGE), Machine.usual(H100)
    assert (forecast(made, machine).error, forecast(made, machine).uncovered) == (widest(ERROR, MIXTURES), ())
    calibrated = replace(machine, error=CALIBRATED, num_runs=5, covers=frozenset({SENT}))
    assert forecast(made, calibrated).error == CALIBRATED
    gathered = forecast(workload(model=MIXTURE), machine)
    assert (gathered.error, gathered.uncovered) == (widest(UNCOVERED, MIXTURES), (GATHERED,))


def test_the_host_holds_what_is_offloaded() -> None:
    made = workload(framework=OFFLOAD)
    weights = made.weights(0) / 8
    assert offloads_of(made) == ("optimizer", "weights")
    assert host_bytes(made, 0) == pytest.approx((4 * 4 + 2) * weights)
    assert host_bytes(replace(made, zero=1, framework=Framework(offloads_optimizer=True)), 0) == 12 * weights
    assert host_bytes(workload(), 0) == 0
    inputs = replace(workload(), recompute="full", interval=2, offloads_inputs=True)
    assert host_bytes(inputs, 0) == 4 * 2048 * 1024 * 2


@pytest.mark.prove  # it reads all published runs; above are the effects one by one
@pytest.mark.skipif(
    not os.path.exists(os.path.join(DATA, "published_runs_new_stacks.csv")),
    reason="others' measured runs lie in ../shared/data, which is not here",
)
def test_no_published_run_has_an_effect_that_is_called_uncovered() -> None:
    for data in (load(DATA), load_unfitted(DATA)):
        for run in data.runs:
            assert effects_of(run.workload, run.device) == {}, (run.stack, run.set)
