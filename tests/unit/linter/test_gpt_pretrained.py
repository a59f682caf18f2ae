"""Lint of a GPT with pretrained weights: each field is compared with config.json, at its line."""

from __future__ import annotations

import json
from pathlib import Path

import dslpar
from dslpar.core.errors import Finding
from dslpar.models.gpt import hugging_face, section

SIZES = {"num_layers": 2, "hidden_size": 48, "num_heads": 4, "vocab_size": 300, "max_seq_len": 64}
CONFIG = """\
model = dict(
    type='GPT', num_layers=2, hidden_size=48, num_heads=4, vocab_size=300, max_seq_len=64,
    activation='gelu_tanh', pretrained='weights',
)
"""


def found(folder: Path, text: str = CONFIG) -> list[Finding]:
    path = folder / "cfg.py"
    path.write_text(text)
    return [each for each in dslpar.lint(path, 1) if each.code.startswith("CKP")]


def weights(folder: Path, **fields: object) -> None:
    model = section.GPT(**SIZES | {"activation": "gelu_tanh"} | fields)
    (folder / "weights").mkdir(exist_ok=True)
    values = {"model_type": "gpt2", **hugging_face.config_of(model)}
    (folder / "weights" / "config.json").write_text(json.dumps(values))


def test_fields_that_fit_are_no_finding(tmp_path: Path) -> None:
    (missing,) = found(tmp_path)
    assert (missing.code, missing.severity) == ("CKP102", "warning"), "the folder may be on the job's hosts"
    weights(tmp_path)
    assert found(tmp_path) == []
    assert dslpar.resolve(tmp_path / "cfg.py", 1).spec.model.pretrained == str(tmp_path / "weights")


def test_each_field_that_differs_has_its_finding_and_its_line(tmp_path: Path) -> None:
    weights(tmp_path, num_heads=6, activation="gelu")
    heads, activation = found(tmp_path)
    assert heads.message == "num_heads is 4, but the weights in model.pretrained have 6"
    assert (heads.help, heads.location.line) == ("model.num_heads=6", 2)
    assert activation.message == "activation is 'gelu_tanh', but the weights in model.pretrained have 'gelu'"
    assert activation.location.line == 3


def test_what_is_no_folder_of_such_a_model_is_told(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    assert [each.message for each in found(tmp_path)] == ["cannot read its config.json: there is no such file"]
    (tmp_path / "weights" / "config.json").write_text('{"model_type": "bert"}')
    assert "describes a model of type 'bert'" in found(tmp_path)[0].message
    (tmp_path / "weights" / "config.json").write_text("{")
    assert found(tmp_path)[0].message.startswith("cannot read its config.json: ")
