"""Export a checkpoint to a transformers folder: config.json and safetensors files, as `save_pretrained` writes them.

    export_transformers(checkpoint, Path("weights"))       # LlamaForCausalLM.from_pretrained("weights") loads it

The model is built on torch's meta device only. Each tensor is read from the checkpoint when it is written, so only one
tensor at a time is in memory. (transformers' own `save_pretrained` holds the whole model in memory, and Megatron-LM's
converters hold it twice.) The files are byte for byte those that transformers would write for the same weights.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from dslpar.checkpoint import export, folder, rank_state, token_ids, writer
from dslpar.checkpoint.folder import Checkpoint
from dslpar.checkpoint.index import load_index
from dslpar.checkpoint.resume_changes import model_section
from dslpar.checkpoint.slices import Segment
from dslpar.checkpoint.state_files import read_rank_state
from dslpar.checkpoint.tensor_file import DTYPES, LazyTensor, write_lazy_tensors
from dslpar.checkpoint.tensor_reader import TensorReader
from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.core.mesh import TENSOR_AXES
from dslpar.core.project import trusted_packages
from dslpar.engine.model import transformers_class
from dslpar.models.pretrained import INDEX, Source
from dslpar.policies.weights import Part, parts
from dslpar.schema import families
from dslpar.schema.sections import Model
from dslpar.schema.token_folders import TOKENIZER
from dslpar.schema.tokenizer_file import TOKENIZER_JSON

if TYPE_CHECKING:
    from dslpar.checkpoint.adapters import Contents
    from dslpar.policies.pretrained_files import Saved, View

_ALIGNED_BYTES = 8
_ORDER = [
    DTYPES[name]
    for name in ("I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL")
]
"""Order of dtypes in which the safetensors library writes tensors; tensors of one dtype are sorted by name."""
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("vocab.txt", "merges.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja"),
    *("chat_template.json", "preprocessor_config.json", "processor_config.json"),
)
"""Files of tokenizers and processors, which training does not change."""


def export_transformers(
    checkpoint: Checkpoint,
    output: Path,
    dtype: str | None = None,
    max_shard_bytes: int = export.MAX_SHARD_BYTES,
    pretrained: Path | None = None,
    *,
    merges_lora: bool = False,
) -> list[Path]:
    """Write the weights and configs of a run's model to a new folder, as `save_pretrained` does; return their paths.

    The model is a transformers class, or a dslpar model with a transformers equivalent. `dtype` and `max_shard_bytes`
    are as in `export`. `pretrained` is the path of the pretrained folder that the run began with, if it has moved;
    None: the path in the run's config. `merges_lora`: add each adapter's update to the weight that it adapts.

    Raises:
        DslparError: transformers has no such model, `output` is not empty, or a file cannot be read or written.
    """
    origin = _origin(checkpoint, pretrained, merges_lora=merges_lora)
    tensors = {lazy.key: lazy for lazy in _tensors(checkpoint, origin, dtype)}
    dtypes = {name: lazy.dtype for name, lazy in tensors.items()}
    files, index = origin.saved.files(dtypes, max_shard_bytes)
    if origin.pretrained is None:
        written = getattr(model_section(checkpoint), "args", {}).get("config", {})
        token_ids.set_token_ids(origin.saved.model, token_ids.special_tokens(checkpoint), written)
    with writer.new_folder(output) as unfinished:
        floating = next(each for each in dtypes.values() if each.is_floating_point)
        origin.saved.write_configs(unfinished, floating, origin.pretrained)
        tokenizer = _tokenizer_folder(checkpoint, origin.pretrained)
        for name in _TOKENIZER_FILES:
            if tokenizer is not None and (tokenizer / name).is_file():
                shutil.copyfile(tokenizer / name, unfinished / name)
        for file, names in files.items():
            ordered = sorted((tensors[name] for name in names), key=lambda lazy: (_ORDER.index(lazy.dtype), lazy.key))
            write_lazy_tensors(unfinished / file, ordered, {"format": "pt"}, _ALIGNED_BYTES)
        if index is not None:
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            writer.write_file(unfinished / INDEX, [text.encode()])
    return folder.list_files(output)


def _tokenizer_folder(checkpoint: Checkpoint, pretrained: Path | None) -> Path | None:
    """Return the pretrained folder that the run began with, or the folder of its data's tokenizer; None: neither."""
    if pretrained is not None:
        return pretrained
    data: Mapping[str, Any] = checkpoint.manifest["config"].get("data", {})
    data = next(iter(data.get("parts", ())), data)  # all parts of a blend have the same tokenizer
    if data.get("type") == "tokens":
        return Path(data["path"], TOKENIZER)
    if data.get("tokenizer") is None:
        return None
    named = Path(data["tokenizer"])
    return named.parent if named.name == TOKENIZER_JSON else named


