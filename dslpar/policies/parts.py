"""Parts of a transformers model: run the code around its blocks unchanged, with stand-ins for all other modules.

A pipeline divides a model's lists of blocks, but the forward around the blocks computes more: scaled embeddings,
position tables, masks, poolers, soft caps on logits. No such forward is rewritten here. A *part* is a copy of the model
that has real modules for its own code only. Its forward is the model's own, and stand-ins take the place of all other
modules.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.layers.kv_cache import first_position
from dslpar.policies.constructed import fill_buffers
from dslpar.policies.stand_ins import BlockStandIn, LeafStandIn, ShapeStandIn
from dslpar.schema.policy import DECODER_INPUTS, Policy, match


class Parts:
    """A model on the meta device, from which parts are made: copies of the model without its blocks."""

    def __init__(self, model: Any, policy: Policy) -> None:
        self.model, self.policy, self.blocks = model, policy, policy.blocks
        self.lists: dict[str, Sequence[nn.Module]] = {name: list(model.get_submodule(name)) for name in self.blocks}
        self.bare = _without(model, self.blocks)
        self.table, self.head = self._find_vocabulary()
        self._settings: Mapping[str, Any] = {"use_cache": False} if _may_cache(model) else {}

    def _find_vocabulary(self) -> tuple[str, str]:
        """Return the names of the token table and the head; "" if the model has none."""
        model = self.model
        if not any("ids" in name for name in self.policy.inputs):
            return "", ""
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        names = {module: name for name, module in model.named_modules()}
        is_decoder = self.policy.inputs == DECODER_INPUTS
        if is_decoder and not (isinstance(embeddings, nn.Embedding) and isinstance(head, nn.Linear)):
            message = f"{type(model).__name__} has no token embedding, or no linear head"
            raise_finding("TEN234", message, "use a class for causal language modelling", key="model.type")
        table = names[embeddings] if isinstance(embeddings, nn.Embedding) else ""
        return table, names[head] if isinstance(head, nn.Linear) else ""

    @property
    def is_tied(self) -> bool:
        """Return whether the head's weight is tied to the table's."""
        if not (self.table and self.head):
            return False
        table, head = (self.model.get_submodule(name).weight for name in (self.table, self.head))
        return table is head

    def hidden_size(self, index: int) -> int:
        """Return the number of residual features in list `index` of blocks (beyond the last list: in the last)."""
        name = self.blocks[min(index, len(self.blocks) - 1)]
        if self.table:
            return int(self.model.get_submodule(self.table).weight.shape[1])
        for own, region in self.lists[name][0].named_modules():
            if pattern := match(self.policy.regions, f"{name}.0.{own}"):
                inward = self.policy.regions[pattern]
                first = next(iter(inward.values())) if isinstance(inward, Mapping) else inward
                return int(region.get_submodule(first[0]).weight.shape[1])
        return 0

    def part(self, own: Sequence[str], num_blocks: int = 1) -> nn.Module:
        """Return a copy of the model with stand-ins for all modules except `own`.

        `num_blocks`: block stand-ins per list. The copy's `stand_ins` lists its stand-ins.
        """
        model = copy.deepcopy(self.bare)
        for name in self.blocks:
            returned = len(self.policy.returned(name))
            stand_ins = [
                BlockStandIn(block, returned, changes_shape=not self.policy.regions)
                for block in self.lists[name][:num_blocks]
            ]
            model.set_submodule(name, nn.ModuleList(stand_ins))
        for name, module in list(self.leaves(model)):
            if name not in own and not isinstance(module, BlockStandIn):
                made = LeafStandIn(module, name, self.made_up(name)) if self.table else ShapeStandIn(module, name)
                model.set_submodule(name, made)
        for name, module in model.named_modules():
            # A module that contains blocks or the head is no stand-in, so its own parameters become zeros.
            for each, p in (
                list(module.named_parameters(recurse=False)) if name not in own and self.is_around(name) else ()
            ):
                delattr(module, each)
                module.register_buffer(each, torch.zeros(p.shape, device="cpu"), persistent=False)
        fill_buffers(self.model, model)
        in_place = [each for each in model.modules() if isinstance(each, BlockStandIn | LeafStandIn)]
        model.stand_ins = in_place  # type: ignore[assignment]
        return model

    def run(
        self,
        part: nn.Module,
        x: Tensor | None,
        length: int,
        device: torch.device | None = None,
        /,
        **given: Tensor | None,
    ) -> Any:
        """Run a part; return the output of its forward.

        `x` is a decoder's residual [batch, sequence, H], or a piece of it. The full sequence (or chunk, with a cache)
        has `length` tokens. Other models run on their inputs. Inputs that are not `given` are zeros on `device`; by
        default that is the device of the given inputs.
        """
        device = device or next((value.device for value in (x, *given.values()) if value is not None), None)
        settings = self._settings
        if self.policy.inputs == DECODER_INPUTS:
            given.setdefault("position_ids", first_position() + torch.arange(length, device=device)[None])
            return part(inputs_embeds=x, **given, **settings)
        for name in self.policy.inputs:
            if name not in given and "mask" not in name:
                given[name] = self.zeros(name, length).to(device)
        return part(**given, **settings)

    def zeros(self, name: str, length: int) -> Tensor:
        """Return a model input [1, ...] of zeros: ids, an image, or the noise per patch (ViTMAE)."""
        if name == "pixel_values":
            return torch.zeros(1, self.model.config.num_channels, *self._image)
        if name == "noise":
            patch = self.model.config.patch_size
            return torch.zeros(1, self._image[0] // patch * (self._image[1] // patch))
        return torch.zeros(1, length, dtype=torch.long)

    @property
    def _image(self) -> tuple[int, int]:
        """Height and width of an image; 64 if the config has no size, since ResNet takes any."""
        size = getattr(self.model.config, "image_size", 64)
        return tuple(size) if isinstance(size, list | tuple) else (size, size)

    def leaves(self, model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
        """Yield (name, module) of the modules that stand-ins replace: without children, or with weights of their own.

        A module that contains lists of blocks or the head is not replaced, since its forward must run.
        """
        for own, module in model.named_children():
            name = f"{prefix}{own}"
            if list(module.children()) and (self.is_around(name) or not list(module.parameters(recurse=False))):
                yield from self.leaves(module, f"{name}.")
            elif not isinstance(module, nn.ModuleList):
                yield name, module

    def is_around(self, name: str) -> bool:
        """Return whether a module contains lists of blocks or the head."""
        return not name or any(each.startswith(f"{name}.") for each in (*self.blocks, self.head))

    def made_up(self, leaf: str) -> int | None:
        """Return the number of features that a token table's stand-in must return; None: `leaf` is no token table."""
        module = self.bare.get_submodule(leaf)
        is_table = leaf != self.head and _shares(module, self.bare.get_submodule(self.table))
        return self.hidden_size(0) if is_table else None


def _shares(module: nn.Module, table: nn.Module) -> bool:
    """Return whether a module is the table itself, or shares its weight."""
    return any(p is table.weight for p in module.parameters(recurse=False))


def _may_cache(model: Any) -> bool:
    """Return whether a model's forward has the argument `use_cache`, or passes it on to its base model's forward.

    `use_cache` must then be False: a cache in the recorded arguments of blocks would grow from step to step.
    """
    own, inner = (inspect.signature(type(each).forward).parameters for each in (model, model.base_model))
    hands_on = any(each.kind is each.VAR_KEYWORD for each in own.values())
    return "use_cache" in own or (hands_on and "use_cache" in inner)


def _without(model: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """Return a copy of the model with empty lists of blocks; the model itself stays unchanged."""
    lists = {name: model.get_submodule(name) for name in blocks}
    for name in blocks:
        model.set_submodule(name, nn.ModuleList())
    try:
        return copy.deepcopy(model)
    finally:
        for name, found in lists.items():
            model.set_submodule(name, found)
