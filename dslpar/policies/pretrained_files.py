"""Files of transformers' `save_pretrained`, computed for a model without weights: names, order, files, configs.

    saved = Saved(model)                               # a PreTrainedModel on the meta device
    for name, view in saved.views.items(): ...         # a tensor of the files, and which part of which state it is

A *state* is a tensor of the model's state dict. Files may hold other tensors: tied states are stored once, and experts
that the model stacks in one state are stored one by one. transformers' own conversion code runs here on tensors without
data. From its results, which are views, follows the part of a state that each tensor of the files is. transformers
needs the whole model in memory to save it. With these views, one tensor in memory is enough, and a rank can read only
its shard of such files.
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
from dslpar.policies.errors import NEEDS_OWN_CODE


class View(NamedTuple):
    """A tensor of the files as a part of a state: a range of each dim, then permuted, without dims of length 1."""

    state: str
    """Name in the model's state dict."""
    starts: tuple[int, ...]
    """First index of the range, per dim of the state."""
    lengths: tuple[int, ...]
    """Length of the range, per dim of the state."""
    shape: tuple[int, ...]
    """Shape of the tensor in the file."""
    dims: tuple[int, ...]
    """Dim of the state, per dim of the tensor in the file."""

    def of_part(self, part: Tensor) -> Tensor:
        """Return the tensor as the file stores it, from `part`, its slice of the state, of shape `lengths`."""
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
        """States by name that transformers saves: of tied states only one."""
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        states = dict(self.model.state_dict())
        for name in self.model._keys_to_ignore_on_save or ():
            states.pop(name, None)
        kept: dict[str, Tensor] = remove_tied_weights_from_state_dict(states, self.model)
        return kept

    def aliases(self, state: str) -> list[str]:
        """Return `state`, followed by the names of the states that are tied to it."""
        owner = self.model.get_parameter_or_buffer(state)
        return [state, *(name for name, other in self._named if other is owner and name != state)]

    @cached_property
    def _named(self) -> list[tuple[str, Tensor]]:
        model = self.model
        return [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]

    @cached_property
    def views(self) -> Mapping[str, View]:
        """Name of a tensor in the files -> its view, in transformers' order."""
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
                    f"{type(self.model).__name__}: its files hold {name!r}, which is not a part of any of its weights"
                )
                raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
            views[name] = view
        return views

    def stored(self) -> Mapping[str, Sequence[StoredPart]]:
        """Return a mapping from each state to its tensors in the files. Tied states are listed under each name."""
        found: dict[str, list[StoredPart]] = {}
        for name, view in self.views.items():
            order = tuple(view.dims.index(dim) if dim in view.dims else -1 for dim in range(len(view.starts)))
            for alias in self.aliases(view.state):
                found.setdefault(alias, []).append(StoredPart(name, view.starts, view.lengths, order))
        return found

    def files(self, dtypes: Mapping[str, torch.dtype], max_bytes: int) -> tuple[Mapping[str, list[str]], Any]:
        """Return (file -> names of its tensors, values of the index file); None: a single file needs no index."""
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
        """Write config.json, and for generating models generation_config.json (a copy of the pretrained folder's)."""
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
    """Mode in which `contiguous()` does not copy, so that the results of a conversion are views of its inputs."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is Tensor.contiguous else func(*args, **(kwargs or {}))


def _view(name: str, state: Tensor, saved: Tensor) -> View | None:
    """Return `saved`, a view of a state's memory, as a `View`; None: it is not one range per dim."""
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
        # A dim of length 1 matches a dim of length 1 if there is one; else the first dim that is long enough.
        dim = next((dim for dim in fitting if (state.shape[dim] > 1) == (length > 1)), fitting[0])
        dims.append(dim)
        lengths[dim] = length
    return View(name, tuple(starts), tuple(lengths), tuple(saved.shape), tuple(dims))
