"""The layouts of LiBai's page on distributed configuration, with only the import line changed.

On the page, each is a part of `configs/bert_large_pretrain.py`, with `...` for the rest. Here that file is imported.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from dslpar.core.errors import has_errors
from dslpar.linter import check
from dslpar.training import main as training_main
from tests.support.paths import ROOT
from tests.support.ranks import on_ranks

IMPORT = "from .bert_large_pretrain import model, train\n"
LAYERS = "train.dist.pipeline_num_layers = model.cfg.hidden_layers\n"
SNIPPETS = {
    "data": "...\n\ntrain.dist.data_parallel_size = 8\n",
    "tensor": "...\n\ntrain.dist.tensor_parallel_size = 8\n",
    "pipeline": f"...\n\ntrain.dist.pipeline_parallel_size = 8\n\n{LAYERS}",
    "data tensor": "...\n\ntrain.dist.data_parallel_size = 2\ntrain.dist.tensor_parallel_size = 4\n",
    "data pipeline": f"...\n\ntrain.dist.data_parallel_size = 2\ntrain.dist.pipeline_parallel_size = 4\n\n{LAYERS}",
    "tensor pipeline": f"...\n\ntrain.dist.tensor_parallel_size = 2\ntrain.dist.pipeline_parallel_size = 4\n\n{LAYERS}",
    "data tensor pipeline": f"""\
...

train.dist.data_parallel_size = 2
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2

{LAYERS}""",
    "inferred data": f"""\
...
# only set tensor_parallel_size and pipeline_parallel_size
train.dist.tensor_parallel_size = 2
train.dist.pipeline_parallel_size = 2

{LAYERS}""",
    "custom stages": """\
train.dist.pipeline_parallel_size = 4
train.dist.pipeline_num_layers = 24
train.dist.custom_pipeline_stage_id = [0]*6 + [1]*7 + [2]*7 + [3]*4
""",
}
SIZES = {  # data, tensor, pipeline
    "data": (8, 1, 1),
    "tensor": (1, 8, 1),
    "pipeline": (1, 1, 8),
    "data tensor": (2, 4, 1),
    "data pipeline": (2, 1, 4),
    "tensor pipeline": (1, 2, 4),
    "data tensor pipeline": (2, 2, 2),
    "inferred data": (2, 2, 2),
    "custom stages": (2, 1, 4),
}
SMALL = [
    *("model.cfg.hidden_size=32", "model.cfg.ffn_hidden_size=64", "model.cfg.max_seq_length=16"),
    *("batch={'global_size': 8, 'micro_size': 1}", "train.steps=2", "train.eval_interval=None"),
]


def written(folder: Path, name: str) -> str:
    """Write the snippet as a file among LiBai's."""
    shutil.copytree(ROOT / "configs" / "common", folder / "common")
    shutil.copy(ROOT / "configs" / "bert_large_pretrain.py", folder)
    path = folder / "snippet.py"
    path.write_text(IMPORT + SNIPPETS[name])
    return str(path)


@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_lints_and_resolves(tmp_path: Path, name: str) -> None:
    checked = check.check(check.load(written(tmp_path, name)), 8)
    assert not has_errors(checked.findings), [finding.concise() for finding in checked.findings]
    mesh = checked.job.mesh
    assert (mesh.data, mesh.tensor.size, mesh.pipe) == SIZES[name]
    if name == "custom stages":
        assert checked.job.stages.counts == (6, 7, 7, 4)


@pytest.mark.prove  # eight ranks each; `make test` trains configs/libai's files with the same layouts
@pytest.mark.parametrize("name", SNIPPETS)
def test_snippet_trains(tmp_path: Path, name: str) -> None:
    words = ["--config-file", written(tmp_path, name), f"train.output_dir={tmp_path / 'out'}", *SMALL]
    assert on_ranks(8, training_main.main, words, init=None) == [0] * 8
    lines = (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
