"""Attention beyond the proof: what padding may not touch, grouped heads in every version of torch, half precision.

That outputs and gradients are right in every mode is in the proof (cases attention_*, block_llama); here is also that
the proof sees what goes wrong between ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from dslpar import mesh
from dslpar.errors import DslparError
from dslpar.groups import Groups
from dslpar.layers import Attention, Block, Form, Rotary, attention, gather, initialize, normal, placement, sequence
from dslpar.mesh import Mesh
from tests.layers.cases import errors
from tests.layers.cases.blocks import padding
from tests.layers.proof import BATCH, HIDDEN, KV_HEADS, QUERY_HEADS, SEQUENCE, numbers
from tests.layouts import LAYOUTS
from tests.ranks import on_ranks

SHAPE = (BATCH, SEQUENCE, HIDDEN)
HALVES = mesh.Tensor(q=2, mode="cuboid")
"""Of the batch."""
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
    """Only the bias of the projection back is left, and no gradient comes to the input."""
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
    """Float32, sums of some tens of terms."""
    layer, x = made(Groups(Mesh())), numbers(SHAPE, 1).float()
    whole = torch.ones(BATCH, SEQUENCE, dtype=torch.bool)
    assert torch.allclose(layer(x, mask=whole), layer(x), atol=1e-5)


def refused(tensor: mesh.Tensor, mask: Tensor) -> str:
    groups = Groups(Mesh(tensor=tensor))
    x = torch.zeros(placement.residual(tensor, *SHAPE).local_shape)
    try:
        made(groups)(x, mask=mask)
    except DslparError as error:
        return str(error)
    return ""


def test_a_mask_is_of_the_whole_micro_batch() -> None:
    """A piece of it, or Hugging Face's mask of integers, would be taken for another mask."""
    piece_of_it, as_integers = padding()[:6], padding().long()
    for mask in (piece_of_it, as_integers, padding().unsqueeze(1)):
        for said in on_ranks(2, refused, HALVES, mask):
            assert "TEN223" in said
            assert "bool (12, 12)" in said
    assert on_ranks(2, refused, HALVES, padding()) == ["", ""]


@pytest.mark.parametrize(
    ("sizes", "codes"),
    [
        ((50, 12, 4, None), ["TEN205"]),
        ((48, 12, 5, None), ["TEN207"]),
        ((36, 12, 12, Rotary()), ["TEN209"]),
        ((50, 12, 5, Rotary()), ["TEN205", "TEN207"]),
    ],
)
def test_heads_that_do_not_divide(sizes: tuple[Any, ...], codes: list[str]) -> None:
    hidden, heads, kv_heads, rotary = sizes
    with pytest.raises(DslparError) as raised:
        Attention(Groups(Mesh()), hidden, heads, num_kv_heads=kv_heads, rotary=rotary)
    assert [finding.code for finding in raised.value.findings] == codes


def heads_over(tensor: mesh.Tensor, heads: int, kv_heads: int) -> list[str]:
    try:
        Attention(Groups(Mesh(tensor=tensor)), 48, heads, num_kv_heads=kv_heads)
    except DslparError as error:
        return [finding.code for finding in error.findings]
    return []


@pytest.mark.parametrize("layout", ["1d-2", "ring-2", "ulysses-2"])
def test_heads_that_do_not_divide_over_ranks(layout: str) -> None:
    """The ring shares no heads out."""
    for heads, kv_heads, codes in ((3, 3, ["TEN201", "TEN206"]), (6, 3, ["TEN206"]), (6, 2, [])):
        expected = [] if layout == "ring-2" else codes
        assert on_ranks(2, heads_over, LAYOUTS[layout], heads, kv_heads) == [expected] * 2


# ---- grouped heads ----


