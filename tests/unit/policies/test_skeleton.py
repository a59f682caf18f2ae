"""Skeletons and their chains refuse forwards whose blocks are not a chain on the residual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaModel

from dslpar.policies.block_calls import BlockCalls
from dslpar.policies.derive import derive
from dslpar.policies.skeleton import Skeleton
from tests.support import hugging_face as hf


def llama() -> Any:
    with torch.device("meta"):
        return LlamaForCausalLM._from_config(LlamaConfig(**hf.SIZES))


def skeleton(model: Any) -> Skeleton:
    return Skeleton(model, derive(model))


def record(between: Callable[[Tensor], Tensor], argument: Callable[[Tensor], Tensor]) -> None:
    """Make a chain record the arguments of blocks, in a forward with something between them."""

    class Around(LlamaModel):
        def forward(self, *, inputs_embeds: Tensor, **_: Any) -> Any:
            x = inputs_embeds
            for layer in self.layers:
                x = between(layer(x, position_embeddings=argument(x)))
            return BaseModelOutputWithPast(last_hidden_state=self.norm(x))

    model = llama()
    model.model.__class__ = Around
    BlockCalls(skeleton(model))(Groups(Mesh()), torch.zeros(1, 3, 32), None)


def test_a_chain_is_recorded() -> None:
    record(lambda x: x, torch.zeros_like)


def test_glue_between_blocks_is_refused() -> None:
    with pytest.raises(DslparError, match=r"TEN234 .*layers\.1: the forward around the blocks changes the residual"):
        record(lambda x: x + 1, torch.zeros_like)


def test_an_argument_that_depends_on_the_residual_is_refused() -> None:
    with pytest.raises(DslparError, match=r"TEN234 .*layers\.0: its arguments depend on the residual"):
        record(lambda x: x, lambda x: x.detach() * 2)


def test_blocks_that_are_called_twice_are_refused() -> None:
    once = LlamaModel.forward

    class Twice(LlamaModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            y = once(self, *args, **kwargs).last_hidden_state
            return once(self, **{**kwargs, "inputs_embeds": y})

    model = llama()
    model.model.__class__ = Twice
    with pytest.raises(DslparError, match=r"TEN234 .*does not call each of its blocks once"):
        skeleton(model)


def test_a_parameter_beside_modules_is_named() -> None:
    model = llama()
    model.model.scale = nn.Parameter(torch.zeros(3, device="meta"))
    assert "model" in skeleton(model).outline.uncalled


def test_a_norm_with_weights_before_and_after_the_blocks_is_refused() -> None:
    model = llama()
    model.model.register_forward_pre_hook(
        lambda around, args, kwargs: (args, {**kwargs, "inputs_embeds": around.norm(kwargs["inputs_embeds"])}),
        with_kwargs=True,
    )
    with pytest.raises(
        DslparError, match=r"TEN234 .*model\.norm: the model's forward calls it both before and after blocks"
    ):
        skeleton(model)
