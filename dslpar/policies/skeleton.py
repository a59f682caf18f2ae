"""A transformers model with parts taken out: what stands between its blocks runs as transformers wrote it.

A pipeline cuts a model's list of blocks, but a model is more than its blocks: scaled embeddings, position tables,
masks, soft caps on logits stand in the `forward` around them. So no such forward is rewritten here. A stage runs the
model's own, with stand-ins for all but its part: the blocks' stand-in records what would enter the first one, or gives
what has left the last one; what a block is called with besides its input is recorded from the same forward.

transformers has no training pipeline, and its `pp_plan` names modules alone; tracing (torch.distributed.pipelining)
needs a graph without breaks. Neither knows what is done between modules.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.policies.probe import on_cpu


class Call(NamedTuple):
    """What a block is called with besides its input."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class BlockStandIn(nn.Module):
    """In place of a block: records its call, and gives `output`, or its input where that is None.

    What it has recorded, or is to give, is taken away by whoever ran the forward: else a graph would live on.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        for name, value in vars(block).items():  # loops read such as `layer.attention_type`
            if not name.startswith("_") and isinstance(value, (str, int, float, bool)):
                setattr(self, name, value)
        self.input: Tensor | None = None
        self.call: Call | None = None
        self.output: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the output, alone or in a tuple as the block would."""
        if args:
            self.input, rest = args[0], args[1:]
        else:
            self.input, rest = kwargs.pop("hidden_states"), ()
        self.call = Call(rest, kwargs)
        return self.input if self.output is None else self.output

    def clear(self) -> None:
        """Forget what was recorded, and what was to be given."""
        self.input, self.call, self.output = None, None, None


