"""Configs of Accelerate, Trainer, Axolotl and LLaMA-Factory: every key is told or judged, and files are followed."""

from __future__ import annotations

from pathlib import Path

import pytest

from dslpar.migrate.convert import Import, convert
from dslpar.migrate.sources import read_text
from tests.support.paths import ROOT

SAMPLES = ROOT / "tests/support/foreign_configs"
SOURCES = ("accelerate", "axolotl", "llama_factory", "training_arguments")
FILES = sorted(file for name in SOURCES for file in (SAMPLES / name).glob("*.y*ml"))


def made_of(file: Path) -> Import:
    source = read_text(file.read_text(encoding="utf-8"), str(file))
    assert source.name == file.parent.name
    return convert(source)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_key_of_a_real_config_is_known(file: Path) -> None:
    made = made_of(file)
    assert not [entry for entry in made.entries if "no such key" in entry.why]
    assert not [entry for entry in made.entries if entry.fate != "kept" and entry.fate != "renamed" and not entry.why]


def test_auto_is_filled_in_at_the_lines_of_the_file_that_is_named() -> None:
    made = made_of(SAMPLES / "llama_factory/llama3_full_sft.yaml")
    filled = next(entry for entry in made.entries if entry.key == "deepspeed.train_micro_batch_size_per_gpu")
    assert (filled.location.path.rpartition("/")[2], filled.location.line, filled.value) == ("ds.json", 6, 1)
    assert made.values["precision.dtype"] == "bf16"


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    source = read_text("per_device_train_batch_size: 1\ndeepspeed: ds.json\n", str(tmp_path / "a.yaml"))
    (missing,) = (entry for entry in convert(source).entries if "missing file 'ds.json'" in entry.why)
    assert (missing.fate, missing.location.line) == ("needed", 2)


def test_a_folder_becomes_pretrained(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    source = read_text("base_model: tiny\nsequence_len: 64\n", str(tmp_path / "a.yaml"))
    values = convert(source).values
    assert (values["model.type"], values["model.pretrained"]) == ("transformers.LlamaForCausalLM", "tiny")
