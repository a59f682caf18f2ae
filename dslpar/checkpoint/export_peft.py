"""Export a checkpoint's adapters to a peft folder: adapter_config.json and adapter_model.safetensors.

    export_peft(checkpoint, Path("adapter"))      # PeftModel.from_pretrained(base, "adapter") loads it

The files have the names and contents that peft's `save_pretrained` gives them. peft need not be installed. The base
model is not exported: adapter_config.json names the pretrained folder that the run began with.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dslpar.checkpoint import export, folder, writer
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.index import load_index
from dslpar.checkpoint.resume_changes import model_section
from dslpar.checkpoint.tensor_file import DTYPES, LazyTensor, write_lazy_tensors
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.core.project import trusted_packages
from dslpar.engine.model import transformers_class
from dslpar.schema.sections import OtherModel

if TYPE_CHECKING:
    from dslpar.checkpoint.adapters import Contents
    from dslpar.policies.model import HuggingFaceModel

_PREFIX = "base_model.model."
"""Prefix that peft adds to the names of the model that it wraps."""


def export_peft(
    checkpoint: Checkpoint, output: Path, dtype: str | None = None, pretrained: Path | None = None
) -> list[Path]:
    """Write the trained weights of a run with `model.lora` to a new folder, as peft does; return the files' paths.

    `dtype` is as in `export`. `pretrained` is the path of the pretrained folder that the run began with, if it has
    moved; None: the path in the run's config.

    Raises:
        DslparError: the run has no adapters, `output` is not empty, or a file cannot be read or written.
    """
    section = model_section(checkpoint)
    if not isinstance(section, OtherModel) or section.lora is None:
        message = f"{checkpoint.path} comes from a run without adapters: its config has no model.lora"
        raise_finding("CKP222", message, "--format hf writes the whole model", checkpoint.path, "model.lora")
    try:
        from dslpar.checkpoint.adapters import contents
        from dslpar.policies.model import HuggingFaceModel
    except ImportError as error:
        message, hint = f"transformers cannot be imported: {error}", "pip install 'dslpar[hf]', with Python 3.11"
        raise DslparError([finding("CKP222", message, hint, checkpoint.path)]) from error
    known = transformers_class(section, checkpoint.path, trusted_packages())
    assert known is not None, "only transformers models have lora"
    cls, arguments = known
    if pretrained is not None and "pretrained" in arguments:
        arguments["pretrained"] = str(pretrained)
    with torch.device("meta"):
        model = HuggingFaceModel(cls, **arguments, lora=section.lora)
        found = contents(model)
    assert model.adapters is not None
    config = model.adapters.peft_config(model.model, arguments.get("pretrained"))
    tensors = sorted(_tensors(checkpoint, model, found, dtype), key=lambda lazy: lazy.key)
    with writer.new_folder(output) as unfinished:
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        writer.write_file(unfinished / "adapter_config.json", [text.encode()])
        write_lazy_tensors(unfinished / "adapter_model.safetensors", tensors, {"format": "pt"})
    return folder.list_files(output)


def _matrix(reader: TensorReader, key: str, parameter: str) -> Tensor:
    from dslpar.policies.lora import in_peft_s_form

    return in_peft_s_form(key, reader.full(parameter))


def _tensors(
    checkpoint: Checkpoint, model: HuggingFaceModel, found: Contents, dtype: str | None
) -> Iterator[LazyTensor]:
    from dslpar.policies.lora import in_peft_s_form

    index = load_index(Path(checkpoint.path))
    reader, states = TensorReader(Path(checkpoint.path), index), model.model.state_dict()
    assert model.adapters is not None

    def lazy(key: str, parameter: str, shape: tuple[int, ...], read: partial[Tensor]) -> LazyTensor:
        target = export.target_dtype(DTYPES[index.parameters[parameter].dtype], dtype)
        return LazyTensor(_PREFIX + key, target, shape, lambda: export.convert(key, read(), target))

    for key, parameter in found.matrices.items():
        shape = tuple(in_peft_s_form(key, torch.empty(index.parameters[parameter].shape, device="meta")).shape)
        yield lazy(key, parameter, shape, partial(_matrix, reader, key, parameter))
    for name in found.trained:
        module, _, own = name.rpartition(".")
        key = f"{module}.base_layer.{own}" if module in model.adapters.targets else name
        part, shape = found.parts[name], states[name].shape
        yield lazy(key, part.parameter, tuple(shape), partial(part.read, reader.full, shape))