@pytest.mark.parametrize("causal", [True, False])
def test_torch_without_grouped_queries(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before 2.5 keys are repeated: the same products in another order."""
    q, k, v = numbers((2, 6, 5, 4), 1), numbers((2, 3, 5, 4), 2), numbers((2, 3, 5, 4), 3)
    grouped = attention.attend(q, k, v, causal=causal)
    monkeypatch.setattr(attention, "_GROUPED", False)
    assert (attention.attend(q, k, v, causal=causal) - grouped).abs().max() < 1e-14


# ---- half precision ----


def in_bfloat16(tensor: mesh.Tensor) -> dict[str, Any]:
    """Of a block in Llama's form: dtypes, and how far bfloat16 is from float32, of the output and the gradients."""
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
    """2^-9 a rounding, some tens of them on the way to a gradient: 3 % at most; anything wrong is off by 100 %."""
    for found in on_ranks(LAYOUTS[layout].size, in_bfloat16, LAYOUTS[layout]):
        assert found["dtypes"] == {torch.bfloat16}
        assert max(found["errors"]) < 0.03


# ---- the proof can fail ----


def positions_begin_at_zero_on_every_rank() -> None:
    def turned(self: Rotary, x: Tensor, first: int, num_heads: int) -> Tensor:
        return rightly(self, x, 0, num_heads)

    rightly = Rotary.__call__
    Rotary.__call__ = turned  # type: ignore[method-assign]


def padding_of_the_own_keys_at_every_step() -> None:
    def scores(self: sequence.Ring, q: Tensor, k: Tensor, step: int) -> Tensor:
        mask = self.mask if self.mask is None else self.mask.roll(step * k.shape[2], 1)
        return rightly(self._replace(mask=mask), q, k, step)

    rightly = sequence.Ring.scores
    sequence.Ring.scores = scores  # type: ignore[method-assign]


def padding_of_the_first_samples() -> None:
    attention.own_samples = lambda groups, mask, x: mask[: x.shape[0]]


def groups_of_distant_heads() -> None:
    """Query i with key i % G, where it is i // (A / G)."""

    def fused(q: Tensor, k: Tensor, v: Tensor, *how: Any) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        return rightly(q, k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1), *how)

    rightly = attention._fused
    attention._fused = fused


MUTATIONS = (
    (positions_begin_at_zero_on_every_rank, "ring-2", "attention_rotary"),
    (positions_begin_at_zero_on_every_rank, "ulysses-2", "block_llama"),
    (padding_of_the_own_keys_at_every_step, "ring-2", "attention_padded"),
    (padding_of_the_first_samples, "2.5d-3-depth-3", "attention_padded"),
    (groups_of_distant_heads, "1d-2", "attention_grouped"),
)


def worst(mutate: Callable[[], None], tensor: mesh.Tensor, case: str) -> float:
    mutate()
    return max(errors(tensor, case).values())


@pytest.mark.parametrize(("mutate", "layout", "case"), MUTATIONS)
def test_a_mutation_is_seen(mutate: Callable[[], None], layout: str, case: str) -> None:
    """Each was off by more than 0.1."""
    found = on_ranks(LAYOUTS[layout].size, worst, mutate, LAYOUTS[layout], case)
    assert max(found) > 1e-2


# ---- ranks agree ----


def outputs(tensor: mesh.Tensor, dtype: torch.dtype) -> Tensor:
    groups = Groups(Mesh(tensor=tensor))
    layer, at = made(groups, causal=False), placement.residual(tensor, *SHAPE)
    with torch.inference_mode():
        y = layer(at.cut(numbers(SHAPE, 1), groups.coord).to(dtype), mask=padding())
        return gather(y, at, groups)


def test_evaluation_in_inference_mode_gives_the_same() -> None:
    """Float32 in another order of summation."""
    whole = outputs(mesh.Tensor(), torch.float32)
    for y in on_ranks(2, outputs, LAYOUTS["ring-2"], torch.float32):
        assert (y - whole).abs().max() < 1e-4 * whole.abs().max()
