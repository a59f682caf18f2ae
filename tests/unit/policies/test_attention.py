"""`attn_implementation`: torch's attention with any kernel, with FlashAttention alone, or an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.core.mesh import TensorMesh as TensorMesh
from dslpar.distributed.groups import Groups
from dslpar.layers.dropout import seed_generators
from dslpar.layout.attention_blocks import Pattern
from dslpar.models.layered import build_module
from tests.support.compiled import TORCH_S_OWN_WARNINGS
from tests.support.versions import HAS_TRANSFORMERS, NO_TRANSFORMERS

if not HAS_TRANSFORMERS:
    pytest.skip(NO_TRANSFORMERS, allow_module_level=True)

from transformers.masking_utils import causal_mask_function

from dslpar.policies.attention import Recipe, _attend, _weighted
from dslpar.policies.model import HuggingFaceModel
from tests.support import hugging_face as hf
from tests.support.ranks import on_ranks


def logits(implementation: str | None, family: str = "llama", **more: Any) -> Tensor:
    known = hf.FAMILIES[family]
    given = {} if implementation is None else {"attn_implementation": implementation}
    model = HuggingFaceModel(known.classes()[0], dict(known.sizes) | given | more)
    module = build_module(model, Groups(Mesh(), rank=0), seed=1).train()
    return module(torch.arange(24).view(2, 12))


@torch.no_grad()
def test_flash_attention_is_torch_s_kernel() -> None:
    """It is as exact as float32: three blocks, logits of order 1."""
    default, sdpa, flash = logits(None), logits("sdpa"), logits("flash_attention_2")
    assert torch.equal(default, sdpa)
    assert float((flash - sdpa).abs().max()) < 1e-5 * float(sdpa.abs().max())


@pytest.mark.parametrize(
    ("implementation", "family", "more", "said"),
    [
        (
            "eager",
            "llama",
            {},
            r"CFG223 .*attn_implementation 'eager'.*\n.*'sdpa' \(the default\), or 'flash_attention_2'",
        ),
        (
            "flash_attention_2",
            "llama",
            {"attention_dropout": 0.1},
            r"TEN235 .*no FlashAttention kernel for torch.float32 on cpu with dropout\n.*attn_implementation='sdpa'",
        ),
        ("flash_attention_2", "bloom", {}, r"TEN235 .*computes its scores itself"),
        ("flash_attention_2", "gemma2", {"attn_logit_softcapping": 50.0}, r"TEN235 .*attends with a soft cap"),
    ],
)
def test_what_is_not_there_is_an_error(implementation: str, family: str, more: dict[str, Any], said: str) -> None:
    with pytest.raises(DslparError, match=said):
        logits(implementation, family, **more)


@pytest.mark.filterwarnings(*[each.args[0] for each in TORCH_S_OWN_WARNINGS])
def test_a_compiled_layer_saves_the_same_when_it_runs_again() -> None:
    """A mask that the first run makes and the second finds gives two graphs, and torch's checkpoint raises."""
    recipe, groups = Recipe(causal_mask_function, {}), Groups(Mesh(), rank=0)
    x, weight = torch.randn(2, 5, 4, requires_grad=True), torch.randn(4, 3, requires_grad=True)

    @torch.compile(backend="aot_eager", dynamic=False)
    def layer(x: Tensor) -> Tensor:
        heads = x[:, None]
        return scaled_dot_product_attention(heads.exp(), heads, heads, recipe.added(groups, x)) @ weight

    y: Tensor = checkpoint(layer, x, use_reentrant=False)
    y.sum().backward()
    assert x.grad is not None
    assert weight.grad is not None


def test_a_window_both_ways_is_known_by_its_edges() -> None:
    """In transformers, a token attends to `local_size` keys before and after it."""
    for size in (1, 3):
        recipe = Recipe(lambda _, __, query, key, size=size: (query - key).abs() <= size, {"local_size": size})
        assert recipe.pattern == Pattern(causal=False, window=size + 1)
        causal = Recipe(lambda _, __, q, k, size=size: (q >= k) & (q - k < size), {"local_size": size})
        assert causal.pattern == Pattern(causal=True, window=size)


def test_a_sink_takes_weight_and_gives_nothing() -> None:
    """GPT-OSS has a score per head that is in the softmax and not in the sum."""
    scores, v, sinks = torch.randn(2, 4, 5, 5), torch.randn(2, 2, 5, 3), torch.linspace(-1.0, 2.0, 4)
    total = scores.exp().sum(-1, keepdim=True) + sinks.exp().view(1, -1, 1, 1)
    expected = (scores.exp() / total) @ v.repeat_interleave(2, dim=1)
    assert (_weighted(scores, v, 0.0, sinks) - expected.transpose(1, 2)).abs().max() < 1e-5


def _attended() -> Tensor:
    """Return attention of the same heads on each rank, with dropout."""
    groups = Groups(Mesh(tensor=TensorMesh(y=2, mode="1d")))
    module = torch.nn.Module()
    object.__setattr__(module, "dslpar_groups", groups)
    seed_generators(1, torch.device("cpu"))
    x = torch.ones(2, 4, 8, 8)
    return _attend(module, x, x, x, None, dropout=0.5, scaling=1.0, is_causal=False)[0]


def test_heads_of_each_rank_drop_others() -> None:
    one, other = on_ranks(2, _attended)
    assert one.shape == other.shape
    assert not torch.equal(one, other)
