"""Skeleton of a transformers model's forward: the pieces of code before, between and after its lists of blocks.

To run a piece, the model's own forward runs with stand-ins for all other modules. The stand-in for the list of blocks
before the piece returns the input of the piece. The stand-in for the list after the piece records the output of the
piece, and the other arguments of the blocks. A trial run of the whole forward on stand-ins shows which modules belong
to which piece.

transformers has no training pipeline, and its `pp_plan` lists modules, without the code between them. Tracing
(torch.distributed.pipelining) needs a graph without breaks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dslpar.core.catalog import finding, raise_finding
from dslpar.core.errors import DslparError
from dslpar.policies.attention import Recipe
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.policies.parts import Parts
from dslpar.policies.probe import on_cpu
from dslpar.policies.stand_ins import LeafStandIn, is_rotary, tensors
from dslpar.schema.policy import DECODER_INPUTS, Policy


class Piece(NamedTuple):
    """Code of the forward before a list of blocks, or after the last list."""

    place: str
    """front, between, or back."""
    leaves: Sequence[str]
    """Modules of the piece, in the order in which they run, without token tables, the head and rotary embeddings."""
    lookups: Sequence[tuple[str, str]] = ()
    """(token table, model input with its ids) for each lookup in the piece."""
    around: Sequence[str] = ()
    """Modules around lists of blocks whose own parameters the piece uses: ViTMAE's decoder, with its mask token."""


class Outline(NamedTuple):
    """Structure of a model's forward."""

    pieces: Sequence[Piece]
    """One piece before each list of blocks, and one after the last list."""
    carried: Sequence[Sequence[str]]
    """Per list of blocks: names of the blocks' arguments, besides their input, that are activations."""
    masks: Sequence[Mapping[str, str]]
    """Per list of blocks: name of an argument that is a mask -> the model input with this mask's padding."""
    uncalled: Sequence[str]
    """Modules with weights that the forward never calls."""
    outputs: Sequence[str]
    """Names of the model's outputs besides the head's logits."""
    head_output: str
    """Name of the model's output with the head's logits."""
    along: Sequence[str]
    """Further values that modules of the first piece return (`Policy.returns`), passed on to the last piece."""


class _Trial(NamedTuple):
    """Records of a trial run of the whole forward on stand-ins."""

    model: Any
    """The model of stand-ins."""
    order: Sequence[str | int]
    """Calls in order: the name of a stand-in, or, for the first block of a list, the list's number."""
    stand_ins: Sequence[LeafStandIn]
    firsts: Sequence[Any]
    """Stand-in for the first block of each list."""
    inputs: Mapping[str, Tensor]
    """Model inputs by name."""
    output: Mapping[str, Any]
    """The forward's output."""

    @property
    def entered(self) -> list[int]:
        """Positions in `order` at which the lists of blocks begin."""
        return [self.order.index(number) for number in range(len(self.firsts))]


