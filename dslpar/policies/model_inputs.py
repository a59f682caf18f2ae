"""Inputs of a transformers class: a policy splits models of tokens, or of images, and no others.

The forward's signature tells what a class takes: ids of tokens, pixels, or something else beside or instead of them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from dslpar.core.catalog import raise_finding
from dslpar.core.errors import DslparError
from dslpar.policies.errors import UNSPLIT
from dslpar.policies.miniature import default_config

_IDS, _PIXELS = ("input_ids", "decoder_input_ids"), "pixel_values"
_OTHERS = re.compile(
    r"pixel_values|input_features|input_values|input_audio|input_points|input_patches|image_patches|audio_\w+|bbox"
    r"|\w*image_features|visual_feats|video\w*|flattened_patches|past_values|speech\w*|images?|residx|aa"
)
"""Arguments of forwards, besides ids of tokens, that are another kind of input."""


def other_input(cls: Any) -> str:
    """Return the argument of a class's forward that makes it more than a model of tokens or of images; "" if none."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    taken = [each.name for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    others = [name for name in taken if _OTHERS.fullmatch(name)]
    if any(name in taken for name in _IDS):
        return next(iter(others), "")
    if _PIXELS in taken:
        return next((name for name in others if name != _PIXELS), "")
    return next(iter(taken), "")


def check_inputs(cls: Any) -> None:
    """Raise DslparError if a class is no model of tokens alone or images alone; the hint names its language model."""
    other = other_input(cls)
    if not other:
        return
    text = language_model(cls)
    message = f"{cls.__name__} takes {other}: a policy splits models of tokens or of images alone"
    hint = f"type='transformers.{text}', with text_config as its config; or {UNSPLIT}" if text else UNSPLIT
    raise_finding("TEN234", message, hint, key="model.type")


def language_model(cls: Any) -> str:
    """Return the name of the class for causal language modelling with the text config of a composite; "" if none."""
    try:
        of: Any = type(getattr(default_config(cls, {}), "text_config", None))
    except DslparError:  # no defaults, so no class of a text config either
        return ""
    found: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(of, None)
    found = found[0] if isinstance(found, tuple) else found
    return "" if found is None or found is cls or other_input(found) else str(found.__name__)
