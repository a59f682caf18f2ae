"""GPT: weights independent of layout and stages, tied weights, loss scale, dropout, half precision.

tests/distributed/layers/test_layers.py compares its numbers in every mode.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dslpar.core import mesh
from dslpar.core.mesh import Mesh
from dslpar.distributed.collectives import all_gather, all_reduce
from dslpar.distributed.groups import Groups
from dslpar.layers import Attention, Rotary, gather, initialize, placement
from dslpar.layers.parameter import draw, normal
from dslpar.models import GPT, build_layer, build_module
from tests.support.layouts import LAYOUTS
from tests.support.ranks import on_ranks
from tests.support.sampling import sampled

TINY = GPT(num_layers=2, hidden_size=24, num_heads=12, vocab_size=17, max_seq_len=12)
UNTIED = replace(TINY, tie_embeddings=False)
LLAMA = replace(
    UNTIED,
    hidden_size=48,
    num_heads=24,
    num_kv_heads=12,
    norm="rmsnorm",
    activation="swiglu",
    positions="rotary",
    bias=False,
)
SHARDED = ("1d-2", "1d-sequence-3", "2.5d-8-depth-2", "cuboid-2-3-2")


def ids() -> Tensor:
    return torch.randint(17, (12, 12), generator=torch.Generator().manual_seed(1))


def parameters(model: GPT, tensor: mesh.TensorMesh) -> dict[str, Tensor]:
    groups = Groups(Mesh(tensor=tensor))
    module = build_module(model, groups, seed=3)
    return {name: gather(p, p.placement, groups) for name, p in module.named_parameters()}


INITIAL = [*((TINY, layout) for layout in SHARDED), (LLAMA, "1d-sequence-3"), (LLAMA, "cuboid-2-3-2")]


@pytest.mark.parametrize(("model", "layout"), sampled(INITIAL, [(TINY, "1d-2"), (LLAMA, "cuboid-2-3-2")]))
def test_initial_weights_do_not_depend_on_the_layout(model: GPT, layout: str) -> None:
    tensor, whole = LAYOUTS[layout], parameters(model, mesh.TensorMesh())
    for found in on_ranks(tensor.size, parameters, model, tensor):
        assert found.keys() == whole.keys()
        assert all(torch.equal(found[name], value) for name, value in whole.items())


@pytest.mark.parametrize("model", [TINY, UNTIED, LLAMA], ids=["tied", "untied", "llama"])
def test_initial_weights_do_not_depend_on_the_stage(model: GPT) -> None:
    groups = Groups(Mesh())
    module = build_module(model, groups, seed=3)
    for spec in model.layers(groups):
        alone, within = build_layer(spec, groups, seed=3), module.get_submodule(spec.owner)
        for (name, a), (_, b) in zip(alone.named_parameters(), within.named_parameters(), strict=True):
            assert torch.equal(a, b), f"{spec.name}.{name}"


def test_names_and_initial_values() -> None:
    found = parameters(TINY, mesh.TensorMesh())
    assert "head.weight" not in found
    assert found["embedding.tokens.weight"].shape == (17, 24)
    assert found["blocks.1.attention.qkv.weight"].shape == (72, 24)
    assert torch.equal(found["blocks.0.norm1.weight"], torch.ones(24))
    assert torch.equal(found["blocks.0.attention.qkv.bias"], torch.zeros(72))
    name = "blocks.1.mlp.down.weight"  # adds to the residual, so GPT-2 starts it smaller
    assert torch.equal(found[name], draw((24, 96), normal(0.02 / 2), 3, name))
    wider = parameters(replace(TINY, init_out_std=0.3), mesh.TensorMesh())
    assert torch.equal(wider[name], draw((24, 96), normal(0.3), 3, name))
    assert torch.equal(wider["blocks.1.mlp.up.weight"], found["blocks.1.mlp.up.weight"])
    assert "head.weight" in parameters(UNTIED, mesh.TensorMesh())


def test_names_in_the_form_of_llama() -> None:
    found = {name: tuple(value.shape) for name, value in parameters(LLAMA, mesh.TensorMesh()).items()}
    block = {
        "norm1.weight": (48,),
        "attention.qkv.weight": (48 + 2 * 24, 48),
        "attention.out.weight": (48, 48),
        "norm2.weight": (48,),
        "mlp.up.weight": (2 * 192, 48),
        "mlp.down.weight": (48, 192),
    }
    blocks = {f"blocks.{i}.{name}": shape for i in range(2) for name, shape in block.items()}
    outer = {"embedding.tokens.weight": (17, 48), "norm.weight": (48,), "head.weight": (17, 48)}
    assert found == blocks | outer


@pytest.mark.parametrize("model", [TINY, LLAMA], ids=["learned", "rotary"])
def test_dropout_follows_the_embeddings(model: GPT) -> None:
    """Half of the elements of the first block's input are dropped."""
    module = build_module(replace(model, dropout=0.5, init_std=1.0), Groups(Mesh()), seed=3)
    entered: list[Tensor] = []
    module.get_submodule("blocks.0").register_forward_pre_hook(lambda _, inputs: entered.append(inputs[0]))
    module(ids())
    module.eval()(ids())
    dropped, whole = entered
    assert 0.45 < (dropped == 0).double().mean() < 0.55
    assert torch.equal(dropped[dropped != 0], 2 * whole[dropped != 0])


