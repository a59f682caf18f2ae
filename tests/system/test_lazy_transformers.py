"""A transformers model from imports in the config: `LazyCall(LlamaForCausalLM)(config=LazyCall(LlamaConfig)(...))`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked_training import start_job
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

pytestmark = [pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS), pytest.mark.prove]

SIZES = (
    "vocab_size=256, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, "
    "num_key_value_heads=2, max_position_embeddings=16"
)
LAZY = f"""
from dslpar import LazyCall as L
from transformers import LlamaConfig, LlamaForCausalLM
model = L(LlamaForCausalLM)(config=L(LlamaConfig)({SIZES}))
"""
PLAIN = f"model = dict(type='transformers.LlamaForCausalLM', config=dict({SIZES}))\n"
MORE = "parallel = dict(pipeline=2)\ntrain = dict(steps=2, output_dir={!r}, eval_interval=None)\n"


def losses(folder: Path, model: str) -> list[float]:
    """Train on two ranks, and return the losses and the partition from the log."""
    folder.mkdir()
    config, said = folder / "cfg.py", folder / "said.txt"
    config.write_text(model + MORE.format(str(folder / "run")))
    with start_job(2, ["--config", str(config)], said) as job:
        assert job.wait(150) == [0, 0], said.read_text()
    assert "layers on each stage: (2, 1)" in (folder / "run" / "log.txt").read_text()
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)]


@pytest.mark.minutes(4)
def test_a_config_by_imports_is_the_same_run(tmp_path: Path) -> None:
    by_imports = losses(tmp_path / "lazy", LAZY)
    assert len(by_imports) == 2
    assert by_imports == losses(tmp_path / "plain", PLAIN)
