"""Weights as transformers saves them: names, views of states, and files in other forms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dslpar.core.errors import DslparError
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.models.pretrained import Folder
from dslpar.policies.pretrained_files import Saved
from tests.support.hugging_face import FAMILIES, SIZES

CLASSES: dict[str, dict[str, Any]] = {
    "GPTNeoXForCausalLM": SIZES,  # renamed in its files
    "MixtralForCausalLM": SIZES | {"num_local_experts": 3},  # experts one by one in its files
    "DeepseekV3ForCausalLM": FAMILIES["deepseek_v3"].sizes,  # a buffer in its routers
    "GptOssForCausalLM": FAMILIES["gpt_oss"].sizes,  # biases of experts
    "T5ForConditionalGeneration": {"d_model": 32, "d_kv": 4, "num_layers": 2, "num_heads": 8, "vocab_size": 70},
    "ResNetForImageClassification": {"depths": [1, 1], "hidden_sizes": [8, 16], "embedding_size": 8},  # buffers
    "BertForPreTraining": SIZES,
}


@pytest.fixture(scope="module", params=CLASSES)
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Saved, Any, Path]:
    """Return the saved form of a class, a model in memory, and the folder that it has saved."""
    cls = getattr(transformers, request.param)
    config = cls.config_class(**CLASSES[request.param])
    with torch.device("meta"):
        saved = Saved(cls._from_config(config))
    torch.manual_seed(2)
    model, path = cls(config), tmp_path_factory.mktemp("saved")
    with torch.no_grad():
        for p in model.parameters():  # otherwise norms and experts may be equal
            p += torch.randn_like(p)
    model.save_pretrained(path)
    return saved, model, path


def test_each_tensor_of_the_files_is_a_view_of_a_state(both: tuple[Saved, Any, Path]) -> None:
    saved, model, path = both
    found, states = load_file(path / "model.safetensors"), model.state_dict()
    assert saved.views.keys() == found.keys()
    for name, view in saved.views.items():
        ranges = zip(view.starts, view.lengths, strict=True)
        part = states[view.state][tuple(slice(start, start + length) for start, length in ranges)]
        assert torch.equal(view.of_part(part), found[name]), name


def test_any_box_of_a_state_is_read_from_the_files(both: tuple[Saved, Any, Path]) -> None:
    saved, model, path = both
    folder = Folder(str(path), model.base_model_prefix, saved.stored)
    for name, p in model.state_dict().items():
        piece = folder.slice(name)
        assert tuple(piece.get_shape()) == p.shape, name
        index = tuple(slice(length // 3, length - length // 4) for length in p.shape)
        if index:
            assert torch.equal(piece[index], p[index]), name
            assert torch.equal(piece[index[:1]], p[index[:1]]), name
            assert torch.equal(piece[len(p) :], p[len(p) :]), name


def test_what_files_hold_together_is_refused_by_name() -> None:
    """The conversion joins states, which no class with a known policy does."""
    from transformers.core_model_loading import Chunk, WeightConverter

    cls = transformers.LlamaForCausalLM
    with torch.device("meta"):
        model = cls._from_config(cls.config_class(**SIZES))
    joined = WeightConverter("mlp.fused.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], operations=[Chunk(0)])
    model._weight_conversions = [joined]
    with pytest.raises(DslparError, match=r"TEN234 .*its files hold 'model\.layers\.0\.mlp\.fused\.weight'"):
        _ = Saved(model).views


def test_files_of_bert_s_first_years_are_read(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"bert.embeddings.LayerNorm.gamma": torch.ones(3)}, tmp_path / "model.safetensors")
    assert Folder(str(tmp_path), "bert").slice("bert.embeddings.LayerNorm.weight").get_shape() == [3]
    assert Folder(str(tmp_path), "bert").slice("embeddings.LayerNorm.weight").get_shape() == [3]