def test_draws_stay_what_they_are() -> None:
    """Runs and checkpoints of later versions must start from the same weights."""
    assert draw((2,), normal(1.0), 1234, "a").tolist() == pytest.approx([1.587892, 0.854818], abs=1e-6)


def owned_elements(tensor: mesh.TensorMesh) -> int:
    groups = Groups(Mesh(tensor=tensor))
    module = build_module(replace(TINY, vocab_size=24), groups, seed=3)  # a multiple of all: no padding to count
    return sum(p.numel() for p in module.parameters() if p.tensor_model_parallel)


@pytest.mark.parametrize("layout", sampled(SHARDED, {"1d-2", "cuboid-2-3-2"}))
def test_owners_count_every_parameter_once(layout: str) -> None:
    tensor = LAYOUTS[layout]
    assert sum(on_ranks(tensor.size, owned_elements, tensor)) == owned_elements(mesh.TensorMesh())


def losses(tensor: mesh.TensorMesh) -> dict[str, float]:
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    module, loss = build_module(TINY, groups, seed=3), TINY.loss(groups)
    logits, labels = module(ids()).detach(), ids().roll(1, 1)
    labels[1:] = -100
    return {
        "mean": loss(logits, labels).item(),
        "over 24": loss(logits, (labels, torch.tensor(24.0))).item(),
        "nothing counted": loss(logits, torch.full_like(labels, -100)).item(),
    }


@pytest.mark.parametrize("layout", sampled(SHARDED, {"1d-2", "cuboid-2-3-2"}))
def test_the_loss_has_one_scale(layout: str) -> None:
    """Float64 over 12 tokens: 1e-12 is far above rounding, and far below a token."""
    whole = losses(mesh.TensorMesh())
    assert whole["over 24"] == pytest.approx(whole["mean"] / 2, rel=1e-12)
    assert whole["nothing counted"] == 0
    for found in on_ranks(LAYOUTS[layout].size, losses, LAYOUTS[layout]):
        assert found == pytest.approx(whole, rel=1e-12)


def dropped(tensor: mesh.TensorMesh, interval: int = 0) -> dict[str, Any]:
    """Return the stored residual after dropout of ones, and gradients of a model with dropout."""
    groups = Groups(Mesh(tensor=tensor))
    model = replace(TINY, dropout=0.5)
    module = build_module(model, groups, seed=3, interval=interval)
    torch.manual_seed(11)
    model.loss(groups)(module(ids()), ids()).backward()
    grads = {name: p.grad for name, p in module.named_parameters()}
    at = placement.residual(tensor, 12, 12, 24)
    mask = module.blocks.get_submodule("0.dropout")(torch.ones(at.local_shape))
    copies = all_gather(mask[None], groups.axis(*at.replicas))
    return {
        "grads": grads,
        "mask": gather(mask, at, groups),
        "copies equal": all(torch.equal(copy, copies[0]) for copy in copies),
        "state": torch.get_rng_state(),
    }


