"""Programs with transformers classes that have no policy: their own loss, and layers that stay whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import dslpar
from dslpar.core.errors import DslparError
from dslpar.layout.transformers_data_types import check_data
from tests.support.paths import ROOT
from tests.support.plain_models import written
from tests.support.ranks import on_ranks
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)


CONFIG = """
from dslpar.config import LazyCall
from transformers import BertConfig
model = dict(type='transformers.BertForSequenceClassification', config=LazyCall(BertConfig)(
    hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, vocab_size=256, num_labels=3,
    hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
optimizer = dict(type='AdamW', lr=1e-2)
batch = dict(global_size=8)
train = dict(steps=5)
"""


def _losses(path: str) -> list[float]:
    def criterion(output: Any, labels: Tensor) -> Tensor:
        return functional.cross_entropy(output.logits, labels)

    engine = dslpar.initialize(path, criterion=criterion, train_data=iter(())).engine
    generator = torch.Generator().manual_seed(3)
    ids, labels = torch.randint(20, (8, 6), generator=generator), torch.randint(3, (8,), generator=generator)
    size, index = engine.groups.mesh.data, engine.groups.coord["data"]
    return [engine.train_batch([(ids.chunk(size)[index], labels.chunk(size)[index])]) for _ in range(5)]


def test_replicas_train_a_class_as_it_is(tmp_path: Path) -> None:
    path = written(tmp_path, CONFIG)
    (one,), two = on_ranks(1, _losses, path, init="deepspeed"), on_ranks(2, _losses, path, init="deepspeed")
    assert two[0] == two[1] == pytest.approx(one, rel=1e-5)
    assert one[-1] < one[0]


@pytest.mark.parametrize(
    "parallel",
    ["tensor=dict(size=2, mode='1d')", pytest.param("tensor=dict(size=4, mode='2d')", marks=pytest.mark.prove)],
)
def test_a_criterion_is_given_the_same_output_where_the_model_is_cut(tmp_path: Path, parallel: str) -> None:
    (one,) = on_ranks(1, _losses, written(tmp_path, CONFIG), init="deepspeed")
    path = written(tmp_path, CONFIG + f"parallel = dict({parallel})\n")
    cut = on_ranks(4 if "2d" in parallel else 2, _losses, path, init="deepspeed")
    assert all(losses == pytest.approx(one, rel=1e-5) for losses in cut)


def test_what_is_cut_needs_a_policy(tmp_path: Path) -> None:
    config = CONFIG.replace("BertForSequenceClassification", "BertForMultipleChoice")
    path = written(tmp_path, config + "parallel = dict(tensor=dict(size=2, mode='1d'))\n")

    def rank() -> str:
        with pytest.raises(DslparError) as error:
            _losses(path)
        return str(error.value)

    assert all("TEN234" in each for each in on_ranks(2, rank, init="deepspeed"))


# ---- the code in docs/porting.md ----


def _example(code: str) -> Any:
    generator = torch.Generator().manual_seed(3)
    samples = torch.randint(257, (2, 16, 17), generator=generator)
    names: dict[str, Any] = {"dslpar": dslpar, "num_steps": 2, "print": lambda value: printed.append(value)}
    names["batches"] = iter([(batch[:, :-1], batch[:, 1:]) for batch in samples])
    printed: list[Any] = []
    exec(code, names)
    result = names["result"]
    outputs = None if result["outputs"] is None else tuple(result["outputs"].logits.shape)
    return result["loss"].item(), outputs, names["engine"].steps_done, printed


def test_the_pipeline_of_the_porting_page_runs() -> None:
    page = (ROOT / "docs" / "porting.md").read_text()
    (code,) = re.findall(r"```python\n(config = dict\(.*?)```", page, re.DOTALL)
    (first_loss, nothing, steps, first), (loss, outputs, _, last) = on_ranks(2, _example, code, init="deepspeed")
    assert (nothing, outputs, steps) == (None, (16, 16, 257), 2)
    assert first_loss == loss
    assert 5 < loss < 6, "log 257 = 5.55"
    assert first[0][:4] == ["transformer.wte", "transformer.wpe", "transformer.drop", "transformer.h.0"]
    assert last[0][-3:] == ["transformer.h.3", "transformer.ln_f", "lm_head"]
    assert first[1] == last[1] == [{0: "transformer.wte.weight", 1: "lm_head.weight"}]


@pytest.mark.parametrize("program", [True, False])
def test_a_config_s_text_is_not_for_an_encoder(tmp_path: Path, program: bool) -> None:
    path = written(tmp_path, CONFIG.replace("vocab_size=20", "vocab_size=256") + "data = dict(seq_len=8)\n")

    def rank() -> str:
        with pytest.raises(DslparError) as error:
            dslpar.initialize(path) if program else check_data(dslpar.start(path).job)
        return str(error.value)

    (said,) = on_ranks(1, rank, init="deepspeed")
    assert "BAT211 model-reads-no-text: BertForSequenceClassification takes input_ids, attention_mask" in said