class LeafStandIn(nn.Module):
    """In place of a module that holds weights, or buffers: passes its input on; of ids, a zero that adds nothing."""

    def __init__(self, module: nn.Module, name: str) -> None:
        super().__init__()
        self.name = name
        self.calls: list[str] | None = None
        """Where its name is noted when it is called."""
        self.gives_nothing = isinstance(module, nn.Embedding)
        self.is_rotary = is_rotary(module)
        self.keeps_input = False
        self.input: Tensor | None = None
        self.output: Tensor | None = None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return `output` where one is set."""
        if self.calls is not None:
            self.calls.append(self.name)
        self.input = x if self.keeps_input else None
        if self.output is not None:
            return self.output
        if self.is_rotary:
            return None
        return torch.zeros(1, 1, 1, device=x.device) if self.gives_nothing else x

    def clear(self) -> None:
        """Forget what was recorded, and what was to be given."""
        self.input, self.output = None, None


class Outline(NamedTuple):
    """Which leaves outside the blocks run before and after them, in order; without the table and the head."""

    front: Sequence[str]
    back: Sequence[str]
    table: str
    head: str
    uncalled: Sequence[str]
    """What a forward never calls, and holds weights."""


class Skeleton:
    """A model on the meta device without its blocks, which is copied for each part of the chain."""

    def __init__(self, model: Any, blocks: Sequence[str]) -> None:
        self.model, self.blocks = model, blocks
        self.lists: dict[str, Sequence[nn.Module]] = {name: list(model.get_submodule(name)) for name in blocks}
        self._bare = _without(model, blocks)
        embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
        if not isinstance(embeddings, nn.Embedding) or not isinstance(head, nn.Linear):
            message = f"{type(model).__name__} has no table of tokens, or no linear head"
            raise_finding("TEN234", message, "name a class for causal language modelling", key="model.type")
        names = {module: name for name, module in model.named_modules()}
        self.table, self.head = names[embeddings], names[head]
        self.outline = self._outline()

    def part(self, own: Sequence[str], num_blocks: int = 1) -> nn.Module:
        """Return a copy of the model with stand-ins for all but the leaves `own`; `num_blocks`: in each list."""
        model = copy.deepcopy(self._bare)
        for name in self.blocks:
            stand_ins = [BlockStandIn(block) for block in self.lists[name][:num_blocks]]
            model.set_submodule(name, nn.ModuleList(stand_ins))
        for name, module in list(_leaves(model)):
            if name not in own and not isinstance(module, BlockStandIn):
                model.set_submodule(name, LeafStandIn(module, name))
        return model

    @on_cpu
    def _outline(self) -> Outline:
        model: Any = self.part(())
        order: list[str] = []
        for module in model.modules():
            if isinstance(module, LeafStandIn):
                module.calls = order
        for name in self.blocks:
            for block in model.get_submodule(name):
                block.register_forward_pre_hook(lambda *_: order.append(""))
        x = torch.zeros(1, 4, self.hidden_size)
        self._refuse_bare(model)
        run(model, x, torch.arange(4)[None])
        if order.count("") != len(self.blocks):
            message = f"{type(self.model).__name__}: its forward does not call each of its blocks once"
            raise_finding("TEN234", message, "report the model: it needs a rule of its own", key="model.type")
        first, last = order.index(""), len(order) - 1 - order[::-1].index("")
        leaves = dict(_leaves(self._bare))
        kept = [name for name in dict.fromkeys(order) if name and name not in (self.table, self.head)]
        kept = [name for name in kept if not is_rotary(leaves[name])]
        front = [name for name in kept if name in order[:first]]
        back = [name for name in kept if name in order[last:]]
        twice = [name for name in front if name in back and list(leaves[name].parameters())]
        if twice:
            message = f"{', '.join(twice)}: its forward calls it before the blocks and after them, and it holds weights"
            raise_finding("TEN234", message, "report the model: it needs a rule of its own", key="model.type")
        with_weights = [name for name, module in self._bare.named_modules() if list(module.parameters(recurse=False))]
        uncalled = [name for name in with_weights if name not in (*front, *back, self.table, self.head)]
        return Outline(front, back, self.table, self.head, uncalled)

    def _refuse_bare(self, model: nn.Module) -> None:
        """Refuse tensors that hang at modules around others: no stand-in can be in their place.

        Raises:
            DslparError: such parameters, or buffers whose values are made where the model is constructed; all of them.
        """
        fill_buffers(self.model, model)
        bare = [name for name, _ in model.named_parameters()]
        unknown = [name for name, buffer in model.named_buffers() if buffer.is_meta]
        found = [f"{name} is a parameter outside of modules that can be cut" for name in bare]
        found += [f"{name} is a buffer, and its value is made where the model is constructed" for name in unknown]
        if found:
            hint = "report the model: it needs a rule of its own"
            raise DslparError([finding("TEN234", message, hint, key="model.type") for message in found])

    @property
    def hidden_size(self) -> int:
        """Features of the residual stream."""
        return int(self.model.get_submodule(self.table).weight.shape[1])


def run(model: nn.Module, x: Tensor, positions: Tensor | None, padding: Tensor | None = None) -> Tensor:
    """Run a part on the residual `x`; return what its forward gives as logits."""
    mask = {} if padding is None else {"attention_mask": padding.long()}
    logits: Tensor = model(inputs_embeds=x, position_ids=positions, use_cache=False, **mask).logits
    return logits


@torch.no_grad()
def calls(part: nn.Module, blocks: Sequence[str], x: Tensor, positions: Tensor) -> list[Call]:
    """Return what each block is called with besides its input.

    Raises:
        DslparError: between two blocks there is more than the residual; or what they are called with depends on it.
    """
    lists: dict[str, Any] = {name: part.get_submodule(name) for name in blocks}
    stand_ins: list[Any] = [block for found in lists.values() for block in found]
    names = [f"{name}.{number}" for name, found in lists.items() for number in range(len(found))]
    hint = "report the model: it needs a rule of its own"
    run(part, x + torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device), positions)
    others = [block.call for block in stand_ins]
    run(part, x, positions)
    for name, block, earlier, other in zip(names, stand_ins, [None, *stand_ins], others, strict=False):
        if earlier is not None and block.input is not earlier.input:
            message = (
                f"{name}: what enters it is not what left the block before it, but made of it in the forward around"
            )
            raise_finding("TEN234", message, hint, key="model.type")
        if not all(map(torch.equal, tensors(block.call), tensors(other))):
            message = f"{name}: what it is called with depends on the residual, which is in pieces"
            raise_finding("TEN234", message, hint, key="model.type")
    return [block.call for block in stand_ins]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors in nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value]
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (tuple, list)) else ()
    return [tensor for part in parts for tensor in tensors(part)]


@on_cpu
def fill_buffers(model: Any, part: nn.Module) -> None:
    """Give buffers that are on the meta device their values, as transformers does when it loads a model.

    One that `_init_weights` does not know stays where it is: torch refuses to compute with it.
    """
    for module in part.modules():
        on_meta = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
        for name, buffer in on_meta.items():
            # NaN tells which were filled.
            module._buffers[name] = torch.full_like(
                buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu"
            )
        if on_meta:
            model._init_weights(module)
        for name, buffer in on_meta.items():
            filled = module._buffers[name]
            if filled is None or not filled.is_floating_point() or filled.isnan().any():
                module._buffers[name] = buffer


def is_rotary(module: nn.Module) -> bool:
    return any("inv_freq" in name for name, _ in module.named_buffers(recurse=False))


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, module in model.named_modules():
        if name and not list(module.children()) and not isinstance(module, nn.ModuleList):
            yield name, module


def _without(model: nn.Module, blocks: Sequence[str]) -> nn.Module:
    """Return a copy of the model, its lists of blocks empty; the model itself is as before."""
    lists = {name: model.get_submodule(name) for name in blocks}
    for name in blocks:
        model.set_submodule(name, nn.ModuleList())
    try:
        return copy.deepcopy(model)
    finally:
        for name, found in lists.items():
            model.set_submodule(name, found)
