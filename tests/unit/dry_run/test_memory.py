"""Memory of a dry run: what a micro-batch saves, tensor by tensor, equals the forecast's closed forms."""

from __future__ import annotations

import pytest

from dslpar.dry_run.dry_run import dry_run
from dslpar.forecast.activations import activations
from dslpar.forecast.workload import workload_of
from tests.support.dry_runs import LLAMA, MODES, job_of
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

SMALL = 0.01
"""Share of rotary tables and generator states, which the closed forms leave out; models are small here."""


@pytest.mark.parametrize("mode", sampled(MODES, {"none", "1d sequence", "2.5d", "ring"}))
def test_the_forecast_says_the_same(mode: str) -> None:
    for kept, forecast in on_ranks(1, _both, mode, init=None)[0]:
        assert kept == pytest.approx(forecast, rel=SMALL)


def _both(mode: str) -> list[tuple[float, float]]:
    pairs: list[tuple[float, float]] = []
    for form in ("", LLAMA.replace("dropout=0.1", "dropout=0.0")):
        for more in ("", "activation_checkpoint = dict(interval=1)"):
            job = job_of(mode, "1f1b", form=form, more=f"precision = 'bf16'\n{more}")
            workload = workload_of(job)
            assert workload is not None
            forecast, dry = activations(workload, 1), dry_run(job, job.mesh.rank({"pipe": 1}))
            assert dry.peak_saved_bytes is not None
            pairs += [(dry.saved_bytes, forecast.first), (dry.peak_saved_bytes, forecast.saved)]
    return pairs
