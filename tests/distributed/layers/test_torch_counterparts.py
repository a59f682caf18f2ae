"""Every public layer against its torch counterpart, with non-default options, in every order of use.

The tests run in one process, in float64. A row is a layer, its torch module, and torch's names of the layer's weights.
Each row goes through every order of building, loading, initializing, training, copying and saving. Both must then give
the same output, and the same gradients of the input and of every weight. Other layouts are in cases/, with functions as
references. Here the reference is torch's module with its defaults.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import dslpar.layers
from dslpar import layers
from dslpar.core.mesh import Mesh
from dslpar.distributed.groups import Groups
from dslpar.layers import (
    MLP,
    Affine,
    Attention,
    BatchNorm,
    Block,
    Dropout,
    Embedding,
    Form,
    Head,
    Init,
    LayerNorm,
    Linear,
    Mixture,
    MixtureBlock,
    PatchEmbedding,
    PositionEmbedding,
    RMSNorm,
    Rotary,
    TokenLinear,
    initialize,
    normal,
)
from dslpar.layers.parameter import initialize_built
from tests.support.compare_dense import numbers

H, F, A, S, V = 8, 12, 2, 6, 7
BATCH = 4
TOLERANCE = 1e-11
Names = Mapping[str, str]
Convert = Callable[[Tensor], Tensor]


class Row(NamedTuple):
    """A layer and its counterpart."""

    ours: Callable[[Groups], nn.Module]
    torchs: Callable[[], nn.Module]
    names: Names = MappingProxyType({})
    """dslpar's name of a weight -> torch's, if they differ."""
    x: Callable[[], Tensor] = lambda: numbers((BATCH, S, H), 1)
    forward: Mapping[str, Any] = MappingProxyType({})
    """Arguments of dslpar's forward in addition to the input."""


# ---- torch's modules ----


class Add(nn.Module):
    """Adds rows of torch's Embedding, by position."""

    def __init__(self, num_positions: int) -> None:
        super().__init__()
        self.table = nn.Embedding(num_positions, H)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.table(torch.arange(x.shape[1]))
        return y


class Scale(nn.Module):
    """LayerScale in torch, as in torchvision's ConvNeXt."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((H,), 0.5))
        self.bias = nn.Parameter(torch.zeros(H)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + (0 if self.bias is None else self.bias)


class OverTokens(nn.Linear):
    """torch's Linear over the tokens."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Patches(nn.Module):
    """ViT's patch embedding as in torchvision: a Conv2d, with the class token before the patches."""

    def __init__(self, bias: bool, class_token: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, H, kernel_size=2, stride=2, bias=bias)
        self.class_token = nn.Parameter(torch.zeros(H)) if class_token else None

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images).flatten(2).transpose(1, 2)
        return x if self.class_token is None else torch.cat([self.class_token.expand(len(x), 1, H), x], 1)


class SelfAttention(nn.Module):
    """torch's MultiheadAttention on one input, batch first, with an attention mask."""

    def __init__(self, bias: bool = True, seen: Tensor | None = None, padding: Tensor | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(H, A, bias=bias, batch_first=True)
        self.hidden = None if seen is None else ~seen
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        ignored = None if self.padding is None else ~self.padding
        y: Tensor = self.attention(x, x, x, ignored, False, self.hidden)[0]
        return y


class Grouped(nn.Module):
    """Grouped queries with rotary positions, from torch's Linear and attention; pairs are complex, as in Llama."""

    def __init__(self, theta: float) -> None:
        super().__init__()
        self.q, self.kv, self.out = nn.Linear(H, H, False), nn.Linear(H, H, False), nn.Linear(H, H, False)
        turns = torch.outer(torch.arange(S).double(), theta ** -(torch.arange(0, 2, 2).double() / 2))
        self.register_buffer("turns", torch.polar(torch.ones_like(turns), turns), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (-1, 2)).transpose(1, 2) for part in (self.q(x), *self.kv(x).chunk(2, -1))]
        turned = [
            torch.view_as_real(torch.view_as_complex(each.contiguous()).unsqueeze(-1) * self.turns)
            for each in heads[:2]
        ]
        q, k = (each.flatten(-2) for each in turned)
        y = functional.scaled_dot_product_attention(q, k, heads[2], is_causal=True, enable_gqa=True)
        z: Tensor = self.out(y.transpose(1, 2).flatten(2))
        return z


