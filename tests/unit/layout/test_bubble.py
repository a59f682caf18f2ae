"""The bubble of a job, from its partition, schedule and recomputation."""

from __future__ import annotations

import pytest

from dslpar.layout import bubble
from dslpar.linter.check import load_text, resolve
from tests.support.lint import MODEL, PATH

EVEN = MODEL.replace("hidden_size=96", "hidden_size=96000")
"""So wide that the head, with 256 tokens, hardly counts."""


def simulated(text: str) -> bubble.Timeline:
    timeline = bubble.simulate_job(resolve(load_text(text, PATH), 8))
    assert timeline is not None
    return timeline


def test_even_stages_have_the_closed_form_s_bubble() -> None:
    timeline = simulated(EVEN + "parallel = dict(pipeline=4)\nbatch = dict(accumulation=8)\n")
    assert timeline.bubble == pytest.approx(3 / 11, abs=1e-3)


def test_stages_take_as_long_as_their_layers() -> None:
    text = EVEN + "parallel = dict(pipeline=dict(size=2, counts=[2, 6]))\nbatch = dict(accumulation=64)\n"
    timeline = simulated(text)
    first, last = timeline.busy
    assert last == pytest.approx(3 * first, rel=1e-3)
    # The first stage ends long before. The busiest waits for one forward of 1/2, and for one backward at the end.
    assert timeline.bubble == pytest.approx(0.5 / (64 * 1.5 + 0.5), rel=1e-3)


def test_recomputation_is_in_the_backward() -> None:
    text = EVEN + "parallel = dict(pipeline=2)\nbatch = dict(accumulation=4)\n"
    plain, again = simulated(text), simulated(text + "activation_checkpoint = 1\n")
    assert again.makespan == pytest.approx(plain.makespan * 4 / 3)


def test_listed_layers_are_weighed_by_those_with_parameters() -> None:
    layers = ", ".join(
        f"dict(type='{name}')" if name == "ReLU" else "dict(type='Linear', in_features=8, out_features=8)"
        for name in ("Linear", "ReLU", "Linear", "Linear")
    )
    text = (
        f"model = dict(type='Sequential', layers_cfg=[{layers}])\n"
        "parallel = dict(pipeline=dict(size=2, counts=[2, 2]))\nbatch = dict(accumulation=4)\n"
        "data = dict(type='a.Data')\n"
    )
    job = resolve(load_text(text, PATH), 8)
    assert bubble.durations_of(job).forward == pytest.approx([2 / 3, 4 / 3])


def test_too_long_a_step_is_not_simulated() -> None:
    text = EVEN + "parallel = dict(pipeline=2)\nbatch = dict(accumulation=60000)\n"
    assert bubble.simulate_job(resolve(load_text(text, PATH), 8)) is None
    assert bubble.simulate_job(resolve(load_text(text, PATH), 8), 10) is not None
