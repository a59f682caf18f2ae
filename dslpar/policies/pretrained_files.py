"""Files of transformers' `save_pretrained`, computed for a model without weights: names, order, files, configs.

    saved = Saved(model)                               # a PreTrainedModel on the meta device
    for name, view in saved.views.items(): ...         # a tensor of the files, and which part of which state it is

transformers' own code decides. Its code for tied weights runs here on tensors without data. So does its code for models
whose files hold other tensors than the modules (single experts, if a module has them in one tensor). The resulting view
shows the part of a state that a tensor of the files is. transformers needs the whole model in memory to save it. With
views, one tensor in memory is enough, and a rank can read its own piece of such files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dslpar.core.catalog import raise_finding
from dslpar.models.pretrained import StoredPart


class View(NamedTuple):
    """A part of a state: a range of each dim. Dims may then be permuted, and dims of length 1 dropped."""

    state: str
    """Name in the model's state dict."""
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    dims: tuple[int, ...]
    """State's dim for each dim of the file's tensor."""

    def of_part(self, part: Tensor) -> Tensor:
        """Return the file's tensor from the state's part, of shape `lengths`."""
        strides = part.contiguous().stride()
        return part.contiguous().as_strided(self.shape, [strides[dim] for dim in self.dims])


class Saved:
    """Tensors that transformers saves for a model on the meta device.

    Raises:
        DslparError: a tensor of the files is not a part of exactly one weight.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @cached_property
    def states(self) -> Mapping[str, Tensor]:
        """Saved states by name; of tied states, the one that transformers keeps."""
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        states = dict(self.model.state_dict())
        for name in self.model._keys_to_ignore_on_save or ():
            states.pop(name, None)
        kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(states, self.model)
        return kept

    def aliases(self, state: str) -> list[str]:
        """Return all names of a state: `state` itself, followed by the names tied to it."""
        owner = self.model.get_parameter_or_buffer(state)
        return [state, *(name for name, other in self._named if other is owner and name != state)]

    @cached_property
    def _named(self) -> list[tuple[str, Tensor]]:
        model = self.model
        return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]

    @cached_property
    def views(self) -> Mapping[str, View]:
        """Views by name of the tensors in the files, in transformers' order."""
        from transformers.core_model_loading import revert_weight_conversion

        storages = {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in self.states.items()}
        with torch.no_grad(), _Views():
            saved = revert_weight_conversion(self.model, dict(self.states))
        views = {}
        for name, tensor in saved.items():
            found = storages.get(tensor.untyped_storage()._cdata)
            view = found and _view(*found, tensor)
            if view is None:
                message = (
                    f"{type(self.model).__name__}: its files hold {name!r}, which is no part of one of its weights"
                )
                raise_finding("TEN234", message, "report the model: it needs a rule of its own", key="model.type")
            views[name] = view
        return views

    def stored(self) -> Mapping[str, Sequence[StoredPart]]:
        """Return the tensors of the files that make up each state, by all of the state's names."""
        found: dict[str, list[StoredPart]] = {}
        for name, view in self.views.items():
            order = tuple(view.dims.index(dim) if dim in view.dims else -1 for dim in range(len(view.starts)))
            for alias in self.aliases(view.state):
                found.setdefault(alias, []).append(StoredPart(name, view.starts, view.lengths, order))
        return found

    def files(self, dtypes: Mapping[str, torch.dtype], max_bytes: int) -> tuple[Mapping[str, list[str]], Any]:
        """Return tensor names by file, and the values of the index; None: a single file needs no index."""
        from huggingface_hub import split_torch_state_dict_into_shards

        empty = {name: torch.empty(view.shape, dtype=dtypes[name], device="meta") for name, view in self.views.items()}
        split = split_torch_state_dict_into_shards(
            empty, filename_pattern="model{suffix}.safetensors", max_shard_size=max_bytes
        )
        if not split.is_sharded:
            return split.filename_to_tensors, None
        metadata = {"total_parameters": self.model.num_parameters(), **split.metadata}
        return split.filename_to_tensors, {"metadata": metadata, "weight_map": split.tensor_to_filename}

    def write_configs(self, folder: Path, dtype: torch.dtype, pretrained: Path | None) -> None:
        """Write config.json; for a model that generates also generation_config.json (the pretrained folder's)."""
        model = self.model
        model.config.dtype = str(dtype).removeprefix("torch.")
        model.config.architectures = [type(model).__name__]
        model.config.save_pretrained(folder)
        if model.can_generate():
            generation = model.generation_config
            if pretrained is not None and (pretrained / "generation_config.json").is_file():
                generation = type(generation).from_pretrained(pretrained, local_files_only=True)
            generation.save_pretrained(folder)


class _Views(TorchFunctionMode):
    """Have `contiguous()` copy nothing, so that the results of a conversion stay views of its inputs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _view(name: str, state: Tensor, saved: Tensor) -> View | None:
    """Return the part of a state that `saved` is a view of; None: it is not one range per dim."""
    starts, offset = [], saved.storage_offset()
    for stride in state.stride():
        starts.append(offset // stride)
        offset %= stride
    lengths, dims = [1] * state.dim(), []
    for length, stride in zip(saved.shape, saved.stride(), strict=True):
        free = [dim for dim, own in enumerate(state.stride()) if own == stride and dim not in dims]
        fitting = [dim for dim in free if starts[dim] + length <= state.shape[dim]]
        if not fitting:
            return None
        # Dims of length 1 are interchangeable; otherwise take the first dim that is long enough.
        dim = next((dim for dim in fitting if (state.shape[dim] > 1) == (length > 1)), fitting[0])
        dims.append(dim)
        lengths[dim] = length
    return View(name, tuple(starts), tuple(lengths), tuple(saved.shape), tuple(dims))
