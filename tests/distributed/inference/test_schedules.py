"""Inference from a run with several stages per rank: the layers are partitioned anew, one stage per rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dslpar.inference.trained import open_run
from dslpar.schema import sections as schema_sections
from tests.support.ranks import on_ranks
from tests.support.resumed_runs import FOUR_LAYERS, LENGTH, job_of, run, scheduled
from tests.support.sampling import sampled

VOCAB = 256
COUNTS = {"counts": (1, 1, 1, 1)}
IDS = {"stage_ids": (0, 1, 0, 1)}
CUTS: dict[str, dict[str, Any]] = {
    "counts": {"parallel": schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2, **COUNTS))},
    "stage ids": {"parallel": schema_sections.Parallel(pipeline=schema_sections.PipelineParallel(size=2, **IDS))},
    "automatic": {},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return runs of two ranks, each with two stages of one block, by their partition."""
    known: dict[str, Path] = {}

    def get(cut: str) -> Path:
        if cut not in known:
            known[cut] = folder = tmp_path_factory.mktemp("run")
            model = replace(FOUR_LAYERS, vocab_size=VOCAB)
            job = job_of(folder, 2, **scheduled("interleaved", 2, model=model) | CUTS[cut])
            assert job.stages.counts == (1, 1, 1, 1)
            on_ranks(2, run, job, 2, init="deepspeed")
        return known[cut]

    return get


def logits(path: str, world: int, overrides: Sequence[str], config: str | None) -> torch.Tensor:
    """Return logits of three prompts, on all ranks."""
    from dslpar.distributed.groups import Groups
    from dslpar.inference.model import InferenceModel

    trained = open_run(path, world, overrides, config=config)
    assert trained.job.chunks.num == 1
    model = InferenceModel(trained, Groups(trained.job.mesh), torch.device("cpu"))
    ids = torch.randint(VOCAB, (4, LENGTH), generator=torch.Generator().manual_seed(3))
    stored, found = model(ids), torch.zeros(4, VOCAB)
    if model.is_last_stage:
        found = model.logits_at(stored, LENGTH - 1, VOCAB)
    return model.from_last_stage(found)


ELSEWHERE: dict[str, tuple[int, list[str]]] = {
    "its own layout": (2, []),
    "four ranks": (4, ["parallel.pipeline.size=4"]),
    "three stages": (3, ["parallel.pipeline.size=3", "parallel.pipeline.counts=[1, 1, 2]"]),
    "1d 2": (4, ["parallel.tensor=dict(size=2, mode='1d')"]),
}


@pytest.mark.parametrize("cut", sampled(CUTS, {"stage ids"}))
def test_it_gives_what_one_process_gives(trained: Callable[[str], Path], cut: str) -> None:
    path = str(trained(cut))
    (alone,) = on_ranks(1, logits, path, 1, [], None)
    assert alone.abs().max() > 0.1
    for name, (world, overrides) in ELSEWHERE.items():
        for found in on_ranks(world, logits, path, world, overrides, None):
            assert (found - alone).abs().max() <= 1e-6 * alone.abs().max(), name


@pytest.mark.parametrize(
    "cut",
    [
        f"parallel = dict(pipeline=dict(size=2, counts={list(COUNTS['counts'])}))",
        f"parallel = dict(pipeline=dict(size=2, stage_ids={list(IDS['stage_ids'])}))",
        "parallel = dict(pipeline=2)",
        f"train = dict(dist=dict(pipeline_parallel_size=2, custom_pipeline_stage_id={list(IDS['stage_ids'])}))",
    ],
)
def test_another_config_may_have_chunks_too(trained: Callable[[str], Path], tmp_path: Path, cut: str) -> None:
    sizes = f"num_layers=4, hidden_size=16, num_heads=2, vocab_size={VOCAB}, max_seq_len={LENGTH}, dropout=0.1"
    config = tmp_path / "other.py"
    config.write_text(f"model = dict(type='GPT', {sizes})\nschedule = 'interleaved'\n{cut}\n")
    path = str(trained("automatic"))
    (alone,) = on_ranks(1, logits, path, 1, [], None)
    for found in on_ranks(2, logits, path, 2, [], str(config)):
        assert (found - alone).abs().max() <= 1e-6 * alone.abs().max()
