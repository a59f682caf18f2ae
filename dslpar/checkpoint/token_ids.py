"""Ids of special tokens for an exported model: where text ends, where it begins, and padding.

    set_token_ids(model, special_tokens(checkpoint))      # config and generation config of a transformers model

transformers' `generate` stops at `eos_token_id` only. The defaults of its config classes are those of one published
tokenizer (Llama's 2), so a run with another tokenizer needs its own ids. As in GPT-2, a text begins after the end of
the text before it, unless the tokenizer has a token for it.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.resume_changes import spec_of
from dslpar.schema.datasets import TokensData, parts_of
from dslpar.schema.token_folders import TOKENIZER
from dslpar.schema.tokenizer_file import read_tokenizer
from dslpar.schema.vocabularies import vocabulary_of

_PURPOSES = ("eos", "bos", "pad")


def special_tokens(checkpoint: Checkpoint) -> dict[str, int]:
    """Return purpose ("eos", "bos", "pad") -> id of a run's tokenizer or token files; empty if text has no end.

    A tokenizer that has moved since the run counts as none.
    """
    spec = spec_of(checkpoint)
    for data in parts_of(spec.data):
        found = vocabulary_of(data, checkpoint.path, spec.model)
        file = found.tokenizer
        if isinstance(data, TokensData):
            file = read_tokenizer(str(Path(data.path, TOKENIZER)))
        ids = {name: id for name in _PURPOSES if file is not None and (id := file.special(name)) is not None}
        ids |= {name: id for name, id in found.special.items() if name in _PURPOSES}
        if "eos" in ids:
            return {"bos": ids["eos"], **ids}
    return {}


def set_token_ids(model: Any, ids: Mapping[str, int], written: Container[str] = ()) -> None:
    """Set a generating model's ids in its config and generation config, except those that the author has `written`.

    A model whose tokenizer has no padding pads prompts with the end of text. That is in the generation config only:
    in config.json it would stop the training of the token's embedding (`padding_idx`).
    """
    if "eos" not in ids or not model.can_generate():
        return
    config, generation = model.config, model.generation_config
    for name in (f"{purpose}_token_id" for purpose in _PURPOSES):
        id = ids.get(name.removesuffix("_token_id"))
        is_fixed = name in written or (config.is_encoder_decoder and getattr(config, name, None) is not None)
        if id is not None and not is_fixed:
            setattr(config, name, id)
        setattr(generation, name, getattr(config, name, None))
    if generation.pad_token_id is None:
        generation.pad_token_id = ids["eos"]
    generation._from_model_config = False
