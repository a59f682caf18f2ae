"""Every file under configs/ and hostfiles/: lints clean for its launch command's world, shows, and trains.

The runs are scaled down (width, sequence, batch), and their losses equal those of one process, since these configs only
demonstrate layouts. AdamW amplifies rounding if a gradient is zero, hence 1e-5 and not 1e-6.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401  # ZeRO imports it, and torch's compiler with it: once
import numpy
import pytest

from dslpar.cli import main as cli_main
from dslpar.cluster import hostfile
from dslpar.layout.divisors import least_micro_size
from dslpar.linter import check
from dslpar.schema import sections
from dslpar.schema.datasets import type_name
from dslpar.training import main as training_main
from tests.support.digits import load_digits
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

CONFIGS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "configs").rglob("*.py")
    if "common" not in path.relative_to(ROOT).parts
)
HOSTFILES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "hostfiles").iterdir())
RUN_BY_DEFAULT = {
    "configs/gpt_3d.py",
    "configs/libai/load_balanced.py",
}

WIDTH = {"hidden_size": 32, "max_seq_len": 16, "ffn_hidden_size": 64}
LIBAI_NAMES = {
    "hidden_size": "cfg.hidden_size",
    "max_seq_len": "cfg.max_seq_length",
    "ffn_hidden_size": "cfg.ffn_hidden_size",
}
ENCODER = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
WITHOUT_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
IMAGES = {"image_size": 8, "patch_size": 2, "num_channels": 1}
OF_TRANSFORMERS = {
    "BertForPreTraining": {**ENCODER, **WITHOUT_DROPOUT, "vocab_size": 260},
    "RobertaForMaskedLM": {**ENCODER, **WITHOUT_DROPOUT, "vocab_size": 260},
    "T5ForConditionalGeneration": dict(
        d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4, dropout_rate=0.0, vocab_size=300
    ),
    "ViTForImageClassification": {**ENCODER, **WITHOUT_DROPOUT, **IMAGES, "num_labels": 10},
    "ViTMAEForPreTraining": {**ENCODER, **WITHOUT_DROPOUT, **IMAGES}
    | dict(
        decoder_hidden_size=32, decoder_num_hidden_layers=2, decoder_num_attention_heads=4, decoder_intermediate_size=64
    ),
    "SwinForImageClassification": {**WITHOUT_DROPOUT, **IMAGES, "num_labels": 10}
    | dict(embed_dim=16, depths=[1, 1], num_heads=[2, 4], window_size=2, drop_path_rate=0.0),
    "GPT2LMHeadModel": dict(
        n_embd=32, n_layer=2, n_head=4, vocab_size=256, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}
"""Sizes without dropout, by class."""


@pytest.fixture(autouse=True)
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def world_of(config: str) -> int:
    """Return the number of ranks in the launch command of the file's first comment."""
    comment = (ROOT / config).read_text().partition("\n\n")[0]
    command = re.search(r"deepspeed (?:--num_gpus (\d+)|--hostfile (\S+)).* --config (\S+)", comment)
    assert command, f"{config} does not open with its launch command"
    num_gpus, hosts, named = command.groups()
    assert named == config
    return int(num_gpus) if num_gpus else hostfile.parse((ROOT / hosts).read_text(), hosts).world_size


def scaled_down(config: str, images: Path) -> list[str]:
    """Return overrides to small sizes and few steps, in fp32, with the same number of samples per step in any world."""
    root, job = check.load(config).root, check.resolve(config, world_of(config))
    model = root.get("model").value
    if isinstance(job.spec.model, sections.OtherModel) and job.spec.model.is_of_transformers:
        name = job.spec.model.target.rpartition(".")[2]
        words = [f"model.config.{key}={value}" for key, value in OF_TRANSFORMERS[name].items()]
        words += [] if type_name(job.spec.data) == "images" else ["data.seq_len=16"]
    elif isinstance(job.spec.model, sections.ImageModel):
        words = [f"model.{key}={value}" for key, value in {**IMAGES, "hidden_size": 32, "num_classes": 10}.items()]
    else:
        names = {name: LIBAI_NAMES[name] if "cfg" in model else name for name in WIDTH if "layers_cfg" not in model}
        words = [f"model.{name}={WIDTH[short]}" for short, name in names.items()]
    least = least_micro_size(job.mesh.tensor)
    words += ["precision=None"] * ("precision" in root.value)
    words += ["schedule.num_microbatches=None"] * (
        "num_microbatches" in getattr(root.value.get("schedule"), "value", ())
    )
    if type_name(job.spec.data) == "images":
        digits = load_digits()
        numpy.savez(images, images=(digits.images * 15).astype("uint8"), labels=digits.target)
        words += [f"data.path={images}", "data.mean=0.3", "data.std=0.4"]
    batch = f"batch={{'global_size': 8, 'micro_size': {least}}}"
    return [*words, batch, "train.steps=2", "train.eval_interval=None"]


def losses(config: str, world: int, folder: Path, *overrides: str) -> list[float]:
    """Return the losses of two steps on `world` ranks."""
    words = [
        "--config",
        config,
        f"train.output_dir={folder}",
        *scaled_down(config, folder.with_suffix(".npz")),
        *overrides,
    ]
    assert on_ranks(world, training_main.main, words, init=None) == [0] * world
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


BY_PROGRAM = {"configs/libai/moco_pretrain.py"}
"""train.py has no two views of an image; tests/distributed/models/test_image_learning.py trains such a model."""


def test_the_examples_are_found() -> None:
    assert set(CONFIGS) >= RUN_BY_DEFAULT
    assert {"hostfiles/8gpu", "hostfiles/2x8gpu"} <= set(HOSTFILES)


@pytest.mark.parametrize("config", CONFIGS)
def test_config_lints_clean(config: str) -> None:
    assert [finding.concise() for finding in check.lint(config, world_of(config))] == []


@pytest.mark.parametrize("config", CONFIGS)
def test_config_shows(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    world = world_of(config)
    assert cli_main.main(["show", config, "--world-size", str(world), "--format", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["world_size"] == world
    micro, accumulation = shown["batch"]["micro_size"], shown["batch"]["accumulation"]
    assert shown["batch"]["global_size"] == micro * accumulation * shown["parallel"]["data"]


@pytest.mark.parametrize("path", HOSTFILES)
def test_hostfile_lints_clean(path: str) -> None:
    cluster = hostfile.parse((ROOT / path).read_text(), path)
    findings = check.lint("configs/gpt_3d.py", cluster.world_size, cluster=cluster)
    assert [finding.concise() for finding in findings] == []


@pytest.mark.parametrize(
    "config",
    [
        config if config in RUN_BY_DEFAULT else pytest.param(config, marks=pytest.mark.prove)
        for config in CONFIGS
        if config not in BY_PROGRAM
    ],
)
def test_config_trains_as_one_process_does(config: str, tmp_path: Path) -> None:
    if "from transformers import" in (ROOT / config).read_text() and not HAS_TRANSFORMERS:
        pytest.skip(NO_TRANSFORMERS)
    one_process = "train.dist=None" if "libai" in config else "parallel=None"
    alone = losses(config, 1, tmp_path / "alone", one_process, "schedule=None")
    assert losses(config, world_of(config), tmp_path / "spread") == pytest.approx(alone, rel=1e-5)
    assert len(alone) == 2
