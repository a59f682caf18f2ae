"""Chain of layers of a transformers model: the forward of each layer, and the values that layers pass on.

Every layer passes on the residual. Some models need more: other activations that are arguments of blocks (T5's position
bias, its encoder's output), padding masks, and ids for a later token table. These values are passed on with the
residual, in a tuple whose order sender and receiver know. Masks are sent as uint8, since not every backend sends bool.

A *piece* is the code before, between or after the lists of blocks (`skeleton`). A layer that is a piece runs the
model's own forward, with stand-ins for all other modules. The stand-ins return the values from the previous layer, and
the forward ends where the piece ends. So transformers' code runs unchanged. (Megatron-LM and
torch.distributed.pipelining need a forward that they can divide.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from dslpar.distributed.groups import Groups
from dslpar.layers import from_residual, to_residual
from dslpar.policies.balance_loss import Balance, collecting
from dslpar.policies.block_calls import BlockCalls, whole_length
from dslpar.policies.skeleton import Skeleton
from dslpar.policies.stand_ins import ForwardEnded, ShapeStandIn
from dslpar.schema.policy import DECODER_INPUTS

Value = Tensor | tuple[Tensor, ...]
"""Value that layers pass on: the residual, or a tuple of the residual and other tensors."""
RESIDUAL = "the residual"
"""Key of the residual in a layer's state (values by name); no argument of a forward has this name."""
ROUTING = "the routers' sums"
"""Key of the sums of which the load-balancing loss is computed."""


