"""What transformers' `save_pretrained` writes of a model that has no weights yet: names, order, files, configs.

    saved = Saved(model)                               # a PreTrainedModel on the meta device
    for name, view in saved.views.items(): ...         # a tensor of the files, and which part of which state it is

transformers itself decides: its code for tied weights, and for models whose files hold other tensors than the modules
do (experts one by one, where a module has them in one), runs here on tensors without data. What a file's tensor is made
of follows from the view that it is left with. transformers needs the whole model in memory to save it; so, one tensor
of it is enough, and with the same views a rank reads its own piece of such files.
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
    """A part of a state: of each of its dims a range; the dims may then be exchanged, and those of length 1 dropped."""

    state: str
    """Its name in the model's state dict."""
    starts: tuple[int, ...]
    lengths: tuple[int, ...]
    shape: tuple[int, ...]
    """Of the tensor in the file."""
    dims: tuple[int, ...]
    """For each dim of the file's tensor the state's dim that it runs along."""

    def of_part(self, part: Tensor) -> Tensor:
        """Return the file's tensor of the part [lengths] that this view takes of the state."""
        strides = part.contiguous().stride()
        return part.contiguous().as_strided(self.shape, [strides[dim] for dim in self.dims])


class Saved:
    """What is saved of a model, which is on the meta device.

    Raises:
        DslparError: one of its tensors in a file is made of several, or is no part of one.
    """

    def __init__(self, model: Any) -> None:
        self.model = model

    @cached_property
    def states(self) -> Mapping[str, Tensor]:
        """The model's states that are saved, by name: of tied ones the one that transformers keeps."""
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        states = dict(self.model.state_dict())
        for name in self.model._keys_to_ignore_on_save or ():
            states.pop(name, None)
        kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(states, self.model)
        return kept

    def aliases(self, state: str) -> list[str]:
        """Return all names of a state: it is first, and those that are tied to it follow."""
        owner = self.model.get_parameter_or_buffer(state)
        return [state, *(name for name, other in self._named if other is owner and name != state)]

    @cached_property
    def _named(self) -> list[tuple[str, Tensor]]:
        model = self.model
        return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]

    @cached_property
    def views(self) -> Mapping[str, View]:
        """The tensors of the files, in transformers' order."""
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
        """Return of which tensors of the files each state is made, by all of its names."""
        found: dict[str, list[StoredPart]] = {}
        for name, view in self.views.items():
            order = tuple(view.dims.index(dim) if dim in view.dims else -1 for dim in range(len(view.starts)))
            for alias in self.aliases(view.state):
                found.setdefault(alias, []).append(StoredPart(name, view.starts, view.lengths, order))
        return found

    def files(self, dtypes: Mapping[str, torch.dtype], max_bytes: int) -> tuple[Mapping[str, list[str]], Any]:
        """Return names of tensors by file, and the index's values; None: there is one file, which needs none."""
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
        """Write config.json and, of a model that generates, generation_config.json: as the pretrained folder has it."""
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
    """Have `contiguous()` copy nothing, so that what a conversion takes of a tensor stays a view of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _view(name: str, state: Tensor, saved: Tensor) -> View | None:
    """Return which part of a state shares its storage with `saved`; None: no range of each dim is that."""
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
        # Of dims of length 1 any will do; else the first that is long enough.
        dim = next((dim for dim in fitting if (state.shape[dim] > 1) == (length > 1)), fitting[0])
        dims.append(dim)
        lengths[dim] = length
    return View(name, tuple(starts), tuple(lengths), tuple(saved.shape), tuple(dims))
