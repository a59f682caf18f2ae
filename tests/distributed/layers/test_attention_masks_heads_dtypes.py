"""Attention beyond the proof: padding, grouped heads in every version of torch, half precision.

The proof compares outputs and gradients in every mode (cases attention_*, block_llama). test_mutations.py has the
mistakes between ranks that the proof detects.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dslpar.core import mesh
from dslpar.core.errors import DslparError
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import Attention, Block, Form, Placement, Rotary, attention, gather, initialize, normal, placement
from dslpar.layers.context_attention import ulysses
from tests.distributed.layers.cases.blocks import documents, padding
from tests.support import ring_sums
from tests.support.compare_dense import BATCH, HIDDEN, KV_HEADS, QUERY_HEADS, SEQUENCE, numbers
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.versions import needs_torch

SHAPE = (BATCH, SEQUENCE, HIDDEN)
HALVES = mesh.TensorMesh(q=2, mode="cuboid")
"""Halves of the batch."""
GROUPED: dict[str, Any] = {"num_kv_heads": KV_HEADS, "rotary": Rotary()}


def made(groups: Groups, **more: Any) -> Attention:
    layer = Attention(groups, HIDDEN, QUERY_HEADS, **GROUPED, init=normal(0.3), init_out=normal(0.3), **more)
    initialize(layer, groups, seed=3)
    return layer


# ---- padding ----


@pytest.mark.parametrize("causal", [True, False])
def test_what_padding_holds_changes_no_token(causal: bool) -> None:
    layer, mask, x = made(Groups(Mesh()), causal=causal), padding(), numbers(SHAPE, 1).float()
    other = torch.where(mask.unsqueeze(-1), x, 1e3 * numbers(SHAPE, 2).float())
    assert torch.equal(layer(x, mask=mask)[mask], layer(other, mask=mask)[mask])
    assert not torch.equal(layer(x)[mask], layer(other)[mask]), "without the mask it does"


@pytest.mark.parametrize("causal", [True, False])
def test_queries_without_keys_give_zeros(causal: bool) -> None:
    """Only the bias of the output projection is left, and the input gets no gradient."""
    layer, mask = made(Groups(Mesh()), causal=causal), padding()
    x = numbers(SHAPE, 1).float().requires_grad_()
    with torch.no_grad():
        layer.out.bias.copy_(torch.arange(HIDDEN))
    y = layer(x, mask=mask)
    alone = ~mask.cumsum(1).bool() if causal else ~mask.any(1, keepdim=True).expand_as(mask)
    assert 0 < alone.sum() < alone.numel()
    assert torch.equal(y[alone], layer.out.bias.expand_as(y[alone]))
    y.square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert torch.equal(x.grad[alone & ~mask], torch.zeros_like(x.grad[alone & ~mask]))


def test_no_padding_is_no_mask() -> None:
    """Float32, with sums of some tens of terms."""
    layer, x = made(Groups(Mesh())), numbers(SHAPE, 1).float()
    whole = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    assert torch.allclose(layer(x, mask=whole), layer(x), atol=1e-5)


def test_documents_are_as_if_alone() -> None:
    """Rotary positions are relative, so a document attends equally wherever it begins; float32."""
    layer, x = made(Groups(Mesh())), numbers(SHAPE, 1).float()
    mask = documents()
    packed = layer(x, mask=mask)
    for sample, numbers_of in enumerate(mask):
        for number in numbers_of.unique():
            if number:
                own = numbers_of == number
                alone = layer(x[sample, own][None])[0]
                assert torch.allclose(packed[sample, own], alone, atol=2e-6 * alone.abs().max().item())


def refused(tensor: mesh.TensorMesh, mask: Tensor) -> str:
    groups = Groups(Mesh(tensor=tensor))
    x = torch.zeros(placement.residual(tensor, *SHAPE).local_shape)
    try:
        made(groups)(x, mask=mask)
    except DslparError as error:
        return str(error)
    return ""


def test_a_mask_is_of_the_whole_micro_batch() -> None:
    """A piece of it, or Hugging Face's integer mask, would be taken for another mask."""
    piece_of_it, as_integers = padding()[:6], padding().long()
    for mask in (piece_of_it, as_integers, padding().unsqueeze(1)):
        for message in on_ranks(2, refused, HALVES, mask):
            assert "TEN223" in message
            assert "bool (12, 12)" in message
    assert on_ranks(2, refused, HALVES, padding()) == ["", ""]


@pytest.mark.parametrize(
    ("sizes", "codes"),
    [
        ((50, 12, 4, None), ["TEN205"]),
        ((48, 12, 5, None), ["TEN207"]),
        ((36, 12, 12, Rotary()), ["TEN209"]),
        ((50, 12, 5, Rotary()), ["TEN205", "TEN207"]),
        ((48, 12, 0, None), ["TEN207"]),
        ((48, 0, 12, Rotary()), ["TEN205"]),
    ],
)
def test_heads_that_do_not_divide(sizes: tuple[Any, ...], codes: list[str]) -> None:
    hidden, heads, kv_heads, rotary = sizes
    with pytest.raises(DslparError) as raised:
        Attention(Groups(Mesh()), hidden, heads, num_kv_heads=kv_heads, rotary=rotary)
    assert [finding.code for finding in raised.value.findings] == codes