class Gated(nn.Module):
    """Llama's MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_and_up, self.down = nn.Linear(H, 2 * F, bias=False), nn.Linear(F, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_and_up(x).chunk(2, -1)
        y: Tensor = self.down(functional.silu(gate) * up)
        return y


class Experts(nn.Module):
    """All experts on all tokens, and the weighted sum of the chosen two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, 3, bias=False)
        self.up, self.down = nn.Parameter(torch.randn(3, F, H)), nn.Parameter(torch.randn(3, H, F))

    def forward(self, x: Tensor) -> Tensor:
        weights, index = torch.softmax(self.router(x), -1).topk(2)
        chosen = torch.zeros(*x.shape[:-1], 3).scatter(-1, index, weights / weights.sum(-1, keepdim=True))
        inner = functional.gelu(torch.einsum("bsh,efh->bsef", x, self.up))
        return torch.einsum("bse,bsef,ehf->bsh", chosen, inner, self.down)


class Tokens(nn.Embedding):
    """torch's Embedding; with a residual, its table is the head."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight) if x.is_floating_point() else super().forward(x)


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(H, A, F, 0.0, "gelu", layer_norm_eps=1e-3, batch_first=True, norm_first=True)


class EncoderLayerOfExperts(nn.TransformerEncoderLayer):
    """torch's encoder layer with experts in place of its two linears."""

    def __init__(self) -> None:
        super().__init__(H, A, F, 0.0, "gelu", layer_norm_eps=1e-3, batch_first=True, norm_first=True)
        self.experts = Experts()
        del self.linear1, self.linear2

    def _ff_block(self, x: Tensor) -> Tensor:
        y: Tensor = self.experts(x)
        return y


