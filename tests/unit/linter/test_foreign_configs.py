"""CFG123: a config of another framework has one finding, which names the command that converts it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dslpar.cli import foreign_files
from dslpar.cli.main import main
from dslpar.core.errors import has_errors
from dslpar.language.load import load_text
from dslpar.linter import check
from dslpar.schema.frameworks import frameworks
from tests.support.lint import MODEL
from tests.support.paths import ROOT

TREES = ROOT / "tests/support/foreign_configs"
TITLES = {framework.name: framework.title for framework in frameworks()}
DEEPSPEEDS_SECTIONS = {
    "accelerate/ds_alst.json",
    "accelerate/ds_zero2.json",
    "axolotl/zero2.json",
    "axolotl/zero3_offload.json",
    "llama_factory/ds.json",
    "llama_factory/ds_fp8.json",
    "training_arguments/ds_zero3.json",
}
"""Files that another framework's config names, with the keys of DeepSpeed."""
WITH_COMMENTS = ("deepspeed/infinity.hjson", "deepspeed/random_ltd.json")
"""Files of DeepSpeed that are no JSON to dslpar; the command recognises them once their comments are removed."""
NOT_CONVERTED = {"nemo_rl": "NeMo RL", "verl": "verl"}
NOT_RECOGNISED = {"from_environment.py"}  # none of its settings can be read
FILES = [path for path in sorted(TREES.rglob("*.*")) if path.is_file() and path.name not in NOT_RECOGNISED]


@pytest.mark.parametrize("path", FILES, ids=[path.relative_to(TREES).as_posix() for path in FILES])
def test_a_config_of_another_framework_has_one_finding(path: Path) -> None:
    name = path.relative_to(TREES).as_posix()
    folder = "deepspeed" if name in DEEPSPEEDS_SECTIONS else name.partition("/")[0]
    found = check.lint(path, 8)
    if folder in NOT_CONVERTED:
        (item,) = found
        assert (item.code, NOT_CONVERTED[folder] in item.message) == ("CFG128", True)
        return
    if name in WITH_COMMENTS:
        assert foreign_files.is_foreign(check.load(str(path)), found)
        return
    title = TITLES[folder]
    if has_errors(found):
        assert [item.code for item in found] == ["CFG123"]
        assert title in found[0].message
        assert f"dslpar import {path}" in found[0].help
        assert (found[0].location.path, found[0].location.line) == (str(path), 1)
    else:
        assert "libai" in path.parts, "LiBai's form loads as it is"


def test_deepspeeds_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}))
    assert main(["lint", str(path), "--format", "concise"]) == 0  # a named file is linted where it stands
    assert capsys.readouterr().out == ""
    (found,) = check.lint(path)
    assert (found.code, "DeepSpeed" in found.message) == ("CFG123", True)


@pytest.mark.parametrize(
    "text",
    [
        f"{MODEL}fp16 = dict(enabled=True)\nclip_grad_norm = 1.0\nBATCH_SIZE = 4\n",
        f"{MODEL}optim = dict(lr=1.0)\ntrain = dict(train_iter=3, amp=dict(enabled=True))\n",
        f"from libai.config import LazyCall\n{MODEL}train = dict(train_iter=3)\n",
        "from dslpar import LazyCall\nfp16 = 1\nclip_grad_norm = 1.0\n",
        "parallel = dict(pipeline=2)\nclip_grad_norm = 1.0\n",
        "from torch.optim import AdamW\noptimizer = dict(type=AdamW, lr=-1)\n",
    ],
)
def test_a_config_of_ours_with_mistakes_is_none(text: str) -> None:
    found = check.lint(load_text(text, "a.py"), 8)
    assert has_errors(found)
    assert "CFG123" not in {item.code for item in found}


def test_what_loads_as_it_is_has_no_such_finding() -> None:
    text = f"from colossalai.amp import AMP_TYPE\nfrom libai.config import LazyCall\n{MODEL}parallel = dict(data=8)\n"
    assert check.lint(load_text(text, "a.py"), 8) == []
