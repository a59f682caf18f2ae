"""How the layers of a transformers model run: what each takes, what it hands on, what its code is called with.

Between layers travels the stored residual. Some models need more: the other activations that a block is called with
(T5's position bias, what its encoder has left), padding masks, and ids that are looked up later. These go along in a
tuple, in an order that both sides know; masks as uint8, since not every backend sends bool.

That the arguments of blocks are recorded from a forward on zeros, so that no stage needs the code before it, is an idea
of the pipelines that trace a model (torch.distributed.pipelining); here it is done once a length, and not traced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import from_residual, placement, to_residual
from dslpar.policies import padding
from dslpar.policies.policy import DECODER_INPUTS
from dslpar.policies.skeleton import Skeleton
from dslpar.policies.stand_ins import BlockStandIn, LeafStandIn, ShapeStandIn, is_rotary, tensors

Value = Tensor | tuple[Tensor, ...]
"""What goes from layer to layer."""
RESIDUAL = "the residual"
"""Its name among what goes along; no argument has it."""


class Chain:
    """The forwards of a model's layers; all are called with the module that the layer has built, and a `Value`."""

    def __init__(self, of: Skeleton) -> None:
        self.skeleton, self.policy, self.outline = of, of.policy, of.outline
        self.is_decoder = self.policy.inputs == DECODER_INPUTS
        self.mask_use = padding.mask_use(of) if self.is_decoder else padding.MaskUse(False, False)
        self._along = {
            (number, is_first): self._names_of_block(number, is_first)
            for number in range(len(self.policy.blocks))
            for is_first in (True, False)
        }
        """What a block is given, in order: of each list, its first one and the others."""
        self._recorded: dict[object, list[list[Mapping[str, Any]]]] = {}
        self._masked: tuple[Tensor, list[list[Mapping[str, Any]]]] | None = None

    # ---- layers ----

    def look_up(self, number: int, leaf: str, module: nn.Module, value: Value) -> Value:
        """Look tokens up in piece `number`: of a decoder they become the residual."""
        piece = self.outline.pieces[number]
        done = [name for name, _ in piece.lookups][: [name for name, _ in piece.lookups].index(leaf)]
        state = self._unpack(value, number, done)
        rows = module(state[dict(piece.lookups)[leaf]])
        if self.is_decoder:
            return self._pack(state | {RESIDUAL: rows}, [RESIDUAL, *self._needed(1, 0)])
        return self._pack(state | {leaf: rows}, self._names(number, [*done, leaf]))

    def run_piece(self, groups: Groups, number: int, module: nn.Module, value: Value) -> Value:
        """Run what stands before list `number` of blocks, or after the last."""
        piece = self.outline.pieces[number]
        state = self._unpack(value, number, [name for name, _ in piece.lookups])
        entered, extra = self._run(groups, number, module, state)
        if piece.place == "back":
            return (entered, *extra.values()) if extra else entered
        return self._pack(state | extra | {RESIDUAL: entered}, self._along[number, True])

    def run_block(self, groups: Groups, number: int, block: int, module: nn.Module, value: Value) -> Value:
        """Run a block of list `number`."""
        names = self._along[number, block == 0]
        state = dict(zip(names, value if isinstance(value, tuple) else (value,), strict=False))
        x = state[RESIDUAL]
        mask = state.get(DECODER_INPUTS[1]) if self.mask_use.anything else None
        arguments = dict(self._arguments(groups, x, mask)[number][block])
        for name, of in self.outline.masks[number].items():
            if of in state:
                arguments[name] = arguments[name].with_padding(state[of])
        arguments |= {name: state[name] for name in names if name in arguments and name not in self.policy.inputs}
        output = module(x, **arguments)
        x, *returned = output if isinstance(output, tuple) else (output,)
        handed_on = zip(self.policy.returned(self.policy.blocks[number]), returned, strict=False)
        # A stage sends contiguous memory alone; later blocks hand on what they were given.
        state |= {RESIDUAL: x} | {name: each.contiguous() for name, each in handed_on if name}
        is_last = block == len(self.skeleton.lists[self.policy.blocks[number]]) - 1
        return self._pack(state, self._names(number + 1, ()) if is_last else self._along[number, False])

    def apply_head(self, groups: Groups, module: nn.Module, value: Value) -> Value:
        """Make logits of the residual, beside what else there is."""
        x, *others = value if isinstance(value, tuple) else (value,)
        if "back" in self.policy.whole:
            x = to_residual(groups, x)
        logits = module(x)
        return (logits, *others) if others else logits

    def run_logits(self, module: nn.Module, logits: Tensor) -> Tensor:
        """Do what the model does to its head's logits."""
        block, head = self._last_block(module), self._head(module)
        head.output = logits
        y: Tensor = self.skeleton.run(module, logits, logits.shape[1]).logits
        block.clear()
        head.clear()
        return y

    # ---- pieces ----

    def run_alone(self, number: int, module: nn.Module, x: Tensor) -> Tensor:
        """Run a piece on the residual alone."""
        entered: Tensor = self._run(None, number, module, {RESIDUAL: x})[0]
        return entered

    def _run(
        self, groups: Groups | None, number: int, module: nn.Module, state: Mapping[str, Tensor]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return what enters the blocks, or the head, and what else the piece gives."""
        piece = self.outline.pieces[number]
        is_cut = groups is not None and groups.axis("tensor").size > 1 and piece.place in self.policy.whole
        for leaf, _ in piece.lookups if not self.is_decoder else ():
            module.get_submodule(leaf).output = state[leaf]
        x = state.get(RESIDUAL)
        if number:
            assert x is not None
            before: Any = module.get_submodule(f"{self.policy.blocks[number - 1]}.0")
            before.output = from_residual(groups, x) if is_cut and groups is not None else x
        given = {name: each for name, each in state.items() if name in self.policy.inputs and "mask" not in name}
        beside: dict[str, Tensor] = {}
        hooks = self._pass_along(module, state, beside)
        if self.skeleton.head and piece.place == "back":
            self._head(module).keeps_input = True
        if self.is_decoder:
            assert x is not None
            mask = state.get(DECODER_INPUTS[1]) if number == 0 and self.mask_use.positions else None
            made_of_mask = {} if mask is None else {"position_ids": None, "attention_mask": mask.long()}
            length = self._length(groups, x) if number == 0 else x.shape[1]
            output = self.skeleton.run(module, x, length, **made_of_mask)
        else:
            length = next(iter(given.values())).shape[-1] if x is None else x.shape[1]
            if number and self.outline.along:  # which is of the micro-batch, and so must the inputs be that are gone
                first = state[self.outline.along[0]]
                for name in self.policy.inputs:
                    zeros = self.skeleton.zeros(name, length).to(first.device)
                    given.setdefault(name, zeros.expand(len(first), *zeros.shape[1:]))
            output = self.skeleton.run(module, None, length, **given)
        entered, extra = self._results(number, module, output)
        if is_cut and piece.place != "back" and groups is not None:
            entered = to_residual(groups, entered)
        for hook in hooks:
            hook.remove()
        for each in module.modules():
            if isinstance(each, BlockStandIn | LeafStandIn):
                each.clear()
        return entered, extra | beside

    def _pass_along(self, module: nn.Module, state: Mapping[str, Tensor], beside: dict[str, Tensor]) -> list[Any]:
        """Have stand-ins of modules before the blocks return what these did; note in `beside` what real ones return.

        Return the hooks that note it, to be removed.
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
            after: Any = module.get_submodule(f"{self.policy.blocks[number]}.0")
            return after.input, {name: after.call[name] for name in self.outline.carried[number]}
        outputs = {name: output[name] for name in self.outline.outputs}
        if self.skeleton.head:
            return self._head(module).input, outputs
        first, *others = outputs.items()
        return first[1], dict(others)

    def _head(self, module: nn.Module) -> Any:
        return module.get_submodule(self.skeleton.head)

    def _last_block(self, module: nn.Module) -> Any:
        return module.get_submodule(f"{self.policy.blocks[-1]}.0")

    # ---- what goes along ----

    def _unpack(self, value: Value, number: int, done: Sequence[str]) -> dict[str, Tensor]:
        """Name what a layer of piece `number` is given, after the tables `done` were looked up."""
        given = value if isinstance(value, tuple) else (value,)
        return dict(zip(self._names(number, done), map(_sendable, given), strict=False))

    def _pack(self, state: Mapping[str, Tensor], names: Sequence[str]) -> Value:
        """Return what goes on under these names; inputs that the batch does not have are left out."""
        values = tuple(state[name] for name in names if name in state or name not in self.policy.inputs)
        return values if len(values) > 1 else values[0]

    def _names(self, number: int, done: Sequence[str]) -> list[str]:
        """Return what a layer of piece `number` is given, in order; at first, all that the batch has."""
        if number == 0:
            return [RESIDUAL, *self._needed(1, 0)] if self.is_decoder and done else [*done, *self.policy.inputs]
        return [RESIDUAL, *done, *self.outline.along, *self._needed(number, number)]

    def _names_of_block(self, number: int, is_first: bool) -> list[str]:
        returned = () if is_first else self.policy.returned(self.policy.blocks[number])
        carried = (*filter(None, returned), *self.outline.carried[number], *self.outline.along)
        return [RESIDUAL, *carried, *self._needed(number + 1, number)]

    def _needed(self, piece: int, blocks: int) -> list[str]:
        """Return the inputs that are still read from this piece, and from this list of blocks, on."""
        ids = {of for each in self.outline.pieces[piece:] for _, of in each.lookups}
        masks = {name for each in self.outline.masks[blocks:] for name in each.values()}
        return [name for name in self.policy.inputs if name in ids | masks]

    # ---- what blocks are called with ----

    def _length(self, groups: Groups | None, residual: Tensor) -> int:
        """Return the tokens of a whole sequence, of which the residual may have a piece."""
        if groups is None:
            return int(residual.shape[1])
        letters = placement.residual_cuts(groups.tensor).sequence
        return int(residual.shape[1]) * placement.piece(groups.tensor, groups.coord, letters)[1]

    def _arguments(self, groups: Groups, like: Tensor, mask: Tensor | None) -> list[list[Mapping[str, Any]]]:
        """Return what each block is called with besides its input, for sequences as long as `like`: recorded once.

        Where the forward computes with the padding mask (alibi), it is recorded once a micro-batch: for that `mask`.
        """
        key = (like.shape[1], like.dtype, like.device, groups)
        if mask is not None and self._masked is not None and self._masked[0] is mask:
            return self._masked[1]
        if mask is not None or key not in self._recorded:
            model, lists = self.skeleton.model, self.skeleton.lists
            rotary = [name for name, module in model.named_modules() if is_rotary(module)]
            part: Any = self.skeleton.part(rotary, num_blocks=max(map(len, lists.values())))
            part.eval()  # dropout would draw from the run's generator
            part.to(like.device)
            length = self._length(groups, like)
            positions = torch.arange(length, device=like.device)[None]
            sequence = placement.inner_cuts(groups.tensor).sequence
            positions = placement.take(positions, 1, groups.tensor, groups.coord, sequence)
            x = like.new_zeros(1, 1, 1).expand(1, positions.shape[1], like.shape[2])
            recorded = self._record(part, x, length, positions, mask)
            if mask is not None:
                self._masked = (mask, recorded)
                return recorded
            self._recorded[key] = recorded
        return self._recorded[key]

    @torch.no_grad()
    def _record(
        self, part: Any, x: Tensor, length: int, positions: Tensor, mask: Tensor | None
    ) -> list[list[Mapping[str, Any]]]:
        """Run the forward on zeros, and return what each block of each list is called with.

        Raises:
            DslparError: between two blocks there is more than the residual; or a call depends on what is in pieces.
        """
        lists = [list(part.get_submodule(name)) for name in self.policy.blocks]
        if not self.is_decoder:
            self.skeleton.run(part, None, length)
        else:
            given: dict[str, Tensor | None] = {"position_ids": positions}
            if mask is not None:
                given = {"position_ids": None if self.mask_use.positions else positions, "attention_mask": mask.long()}
            other = x + torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
            self.skeleton.run(part, other, positions.shape[1], **given)
            others = [block.call for block in lists[0]]
            self.skeleton.run(part, x, positions.shape[1], **given)
            for number, (block, call) in enumerate(zip(lists[0], others, strict=True)):
                own, same = self._tensors(block.call), self._tensors(call)
                if not all(map(torch.equal, own, same)):
                    message = "what it is called with depends on the residual, which is in pieces"
                    self._refuse(f"{self.policy.blocks[0]}.{number}: {message}")
        for name, blocks in zip(self.policy.blocks, lists, strict=True):
            for number, (earlier, block) in enumerate(pairwise(blocks), 1):
                if block.input is not earlier.gave:
                    message = (
                        "what enters it is not what left the block before it, but made of it in the forward around"
                    )
                    self._refuse(f"{name}.{number}: {message}")
        return [[block.call for block in blocks] for blocks in lists]

    def _tensors(self, call: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors of a call but for those that go along."""
        return tensors({name: value for name, value in call.items() if name not in self.outline.carried[0]})

    def _refuse(self, message: str) -> NoReturn:
        raise_finding("TEN234", message, "report the model: it needs a rule of its own", key="model.type")


def _sendable(value: Tensor) -> Tensor:
    return value.to(torch.uint8) if value.dtype == torch.bool else value
