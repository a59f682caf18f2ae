"""Paths in configs: each key that names one is known, a missing one is named, and what it may mean."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from dslpar.core.errors import DslparError
from dslpar.data.source import find_source
from dslpar.linter.check import lint, load, load_text
from dslpar.schema import paths
from dslpar.schema.datasets import DATASETS
from dslpar.schema.sections import Spec
from dslpar.schema.sections_reader import read
from tests.support.lint import MODEL

TOKENS = "type='tokens', path='{}'"
LLAMA = "model = dict(type='transformers.LlamaForCausalLM', pretrained='{}')\n"


def spec_of(text: str, folder: Path) -> tuple[Spec, str]:
    path = str(folder / "cfg.py")
    return read(load_text(text, path)).spec, path


def test_every_key_of_data_that_names_a_path_is_known(tmp_path: Path) -> None:
    """The annotation of such a key is Path, and `files` lists paths; BAT118 reads a chat's template."""
    for name, cls in DATASETS.items():
        keys = {item.name for item in fields(cls) if str(item.type).removesuffix(" | None") == "Path"}
        keys |= {item.name for item in fields(cls)} & {"files"}
        values = {key: ["gone"] if key == "files" else "gone" for key in keys}
        spec, path = spec_of(f"{MODEL}data = dict(type={name!r}, **{values})\n" if keys else MODEL, tmp_path)
        assert {each.key for each in paths.paths_of_data(spec, path)} == {f"data.{key}" for key in keys}
        assert {each.path for each in paths.paths_of_data(spec, path)} <= {str(tmp_path / "gone")}


@pytest.mark.parametrize("model", [LLAMA, MODEL.replace("max_seq_len=96", "max_seq_len=96, pretrained='{}'")])
def test_pretrained_is_a_path_of_every_model(tmp_path: Path, model: str) -> None:
    spec, path = spec_of(model.format("weights"), tmp_path)
    (named,) = paths.named_paths(spec, path)
    assert (named.key, named.written, named.path) == ("model.pretrained", "weights", str(tmp_path / "weights"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("../t2/tokz", "../t2/toks"),
        ("../t3/toks", "../t2/toks"),
        ("../T2/toks", "../t2/toks"),
        ("../t2/other", None),
        ("nowhere", None),
        ("{}/t2/tok", "{}/t2/toks"),
        ("t2/toks", None),
    ],
)
def test_a_near_path_is_meant(tmp_path: Path, written: str, meant: str | None) -> None:
    (tmp_path / "t2" / "toks").mkdir(parents=True)
    (tmp_path / "t1").mkdir()
    spec, path = spec_of(f"{MODEL}data = dict({TOKENS.format(written.format(tmp_path))})\n", tmp_path / "t1")
    (named,) = paths.paths_of_data(spec, path)
    hint = None if meant is None else f"did you mean {meant.format(tmp_path)!r}?"
    assert named.hint("") == (hint or "")


def test_a_path_from_the_working_folder_is_meant_from_the_config_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t2" / "toks").mkdir(parents=True)
    (tmp_path / "t1").mkdir()
    monkeypatch.chdir(tmp_path)
    config = Path("t1/cfg.py")
    config.write_text(f"{MODEL}data = dict({TOKENS.format('t2/toks')})\n")
    (found,) = [item for item in lint(load(str(config)), 1) if item.code == "BAT111"]
    assert found.help == "did you mean '../t2/toks'?"


def test_files_of_megatron_may_lack_their_suffix(tmp_path: Path) -> None:
    (tmp_path / "text_document.idx").touch()
    spec, path = spec_of(f"{MODEL}data = dict({TOKENS.format('text_document')})\n", tmp_path)
    (named,) = paths.paths_of_data(spec, path)
    assert not named.is_missing
    assert named.on_hosts == str(tmp_path / "text_document.idx")


@pytest.mark.parametrize(
    "data",
    [
        "type='tokens', path='gone'",
        "type='text', files=['gone']",
        "type='text', tokenizer='gone'",
        "type='images', path='gone'",
        "type='huggingface', path='gone'",
        "type='chat', files=['gone']",
        "type='blend', parts=[dict(type='tokens', path='gone'), dict(type='text')]",
    ],
)
def test_a_run_says_that_a_path_is_missing_and_not_corrupted(tmp_path: Path, data: str) -> None:
    config = tmp_path / "cfg.py"
    config.write_text(f"{MODEL}data = dict({data})\n")
    job = _Job(*spec_of(config.read_text(), tmp_path))
    with pytest.raises(DslparError) as raised:
        find_source(job)  # type: ignore[arg-type]
    (found,) = raised.value.findings
    assert (found.code, found.name) == ("BAT201", "no-such-text")
    assert found.message == f"no such file or folder {str(tmp_path / 'gone')!r}"
    assert "verify" not in found.help


class _Job:
    """The parts of a job that tell where its data are."""

    def __init__(self, spec: Spec, path: str) -> None:
        self.spec, self.path = spec, path


def test_all_missing_paths_are_reported_at_once(tmp_path: Path) -> None:
    text = LLAMA.format("org/model") + "data = dict(type='text', files=['a', 'b'], tokenizer='org/tokenizer')\n"
    spec, path = spec_of(text, tmp_path)
    with pytest.raises(DslparError) as raised:
        paths.check(paths.named_paths(spec, path), path)
    found = raised.value.findings
    assert [item.key for item in found] == ["model.pretrained", "data.files.0", "data.files.1", "data.tokenizer"]
    assert [item.code for item in found] == ["CKP205", "BAT201", "BAT201", "BAT201"]
    assert ["hub ids are not read" in item.message for item in found] == [True, False, False, True]
