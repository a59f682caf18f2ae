"""Record the arguments, besides the input, that a transformers model's forward passes to its blocks.

Examples are rotary position embeddings and masks. They are recorded once per sequence length, from a forward on zeros
with stand-ins for the blocks. So a pipeline stage can call its blocks without the code that runs on earlier stages. The
idea comes from pipelines that trace a model (torch.distributed.pipelining); here nothing is traced.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NoReturn
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import masking_utils

from dslpar.core.catalog import raise_finding
from dslpar.distributed.groups import Groups
from dslpar.layers import placement
from dslpar.layers.kv_cache import first_position
from dslpar.policies import padding
from dslpar.policies.attention import DOCUMENTS
from dslpar.policies.errors import NEEDS_OWN_CODE
from dslpar.policies.skeleton import Skeleton
from dslpar.policies.stand_ins import is_rotary, tensors
from dslpar.schema.policy import DECODER_INPUTS

Calls = list[list[Mapping[str, Any]]]
"""Arguments by name, for each block of each list of blocks: calls[list][block][name]."""


class BlockCalls:
    """Recorded arguments of a model's blocks, for residuals of any shape."""

    def __init__(self, of: Skeleton) -> None:
        self.skeleton, self.policy = of, of.policy
        self.is_decoder = self.policy.inputs == DECODER_INPUTS
        self.mask_use = padding.mask_use(of) if self.is_decoder else padding.MaskUse(False, False)
        self._recorders: dict[object, Any] = {}
        self._recorded: dict[object, Calls] = {}
        self._of_mask: tuple[Tensor, Calls] | None = None
        self._of_chunk: tuple[object, Calls] | None = None

    def __call__(self, groups: Groups, like: Tensor, mask: Tensor | None) -> Calls:
        """Return each block's arguments besides its input, for sequences as long as in the residual `like`.

        If the forward computes with the padding mask (alibi), the arguments are recorded for each micro-batch's `mask`.
        """
        if mask is None or not self.mask_use.anything:
            key = (like.shape[1], like.dtype, like.device, groups)
            if first := first_position():
                return self._of_chunks(first, key, groups, like)
            if key not in self._recorded:
                self._recorded[key] = self._record(self._recorder(like.device), groups, like, None)
            return self._recorded[key]
        if self._of_mask is None or self._of_mask[0] is not mask:
            # One recorder per length: some rotary modules change their frequencies with the longest sequence so far.
            place = (like.shape[1], like.device)
            if place not in self._recorders:
                self._recorders[place] = self._recorder(like.device)
            self._of_mask = (mask, self._record(self._recorders[place], groups, like, mask))
        return self._of_mask[1]

    def _of_chunks(self, first: int, key: object, groups: Groups, like: Tensor) -> Calls:
        """Return the calls for a chunk of tokens in generation, which begins at `first`; only the latest is cached."""
        if self._of_chunk is None or self._of_chunk[0] != (first, key):
            place = ("chunks", like.device)
            if place not in self._recorders:
                self._recorders[place] = self._recorder(like.device)
            self._of_chunk = (first, key), self._record(self._recorders[place], groups, like, None)
        return self._of_chunk[1]

    def check_mask(self, mask: Tensor | None) -> None:
        """Raise DslparError for a mask of document numbers if the forward would compute with it as with padding."""
        if mask is not None and mask.dtype == DOCUMENTS and self.mask_use.anything:
            name = type(self.skeleton.model).__name__
            message = f"{name} computes with padding masks, so it cannot take a mask of documents"
            raise_finding("TEN223", message, "use one document per sample, without an int32 mask")

    @torch.no_grad()
    def _record(self, part: Any, groups: Groups, like: Tensor, mask: Tensor | None) -> Calls:
        """Run the forward of `part` on zeros, and return the arguments of each block of each list.

        Raises:
            DslparError: the forward changes the residual between two blocks, passes a cache to a block, or computes a
                block's arguments from the residual, of which a rank has only a piece.
        """
        if self.is_decoder:
            self._run_on_zeros(part, groups, like, mask)
        else:
            self.skeleton.run(part, None, whole_length(groups, like), like.device)
        lists = [list(part.get_submodule(name)) for name in self.policy.blocks]
        for name, blocks in zip(self.policy.blocks, lists, strict=True):
            for number, (earlier, block) in enumerate(pairwise(blocks), 1):
                if block.input is not earlier.gave:
                    message = (
                        "the forward around the blocks changes the residual between the previous block and this one"
                    )
                    _refuse(f"{name}.{number}: {message}")
        calls = [[block.call for block in blocks] for blocks in lists]
        if any(call.get("past_key_values") is not None for of_list in calls for call in of_list):
            _refuse("its blocks are called with a cache, which would grow from step to step")
        for each in part.stand_ins:
            each.clear()
        return calls

    def _recorder(self, device: torch.device) -> Any:
        """Return the model with stand-ins for all modules except rotary embeddings."""
        rotary = [name for name, module in self.skeleton.model.named_modules() if is_rotary(module)]
        part = self.skeleton.part(rotary, num_blocks=max(map(len, self.skeleton.lists.values())))
        return part.eval().to(device)  # dropout would draw from the run's generator

    def _run_on_zeros(self, part: Any, groups: Groups, like: Tensor, mask: Tensor | None) -> None:
        """Run a decoder's forward on zeros, and check that on other values the blocks get the same arguments."""
        positions = first_position() + torch.arange(whole_length(groups, like), device=like.device)[None]
        sequence = placement.inner_cuts(groups.tensor).sequence
        positions = placement.take_tokens(positions, 1, groups.tensor, groups.coord, sequence)
        length = positions.shape[1]
        given: dict[str, Tensor | None] = {"position_ids": positions}
        if mask is not None:
            given = {"position_ids": None if self.mask_use.positions else positions, "attention_mask": mask.long()}
        x = like.new_zeros(1, 1, 1).expand(1, length, like.shape[2])
        # If positions are not consecutive, as in a zigzag order, transformers would assume that a new document begins.
        with patch.object(masking_utils, "find_packed_sequence_indices", lambda _: None, create=True):
            self._run_twice(part, x, length, given)

    def _run_twice(self, part: Any, x: Tensor, length: int, given: Mapping[str, Tensor | None]) -> None:
        if first_position():  # the check was done for the first chunk of the sequence
            self.skeleton.run(part, x, length, **given)
            return
        other = x + torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype, device=x.device)
        name = self.policy.blocks[0]
        self.skeleton.run(part, other, length, **given)
        others = [block.call for block in part.get_submodule(name)]
        self.skeleton.run(part, x, length, **given)
        for number, (block, call) in enumerate(zip(part.get_submodule(name), others, strict=True)):
            if not all(map(torch.equal, self._tensors(block.call), self._tensors(call))):
                _refuse(f"{name}.{number}: its arguments depend on the residual, of which a rank has only a shard")

    def _tensors(self, call: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors among a block's arguments, except activations that layers pass on with the residual."""
        return tensors({name: value for name, value in call.items() if name not in self.skeleton.outline.carried[0]})


def whole_length(groups: Groups | None, residual: Tensor) -> int:
    """Return the number of tokens of the whole sequence, of which the residual may have only a piece."""
    if groups is None:
        return int(residual.shape[1])
    letters = placement.residual_cuts(groups.tensor).sequence
    return int(residual.shape[1]) * placement.piece(groups.tensor, groups.coord, letters)[1]


def _refuse(message: str) -> NoReturn:
    raise_finding("TEN234", message, NEEDS_OWN_CODE, key="model.type")
