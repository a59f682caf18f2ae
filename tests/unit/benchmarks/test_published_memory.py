"""The memory forecast's benchmark: the memory that each framework's rows hold, and its scores on the data."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import forecast_memory
from benchmarks.published_memory import DATA, Run, read, winners, workload
from dslpar.forecast.stage_memory import stage_memory

needs_data = pytest.mark.skipif(
    not (DATA / "published_runs.csv").exists(),
    reason="others' measured runs lie in ../shared/data, which is not here",
)
HEADER = (
    "source,set,flags,device,dp,tp,pp,vp,sp,zero,mbs,gbs,seq,recompute,attn,precision,step_s,peak_gb,failed,"
    "L,h,a,kv,ffn,vocab,act,tied,framework"
)


def run(tmp_path: Path, **changes: object) -> Run:
    """Return a row of nanotron's model with a billion weights, on eight H100."""
    row = dict(
        source=0, set="s", flags="", device="H100-SXM-80GB", dp=8, tp=1, pp=1, vp=1, sp=1, zero=0, mbs=1, gbs=256,
        seq=4096, recompute="none", attn="flash", precision="bf16", step_s=1, peak_gb=36.7, failed=0, L=16, h=2048,
        a=32, kv=32, ffn=8192, vocab=131072, act="swiglu", tied=1, framework="nanotron 0.5",
    )  # fmt: skip
    path = tmp_path / "runs.csv"
    values = row | changes
    path.write_text(f"{HEADER}\n{','.join(str(values[name]) for name in HEADER.split(','))}\n")
    (found,) = read(path)
    return found


def bytes_a_weight(found: Run) -> float:
    """Return the first stage's total memory per weight."""
    made = workload(found)
    held = stage_memory(made, 0)
    return (held.weights + held.gradients + held.optimizer) / made.weights(0)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 2 + 6 + 12),
        ({"zero": 1}, 2 + 6 + 12 / 8),
        ({"dp": 1}, 2 + 4 + 12),
        ({"source": 3, "zero": 3, "framework": "llm-foundry (FSDP1)"}, 16 / 8),
        ({"source": 4, "zero": 3, "framework": "torchtitan (FSDP2)"}, 16 / 8),
        ({"source": 2, "framework": "Megatron-DeepSpeed (fp16, 1F1B)"}, 2 + 4 + 12),
    ],
)
def test_bytes_of_a_weight(tmp_path: Path, changes: dict[str, object], expected: float) -> None:
    assert bytes_a_weight(run(tmp_path, **changes)) == pytest.approx(expected)


def test_logits_are_of_each_framework_s_loss(tmp_path: Path) -> None:
    tokens, vocab = 4096, 131072
    for framework, source, expected in (("nanotron 0.5", 0, 10), ("llm-foundry (FSDP1)", 3, 4)):
        held = stage_memory(workload(run(tmp_path, framework=framework, source=source, zero=3)), 0)
        assert held.logits == pytest.approx(expected * tokens * vocab)


@pytest.mark.parametrize(("pipe", "tensor", "keep"), [(1, 8, "x"), (1, 16, "none"), (2, 2, "x"), (2, 4, "none")])
def test_nanotron_s_panels(tmp_path: Path, pipe: int, tensor: int, keep: str) -> None:
    assert run(tmp_path, pp=pipe, tp=tensor, dp=1).mesh.tensor.keep == keep


@pytest.mark.prove  # it forecasts all published runs: a score, and no run is lost with it
@needs_data
def test_scores_reach_what_was_asked() -> None:
    runs = read(DATA / "published_runs.csv")
    assert len(winners(runs)) > 150
    missed = [str(score) for score in forecast_memory.all_scores(runs) if not score.passes]
    assert not missed