@pytest.mark.parametrize("layout", ["1d-2", "1d-sequence-2", "2d-4"])
def test_dropout_is_equal_on_copies_and_differs_between_pieces(layout: str) -> None:
    tensor = LAYOUTS[layout]
    found = on_ranks(tensor.size, dropped, tensor)
    at = placement.residual(tensor, 12, 12, 24)
    assert all(rank["copies equal"] for rank in found)
    assert all(torch.equal(rank["state"], found[0]["state"]) for rank in found)
    mask = found[0]["mask"]
    assert set(mask.unique().tolist()) == {0.0, 2.0}
    assert 0.45 < (mask == 0).double().mean() < 0.55  # 3456 draws: 5 % is six standard deviations
    corners = [{"d": 0, "q": q, "y": y, "z": 0} for q in range(tensor.q) for y in range(tensor.y)]
    pieces = [at.cut(mask, corner) for corner in corners]
    different = {tuple(piece.flatten().tolist()) for piece in pieces}
    assert len(different) == mask.numel() // pieces[0].numel()


@pytest.mark.parametrize("layout", ["1d-2", pytest.param("2d-4", marks=pytest.mark.prove)])
def test_recomputed_blocks_repeat_their_dropout(layout: str) -> None:
    tensor = LAYOUTS[layout]
    plain, recomputed = on_ranks(tensor.size, dropped, tensor), on_ranks(tensor.size, dropped, tensor, 1)
    for a, b in zip(plain, recomputed, strict=True):
        assert all(torch.equal(a["grads"][name], grad) for name, grad in b["grads"].items())


def slope_with_dropout(tensor: mesh.TensorMesh) -> tuple[float, float]:
    """Return the slope of a sum of attention outputs along one input direction: by backward, and by differences."""
    torch.set_default_dtype(torch.float64)
    groups = Groups(Mesh(tensor=tensor))
    attention = Attention(
        groups, 24, 12, num_kv_heads=6, rotary=Rotary(), dropout=0.4, init=normal(0.3), init_out=normal(0.3)
    )
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, :3] = mask[1, 7:] = False
    initialize(attention, groups, seed=3)
    at = placement.residual(tensor, 2, 12, 24)
    generator = torch.Generator().manual_seed(groups.rank)
    x, direction, y_grad = (torch.randn(at.local_shape, generator=generator) for _ in range(3))

    def value(x: Tensor) -> Tensor:
        torch.manual_seed(11)
        return (attention(x, mask=mask) * y_grad).sum()

    def over_all(own: Tensor) -> float:
        return all_reduce(own.detach(), groups.axis("tensor")).item()

    x.requires_grad_()
    value(x).backward()
    assert x.grad is not None
    step = 1e-5
    with torch.no_grad():
        difference = over_all(value(x + step * direction)) - over_all(value(x - step * direction))
    return over_all((x.grad * direction).sum()), difference / (2 * step)


@pytest.mark.parametrize("layout", ["ring-3", "ulysses-2", "2d-4"])
def test_attention_dropout_has_the_right_gradient(layout: str) -> None:
    """Central differences of step 1e-5 in float64 are right to some 1e-9; a mask that is not repeated is off by its own
    size.
    """
    tensor = LAYOUTS[layout]
    for by_backward, by_difference in on_ranks(tensor.size, slope_with_dropout, tensor):
        assert by_backward == pytest.approx(by_difference, rel=1e-6)


def in_bfloat16(tensor: mesh.TensorMesh) -> tuple[float, dict[str, torch.dtype], float]:
    groups = Groups(Mesh(tensor=tensor))
    exact = TINY.loss(groups)(build_module(TINY, groups, seed=3)(ids()), ids()).item()
    module: nn.Module = build_module(TINY, groups, seed=3).bfloat16()
    loss = TINY.loss(groups)(module(ids()), ids())
    loss.backward()
    return exact, {name: p.grad.dtype for name, p in module.named_parameters() if p.grad is not None}, loss.item()


@pytest.mark.parametrize("layout", ["1d-2", "2d-4", "cuboid-1-2-2-replicated"])
def test_bfloat16_runs_and_is_near(layout: str) -> None:
    """The mantissa has 8 bits: 4e-3 per operation. The loss, in float32, stays within a few of them."""
    tensor = LAYOUTS[layout]
    for exact, dtypes, loss in on_ranks(tensor.size, in_bfloat16, tensor):
        assert set(dtypes.values()) == {torch.bfloat16}
        assert loss == pytest.approx(exact, rel=1e-2)
