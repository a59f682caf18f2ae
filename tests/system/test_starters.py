"""Configs from `dslpar init`: each model trains two steps in one process, and over ranks."""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest

from dslpar.cli.main import main
from dslpar.cli.starter_models import NAMES, find_model
from dslpar.layout.transformers_data_types import data_types
from dslpar.schema.transformers_policies import DERIVED, POLICIES
from tests.support.forked_training import start_job
from tests.support.runs import metrics
from tests.support.sampling import sampled
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

SHORT = ("train.steps=2", "train.eval_interval=2", "train.eval_steps=1", "train.save_interval=0")
RUNS = [(model, 1) for model in NAMES] + [(model, 8) for model in ("gpt", "llama", "bert", "t5", "vit", "resmlp")]


CLASSES = sorted(cls for cls in {*POLICIES, *DERIVED} if data_types(cls))


def train(tmp_path: Path, model: str, gpus: int) -> None:
    """Train two steps of the config from `dslpar init --model MODEL --gpus GPUS`."""
    wanted = find_model(model)
    if str(wanted.section["type"]).startswith("transformers.") and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    words = [str(tmp_path / "config.py"), "--model", model, "--gpus", str(gpus)]
    if wanted.data[0] == "images":
        draw = numpy.random.default_rng(0)
        images = draw.integers(0, 256, (256, 32, 32, 3), dtype=numpy.uint8)
        numpy.savez(tmp_path / "images.npz", images=images, labels=draw.integers(0, 10, 256))
        words += ["--data-path", str(tmp_path / "images.npz")]
    assert main(["init", *words]) == 0
    argv = ["--config", words[0], f"train.output_dir={tmp_path / 'out'}", *SHORT]
    said = tmp_path / "said.txt"
    with start_job(gpus, argv, said) as job:
        assert job.wait(200) == [0] * gpus, said.read_text()
    lines = metrics(tmp_path / "out")
    assert [line["step"] for line in lines] == [1, 2]
    assert lines[1]["eval_loss"] > 0


@pytest.mark.parametrize(("model", "gpus"), sampled(RUNS, {("gpt", 1)}, named=lambda row: f"{row[0]}-{row[1]}"))
def test_a_starter_trains(tmp_path: Path, model: str, gpus: int) -> None:
    train(tmp_path, model, gpus)


@pytest.mark.prove
@pytest.mark.parametrize("cls", CLASSES)
def test_every_class_of_transformers_that_is_trained_has_a_starter(tmp_path: Path, cls: str) -> None:
    """This includes GraniteMoE, whose first step once met the keys of an earlier evaluation in a cache."""
    train(tmp_path, cls, 1)


@pytest.mark.prove
@pytest.mark.skipif(not HAS_TRANSFORMERS, reason=NO_TRANSFORMERS)
def test_a_folder_of_transformers_goes_on_training(tmp_path: Path) -> None:
    import transformers

    config = transformers.LlamaConfig(**find_model("LlamaForCausalLM").section["config"])  # type: ignore[arg-type]
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    config_file = str(tmp_path / "config.py")
    assert main(["init", config_file, "--model", str(tmp_path / "llama"), "--gpus", "4"]) == 0
    said = tmp_path / "said.txt"
    with start_job(4, ["--config", config_file, f"train.output_dir={tmp_path / 'out'}", *SHORT], said) as job:
        assert job.wait(200) == [0] * 4, said.read_text()
    assert len(metrics(tmp_path / "out")) == 2