class ResidualAlone(MixtureBlock):
    """The block without the sums for the load-balancing loss."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x, mask)[0]


ATTENTION = {
    "qkv.weight": "attention.in_proj_weight", "qkv.bias": "attention.in_proj_bias",
    "out.weight": "attention.out_proj.weight", "out.bias": "attention.out_proj.bias",
}  # fmt: skip
ENCODER = {
    "norm1.weight": "norm1.weight", "norm1.bias": "norm1.bias", "norm2.weight": "norm2.weight",
    "norm2.bias": "norm2.bias", "attention.qkv.weight": "self_attn.in_proj_weight",
    "attention.qkv.bias": "self_attn.in_proj_bias", "attention.out.weight": "self_attn.out_proj.weight",
    "attention.out.bias": "self_attn.out_proj.bias", "mlp.up.weight": "linear1.weight", "mlp.up.bias": "linear1.bias",
    "mlp.down.weight": "linear2.weight", "mlp.down.bias": "linear2.bias",
}  # fmt: skip
TWO_LINEARS = {"up.weight": "0.weight", "up.bias": "0.bias", "down.weight": "2.weight", "down.bias": "2.bias"}
CONV = {"projection.weight": "conv.weight", "projection.bias": "conv.bias"}
CAUSAL = torch.ones(S, S, dtype=torch.bool).tril()
WINDOW = CAUSAL & torch.ones(S, S, dtype=torch.bool).triu(-2)
PADDING = torch.tensor([[True] * S, [True] * 4 + [False] * 2, [True] * 5 + [False], [True] * S])


def ids() -> Tensor:
    return torch.randint(V, (BATCH, S), generator=torch.Generator().manual_seed(1))


def images() -> Tensor:
    return numbers((BATCH, 3, 6, 6), 1)


def rows() -> Tensor:
    return numbers((BATCH, H), 1)


def two_linears(activation: nn.Module, bias: bool) -> nn.Module:
    return nn.Sequential(nn.Linear(H, F, bias), activation, nn.Linear(F, H, bias))


ROWS: dict[str, Row] = {
    "Linear inward": Row(lambda g: Linear(g, H, F, role="inward"), lambda: nn.Linear(H, F)),
    "Linear inward, no bias": Row(
        lambda g: Linear(g, H, F, role="inward", bias=False, init=Init(1.0, 0.5)), lambda: nn.Linear(H, F, bias=False)
    ),
    "Linear outward": Row(lambda g: Linear(g, H, F, role="outward"), lambda: nn.Linear(H, F)),
    "Linear of rows, no bias": Row(
        lambda g: Linear(g, H, F, role="outward", bias=False), lambda: nn.Linear(H, F, bias=False), x=rows
    ),
    "Linear of several, gathered": Row(
        lambda g: Linear(g, H, [F, 4, 2], role="inward", gather_output=True), lambda: nn.Linear(H, F + 6)
    ),
    "Embedding": Row(lambda g: Embedding(g, V, H), lambda: nn.Embedding(V, H), x=ids),
    "Embedding with padding": Row(
        lambda g: Embedding(g, V, H, padding_idx=-3, init=normal(0.5)),
        lambda: nn.Embedding(V, H, padding_idx=-3),
        x=ids,
    ),
    "Embedding as head": Row(lambda g: Embedding(g, V, H, padding_idx=2), lambda: Tokens(V, H, padding_idx=2)),
    "PositionEmbedding": Row(
        lambda g: PositionEmbedding(g, S + 2, H, init=normal(1.0)), lambda: Add(S + 2), {"weight": "table.weight"}
    ),
    "LayerNorm": Row(lambda g: LayerNorm(g, H), lambda: nn.LayerNorm(H)),
    "LayerNorm, no bias": Row(
        lambda g: LayerNorm(g, H, eps=0.5, bias=False), lambda: nn.LayerNorm(H, eps=0.5, bias=False)
    ),
    "RMSNorm": Row(lambda g: RMSNorm(g, H, eps=0.5), lambda: nn.RMSNorm(H, eps=0.5)),
    "Attention": Row(lambda g: Attention(g, H, A), lambda: SelfAttention(seen=CAUSAL), ATTENTION),
    "Attention, not causal": Row(
        lambda g: Attention(g, H, A, causal=False, bias=False), lambda: SelfAttention(bias=False), ATTENTION
    ),
    "Attention with a window": Row(
        lambda g: Attention(g, H, A, window=3), lambda: SelfAttention(seen=WINDOW), ATTENTION
    ),
    "Attention with padding": Row(
        lambda g: Attention(g, H, A, causal=False), lambda: SelfAttention(padding=PADDING), ATTENTION,
        forward={"mask": PADDING},
    ),
    "MLP": Row(lambda g: MLP(g, H, F), lambda: two_linears(nn.GELU(), True), TWO_LINEARS),
    "MLP with tanh, no bias": Row(
        lambda g: MLP(g, H, F, activation="gelu_tanh", bias=False),
        lambda: two_linears(nn.GELU(approximate="tanh"), False),
        TWO_LINEARS,
    ),
    "MLP with a gate": Row(
        lambda g: MLP(g, H, F, activation="swiglu", bias=False), Gated,
        {"up.weight": "gate_and_up.weight", "down.weight": "down.weight"},
    ),
    "Mixture": Row(lambda g: Mixture(g, H, F, num_experts=3), Experts, {"router": "router.weight"}),
    "Block": Row(
        lambda g: Block(g, H, A, form=Form(causal=False), ffn_hidden_size=F, eps=1e-3), encoder_layer, ENCODER
    ),
    "MixtureBlock": Row(
        lambda g: ResidualAlone(g, H, A, form=Form(causal=False), mixture=Mixture(g, H, F, num_experts=3), eps=1e-3),
        EncoderLayerOfExperts,
        {name: of for name, of in ENCODER.items() if not name.startswith("mlp")}
        | {"mlp.router": "experts.router.weight", "mlp.up": "experts.up", "mlp.down": "experts.down"},
    ),
    "Dropout of nothing": Row(lambda g: Dropout(g, 0.0), lambda: nn.Dropout(0.0)),
    "Dropout of all": Row(lambda g: Dropout(g, 1.0), lambda: nn.Dropout(1.0)),
    "Dropout in evaluation": Row(lambda g: Dropout(g, 0.5).eval(), lambda: nn.Dropout(0.5).eval()),
    "Affine": Row(lambda g: Affine(g, H, init=Init(0.5)), lambda: Scale(True)),
    "Affine, no bias": Row(lambda g: Affine(g, H, bias=False, init=Init(0.5)), lambda: Scale(False)),
    "TokenLinear": Row(lambda g: TokenLinear(g, S), lambda: OverTokens(S, S)),
    "TokenLinear, no bias": Row(lambda g: TokenLinear(g, S, bias=False), lambda: OverTokens(S, S, bias=False)),
    "PatchEmbedding": Row(lambda g: PatchEmbedding(g, 6, 2, 3, H), lambda: Patches(True, False), CONV, images),
    "PatchEmbedding with a class token": Row(
        lambda g: PatchEmbedding(g, 6, 2, 3, H, class_token=True), lambda: Patches(True, True), CONV, images
    ),
    "PatchEmbedding with a class token, no bias": Row(
        lambda g: PatchEmbedding(g, 6, 2, 3, H, class_token=True, bias=False),
        lambda: Patches(False, True),
        CONV,
        images,
    ),
    "BatchNorm": Row(
        lambda g: BatchNorm(g, H, after="inward", eps=0.5),
        lambda: nn.BatchNorm1d(H, eps=0.5, track_running_stats=False),
        x=rows,
    ),
    "BatchNorm, not affine": Row(
        lambda g: BatchNorm(g, H, after="outward", affine=False),
        lambda: nn.BatchNorm1d(H, affine=False, track_running_stats=False),
        x=rows,
    ),
    "BatchNorm in evaluation": Row(
        lambda g: BatchNorm(g, H, after="outward").eval(),
        lambda: nn.BatchNorm1d(H, track_running_stats=False).eval(),
        x=rows,
    ),
    "Head": Row(lambda g: Head(g, H, V), lambda: nn.Linear(H, V, bias=False)),
    "Head with bias": Row(lambda g: Head(g, H, V, bias=True), lambda: nn.Linear(H, V), x=rows),
}  # fmt: skip
OTHERS = {
    "Init", "Form", "Rotary", "Placement", "Layer", "IGNORE_INDEX", "Linear1D", "Linear2D", "Linear2p5D", "Linear3D",
    "gather", "initialize", "mark_owners", "normal", "parameter", "placement_of",
}  # fmt: skip
"""Public names that are no layer, or `Linear` under another name."""
FUNCTIONS = {
    "accuracy", "cross_entropy", "first_token", "from_inner", "from_residual", "mean_of_tokens", "to_inner",
    "to_residual",
}  # fmt: skip


# ---- orders ----


class Pair(NamedTuple):
    """A layer, and torch's module with the same weights."""

    row: Row
    groups: Groups
    ours: nn.Module
    torchs: nn.Module

    def new(self) -> nn.Module:
        return self.row.ours(self.groups)

    def state(self) -> dict[str, Tensor]:
        """Return torch's weights under dslpar's names."""
        theirs = dict(self.torchs.named_parameters())
        named = {name: theirs[self.row.names.get(name, name)] for name, _ in self.ours.named_parameters()}
        return {
            name: value.detach().clone().view(dict(self.ours.named_parameters())[name].shape)
            for name, value in named.items()
        }

    def trained(self) -> Pair:
        """Return both after a step."""
        for module in (self.ours, self.torchs):
            for p in module.parameters():
                p.grad = None
        compare(self)
        with torch.no_grad():
            for module in (self.ours, self.torchs):
                for p in module.parameters():
                    p.sub_(p.grad, alpha=0.1)
        return self


