"""The section of a transformers model reaches the model, and the build refuses the keys that lint refuses."""

from __future__ import annotations

import pytest
import transformers

from dslpar.core.errors import DslparError
from dslpar.engine.model import _transformers_model, model_from_job
from dslpar.linter.check import load_text, resolve
from dslpar.policies.model import HuggingFaceModel

KEY = "no_such_key"


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM", "ViTForImageClassification"])
def test_the_build_refuses_what_lint_refuses(name: str) -> None:
    """A config that nobody linted reaches the same end: the section has no key for it."""
    for args in ({"config": {}, KEY: 1}, {"config": {KEY: 1}}, {"config": {}, "lora": {KEY: 1}}):
        with pytest.raises(DslparError, match=KEY):
            _transformers_model(getattr(transformers, name), args, "cfg.py", ())


def test_the_build_accepts_the_older_keys_that_lint_accepts() -> None:
    """transformers reads `rope_theta` into `rope_parameters`, though its config class no longer has such a field."""
    model = _transformers_model(transformers.LlamaForCausalLM, {"config": {"rope_theta": 5e5}}, "cfg.py", ())
    assert isinstance(model, HuggingFaceModel)
    assert model.model.config.rope_parameters["rope_theta"] == 5e5


@pytest.mark.parametrize(
    ("key", "kernel"), [("", "sdpa"), (", attn_implementation='flash_attention_2'", "flash_attention_2")]
)
def test_attn_implementation_reaches_the_model(key: str, kernel: str) -> None:
    sizes = "num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=48, vocab_size=256"
    text = f"model = dict(type='transformers.LlamaForCausalLM', config=dict({sizes}){key})\n"
    model = model_from_job(resolve(load_text(text, "cfg.py"), 1))
    assert isinstance(model, HuggingFaceModel)
    assert model.attention == kernel
