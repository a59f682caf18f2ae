"""Resolving a spec to a Job: stages, names of runs, findings."""

from __future__ import annotations

import pytest

from dslpar import DslparError, resolve
from dslpar.layout.resolve import Job
from dslpar.linter import check
from dslpar.linter.check import load_text
from dslpar.schema import sections
from tests.support.lint import MODEL, PATH


def job_of(text: str, world: int = 8) -> Job:
    return resolve(load_text(MODEL + text, PATH), world)


def test_stages_of_both_forms() -> None:
    libai = job_of("train = dict(dist=dict(pipeline_parallel_size=4))\n").stages
    assert (libai.counts, libai.auto_ids) == ((2, 2, 3, 1), libai.actual_ids)
    assert job_of("parallel = dict(pipeline=dict(size=4, method='libai'))\n").stages == libai
    by_hand = job_of("parallel = dict(pipeline=dict(size=4, counts=[1, 1, 1, 5]))\n").stages
    assert by_hand.counts == (1, 1, 1, 5)
    assert by_hand.actual_ids == (0, 1, 2, 3, 3, 3, 3, 3)
    assert by_hand.auto_ids == (0, 0, 1, 1, 2, 2, 3, 3)


LINEAR = "dict(type='Linear', in_features=8, out_features=8)"
LAYERS = "model = dict(type='torch.nn.Sequential', layers_cfg=[{layers}])\n"


@pytest.mark.parametrize(
    ("pipeline", "counts"),
    [
        ("2", (4, 2)),  # by the layers with parameters, two on each stage
        ("dict(size=2, method='uniform')", (3, 3)),
        ("dict(size=3, method='libai')", (2, 2, 2)),
        ("dict(size=3, method='type:linear')", (2, 3, 1)),
        ("dict(size=2, counts=[1, 5])", (1, 5)),
        ("dict(size=2, stage_ids=[0, 0, 0, 0, 0, 1])", (5, 1)),
        ("dict(size=2, method='parameters')", None),  # known when they are built
        ("1", (6,)),
    ],
)
def test_stages_of_listed_layers(pipeline: str, counts: tuple[int, ...] | None) -> None:
    layers = (LINEAR, "dict(type='ReLU')", LINEAR, "dict(type='ReLU')", "dict(type='a.MyLayer')", LINEAR)
    text = f"{LAYERS.format(layers=', '.join(layers))}parallel = dict(pipeline={pipeline})\n"
    stages = resolve(load_text(text, PATH), 12).stages
    assert stages.counts == counts
    assert (stages.actual_ids is None) == (counts is None or pipeline == "1")


def test_layer_idx_counts_what_a_pipeline_cuts() -> None:
    layers = "[dict(type='a.MyLayer', layer_idx=index) for index in (None, 0, 0, 1, None, 2, -1)]"
    text = f"model = dict(type='Sequential', layers_cfg={layers})\nparallel = dict(pipeline=3)\n"
    job = resolve(load_text(text, PATH), 3)
    assert (job.spec.model.num_layers, job.stages.counts) == (3, (1, 1, 1))


def test_layers_that_nothing_lists_are_cut_when_they_are_built() -> None:
    stages = resolve(load_text("model = dict(type='a.B')\nparallel = dict(pipeline=2)\n", PATH), 2).stages
    assert stages == (None, None, None)


def test_idle_handlers_are_left_out() -> None:
    names = ("DataParallelGradientHandler", "my.Handler")
    job = job_of(f"gradient_handler = [dict(type=name) for name in {names}]\n")
    assert [handler.target for handler in job.spec.gradient_handler] == ["my.Handler"]


def test_registered_names_are_known_where_they_are_registered() -> None:
    text = "model = dict(type='MyNet', layers_cfg=[dict(type='MyLayer')])\ngradient_handler = dict(type='MyHandler')\n"
    config = load_text(text, PATH)
    names = {"models": ["MyNet"], "layers": ["MyLayer"], "gradient_handlers": ["MyHandler"]}
    job = check.resolve(config, 1, registered=names)
    assert (job.spec.model, job.spec.gradient_handler) == (
        sections.OtherModel(target="MyNet", args={"layers_cfg": [{"type": "MyLayer"}]}),
        (sections.GradientHandler(target="MyHandler"),),
    )
    found = check.lint(config, 1)
    assert [finding.code for finding in found] == ["CFG108"] * 3
    assert all("known only in the process that registers it" in finding.help for finding in found)


def test_where_a_run_writes() -> None:
    assert job_of("").output_dir == "outputs/cfg"
    assert job_of("train = dict(output_dir='elsewhere')\n").output_dir == "elsewhere"


def test_resolve_raises_every_finding() -> None:
    with pytest.raises(DslparError) as caught:
        job_of("parallel = dict(pipeline=3)\nzero = 7\n")
    assert [finding.code for finding in caught.value.findings] == ["PAR101", "CFG103"]
    assert "cfg.py:2:26: PAR101 world-not-a-multiple" in str(caught.value)
    assert "help: start 6 or 9 ranks" in str(caught.value)