# ---- the transformers model, and the places of its tensors ----


class _Origin(NamedTuple):
    """A transformers model, and the places of its tensors in a checkpoint."""

    saved: Saved
    """Files that transformers would write for the model."""
    parts: Mapping[str, Part]
    """Name in transformers' state dict -> place in a parameter of the checkpoint. Buffers are not listed."""
    pretrained: Path | None
    """Pretrained folder that the run began with; None: the run began with random weights."""
    adapters: Contents | None = None
    """Contents of a model run by a policy, with the adapters to merge into its weights; None: no policy."""


def _origin(checkpoint: Checkpoint, pretrained: Path | None, *, merges_lora: bool) -> _Origin:
    """Find the transformers class of a run's model. For a dslpar model, find the equivalent class.

    Raises:
        DslparError: no transformers class is equivalent, transformers is not installed, or the folder that the run
            began with is missing.
    """
    model = model_section(checkpoint)
    try:
        if isinstance(model, Model):
            return _of_family(checkpoint, model, pretrained)
        if model.lora is not None and not merges_lora:
            message = f"{checkpoint.path} comes from a run that trains adapters, which save_pretrained does not write"
            hint = "--format peft writes them; --merge-lora adds them to the weights"
            raise_finding("CKP222", message, hint, checkpoint.path, "model.lora")
        found = transformers_class(model, checkpoint.path, trusted_packages())
        if found is None:
            _refuse(checkpoint)
        cls, arguments = found
        return _of_transformers(checkpoint, cls, arguments | {"lora": model.lora}, pretrained)
    except ImportError as error:
        message, hint = f"transformers cannot be imported: {error}", "pip install 'dslpar[hf]', with Python 3.11"
        raise DslparError([finding("CKP222", message, hint, checkpoint.path)]) from error


def _refuse(checkpoint: Checkpoint) -> NoReturn:
    message = f"{checkpoint.path} comes from a run whose model is neither a transformers model nor a GPT"
    raise_finding("CKP222", message, "leave --format out, to write dslpar's own format", checkpoint.path, "model")


def _of_transformers(checkpoint: Checkpoint, cls: Any, arguments: dict[str, Any], pretrained: Path | None) -> _Origin:
    """Return the origin of a transformers model, which ran by a policy, or unsharded as a single layer "model"."""
    from dslpar.checkpoint.adapters import contents
    from dslpar.policies.config import config_of
    from dslpar.policies.model import HuggingFaceModel
    from dslpar.policies.pretrained_files import Saved

    if pretrained is not None and "pretrained" in arguments:
        arguments["pretrained"] = str(pretrained)
    began_with, merged = arguments.get("pretrained"), None
    with torch.device("meta"):
        saved = Saved(cls._from_config(config_of(cls, arguments.get("config"), began_with)))
        names = load_index(Path(checkpoint.path)).parameters
        states = {name: tuple(state.shape) for name, state in saved.model.state_dict().items()}
        if all(name.removeprefix("model.") in states and name.startswith("model.") for name in names):
            found = {name.removeprefix("model."): Part(name, states[name.removeprefix("model.")]) for name in names}
        else:
            merged = contents(HuggingFaceModel(cls, **arguments))
            found = dict(merged.parts)
    return _Origin(saved, found, None if began_with is None else Path(began_with), merged)


def _of_family(checkpoint: Checkpoint, model: Model, pretrained: Path | None) -> _Origin:
    """Return the origin of a dslpar model that has a transformers equivalent.

    The model family's module "hugging_face" names the transformers class. If the run began with a pretrained folder,
    the transformers config is that folder's.
    """
    try:
        same = families.family_module(model, "hugging_face")
    except ModuleNotFoundError:
        _refuse(checkpoint)
    name, config = same.class_of(model), same.config_of(model)
    import transformers

    from dslpar.policies.config import config_of
    from dslpar.policies.pretrained_files import Saved

    cls = getattr(transformers, name)
    given: str | None = getattr(model, "pretrained", None)
    began_with = pretrained if pretrained or given is None else Path(given)
    path = None if began_with is None else str(began_with)
    with torch.device("meta"):
        saved = Saved(cls._from_config(config_of(cls, config if path is None else None, path)))
    states = {name: tuple(state.shape) for name, state in saved.model.state_dict().items()}
    named = load_index(Path(checkpoint.path)).parameters
    sources = ((each, tuple(Source(*of) for of in same.tensors_of(model, each))) for each in named)
    return _Origin(saved, parts(sources, states), began_with)