def heads_over(tensor: mesh.TensorMesh, heads: int, kv_heads: int) -> list[str]:
    try:
        Attention(Groups(Mesh(tensor=tensor)), 48, heads, num_kv_heads=kv_heads)
    except DslparError as error:
        return [finding.code for finding in error.findings]
    return []


@pytest.mark.parametrize("layout", ["1d-2", "ring-2", "ulysses-2"])
def test_heads_that_do_not_divide_over_ranks(layout: str) -> None:
    """The ring does not share out heads."""
    for heads, kv_heads, codes in ((3, 3, ["TEN201", "TEN206"]), (6, 3, ["TEN206"]), (6, 2, [])):
        expected = [] if layout == "ring-2" else codes
        assert on_ranks(2, heads_over, LAYOUTS[layout], heads, kv_heads) == [expected] * 2


# ---- grouped heads ----


@pytest.mark.parametrize("causal", [True, False])
def test_torch_without_grouped_queries(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before torch 2.5, keys are repeated: the same products in another order."""
    q, k, v = numbers((2, 6, 5, 4), 1), numbers((2, 3, 5, 4), 2), numbers((2, 3, 5, 4), 3)
    grouped = attention.attend(q, k, v, causal=causal)
    monkeypatch.setattr(attention, "_TORCH_HAS_GQA", False)
    assert (attention.attend(q, k, v, causal=causal) - grouped).abs().max() < 1e-14


# ---- dropout ----


def kept_probabilities(tensor: mesh.TensorMesh) -> Tensor:
    """Return [batch, heads, sequence] of this rank: the sums of kept probabilities, with all keys equal."""
    groups = Groups(Mesh(tensor=tensor))
    layer = made(groups, causal=False, dropout=0.5)
    samples = BATCH // (1 if tensor.split == "sequence" else tensor.x)
    length = SEQUENCE // (tensor.x if tensor.split == "sequence" else 1)
    q, k, v = (torch.zeros(samples, heads, length, layer.head_dim) for heads in layer.heads)
    torch.manual_seed(11)
    return layer._attend(q, k, v + 1, None)[..., 0]


@pytest.mark.parametrize("layout", ["ring-2", "ulysses-2", "2d-4"])
def test_dropout_differs_between_pieces(layout: str) -> None:
    """No two pieces of attention's inner activations have the same mask, and the same seed repeats the masks."""
    tensor = LAYOUTS[layout]
    found = on_ranks(tensor.size, kept_probabilities, tensor)
    pieces = found if tensor.impl == "ring" else [piece for rank in found for piece in rank.chunk(tensor.x, 1)]
    assert len({tuple(piece.flatten().tolist()) for piece in pieces}) == len(pieces)
    again = on_ranks(tensor.size, kept_probabilities, tensor)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


# ---- half precision ----


def in_bfloat16(tensor: mesh.TensorMesh) -> dict[str, Any]:
    """Return the dtypes of a Llama block, and the difference of bfloat16 from float32, of output and gradients."""
    groups = Groups(Mesh(tensor=tensor))
    at = placement.residual(tensor, *SHAPE)
    results: dict[torch.dtype, list[Tensor]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        form = Form(norm="rmsnorm", activation="swiglu", **GROUPED)
        block = Block(groups, HIDDEN, QUERY_HEADS, form=form, init=normal(0.2), init_out=normal(0.2))
        initialize(block, groups, seed=3)
        block.to(dtype)
        x = at.cut(numbers(SHAPE, 1), groups.coord).to(dtype).requires_grad_()
        y = block(x, padding())
        y.backward(at.cut(numbers(SHAPE, 2), groups.coord).to(dtype))
        results[dtype] = [y.detach(), x.grad, block.attention.qkv.weight.grad, block.mlp.up.weight.grad]
    exact, half = results.values()
    return {
        "dtypes": {part.dtype for part in half},
        "errors": [((b - a).norm() / a.norm()).item() for a, b in zip(exact, half, strict=True)],
    }


@pytest.mark.parametrize("layout", ["1d-2", "ring-2", "ulysses-2", "2d-4"])
def test_bfloat16_comes_out_as_it_went_in_and_near(layout: str) -> None:
    """2^-9 per rounding, some tens of them on the way to a gradient: at most 3 %. Any mistake is off by 100 %."""
    for found in on_ranks(LAYOUTS[layout].size, in_bfloat16, LAYOUTS[layout]):
        assert found["dtypes"] == {torch.bfloat16}
        assert max(found["errors"]) < 0.03


@pytest.mark.parametrize("layout", ["1d-4", "2d-4", "3d-8"])
def test_bfloat16_is_near_where_sums_round_at_each_hop(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in NCCL's ring, a sum over n ranks is rounded n - 1 times instead of once: within the same 3 %."""
    ring_sums.install(monkeypatch)
    for found in on_ranks(LAYOUTS[layout].size, in_bfloat16, LAYOUTS[layout]):
        assert found["dtypes"] == {torch.bfloat16}
        assert max(found["errors"]) < 0.03


@pytest.mark.parametrize(("ranks", "error"), [(2, 1.7e-3), (8, 3.7e-3), (16, 5.0e-3)])
def test_what_a_ring_of_bfloat16_loses(ranks: int, error: float) -> None:
    """For normal numbers, as a share of the norm: n - 1 roundings of a growing sum instead of one of a wide sum."""
    parts = list(torch.randn(ranks, 100_000, generator=torch.Generator().manual_seed(1)).bfloat16())
    exact = torch.stack(parts).double().sum(0)
    lost = (ring_sums.in_order(parts, 0).double() - exact).norm() / exact.norm()
    wide = (torch.stack(parts).float().sum(0).bfloat16().double() - exact).norm() / exact.norm()
    assert lost.item() == pytest.approx(error, rel=0.1)
    assert wide.item() == pytest.approx(1.7e-3, rel=0.1)


# ---- ranks agree ----


def outputs(tensor: mesh.TensorMesh, dtype: torch.dtype) -> Tensor:
    groups = Groups(Mesh(tensor=tensor))
    layer, at = made(groups, causal=False), placement.residual(tensor, *SHAPE)
    with torch.inference_mode():
        y = layer(at.cut(numbers(SHAPE, 1), groups.coord).to(dtype), mask=padding())
        return gather(y, at, groups)


@needs_torch(5, "its gloo gathers nothing in inference mode")
def test_evaluation_in_inference_mode_gives_the_same() -> None:
    """Float32 in another order of summation."""
    whole = outputs(mesh.TensorMesh(), torch.float32)
    for y in on_ranks(2, outputs, LAYOUTS["ring-2"], torch.float32):
        assert (y - whole).abs().max() < 1e-4 * whole.abs().max()


# ---- windows ----


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked", [True, False])
def test_the_last_tokens_attend_within_a_window(causal: bool, masked: bool) -> None:
    """As with a cache, fewer queries than keys give the result of all queries at their positions."""
    q, k, v = numbers((2, 6, 9, 4), 1), numbers((2, 3, 9, 4), 2), numbers((2, 3, 9, 4), 3)
    mask = torch.arange(9)[None] >= torch.tensor([[0], [2]]) if masked else None
    whole = attention.attend(q, k, v, causal=causal, window=4, mask=mask)
    for count in (1, 3):
        last = attention.attend(q[:, :, -count:], k, v, causal=causal, window=4, mask=mask)
        assert (last - whole[:, :, -count:]).abs().max() < 1e-14
    far = attention.attend(q, k, v, causal=causal, mask=mask)
    assert (far - whole).abs().max() > 1e-2


def seeds(tensor: mesh.TensorMesh) -> list[Tensor]:
    groups = Groups(Mesh(tensor=tensor))
    layer = made(groups, causal=False, dropout=0.5, window=SEQUENCE)
    q, k, v = (torch.zeros(BATCH, heads, SEQUENCE // tensor.context, layer.head_dim) for heads in layer.heads)
    torch.manual_seed(11)
    return [layer._attend(q, k, v + 1, None)[..., 0]]


@pytest.mark.parametrize("layout", ["1d-2", "ulysses-2"])
def test_dropout_within_a_window_differs_between_ranks(layout: str) -> None:
    """Ranks have different heads."""
    (one,), (other,) = on_ranks(2, seeds, LAYOUTS[layout])
    assert not torch.equal(one, other)


def _of_other_values(context: str) -> Tensor:
    """Return this rank's piece of the context of latent attention, whose values have fewer features than its keys."""
    groups = Groups(Mesh(tensor=LAYOUTS[context]))
    q, k, v = other_values()
    at = Placement(groups.tensor, tuple(q.shape), ((), (), ("d",), ()), sequence_dim=2)
    own = [replace(at, shape=tuple(each.shape)).cut(each, groups.coord) for each in (q, k, v)]
    y = ulysses(*own, groups.axis("ulysses"), partial(functional.scaled_dot_product_attention, is_causal=True))
    return gather(y, replace(at, shape=(2, 4, 8, 3)), groups)


def other_values() -> Sequence[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(2, 4, 8, features, generator=draw, dtype=torch.float64) for features in (5, 5, 3)]


def test_ulysses_exchanges_values_of_other_sizes() -> None:
    """As in DeepSeek-V3, where keys have 192 features per head and values 128."""
    q, k, v = other_values()
    expected = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    for found in on_ranks(2, _of_other_values, "ulysses-2"):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