def load(pair: Pair, module: nn.Module, **how: bool) -> Pair:
    module.load_state_dict(pair.state(), strict=True, **how)
    return pair._replace(ours=module)


def in_a_run(pair: Pair, seed: int = 1) -> Pair:
    """Initialize as an engine does after a program has built the layer."""
    initialize_built(pair.ours, pair.groups, seed, "model.")
    return pair


def initialized(pair: Pair, module: nn.Module, **how: bool) -> nn.Module:
    initialize(module, pair.groups, 3, **how)
    return module


def saved(pair: Pair) -> Pair:
    """Load its state from a file into a new layer."""
    file = io.BytesIO()
    torch.save(pair.ours.state_dict(), file)
    module = pair.new()
    module.load_state_dict(torch.load(io.BytesIO(file.getvalue())))
    return pair._replace(ours=module)


def copied(pair: Pair) -> Pair:
    return pair._replace(ours=copy.deepcopy(pair.ours))


def by_hand(pair: Pair) -> Pair:
    """Write the weights through p.data."""
    module = pair.new()
    for (name, p), value in zip(module.named_parameters(), pair.state().values(), strict=True):
        assert name in pair.state()
        p.data.copy_(value)
    return pair._replace(ours=module)


def moved(pair: Pair) -> Pair:
    """Build on the meta device, and allocate memory later."""
    return pair._replace(ours=pair.new().to("meta").to_empty(device="cpu"))