# ---- the tensors ----


def _tensors(checkpoint: Checkpoint, origin: _Origin, dtype: str | None) -> Iterator[LazyTensor]:
    """Yield the tensors of the files to write. Each tensor is read when it is written.

    Raises:
        DslparError: the checkpoint and the model do not have the same tensors.
    """
    index = load_index(Path(checkpoint.path))
    reader, buffers = TensorReader(Path(checkpoint.path), index), _buffers(checkpoint)
    matrices = {} if origin.adapters is None else origin.adapters.matrices
    problems = []
    for name, view in origin.saved.views.items():
        names = origin.saved.aliases(view.state)
        part = next((origin.parts[each] for each in names if each in origin.parts), None)
        # A buffer's name in the checkpoint begins with its layer's name: "model" if the class ran as a single layer,
        # "front" or "back" if it ran by a policy.
        buffer = next(
            (found for own, found in buffers.items() if f".{own}".endswith(tuple(f".{n}" for n in names))), None
        )
        read: Callable[[], Tensor]
        entry = None if part is None else index.parameters.get(part.parameter)
        if part is not None and entry is not None:
            if entry.shape != part.shape:
                problems.append(f"{part.parameter!r} has shape {entry.shape}, but {part.shape} in the model")
            stored, read = DTYPES[entry.dtype], partial(_read, reader, part, view)
            if origin.adapters is not None and origin.adapters.is_adapted(view.state):
                read = partial(_merged, reader, origin.adapters, part, view)
        elif buffer is not None:
            stored, read = buffer.dtype, partial(_cut, buffer, view)
        else:
            problems.append(f"it has no {name!r}")
            continue
        target = export.target_dtype(stored, dtype)
        yield LazyTensor(name, target, view.shape, partial(_converted, name, read, target))
    used = {*(part.parameter for part in origin.parts.values()), *matrices.values()}
    problems += [f"the model has no {name!r}" for name in index.parameters if name not in used]
    if problems:
        message = f"{checkpoint.path} holds another model: {'; '.join(problems[:8])}"
        hint = (
            "give the folder that the run began with, unchanged (--pretrained); or open a dslpar issue for this model"
        )
        raise_finding("CKP207", message, hint, checkpoint.path)


def _read(reader: TensorReader, part: Part, view: View) -> Tensor:
    """Read one tensor of the files: only its part of the checkpoint's parameter is read."""
    ranges = list(zip(view.starts, view.lengths, strict=True))
    if part.transposed:
        ranges.reverse()
    if ranges:
        ranges[0] = (ranges[0][0] + part.row, ranges[0][1])
    read = reader.local(part.parameter, "", tuple((Segment(*each),) for each in ranges))
    return view.of_part(read.t() if part.transposed else read)


def _merged(reader: TensorReader, adapters: Contents, part: Part, view: View) -> Tensor:
    """Read a weight and add its adapter's update, summed in float32."""
    stored = _read(reader, part, view)
    if view.state in adapters.of_experts:
        first, *others = view.starts
        delta = adapters.delta_of_experts(reader, view.state, slice(first, first + view.lengths[0]))
        return (stored.float() + _cut(delta, view._replace(starts=(0, *others)))).to(stored.dtype)
    delta = adapters.delta(reader, view.state)
    return (stored.float() + _cut(delta.t() if part.transposed else delta, view)).to(stored.dtype)


def _cut(buffer: Tensor, view: View) -> Tensor:
    ranges = zip(view.starts, view.lengths, strict=True)
    return view.of_part(buffer[tuple(slice(start, start + length) for start, length in ranges)])


def _converted(name: str, read: Callable[[], Tensor], dtype: torch.dtype) -> Tensor:
    return export.convert(name, read(), dtype)


def _buffers(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """Return the persistent buffers of the first replica, such as the statistics of a batch norm."""
    found: dict[str, Tensor] = {}
    for rank in rank_state.source_ranks(
        checkpoint.manifest["layout"], dict.fromkeys(("pipe", "data", *TENSOR_AXES), 0)
    ):
        found |= read_rank_state(checkpoint, rank).get("buffers", {})
    return found
