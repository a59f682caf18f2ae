"""Inputs of transformers classes: tokens, images, or something else."""

from __future__ import annotations

import pytest

from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

import transformers

from dslpar.core.errors import DslparError
from dslpar.policies.model_inputs import check_inputs, language_model, other_input


@pytest.mark.parametrize(
    ("name", "other", "text"),
    [
        ("LlamaForCausalLM", "", ""),
        ("T5ForConditionalGeneration", "", ""),
        ("ViTMAEForPreTraining", "", ""),
        ("WhisperForConditionalGeneration", "input_features", ""),
        ("Wav2Vec2ForCTC", "input_values", ""),
        ("CLIPModel", "pixel_values", ""),
        ("LlavaForConditionalGeneration", "pixel_values", "LlamaForCausalLM"),
        ("Gemma3ForConditionalGeneration", "pixel_values", "Gemma3ForCausalLM"),
        ("AutoformerForPrediction", "past_values", ""),
    ],
)
def test_other_inputs_and_the_language_model_within(name: str, other: str, text: str) -> None:
    cls = getattr(transformers, name)
    assert (other_input(cls), language_model(cls)) == (other, text)
    if other:
        said = f"type='transformers.{text}'" if text else "dslpar.initialize"
        with pytest.raises(DslparError, match=f"TEN234 .* takes {other}: .*\nhelp: {said}"):
            check_inputs(cls)
    else:
        check_inputs(cls)