class Skeleton(Parts):
    """A model's parts, and the outline of its forward."""

    def __init__(self, model: Any, policy: Policy) -> None:
        super().__init__(model, policy)
        self.outline = self._outline()

    @on_cpu
    def _outline(self) -> Outline:
        trial = self._trial()
        self._check_order(trial)
        lookups = [(self.table, "input_ids", 0)] if self.is_decoder else self._lookups(trial)
        tables = {self.table, self.head, *(leaf for leaf, _, _ in lookups)}
        pieces = self._pieces(trial, lookups, tables)
        self._check_leaves(trial.model, pieces)
        head_output, others = self._logits(trial)
        along = [name for leaf in pieces[0].leaves for name in self.policy.returned(leaf) if name]
        return Outline(
            pieces,
            carried=[_carried(block.call) for block in trial.firsts],
            masks=[_masks(block.call, self._mask_inputs, self.is_decoder) for block in trial.firsts],
            uncalled=self._uncalled(pieces, tables),
            outputs=[*others, *(name for name in along if name in trial.output)],
            head_output=head_output,
            along=along,
        )

    @property
    def is_decoder(self) -> bool:
        """Return whether the model's inputs are those of a decoder."""
        return self.policy.inputs == DECODER_INPUTS

    def _trial(self) -> _Trial:
        """Run the whole forward once on stand-ins. Each mask input is different, to tell which mask a block gets."""
        model: Any = self.part(())
        order: list[str | int] = []
        stand_ins = [module for module in model.modules() if isinstance(module, LeafStandIn)]
        for module in stand_ins:
            module.calls, module.keeps_input = order, True
        firsts: list[Any] = [model.get_submodule(name)[0] for name in self.blocks]
        for number, block in enumerate(firsts):
            block.register_forward_pre_hook(lambda *_, number=number: order.append(number))
            block.begins_graph = True
        for name, module in model.named_modules():
            for each in module.buffers(recurse=False) if self.is_around(name) else ():
                each.requires_grad_(each.is_floating_point())
        masks = {name: _marked_mask(number) for number, name in enumerate(self._mask_inputs)}
        inputs = masks | {name: self.zeros(name, LENGTH) for name in self.policy.inputs if name not in masks}
        x = torch.zeros(1, LENGTH, self.hidden_size(0), requires_grad=True) if self.is_decoder else None
        output = self.run(model, x, LENGTH, **({} if self.is_decoder else inputs))
        return _Trial(model, order, stand_ins, firsts, inputs, output)

    def _check_order(self, trial: _Trial) -> None:
        """Raise DslparError unless each list of blocks runs once, in the policy's order."""
        lists = range(len(self.blocks))
        if any(trial.order.count(number) != 1 for number in lists):
            message = f"{type(self.model).__name__}: its forward does not call each of its blocks once"
            raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
        if [each for each in trial.order if each in lists] != [*lists]:
            message = f"{type(self.model).__name__}: {', '.join(self.blocks)} do not run in this order"
            raise_finding(
                "TEN234", message, "name the lists of blocks in the order in which they run", key="model.policy"
            )

    def _pieces(self, trial: _Trial, lookups: Sequence[tuple[str, str, int]], tables: set[str]) -> list[Piece]:
        leaves = dict(self.leaves(self.bare))
        bounds = [0, *trial.entered, len(trial.order)]
        pieces = []
        for number, (begin, end) in enumerate(pairwise(bounds)):
            called = dict.fromkeys(each for each in trial.order[begin:end] if isinstance(each, str))
            own = [name for name in called if name not in tables and not is_rotary(leaves[name])]
            looked_up = [(leaf, of) for leaf, of, piece in lookups if piece == number]
            place = "front" if number == 0 else "back" if number == len(self.blocks) else "between"
            result = trial.firsts[number].input if number < len(trial.firsts) else trial.output
            pieces.append(Piece(place, own, looked_up, self._around(trial.model, result)))
        return pieces

    def _logits(self, trial: _Trial) -> tuple[str, list[str]]:
        """Return the name of the head's logits, and the names of other logits."""
        names = [name for name in trial.output if "logits" in name]
        if not (names or self.head or self.policy.loss):
            message = f"{type(self.model).__name__} returns no logits, but {', '.join(trial.output)}"
            raise_finding("TEN234", message, "name a class for a task, such as classification", key="model.type")
        head = trial.model.get_submodule(self.head).input if self.head else None
        # The forward may change the logits (a soft cap). Then no output is the tensor that the head returned.
        of_head = next((name for name in names if trial.output[name] is head), "logits") if self.head else ""
        return of_head, [name for name in names if name != of_head]

    def _around(self, model: nn.Module, end: Any) -> list[str]:
        """Return the modules around lists of blocks whose own parameters affect a piece's result `end`."""
        shared = set(self.bare.get_submodule(self.head).parameters()) if self.head else set()
        owners: dict[Tensor, str] = {}
        for name, module in self.bare.named_modules():
            if self.is_around(name):
                stand_ins = dict(model.get_submodule(name).named_buffers(recurse=False))
                own = [own for own, p in module.named_parameters(recurse=False) if p not in shared]
                owners |= {stand_ins[each]: name for each in own}
        ends = [each for each in tensors(end) if each.requires_grad]
        if not owners or not ends:
            return []
        found = torch.autograd.grad([each.sum() for each in ends], list(owners), retain_graph=True, allow_unused=True)
        used = [name for name, gradient in zip(owners.values(), found, strict=True) if gradient is not None]
        return list(dict.fromkeys(used))

    def _check_leaves(self, model: nn.Module, pieces: Sequence[Piece]) -> None:
        """Raise DslparError if a module with weights belongs to two pieces, or a buffer has no values."""
        problems = [
            f"{name} is a buffer whose value is computed in the model's constructor"
            for name, buffer in model.named_buffers()
            if buffer.is_meta
        ]
        called = [name for piece in pieces for name in (*piece.leaves, *piece.around)]
        problems += [
            f"{name}: the model's forward calls it both before and after blocks, and it holds weights"
            for name in dict.fromkeys(called)
            if called.count(name) > 1 and list(self.bare.get_submodule(name).parameters())
        ]
        if problems:
            raise DslparError([finding("TEN234", message, NEEDS_OWN_CODE, key="model.type") for message in problems])

    @property
    def _mask_inputs(self) -> Sequence[str]:
        return [name for name in self.policy.inputs if "mask" in name]

    def _lookups(self, trial: _Trial) -> list[tuple[str, str, int]]:
        """Return (token table, model input with its ids, number of the piece) of each lookup, in order."""
        if not self.table:
            return []
        found = []
        for module in trial.stand_ins:
            if self.made_up(module.name) is not None and module.input is not None:
                of = next((name for name, value in trial.inputs.items() if module.input is value), None)
                if of is None:
                    message = f"{module.name} looks up something other than an input of the batch"
                    raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
                at = trial.order.index(module.name)
                found.append((module.name, of, sum(at > begin for begin in trial.entered)))
        return sorted(found, key=lambda each: trial.order.index(each[0]))

    def _uncalled(self, pieces: Sequence[Piece], tables: set[str]) -> list[str]:
        names = [*filter(None, tables), *(leaf for piece in pieces for leaf in piece.leaves)]
        called = {p for name in names for p in self.bare.get_submodule(name).parameters()}
        around = [self.bare.get_submodule(name) for piece in pieces for name in piece.around]
        called |= {p for module in around for p in module.parameters(recurse=False)}
        return [
            name
            for name, module in self.bare.named_modules()
            if any(p not in called for p in module.parameters(recurse=False))
        ]


LENGTH = 8
"""Number of tokens in a trial run; each mask input marks another token as padding."""


def _marked_mask(number: int) -> Tensor:
    """Return the padding mask of mask input `number`, which marks token `number` as padding."""
    mask = torch.ones(1, LENGTH, dtype=torch.bool)
    mask[0, number] = False
    return mask


def _carried(call: Mapping[str, Any]) -> list[str]:
    return [name for name, value in call.items() if isinstance(value, Tensor) and value.requires_grad]


def _masks(call: Mapping[str, Any], inputs: Sequence[str], is_decoder: bool) -> dict[str, str]:
    """Return the names of a block's arguments that are masks -> the model input with this mask's padding."""
    found = {}
    for name, value in call.items():
        if isinstance(value, Recipe) and is_decoder:
            found[name] = DECODER_INPUTS[1]
        elif isinstance(value, Recipe) and value.padding is not None:
            found[name] = inputs[int(value.padding[0].long().argmin())]
    return found