class Chain:
    """Forwards of a model's layers. Each gets the module that its layer has built, and the previous layer's `Value`."""

    def __init__(self, of: Skeleton, balance: Balance | None = None) -> None:
        self.skeleton, self.policy, self.outline, self.balance = of, of.policy, of.outline, balance
        self._always = (RESIDUAL,) if balance is None else (RESIDUAL, ROUTING)
        """Names of the values that all layers from the first block's input on pass on, to the model's output."""
        self.is_decoder = self.policy.inputs == DECODER_INPUTS
        self.calls = BlockCalls(of)
        lists = range(len(self.policy.blocks))
        self._along = {
            (number, first): self._names_of_block(number, first) for number in lists for first in (True, False)
        }
        """(number of a list of blocks, whether it is the first block) -> names of the block's inputs, in order."""
        self._after = [self._names(number + 1, ()) for number in lists]
        """Names of the values that the last block of each list passes on."""
        self._returned = [self.policy.returned(name) for name in self.policy.blocks]

    # ---- layers ----

    def look_up(self, number: int, leaf: str, module: nn.Module, value: Value) -> Value:
        """Look ids up in the token table `leaf` of piece `number`. In a decoder the rows become the residual."""
        piece = self.outline.pieces[number]
        done = [name for name, _ in piece.lookups][: [name for name, _ in piece.lookups].index(leaf)]
        state = self._unpack(value, number, done)
        self.calls.check_mask(state.get(DECODER_INPUTS[1]) if self.is_decoder else None)
        rows = module(state[dict(piece.lookups)[leaf]])
        if self.is_decoder:
            if self.balance is not None:
                state.setdefault(ROUTING, self.balance.zeros(rows.device))
            return self._pack(state | {RESIDUAL: rows}, [*self._always, *self._needed(1, 0)])
        return self._pack(state | {leaf: rows}, self._names(number, [*done, leaf]))

    def run_piece(self, groups: Groups, number: int, module: nn.Module, value: Value) -> Value:
        """Run the piece before list `number` of blocks, or after the last list."""
        piece = self.outline.pieces[number]
        state = self._unpack(value, number, [name for name, _ in piece.lookups])
        entered, extra = self._run(groups, number, module, state)
        if piece.place == "back":
            beside = [*extra.values(), *(state[name] for name in self._always[1:])]
            return (entered, *beside) if beside else entered
        extra = {name: _differentiable(each) for name, each in extra.items()}
        return self._pack(state | extra | {RESIDUAL: entered}, self._along[number, True])

    def run_block(self, groups: Groups, number: int, block: int, module: nn.Module, value: Value) -> Value:
        """Run a block of list `number`."""
        names = self._along[number, block == 0]
        state = dict(zip(names, value if isinstance(value, tuple) else (value,), strict=False))
        x = state[RESIDUAL]
        arguments = dict(self.calls(groups, x, state.get(DECODER_INPUTS[1]))[number][block])
        for name, of in self.outline.masks[number].items():
            if of in state:
                arguments[name] = arguments[name].with_padding(state[of])
        arguments |= {name: state[name] for name in names if name in arguments and name not in self.policy.inputs}
        with collecting(module, x, state.get(DECODER_INPUTS[1])) as sums:
            output = module(x, **arguments)
        if ROUTING in state:
            state[ROUTING] = sum(sums, state[ROUTING])
        x, *returned = output if isinstance(output, tuple) else (output,)
        handed_on = zip(self._returned[number], returned, strict=False)
        # A pipeline stage sends only contiguous tensors. Values that a block does not return are passed on unchanged.
        state |= {RESIDUAL: x} | {name: each.contiguous() for name, each in handed_on if name}
        is_last = block == len(self.skeleton.lists[self.policy.blocks[number]]) - 1
        return self._pack(state, self._after[number] if is_last else self._along[number, False])

    def apply_head(self, groups: Groups, module: nn.Module, value: Value) -> Value:
        """Compute logits from the residual; pass other values on."""
        x, *others = value if isinstance(value, tuple) else (value,)
        if "back" in self.policy.whole:
            x = to_residual(groups, x)
        logits = module(x)
        return (logits, *others) if others else logits

    def run_logits(self, module: nn.Module, value: Value) -> Value:
        """Run the model's own code on the head's logits, such as a soft cap; pass other values on."""
        logits, *others = value if isinstance(value, tuple) else (value,)
        block, head = self._first_block(module, -1), self._head(module)
        head.output = logits
        y: Tensor = self.skeleton.run(module, logits, logits.shape[1]).logits
        block.clear()
        head.clear()
        return (y, *others) if others else y

    # ---- pieces ----

    def run_alone(self, number: int, module: nn.Module, x: Tensor) -> Tensor:
        """Run a piece on the residual alone."""
        entered: Tensor = self._run(None, number, module, {RESIDUAL: x})[0]
        return entered

    def _run(
        self, groups: Groups | None, number: int, module: nn.Module, state: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Run a piece. Return the input of the next list of blocks or of the head, and the piece's other values."""
        piece, part = self.outline.pieces[number], cast("Any", module)
        is_cut = groups is not None and groups.axis("tensor").size > 1
        to_make_whole = groups if is_cut and piece.place in self.policy.whole else None
        if number:
            x = state[RESIDUAL]
            before = self._first_block(module, number - 1)
            before.output = from_residual(to_make_whole, x) if to_make_whole else x
        if piece.place != "back":
            self._first_block(module, number).ends_forward = True
        elif self.skeleton.head:
            self._head(module).keeps_input = True
        beside: dict[str, Tensor] = {}
        hooks = self._pass_along(module, state, beside)
        run = partial(self._run_decoder, groups) if self.is_decoder else self._run_on_inputs
        output = None
        with suppress(ForwardEnded):
            output = run(number, module, state)
        entered, extra = self._results(number, module, output)
        if to_make_whole and piece.place != "back":
            entered = to_residual(to_make_whole, entered)
        for hook in hooks:
            hook.remove()
        for each in part.stand_ins:
            each.clear()
        return entered, extra | beside

    def _run_decoder(self, groups: Groups | None, number: int, module: nn.Module, state: Mapping[str, Tensor]) -> Any:
        """Run a piece of a decoder. The ids have been looked up, so the forward begins with the residual."""
        x = state[RESIDUAL]
        if number:
            return self.skeleton.run(module, x, x.shape[1])
        mask = state.get(DECODER_INPUTS[1]) if self.calls.mask_use.positions else None
        made_of_mask = {} if mask is None else {"position_ids": None, "attention_mask": mask.long()}
        return self.skeleton.run(module, x, whole_length(groups, x), **made_of_mask)

    def _run_on_inputs(self, number: int, module: nn.Module, state: Mapping[str, Tensor]) -> Any:
        """Run a piece of a model that is no decoder, on the inputs in the state, and on zeros for all other inputs."""
        for leaf, _ in self.outline.pieces[number].lookups:
            cast("Any", module.get_submodule(leaf)).output = state[leaf]
        given = {name: each for name, each in state.items() if name in self.policy.inputs and "mask" not in name}
        x = state.get(RESIDUAL)
        length = next(iter(given.values())).shape[-1] if x is None else x.shape[1]
        if number and self.outline.along:  # these have the micro-batch's size, so the zeros need the same size
            first = state[self.outline.along[0]]
            for name in self.policy.inputs:
                zeros = self.skeleton.zeros(name, length).to(first.device)
                given.setdefault(name, zeros.expand(len(first), *zeros.shape[1:]))
        device = next(iter(state.values())).device
        return self.skeleton.run(module, None, length, device, **given)

    def _pass_along(self, module: nn.Module, state: Mapping[str, Tensor], beside: dict[str, Tensor]) -> list[Any]:
        """Pass the further values that modules before the blocks return (`Policy.returns`) on to later code.

        A stand-in for such a module returns the values in the state. If the module is part of this piece, a hook
        records its values in `beside`. Return these hooks, which the caller must remove.
        """
        hooks = []
        for leaf in self.outline.pieces[0].leaves:
            places = {name: place for place, name in enumerate(self.policy.returned(leaf), 1) if name}
            own = module.get_submodule(leaf)
            if isinstance(own, ShapeStandIn):
                own.returned = {place: state[name] for name, place in places.items()}
            elif places:

                def note(_: nn.Module, __: Any, output: Any, places: Mapping[str, int] = places) -> None:
                    beside.update((name, output[place]) for name, place in places.items())

                hooks.append(own.register_forward_hook(note))
        return hooks

    def _results(self, number: int, module: nn.Module, output: Any) -> tuple[Any, dict[str, Tensor]]:
        if number < len(self.policy.blocks):
            after = self._first_block(module, number)
            return after.input, {name: after.call[name] for name in self.outline.carried[number]}
        outputs = {name: output[name] for name in self.outline.outputs}
        if self.skeleton.head:
            return self._head(module).input, outputs
        first, *others = outputs.items()
        return first[1], dict(others)

    def _head(self, module: nn.Module) -> Any:
        return module.get_submodule(self.skeleton.head)

    def _first_block(self, module: nn.Module, number: int) -> Any:
        return module.get_submodule(f"{self.policy.blocks[number]}.0")

    # ---- values beside the residual ----

    def _unpack(self, value: Value, number: int, done: Sequence[str]) -> dict[str, Tensor]:
        """Return the inputs by name of a layer of piece `number`, after the lookups in the token tables `done`."""
        given = value if isinstance(value, tuple) else (value,)
        return dict(zip(self._names(number, done), map(_sendable, given), strict=False))

    def _pack(self, state: Mapping[str, Tensor], names: Sequence[str]) -> Value:
        """Return the `Value` with these names, to pass on. Model inputs that the batch lacks are left out."""
        values = tuple(state[name] for name in names if name in state or name not in self.policy.inputs)
        return values if len(values) > 1 else values[0]

    def _names(self, number: int, done: Sequence[str]) -> list[str]:
        """Return the names of a layer's inputs in piece `number`, in order; the first layer gets all model inputs."""
        if number == 0:
            return [*self._always, *self._needed(1, 0)] if self.is_decoder and done else [*done, *self.policy.inputs]
        return [*self._always, *done, *self.outline.along, *self._needed(number, number)]

    def _names_of_block(self, number: int, is_first: bool) -> list[str]:
        returned = () if is_first else self.policy.returned(self.policy.blocks[number])
        carried = (*filter(None, returned), *self.outline.carried[number], *self.outline.along)
        return [*self._always, *carried, *self._needed(number + 1, number)]

    def _needed(self, piece: int, blocks: int) -> list[str]:
        """Return the model inputs that pieces from `piece` on, or lists of blocks from `blocks` on, still read."""
        ids = {of for each in self.outline.pieces[piece:] for _, of in each.lookups}
        masks = {name for each in self.outline.masks[blocks:] for name in each.values()}
        return [name for name in self.policy.inputs if name in ids | masks]


def _sendable(value: Tensor) -> Tensor:
    return value.to(torch.uint8) if value.dtype == torch.bool else value


def _differentiable(value: Tensor) -> Tensor:
    """Make a value sendable in training: DeepSpeed's pipeline needs a gradient for each float, even for a constant."""
    needs_none = value.requires_grad or not value.is_floating_point() or not torch.is_grad_enabled()
    return value if needs_none else value.detach().requires_grad_()