ORDERS: dict[str, Callable[[Pair], Pair]] = {
    "build, load": lambda pair: load(pair, pair.new()),
    "build, assign": lambda pair: load(pair, pair.new(), assign=True),
    "build, load, run": lambda pair: in_a_run(load(pair, pair.new())),
    "build, assign, run": lambda pair: in_a_run(load(pair, pair.new(), assign=True)),
    "build, write, run": lambda pair: in_a_run(by_hand(pair)),
    "build, initialize, load, run": lambda pair: in_a_run(load(pair, initialized(pair, pair.new()))),
    "build, load, initialize, run": lambda pair: in_a_run(
        pair._replace(ours=initialized(pair, load(pair, pair.new()).ours, keep=True))
    ),
    "build, run, load": lambda pair: load(pair, in_a_run(pair._replace(ours=pair.new())).ours),
    "meta, load, run": lambda pair: in_a_run(load(pair, moved(pair).ours)),
    "build, load, copy, run": lambda pair: in_a_run(copied(load(pair, pair.new()))),
    "build, copy, load, run": lambda pair: in_a_run(load(pair, copied(pair._replace(ours=pair.new())).ours)),
    "build, load, train, run": lambda pair: in_a_run(load(pair, pair.new()).trained()),
    "build, load, run, train, save, load, run": lambda pair: in_a_run(
        saved(in_a_run(load(pair, pair.new())).trained())
    ),
}


def compare(pair: Pair) -> None:
    """Compare the output, and gradients of the input and of every weight."""
    x, other = pair.row.x(), pair.row.x()
    if x.is_floating_point():
        x.requires_grad_(), other.requires_grad_()
    y, expected = pair.ours(x, **pair.row.forward), pair.torchs(other)
    grad = numbers(tuple(expected.shape), 2)
    assert_equal(y, expected, "output")
    if not y.requires_grad:
        assert not expected.requires_grad
        return
    y.backward(grad)
    expected.backward(grad)
    if x.is_floating_point():
        # a layer of images gives its pixels a gradient only on request: both were requested
        assert_equal(x.grad, other.grad, "gradient of the input")
    theirs = dict(pair.torchs.named_parameters())
    ours = dict(pair.ours.named_parameters())
    assert len(ours) == len(theirs)
    for name, p in ours.items():
        assert_equal(p.grad, theirs[pair.row.names.get(name, name)].grad, f"gradient of {name}")


def assert_equal(found: Tensor | None, expected: Tensor | None, what: str) -> None:
    assert found is not None, what
    assert expected is not None, what
    assert found.numel() == expected.numel(), what
    error = (found.detach() - expected.detach().view(found.shape)).abs().max().item()
    assert error <= TOLERANCE * max(1.0, expected.abs().max().item()), f"{what} is off by {error}"


@pytest.fixture(autouse=True)
def in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def pair_of(row: Row) -> Pair:
    torch.manual_seed(0)
    torchs = row.torchs()
    with torch.no_grad():
        for p in torchs.parameters():
            p.normal_()
    groups = Groups(Mesh())
    return Pair(row, groups, row.ours(groups), torchs)


@pytest.mark.parametrize("name", ROWS)
def test_a_layer_is_torchs_in_every_order_of_use(name: str) -> None:
    for order, apply in ORDERS.items():
        pair = apply(pair_of(ROWS[name]))
        pair.torchs.zero_grad()
        pair.ours.zero_grad()
        try:
            compare(pair)
        except AssertionError as error:
            raise AssertionError(f"{order}: {error}") from error
        assert all(p.grad is not None for p in pair.ours.parameters()), order


def test_the_table_has_every_public_layer() -> None:
    layers_of = {name.split(",")[0].split(" ")[0] for name in ROWS}
    assert layers_of | OTHERS | FUNCTIONS == set(dslpar.layers.__all__)


def test_grouped_rotary_attention_is_torchs() -> None:
    """Heads have two features, which is one pair, and each key head serves two query heads."""
    groups, theirs = Groups(Mesh()), Grouped(100.0)
    ours = Attention(groups, H, 4, num_kv_heads=2, rotary=Rotary(100.0), bias=False)
    weights = {"qkv.weight": torch.cat([theirs.q.weight, theirs.kv.weight]), "out.weight": theirs.out.weight}
    ours.load_state_dict(weights)
    x = numbers((BATCH, S, H), 1)
    y, expected = ours(x), theirs(x)
    assert_equal(y, expected, "output")
    grads = torch.autograd.grad(y.square().sum(), [*ours.parameters()])
    others = torch.autograd.grad(expected.square().sum(), [theirs.q.weight, theirs.kv.weight, theirs.out.weight])
    assert_equal(grads[0], torch.cat(others[:2]), "gradient of queries, keys and values")
    assert_equal(grads[1], others[2], "gradient of out")


# ---- functions ----


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [-100, 2])
def test_cross_entropy_is_torchs(smoothing: float, reduction: Any, ignored: int) -> None:
    logits, other = (numbers((BATCH, S, V), 1).requires_grad_() for _ in range(2))
    labels = ids()
    labels[0, :3] = ignored
    found = layers.cross_entropy(
        Groups(Mesh()), logits, labels, V, ignore_index=ignored, label_smoothing=smoothing, reduction=reduction
    )
    how = {"ignore_index": ignored, "label_smoothing": smoothing, "reduction": reduction}
    expected = functional.cross_entropy(other.flatten(0, 1), labels.flatten(), **how)
    assert_equal(found, expected, "loss")
    grad = numbers(tuple(found.shape), 2)
    found.backward(grad)
    expected.backward(grad.view(expected.shape))
    assert_equal(logits.grad, other.grad, "gradient")


def test_accuracy_poolings_and_conversions_are_torchs() -> None:
    groups, x = Groups(Mesh()), numbers((BATCH, S, V), 1)
    labels = ids()
    labels[0, :3] = 2
    counted = labels != 2
    expected = (x.argmax(-1) == labels)[counted].double().mean()
    assert math.isclose(layers.accuracy(groups, x, labels, V, ignore_index=2).item(), expected.item(), rel_tol=1e-6)
    assert torch.equal(layers.mean_of_tokens(groups, x), x.mean(1))
    assert torch.equal(layers.first_token(groups, x), x[:, 0])
    for convert in (layers.to_residual, layers.from_residual, layers.to_inner, layers.from_inner):
        assert torch.equal(convert(groups, x), x)


def test_dropout_is_torchs_in_how_much_it_drops() -> None:
    torch.manual_seed(0)
    y = Dropout(Groups(Mesh()), 0.25)(torch.ones(200, 200))
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert y.mean().item() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("mode", ["Linear1D", "Linear2D", "Linear2p5D", "Linear3D"])
def test_the_layers_of_a_mode_are_linear(mode: str) -> None:
    assert issubclass(getattr(layers, mode), Linear)
